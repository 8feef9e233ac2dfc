"""A model is sharded whole, as FSDP2's users shard it: each layer, then the model."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import F64, HEADED, SIZES, assert_same, inputs_of, randomise_
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import bertlite
from bertlite import hf

NAMES = ["BertModel", *(cls.__name__ for cls in HEADED), "BertLMHeadModel"]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("library", [bertlite, hf], ids=lambda library: library.__name__)
def test_a_sharded_model_equals_the_whole(library: Any, name: str, mesh: Any) -> None:
    config = library.BertConfig(**SIZES, is_decoder=name == "BertLMHeadModel")
    whole = randomise_(getattr(library, name)(config)).to(F64).eval()
    sharded = copy.deepcopy(whole)
    for layer in sharded.base_model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert isinstance(sharded, FSDPModule)
    assert isinstance(sharded, type(whole))
    batch = inputs_of(name)
    found = []
    for model in (whole, sharded):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            out = model(**batch)[0]
        out.mul(torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        found.append((out, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}))
    (wanted, wanted_grads), (got, grads) = found
    assert_same(got, wanted)
    assert grads.keys() == wanted_grads.keys()
    for key, grad in grads.items():
        assert_same(grad.full_tensor(), wanted_grads[key])
