"""Two processes on one machine: DDP, FSDP2 and tensor parallelism, by torch and by Trainer.

All jobs of a side run in one launch of torchrun, since starting it takes longer than they do.  What they saw is read
from files: a CPU job sometimes aborts on its way out, after its work is done.
"""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bertlite
from tests.clients.checks import common
from tests.clients.checks.trainer import TEXTS, WORDS, logged, rows, trainer

DDP, FSDP, TENSOR = "DDP", "FSDP2", "tensor parallel"
CLS, WORLD = TEXTS, 2
DECIMALS = 0.0 if common.V5 else 0.5e-4  # transformers 4 logs four
LIMIT = 240  # seconds for all jobs; about 15 are needed
SIDES = {side.name: side for side in (common.OURS, common.STOCK)}
Job = Callable[[common.Side, Path, int], common.Observed]
JOBS: dict[str, Job] = {}


@cache
def launched(side: str) -> Path:
    """Run all jobs with a library, once; return the folder of what they observed."""
    folder = tempfile.mkdtemp(prefix="bertlite-torchrun-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command += ["-m", f"{__package__}.worker", side, folder]
    with open(Path(folder) / "log", "w") as log:
        run = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            run.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # torchrun and its workers, which are a group of their own
            run.wait()
    return Path(folder)


def job(client: str, claim: str, *needs: str, **options: Any) -> Callable[[Any], Any]:
    """Enter a function into JOBS, and what its process 0 observes into CHECKS."""

    def enter(function: Any) -> Any:
        name = common.name_of(function, options)
        JOBS[name] = lambda side, folder, rank: function(side, folder, rank, **options)

        def result(side: common.Side, folder: Path) -> common.Observed:
            file = launched(side.name) / f"{name}-0.pt"
            if not file.exists():
                raise AssertionError(f"no result: {(file.parent / 'log').read_text()[-2000:]}")
            seen: common.Observed = torch.load(file)
            if "error" in seen:
                raise common.ElsewhereError(seen["error"])
            return seen

        result.__name__ = name
        common.check(client, claim, *needs)(result)
        return function

    return enter


def batch() -> dict[str, Tensor]:
    return {**common.tiny_batch(4), "labels": torch.tensor([0, 1, 1, 0])}


def shard(rank: int) -> dict[str, Tensor]:
    """Return this process's half of the batch."""
    half = len(batch()["labels"]) // WORLD
    return {name: x[rank * half : (rank + 1) * half] for name, x in batch().items()}


def alone(side: common.Side, path: Path) -> dict[str, Tensor]:
    """Return the gradients of the whole batch in one process."""
    model = side.load(CLS, path, dtype=torch.float64).train()
    model(**batch()).loss.backward()
    return common.gradients(model)


def ran_twice(names: list[str]) -> None:
    if len(names) != 2 * len(set(names)):
        raise AssertionError(f"{len(names)} runs of {len(set(names))} checkpointed layers")


@job(DDP, "gradients equal those of one process, checkpointed layers too, pruned", pruned=True)
@job(DDP, "gradients equal those of one process, checkpointed layers too")
def ddp(side: common.Side, folder: Path, rank: int, pruned: bool = False) -> common.Observed:
    from torch.nn.parallel import DistributedDataParallel

    path = common.tiny(folder, CLS, pruned, torch.float64)
    wanted, got = alone(side, path), {}
    for checkpointed in (False, True):
        model = side.load(CLS, path, dtype=torch.float64).train()
        if checkpointed:
            getattr(model, f"{common.CHECKPOINTING}_enable")()
        wrapped = DistributedDataParallel(model)  # it averages only while it lives
        with common.counted(model) as ran:
            wrapped(**shard(rank)).loss.backward()
        if checkpointed:
            ran_twice(ran)
        got = common.gradients(model)
        common.equal(got, wanted, within=common.ROUNDING, what="gradients of two processes and of one")
    return got


@job(DDP, "Trainer in two processes, masked words: loss and grad_norm are those of one", "accelerate", cls=WORDS)
@job(DDP, "Trainer in two processes: loss, grad_norm and eval_loss are those of one", "accelerate", cls=CLS)
def trainer_ddp(side: common.Side, folder: Path, rank: int, cls: str) -> common.Observed:
    data, path = rows(cls), common.tiny(folder, cls)
    run = trainer(side.load(cls, path), folder, data, gradient_accumulation_steps=2)
    if run.args.world_size != WORLD:
        raise AssertionError(f"Trainer sees {run.args.world_size} processes")
    run.train()
    plain = side.load(cls, path).train()  # there is no dropout
    whole = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    loss = plain(**whole).loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    seen = {"loss": logged(run, "loss")[0], "grad_norm": logged(run, "grad_norm")[0]}
    if cls == CLS:  # elsewhere the batches have different numbers of labels, and Trainer takes the mean of their means
        # with a model of its own: after `evaluate` a Trainer trains without averaging gradients
        run = trainer(side.load(cls, path), folder, data, eval_dataset=data, per_device_eval_batch_size=2)
        seen["eval_loss"] = run.evaluate()["eval_loss"]
    for name, got in seen.items():
        wanted = float((norm if name == "grad_norm" else loss).detach())
        if abs(got - wanted) > common.ROUNDING32 * wanted + DECIMALS:
            raise AssertionError(f"{name} is {got:.5g}, and {wanted:.5g} for the same 8 rows in one process")
    return seen


@job(FSDP, "fully_shard with checkpointed layers: gradients equal those of one process, pruned", pruned=True)
@job(FSDP, "fully_shard with checkpointed layers: gradients equal those of one process")
def fsdp(side: common.Side, folder: Path, rank: int, pruned: bool = False) -> common.Observed:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    path = common.tiny(folder, CLS, pruned, torch.float64)
    wanted = alone(side, path)
    mesh = init_device_mesh("cpu", (WORLD,))
    model: Any = side.load(CLS, path, dtype=torch.float64).train()
    getattr(model, f"{common.CHECKPOINTING}_enable")()
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with common.counted(model) as ran:
        model(**shard(rank)).loss.backward()
    ran_twice(ran)
    whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if whole:
        raise AssertionError(f"not sharded: {whole}")
    got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    common.equal(got, wanted, within=common.ROUNDING, what="gradients of two processes and of one")
    return got


@job(TENSOR, "heads and neurons split between two processes: logits and gradients equal, pruned", pruned=True)
@job(TENSOR, "heads and neurons split between two processes: logits and gradients equal")
def tensor_parallel(side: common.Side, folder: Path, rank: int, pruned: bool = False) -> common.Observed:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    # The processes share what they can halve.
    path = common.tiny(folder, CLS, dtype=torch.float64, intermediate_size=38)
    if pruned:
        core: Any = bertlite.BertForSequenceClassification.from_pretrained(path)
        bertlite.prune_heads(core, {0: [1, 3]}).save_pretrained(path)
    plain = side.load(CLS, path, dtype=torch.float64)
    out = plain(**batch())
    out.loss.backward()
    model = side.load(CLS, path, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (WORLD,))
    columns = ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")
    for layer in model.bert.encoder.layer:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("attention.output.dense", "output.dense")}
        parallelize_module(layer, mesh, plan)
    split = model(**batch())
    common.equal(split.logits, out.logits, within=common.ROUNDING, what="logits of two processes and of one")
    split.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    got = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in grads.items()}
    common.equal(got, common.gradients(plain), within=common.ROUNDING, what="gradients of two processes and of one")
    return {"logits": out.logits.detach()}
