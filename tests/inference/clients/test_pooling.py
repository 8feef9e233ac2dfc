"""bertlite/inference/clients/pooling.py: Pooling around an optimised encoder adds tokens in order."""

from typing import Any

import numpy as np
import pytest
import torch
from natively import kernels_or_skip

from bertlite import optimize_for_inference
from bertlite.inference.clients.pooling import pool_states
from bertlite.runtime.pooling import POOLINGS
from tests.clients.checks.common import minilm

library = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.models")
TEXTS = ["a dog", "", "the cat sat on the mat", *(f"number {i} " * i for i in range(1, 30, 4))]


@pytest.fixture(scope="module")
def body() -> Any:
    kernels_or_skip()
    return modules.Transformer(str(minilm()))


@pytest.mark.parametrize("pools_prompt", [True, False])
@pytest.mark.parametrize("backend", ["native", "plain"])
def test_a_vector_never_depends_on_the_padding_of_its_batch(backend: str, pools_prompt: bool, body: Any) -> None:
    pooling = modules.Pooling(384, tuple(POOLINGS), include_prompt=pools_prompt)
    prompts = {"prompts": {"query": "find this: "}, "default_prompt_name": "query"}
    model = library.SentenceTransformer(modules=[body, pooling], device="cpu", **prompts)
    quick = optimize_for_inference(model, backend=backend)
    vectors, theirs = quick.encode(TEXTS), model.encode(TEXTS)
    assert np.abs(vectors - theirs).max() <= 1e-5  # of numbers up to 3
    if backend == "native":
        assert (np.stack([quick.encode(text) for text in TEXTS]) == vectors).all()
    tokens = quick.encode(TEXTS, output_value="token_embeddings")
    alone = [pool_states(x[None], torch.ones(1, len(x)), tuple(POOLINGS), 0 if pools_prompt else 4) for x in tokens]
    assert (torch.cat(alone).numpy() == vectors).all()


def test_weights_of_words_count(body: Any) -> None:
    vocabulary = [word for word, _ in sorted(body.tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    weights = modules.WordWeights(vocabulary, {word: 0.1 * (i % 9 + 1) for i, word in enumerate(vocabulary)})
    model = library.SentenceTransformer(modules=[body, weights, modules.Pooling(384)], device="cpu")
    theirs = model.encode(TEXTS)
    assert np.abs(optimize_for_inference(model).encode(TEXTS) - theirs).max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_states_pool_as_those_of_sentence_transformers_in_float64(dtype: torch.dtype) -> None:
    states = torch.randn(3, 11, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = torch.arange(11) < torch.tensor([[11], [4], [7]])
    pooling = modules.Pooling(48, tuple(POOLINGS), include_prompt=False)
    for skip in (0, 3):
        found = pool_states(states, mask, tuple(POOLINGS), skip)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        features = {"token_embeddings": states.double(), "attention_mask": mask.long(), "prompt_length": skip}
        wanted = pooling(features)["sentence_embedding"]
        assert (found - wanted).abs().max() <= (1e-14 if dtype == torch.float64 else 1e-6)
    with pytest.raises(ValueError, match="a text has no tokens after its prompt, so it has no vector"):
        pool_states(states, mask, ("mean",), 4)
    with pytest.raises(ValueError, match="a text has no tokens, so it has no vector"):
        pool_states(states, mask & False, ("mean",))
