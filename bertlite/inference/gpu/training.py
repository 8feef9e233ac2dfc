"""Training steps under CUDA graphs: forward, backward, clipping and optimizer are recorded once for each bucket.

Shapes:  B sequences · S positions · T tokens
"""

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from operator import is_
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.lr_scheduler import ReduceLROnPlateau

from bertlite.inference.gpu import graphs
from bertlite.inference.gpu.graphs import BUCKETS, Bucket, count_tokens, current, run_aside
from bertlite.models.losses import IGNORED, labels_padding
from bertlite.runtime.shapes import power_of_2, round_up, round_up_by_eighths
from bertlite.stack.attention import BACKENDS, PACKING, Backend, without_cudnn
from bertlite.stack.body import BertBody, hooks_of
from bertlite.stack.inputs import Mask
from bertlite.stack.layouts import Slots
from bertlite.support import torch_private

Batch = Mapping[str, Any]
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor, int]]
CASTS = (torch.bfloat16, torch.float16, None)  # dtypes of torch.autocast
NUMBERS = int | float | str | Tensor | None  # noticed in a loss
SEARCHED = 32  # numbers of a list, and entries of a dict without a known key, that are searched in a loss
OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels")  # if of shape (B, S)


def own_loss(model: Any, batch: Batch) -> Tensor:
    """Return the loss of a model with a head, for a batch with labels; raise ValueError if it returns none."""
    loss = getattr(model(**batch, return_dict=True), "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(f"{type(model).__name__} returns no loss for {', '.join(batch)}: give labels, or a loss=")
    return loss


class TrainingStep:
    """A step of training: forward, backward, clipping, optimizer and schedule.  Call it with each batch.

    On a GPU a step launches thousands of kernels, which takes longer than they run.  There the step is recorded as a
    CUDA graph for each bucket of sizes, when the bucket comes for the second time, and then launched at once.  Dropout
    draws other numbers in each replay.  On the CPU it runs as an ordinary loop.

    In 16 bits, as under `autocast`, padding is left out if `attn_implementation` is "auto", "packed" or "varlen".
    States at padding are then zeros.  A batch with another mask, another number of axes or lists runs without a graph.

    Numbers of Python that the loss reads may change, but each value is recorded anew; a tensor that is filled is not.
    After a hook is added or removed, the step is recorded anew.  Python code of the loss and of hooks runs only in a
    recording, draws of Python's random numbers too.  With `accumulate`, gradients that a step does not have are zeros.
    After a change of the model's modules or config, or of its weights' dtype or device, make a new one.  Do not read
    or clear gradients between steps: the last batch's are not there.  Evaluation between steps changes nothing.

    Args:
        model: a model of bertlite or bertlite.hf; or of transformers with sdpa, which computes padding.
        optimizer: on a GPU one that can be recorded, such as AdamW(…, fused=True).  There a learning rate is a tensor:
            change it by `schedule`, or by `group["lr"].fill_(…)`.
        loss: (model, batch on the model's device) -> a scalar; by default the model's own loss.  On a GPU it must
            neither read values of tensors nor depend on positions of padding.
        clip: the largest norm of the gradients.
        schedule: a learning rate schedule of the optimizer, to step after each of its steps.
        scaler: a torch.amp.GradScaler, for float16.
        autocast: the dtype of torch.autocast.
        accumulate: the number of batches for one step of the optimizer; the loss is divided by it for the gradients.
        frozen: models that `loss` runs without gradients, such as a teacher; their padding is left out too.
        capture: records a function, as `graphs.record_run`; by default on a GPU that, on the CPU none.

    Raises:
        ValueError: an argument is none of these, or the optimizer cannot be recorded or has other parameters.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Batch], Tensor] = own_loss,
        *,
        clip: float | None = None,
        schedule: Any = None,
        scaler: Any = None,
        autocast: torch.dtype | None = None,
        accumulate: int = 1,
        frozen: Sequence[nn.Module] = (),
        capture: Capture | None = None,
    ) -> None:
        self.model, self.optimizer, self.loss, self.clip = model, optimizer, loss, clip
        self.schedule, self.autocast, self.accumulate = schedule, autocast, accumulate
        self.device: torch.device = next(model.parameters()).device
        self.scaler = scaler or torch.amp.GradScaler(self.device.type, enabled=False)  # which changes nothing
        self.modules, self.parameters = list(model.modules()), list(model.parameters())

        self.trained = trained_by(optimizer)
        check_arguments(self, frozen)

        # Padding is left out if every model can do it; a body of another kind is run as it is.
        bodies: Any = [getattr(each, "base_model", None) for each in (model, *frozen)]
        self.bodies = bodies if all(isinstance(body, BertBody) for body in bodies) else []
        self.backends: dict[torch.dtype, Backend | None] = {}
        self.steps, self.made = 0, OrderedDict[Any, RecordedStep]()
        self.plain = 0  # the steps in a row that were the first of their kind

        self.prepare: Any = None  # makes an optimizer recordable
        self.pool: graphs.Pool | None = None  # the memory of all graphs, since none keeps anything between two replays
        self.capture = capture
        if capture is None and self.device.type == "cuda":
            self.capture = self.record
            self.prepare = partial(make_recordable_, device=self.device, scaled=scaler is not None)
            self.prepare(optimizer)
            optimizer.register_load_state_dict_post_hook(self.prepare)
        self.moved = moved_by(optimizer)

        # A step reads the dicts of all modules, which stay the same ones: to collect them takes longer.
        others = [*frozen, loss] if isinstance(loss, nn.Module) else frozen
        self.parts = [*self.modules, *(part for each in others for part in each.modules())]
        self.hooks = [hooks for part in self.parts for hooks in hooks_of(part)]
        self.held = [each for part in self.parts for each in (part._parameters, part._buffers)]

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch; return its loss, a scalar on the model's device, for which nothing waits.

        Raises:
            ValueError: a module has a parameter that it did not have when the step was made, or autocast is on.
        """
        check_parameters(self.modules, self.parameters)
        if self.autocast is None and torch.is_autocast_enabled(self.device.type):
            raise ValueError(
                "a step leaves the autocast around it: give it one of its own, as in autocast=torch.bfloat16"
            )

        # Gradients add up over `accumulate` batches, of which the last one steps the optimizer.
        self.clear_()
        self.steps += 1
        last = self.steps % self.accumulate == 0

        # A batch that no bucket fits, as with labels of another kind, trains as in a plain loop.
        with current(self.device):
            fitted = None if self.capture is None else self.fit(batch)
            if fitted is None:
                there = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in batch.items()}
                loss = self.run(there, last, None)
            else:
                loss = self.replay(*fitted, last)

        if last and self.schedule is not None:
            self.schedule.step()
        return loss

    def run(self, batch: Batch, last: bool, bucket: Bucket | None) -> Tensor:
        """Run forward and backward and, after the last of `accumulate` batches, the optimizer."""
        kind = self.device.type
        cast = torch.autocast(kind, self.autocast, self.autocast is not None, cache_enabled=False)

        # Bodies that are changed, and the switch of cuDNN, are for one step at a time.  A thread that records and then
        # wants the switch would wait forever for one that has it and wants to record a teacher.
        turn = nullcontext() if self.capture is None else graphs.RECORDING
        switch = without_cudnn() if kind == "cuda" else nullcontext()
        with turn, cast, packs_into(self.bodies, bucket, self.backend), switch:
            loss = self.loss(self.model, batch)
        self.scaler.scale(loss / self.accumulate).backward()
        if last:
            self.update()
        return loss.detach()

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor, int]:
        """Record a run into the memory of earlier graphs; if none is left, or one failed, torch takes other memory."""
        pool, self.pool = self.pool, None
        if pool is None or all(step.pool is not pool for step in self.made.values()):
            pool = graphs.Pool(self.device)
        found = graphs.record_run(run, pool)
        self.pool = pool
        return found

    def update(self) -> None:
        """Clip the gradients and step the optimizer."""
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Graphs of several batches add to the same memory.
        self.optimizer.zero_grad(set_to_none=self.capture is None or self.accumulate == 1)

    def clear_(self) -> None:
        """Clear the gradients that lie where a step's first batch would add to them.

        A frozen parameter must have none: by zeros the optimizer would move it.  A parameter that is frozen between
        the batches of one step is moved by that step, as in a loop.
        """
        if self.steps % self.accumulate == 0:
            for x in self.trained:
                if self.accumulate == 1 or not x.requires_grad:
                    x.grad = None
        self.trained = trained_by(self.optimizer)
        self.drop_()

    def drop_(self) -> None:
        """Drop the graphs if the state and gradients that they would write lie elsewhere now, or are not all."""
        moved = [*moved_by(self.optimizer), *(x.grad for x in self.trained if self.accumulate > 1)]
        if len(moved) != len(self.moved) or not all(map(is_, moved, self.moved)):
            self.made.clear()
            if self.prepare is not None:  # a group may have come, with a rate of Python
                self.prepare(self.optimizer)
        self.moved = moved

    def fit(self, batch: Batch) -> tuple[Bucket, Batch] | None:
        """Return the bucket of a batch, and the batch with a mask; None if no bucket is for such inputs."""
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            return None

        # A graph replays the same kernels, so it takes inputs whose values the host never has to read.  A gradient
        # would flow into the inputs that all replays share.
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape or mask.is_floating_point()):
            return None
        tensors: dict[str, Tensor] = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
        known = all(isinstance(x, Tensor | int | float | str | None) for x in batch.values())
        if not known or any(x.requires_grad for x in tensors.values()):
            return None

        if any(body.recomputes() for body in self.bodies):
            warnings.warn("steps with checkpointed layers run without CUDA graphs", RuntimeWarning, stacklevel=3)
            return None

        # The sizes are rounded up, so that few graphs serve all batches, from one more token: a sequence is left over.
        rows, length = ids.shape
        tokens, longest = self.count(batch, mask)
        if tokens is None and (names := PACKING & {body.attention_name() for body in self.bodies}):
            text = f"{min(names)!r} would read its mask; attn_implementation='auto' does not"
            warnings.warn(f"a step with padding runs without a CUDA graph: {text}", RuntimeWarning, stacklevel=3)
            return None
        tokens = None if tokens is None else round_up_by_eighths(tokens + 1, 16)
        longest = 0 if tokens is None else power_of_2(max(longest, tokens // 8, 16))  # 0: no layer reads it

        # A longer batch would change the loss of a head that reads padding, and not fit values that are not padded.
        limit = max(getattr(getattr(self.model, "config", None), "max_position_embeddings", length), length)
        fixed = any(x.shape == ids.shape and not is_padded(name, x) for name, x in tensors.items())
        limit = length if self.reads_padding or fixed else limit
        mask = torch.ones_like(ids) if mask is None else mask
        return Bucket(rows, min(round_up(length, 32), limit), tokens, longest), {**batch, "attention_mask": mask}

    def count(self, batch: Batch, mask: Tensor | None) -> tuple[int | None, int]:
        """Return the number of tokens, None if padding is computed, and the length of the longest sequence."""
        rows, length = batch["input_ids"].shape
        if self.backend is None or self.reads_padding or labels_padding(batch.get("labels"), mask):
            return None, length
        if mask is None:
            return rows * length, length
        return count_tokens(mask)

    @property
    def reads_padding(self) -> bool:
        """True if a head reads positions of padding, so that more of them would change its loss."""
        return getattr(self.model, "padding_reader", None) is not None

    @property
    def backend(self) -> Backend | None:
        """The backend that leaves padding out under graphs; None if not every model can run it in the dtype of now."""
        dtype = self.autocast or self.parameters[0].dtype
        if dtype not in self.backends:  # to ask takes longer than a step may
            packs = (x.may_skip_padding() and x.may_train_packed(self.device, dtype) for x in self.bodies)
            able = self.bodies and all(packs) and not any(x.config.is_decoder for x in self.bodies)
            self.backends[dtype] = BACKENDS["varlen"] if able else None
        return self.backends[dtype]

    def settings(self) -> list[Any]:
        """Return what a graph keeps as it was when it was recorded, so that a change of it must be recorded anew."""
        # A weight whose `data` is set lies elsewhere; each hook has a number of its own.
        places = [None if x is None else x.data_ptr() for each in self.held for x in each.values()]
        own = [self.clip, self.scaler, self.autocast, self.accumulate, identity_key(self.loss), *numbers_in(self.loss)]
        own += [x for x in vars(self.scaler).values() if isinstance(x, int | float)]  # how its scale grows
        own += torch_private.hooks_of_training(self.optimizer, self.trained)
        modes, fields = [part.training for part in self.parts], [*map(vars, self.parts)]
        rates = [part["p"] for part in fields if "p" in part and isinstance(part["p"], Hashable)]  # dropout's
        forwards = [(i, identity_key(part["forward"])) for i, part in enumerate(fields) if "forward" in part]
        return [*own, *modes, *rates, *places, *forwards, *chain.from_iterable(filter(None, self.hooks))]

    def replay(self, bucket: Bucket, batch: Batch, last: bool) -> Tensor:
        """Run the step of a bucket: plainly for the first time, recorded for the second."""
        assert self.capture is not None

        # The key holds everything that a graph cannot notice afterwards: shapes, modes, and numbers of Python.
        shapes = {name: shape_in(bucket, name, x, batch) for name, x in batch.items() if isinstance(x, Tensor)}
        flags = tuple([x.requires_grad for x in (*self.parameters, *self.trained)])

        # a graph keeps dtypes, and numbers of Python, which a schedule of momentum changes
        kept = [*batch, *(x.dtype if isinstance(x, Tensor) else x for x in batch.values())]
        options = [x for group in self.optimizer.param_groups for x in group.values() if isinstance(x, Hashable)]
        kept += [x.data_ptr() if isinstance(x, Tensor) else x for x in options]
        key = bucket, last, tuple(shapes.items()), flags, *kept, *self.settings()

        # The first run is plain: it makes the optimizer's state and warms up what a recording may not.
        known, loss = self.made.pop(key, None), None
        step = known or RecordedStep(batch, shapes, self.device)
        step.copy(batch)
        run = partial(self.run, step.batch, last, bucket)

        # A step that finds no graph again and again is slower than it needs to be.
        self.plain = self.plain + 1 if known is None else 0
        if self.plain == BUCKETS:
            text = "steps in a row were new: a number that the loss or the optimizer reads may change with each"
            warnings.warn(
                f"{BUCKETS} {text}, so that no graph is used; a tensor may be filled", RuntimeWarning, stacklevel=3
            )
        if known is None:
            loss = run_aside(run) if self.device.type == "cuda" else run()
            self.drop_()

        # The graph that was unused for longest goes first.
        self.made[key] = step
        while len(self.made) > BUCKETS:
            self.made.popitem(last=False)
        if loss is not None:
            return loss

        fault = None
        if step.launch is None:
            fault = held_gradients([*{*self.parameters, *self.trained}])
            try:  # if `accumulate` is 1, backward writes gradients, and adds to none
                if fault is None:
                    step.launch, step.loss, _ = self.capture(run)
                    step.pool = self.pool
            except torch.OutOfMemoryError:
                self.made.clear()
                fault = "there was no memory for it, and earlier ones go"

        if step.launch is None:  # outside the handler: its traceback keeps the memory of the whole recording
            warnings.warn(f"this step runs without a CUDA graph: {fault}", RuntimeWarning, stacklevel=3)
            torch_private.forget_gradients_(self.scaler, self.optimizer)
            if self.accumulate == 1:
                self.clear_()  # the recording made gradients and never computed them
            return run()
        step.launch()
        return step.loss.clone()


def trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer has now."""
    return [x for group in optimizer.param_groups for x in group["params"]]


def moved_by(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters and the state of an optimizer: a graph changes those there were when it was recorded."""
    states = [each.values() for each in optimizer.state.values() if isinstance(each, dict)]
    return [*trained_by(optimizer), *chain.from_iterable(states)]


def held_gradients(parameters: Iterable[Tensor]) -> str | None:
    """Return how an earlier forward keeps a step from being recorded; None if nothing holds its graph.

    The nodes that add up gradients live as long as a graph has them, and run on the stream on which they were made.
    """

    def noted(x: Tensor) -> Any:
        return get_gradient_edge(x).node.metadata

    trained = [x for x in parameters if x.requires_grad]
    for x in trained:  # a node without a holder is made anew, without this
        noted(x)["held"] = True
    if any("held" in noted(x) for x in trained):
        return "something holds an output of an earlier forward with its gradients; detach or delete it"
    return None


def identity_key(function: Any) -> Any:
    """Return a key that is equal for the same function only, and keeps it; the function need not be hashable."""
    return function if inspect.ismethod(function) else function.__call__


def check_arguments(step: Any, frozen: Any) -> None:
    """Raise ValueError for arguments with which a `TrainingStep` would train nothing, or otherwise than it says."""
    clip, count, schedule, groups = step.clip, step.accumulate, step.schedule, step.optimizer.param_groups
    others, is_norm = {*step.parameters}.isdisjoint(step.trained), isinstance(clip, int | float) and clip is not True
    theirs = getattr(getattr(schedule, "optimizer", None), "param_groups", groups)

    # Each mistake with the sentence that mends it, in the order in which they are looked for.
    faults = (
        (type(count) is not int or count < 1, f"accumulate is {count!r}; give a number of batches, from 1 on"),
        (clip is not None and not (is_norm and clip > 0), f"clip is {clip!r}; give a norm above 0, or None"),
        (step.autocast not in CASTS, f"autocast is {step.autocast!r}; give one of {', '.join(map(str, CASTS))}"),
        (not isinstance(frozen, Iterable), "frozen is no list of models; give one, as in frozen=[teacher]"),
        (others, "the optimizer has none of the model's parameters; make it from model.parameters()"),
        (theirs is not groups, "the schedule is another optimizer's; make it from the optimizer that is given"),
        (isinstance(schedule, ReduceLROnPlateau), "the schedule steps by a score; step it yourself, with the score"),
    )

    for holds, text in faults:
        if holds:
            raise ValueError(text)


class RecordedStep:
    """The inputs of one bucket, which stay in place, and its graph once that is recorded."""

    launch: Callable[[], None] | None = None
    loss: Tensor
    pool: graphs.Pool | None = None  # the memory of its graph

    def __init__(self, batch: Batch, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        made = {name: torch.empty(shape, dtype=batch[name].dtype, device=device) for name, shape in shapes.items()}
        self.batch = {**batch, **made}

    def copy(self, batch: Batch) -> None:
        """Copy a batch to the inputs; positions behind it are padding, and have no labels.

        CUDA reads pinned memory late, when its owner may have refilled it, so a pageable copy is sent: it has been
        read when the call returns, which waits for earlier steps only if it is large.
        """
        for name, x in batch.items():
            if isinstance(x, Tensor):
                kept = self.batch[name]
                if kept.shape != x.shape:
                    kept.fill_(IGNORED if name == "labels" else 0)
                    kept = kept[:, : x.shape[1]]
                kept.copy_(x.clone() if x.is_pinned() else x, non_blocking=True)


def shape_in(bucket: Bucket, name: str, x: Tensor, batch: Batch) -> tuple[int, ...]:
    """Return the shape of an input of a bucket: as given, but values of tokens are padded to its length."""
    if is_padded(name, x) and x.shape[:2] == batch["input_ids"].shape:
        return (*bucket[:2], *x.shape[2:])
    return tuple(x.shape)


def is_padded(name: str, x: Tensor) -> bool:
    """Return whether an input is padded like the ids; another one may have their shape by chance."""
    return x.dim() > 2 or (name in OF_TOKENS and not x.is_floating_point())


def check_parameters(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if a module has a parameter that is none of these."""
    known = {id(None), *map(id, parameters)}
    named = ((part, name, x) for part in modules for name, x in part._parameters.items())
    new = next((f"{type(part).__name__}.{name}" for part, name, x in named if id(x) not in known), None)
    if new is not None:
        text = "is a new parameter, as after load_state_dict(assign=True), and the optimizer trains the old one"
        raise ValueError(f"{new} {text}: make an optimizer and a TrainingStep anew")


def numbers_in(loss: Any) -> list[Any]:
    """Return the numbers that a loss reads outside its arguments, and the places of tensors.

    Its defaults, its closure and the arguments of `functools.partial` are searched, and, for the names in its code,
    its globals, its object, and all that it reads from these.  Functions that it calls, slots, attributes of classes
    and what lists hold besides numbers are not searched.
    """
    held: list[Any] = []
    while isinstance(loss, partial):
        held += [*loss.args, *loss.keywords.values()]
        loss = loss.func

    # A loss may be a function, a method, or an object that can be called, whose code is a module's `forward`.
    called = getattr(type(loss), "forward", None) if isinstance(loss, nn.Module) else type(loss).__call__
    function = getattr(loss, "__func__", loss if inspect.isfunction(loss) else called)
    if inspect.isfunction(function):
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty until its name is bound
                held.append(cell.cell_contents)

        # Only names in its code, and in functions within it, count: a module has other globals too.
        codes = [function.__code__]
        for code in codes:
            codes += [x for x in code.co_consts if isinstance(x, CodeType)]
        read = {name for code in codes for name in code.co_names}
        held += [function.__globals__[name] for name in sorted(read & function.__globals__.keys())]
        names = read.union(x for code in codes for x in code.co_consts if isinstance(x, str))

        # Each object that it reads may hold more.
        owners = [getattr(loss, "__self__", loss), *held]
        seen = {*map(id, owners)}
        for owner in owners:
            found = fields_in(owner, names)
            held += found
            owners += [x for x in found if not isinstance(x, NUMBERS) and id(x) not in seen]
            seen.update(map(id, found))
    return [place_of(x) if isinstance(x, Tensor) else x for x in held if isinstance(x, NUMBERS)]


def place_of(x: Tensor) -> int:
    """Return where a tensor's values are; a sparse one has several places."""
    return x.data_ptr() if x.layout is torch.strided else id(x)


def fields_in(owner: Any, names: Set[str]) -> list[Any]:
    """Return what code with these names may read from an object.

    A short dict with none of these names gives all, since a key may be computed, a list its first numbers, and a
    module also the numbers that its `forward` reads.
    """
    if isinstance(owner, list | tuple):
        return [x for x in owner[:SEARCHED] if isinstance(x, int | float | str)]
    fields = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    known = sorted(names & fields.keys())
    if isinstance(owner, dict) and not known and len(owner) <= SEARCHED:
        return [*fields.values()]
    code = getattr(getattr(type(owner), "forward", None), "__code__", None) if isinstance(owner, nn.Module) else None
    own = [fields[name] for name in sorted(fields.keys() & code.co_names)] if code else []
    return [fields[name] for name in known] + [x for x in own if isinstance(x, int | float | str)]


@contextmanager
def packs_into(bodies: Sequence[Any], bucket: Bucket | None, backend: Backend | None) -> Iterator[None]:
    """Let bodies put tokens into the slots of a bucket, unless padding is read; other threads run them as they are."""
    thread = get_ident()

    # The bucket's slots replace the layout that a body would make, whose size is not fixed.
    def choose_layout(body: Any, args: Any, cache: Any) -> Any:
        assert bucket is not None
        reads_padding = args.skip_padding is False or args.output_attentions or args.attention_mask is None
        if reads_padding or cache is not None or get_ident() != thread:
            return type(body).choose_layout(body, args, cache)
        return Slots.of_rows(args.attention_mask.ne(0), bucket.tokens or 0, bucket.longest, rest=True)

    # For slots there is one backend and no mask; any other layout is the body's own choice.
    def select(body: Any, args: Any, layout: Any, *others: Any, **named: Any) -> Any:
        if isinstance(layout, Slots):
            return backend, Mask()
        return type(body).select_backend_and_mask(body, args, layout, *others, **named)

    # An object's own methods go before its class's, and are deleted again.
    changed = bodies if bucket is not None and bucket.tokens is not None else ()
    for body in changed:
        vars(body).update(choose_layout=partial(choose_layout, body), select_backend_and_mask=partial(select, body))
    try:
        yield
    finally:
        for body in changed:
            del vars(body)["choose_layout"], vars(body)["select_backend_and_mask"]


def make_recordable_(optimizer: torch.optim.Optimizer, device: torch.device, scaled: bool = False) -> None:
    """Keep the learning rates and counts of steps of an optimizer on a GPU, where a graph reads them.

    Args:
        scaled: a GradScaler steps it, which waits for the GPU to skip steps that overflow, unless it is fused.

    Raises:
        ValueError: the optimizer cannot be recorded.
    """
    if "capturable" not in optimizer.defaults or (scaled and not torch_private.skips_overflows(optimizer)):
        name = f"{type(optimizer).__name__}{' with a GradScaler' if scaled else ''}"
        raise ValueError(f"{name} cannot be recorded in a CUDA graph: use torch.optim.AdamW(…, fused=True)")
    torch_private.expect_plain_steps_(optimizer)
    optimizer.defaults["capturable"] = True  # a group that is added later has it too
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)
