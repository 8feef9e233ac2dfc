"""What a GPU records reads no value: on tensors without values that say they are on a GPU, a read raises.

`tests/test_device.py` runs these tests in a process of their own: no backward may run beside such tensors.
"""

import warnings
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from conftest import DISENTANGLED, make
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import bertlite
from bertlite import BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification
from bertlite.inference import TrainingStep
from bertlite.inference.gpu import fused, graphs, triton_kernels
from bertlite.inference.gpu.graphs import Bucket, use_graphs_
from bertlite.stack.attention import BACKENDS
from bertlite.stack.modules import BertIntermediate


def on_fake_gpu_(model: nn.Module) -> None:
    """Give a model parameters without values that say they are on a GPU; in a FakeTensorMode."""
    for module in model.modules():
        for name, x in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device="cuda")))


@pytest.mark.parametrize(
    ("cls", "dtype", "packed"),
    [
        (BertForSequenceClassification, torch.bfloat16, True),
        (BertForTokenClassification, torch.bfloat16, True),
        (bertlite.BertForMaskedLM, torch.float32, False),
        (BertForQuestionAnswering, torch.bfloat16, False),
    ],
)
def test_the_forward_of_a_step_reads_no_value_of_a_gpu(cls, dtype, packed, monkeypatch):
    """On tensors without values that say they are on a GPU: reading one raises, as it does while a graph is recorded.

    Its backward needs a GPU.
    """
    backend = BACKENDS["varlen"] if packed else None
    monkeypatch.setattr(TrainingStep, "backend", backend)
    monkeypatch.setattr(Tensor, "backward", lambda loss: None)
    model = make(cls, hidden_size=64, attn_implementation="auto").to(dtype).train()
    with FakeTensorMode():
        on_fake_gpu_(model)
        ids = torch.ones(4, 32, dtype=torch.long, device="cuda")
        labels = {"labels": ids[:, 0] if cls is BertForSequenceClassification else ids}
        if cls is BertForQuestionAnswering:
            labels = {"start_positions": ids[:, 0], "end_positions": ids[:, 0]}
        step = TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1), capture=lambda run: run)
        bucket = Bucket(4, 32, 96 if packed else None, 32)
        loss = step.run({"input_ids": ids, "attention_mask": ids, **labels}, False, bucket)
        assert (loss.shape, loss.device.type) == ((), "cuda")
        with pytest.raises(DataDependentOutputException):
            loss.item()


@pytest.mark.parametrize("positions", ["absolute", "bucketed", "relative_key_query", "disentangled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_what_is_recorded_reads_no_value_of_a_gpu(positions, dtype, monkeypatch):
    """On tensors without values that say they are on a GPU: reading one raises, as while a graph is recorded.

    What launches kernels of Triton runs too, but launches none.
    """
    pytest.importorskip("torch.nn.attention.varlen", reason="torch has it since 2.10")
    pytest.importorskip("triton")
    for name in [name for name in vars(triton_kernels) if name.endswith("_kernel")]:
        monkeypatch.setattr(triton_kernels, name, defaultdict(lambda: lambda *inputs, **settings: None))
    monkeypatch.setattr(fused, "missing_for_triton", lambda device, dtype: None)
    monkeypatch.setattr(fused, "ways_of", lambda part, *of: {fused.MODULES: partial(BertIntermediate.forward, part)})
    monkeypatch.setattr(graphs, "record_forward", lambda run, pool: (lambda: None, run(), 0))
    changes: dict[str, Any] = {"positions_skip_padding": True, "pad_token_id": 1} if positions == "bucketed" else {}
    changes |= DISENTANGLED if positions == "disentangled" else {}
    model = make(position_embedding_type=positions, attn_implementation="auto", hidden_size=64, **changes).to(dtype)
    with FakeTensorMode(), warnings.catch_warnings(action="ignore"):
        on_fake_gpu_(model)
        monkeypatch.setattr(graphs, "missing_for_short", lambda needs, longest: "Triton needs values")
        use_graphs_(model)
        assert model.fused
        packs = positions == "absolute" and dtype == torch.bfloat16
        out = graphs.BucketGraph(model, Bucket(4, 32, 96 if packs else None, 32), graphs.Pool(None)).out
        assert (out.shape, out.dtype, out.device.type) == ((4, 32, 64), dtype, "cuda")
