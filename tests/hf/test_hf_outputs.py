"""Our classes return what transformers' own return, and refuse what those ignore."""

import torch
from conftest import assert_same, full_outputs
from pairs import (
    BOTH,
    EVERY,
    V5,
    inputs_of,
    labels_of,
    pair,
    present,
)

F32 = torch.float32


def asked(backend: str) -> dict[str, bool]:
    return {"output_hidden_states": True, "output_attentions": backend == "eager"}  # 5.x has none of sdpa's


# Equal to transformers' own


@BOTH
@EVERY
def test_every_class_equals_transformers(name: str, backend: str, kernels_run: list[str]) -> None:
    theirs, ours = pair(name, backend)
    inputs = {**inputs_of(name), **labels_of(name)}
    ours.set_attn_implementation(backend) if V5 else None
    got, wanted = full_outputs(ours, inputs, **asked(backend)), full_outputs(theirs, inputs, **asked(backend))
    assert type(got) is type(wanted)
    assert_same(present(got), present(wanted))
    assert set(kernels_run) == {backend}
