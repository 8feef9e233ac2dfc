"""What holds on a second device: the CPU's results, no operator on tensors of two devices, and no needless wait.

`tests/test_device.py` runs these tests in a process of their own, as `pytest tests/device/checks.py` does by hand.

Shapes:  B 3 sequences · S 11 positions · K 8 of an encoder · D 48 hidden · L 2 layers · N 4 heads · V 97 words
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import DISENTANGLED, HEADED, SIZES, assert_same, inputs_of, labels_of, make_batch, randomise_, tensors
from safetensors.torch import load_file
from torch import Tensor, nn

import bertlite
import bertlite.pruning
from bertlite import Embedder, hf
from bertlite.stack import attention
from tests.device.device import SECOND, start
from tests.hf.pairs import CHECKPOINTING

attention.MOST_DRAWING = 0  # dropout is torch's own, which the second device draws as the CPU does

WAITS = start()
B, S, K, D, L, N = 3, 11, 8, 48, 2, 4
LENGTHS = (11, 7, 4)
ROUNDING = 4e-15  # of the largest value: LayerNorm is one kernel on the CPU, and several operators on other devices
ROOMS = {"bertlite": (bertlite, bertlite.BertConfig), "hf": (hf, transformers.BertConfig)}
DECODER = {"is_decoder": True}
CROSS = {**DECODER, "add_cross_attention": True}
PRUNED_HEADS, PRUNED_NEURONS = {0: [1, 3], 1: [0, 1, 2, 3]}, {1: [0, 5, 36]}
HEADS = [cls.__name__ for cls in HEADED]
CLASSIFIER = "BertForSequenceClassification"
EVERY_ROOM = pytest.mark.parametrize("room", ROOMS)
BACKENDS = [("bertlite", "eager"), ("bertlite", "sdpa"), ("hf", "auto")]
PACKED = [("bertlite", "packed"), ("hf", "packed")]
EVERY_BACKEND = pytest.mark.parametrize(("room", "backend"), [*BACKENDS, *PACKED])

Given = dict[str, Any]


def lengths_mask(*lengths: int) -> Tensor:
    return make_batch(B, S, lengths=lengths or LENGTHS)["attention_mask"]


def mask_of_queries() -> Tensor:
    return torch.ones(S, S, dtype=torch.long).tril()[None] * lengths_mask()[:, None]


def scores() -> Tensor:
    drawn = torch.randn(B, 1, S, S, dtype=torch.float64)
    return drawn.masked_fill(mask_of_queries()[:, None] == 0, torch.finfo(drawn.dtype).min)


ROWS: dict[str, Callable[[], Given]] = {  # what tokens in rows are given
    "no mask": dict,
    "2-D mask": lambda: {"attention_mask": lengths_mask()},
    "bool mask": lambda: {"attention_mask": lengths_mask().bool()},
    "mask with an empty row": lambda: {"attention_mask": lengths_mask(11, 0, 4)},
    "first_token_only": lambda: {"attention_mask": lengths_mask(), "first_token_only": True},
    "first_token_only, empty row": lambda: {"attention_mask": lengths_mask(11, 0, 4), "first_token_only": True},
    "return_encoded": lambda: {"attention_mask": lengths_mask(), "return_encoded": True},
    "tuple": lambda: {"attention_mask": lengths_mask(), "return_dict": False},
    "hidden states": lambda: {"attention_mask": lengths_mask(), "output_hidden_states": True},
    "inputs_embeds": lambda: {"inputs_embeds": torch.randn(B, S, D, dtype=torch.float64), "input_ids": None},
    "position_ids": lambda: {"position_ids": torch.arange(S).flip(0)},
    "head_mask (N,)": lambda: {"head_mask": torch.rand(N)},
    "head_mask (L, N)": lambda: {"attention_mask": lengths_mask(), "head_mask": torch.rand(L, N)},
    "head_mask (L, B, N)": lambda: {"head_mask": torch.rand(L, B, N)},
    "head_mask (L, B, N, 1, 1)": lambda: {"head_mask": torch.rand(L, B, N, 1, 1)},
}
PADDED: dict[str, Callable[[], Given]] = {  # and what only rows with padding can be given
    "3-D mask": lambda: {"attention_mask": mask_of_queries()},
    "4-D bool mask": lambda: {"attention_mask": mask_of_queries()[:, None].bool()},
    "4-D float mask": lambda: {"attention_mask": scores()},
    "attentions": lambda: {"attention_mask": lengths_mask(), "output_attentions": True},
}
VARIANTS: dict[str, dict[str, Any]] = {  # of the config
    "pruned": {"pruned": True},
    "chunked": {"chunk_size_feed_forward": 4},
    "relative_key": {"position_embedding_type": "relative_key"},
    "relative_key_query": {"position_embedding_type": "relative_key_query"},
    "relative, disentangled": {"position_embedding_type": "disentangled", **DISENTANGLED},
}
CLASSES = torch.arange(B) % 2
WORDS = make_batch(B, S)["input_ids"].where(make_batch(B, S)["input_ids"] % 3 == 0, -100)


def make(
    room: str = "bertlite", name: str = "BertModel", backend: str = "sdpa", pruned: bool = False, **changes: Any
) -> Any:
    """Make a model on the CPU whose weights are the same in both rooms."""
    models, config = ROOMS[room]
    sizes = {**SIZES, "num_hidden_layers": L}
    model: Any = getattr(models, name)(config(**sizes, attn_implementation=backend, **changes))
    randomise_(model).double().eval()
    if pruned:
        bertlite.pruning.prune_heads_(model, PRUNED_HEADS)
        bertlite.pruning.prune_neurons_(model, PRUNED_NEURONS)
    return model


def rows(**given: Any) -> Given:
    """Return token ids and types in rows, and what else is given; `input_ids=None` leaves them out."""
    batch = {**make_batch(B, S), "attention_mask": None, **given}
    return {name: x for name, x in batch.items() if x is not None}


def moved(x: Any, device: torch.device, stay: tuple[str, ...] = ()) -> Any:
    """Return the same on a device, but for the names that stay on the host."""
    if isinstance(x, dict):
        return {name: each if name in stay else moved(each, device) for name, each in x.items()}
    return x.to(device) if isinstance(x, Tensor) else x


def forward(model: Any, given: Given) -> Any:
    with torch.no_grad():
        return {"outputs": model(**given)}


def training_step(model: Any, given: Given) -> Any:
    """Return the outputs and the gradients of their loss, or of all of them."""
    out = model(**given)
    found = tensors({name: x for name, x in out.items() if name != "layout"} if isinstance(out, Mapping) else out)
    loss = found[".loss"] if ".loss" in found else sum(x.square().mean() for x in found.values() if x.requires_grad)
    model.zero_grad()
    loss.backward()
    return {"outputs": found, "gradients": {k: p.grad for k, p in model.named_parameters() if p.grad is not None}}


def compare(
    model: nn.Module,
    given: Given,
    waits: int = 0,
    step: Callable[[Any, Given], Any] = training_step,
    stay: tuple[str, ...] = (),
    rounding: float = ROUNDING,
) -> None:
    """Assert that a step gives the same on both devices, stays on the second, and waits for it at most so often."""
    there, given_there = copy.deepcopy(model).to(SECOND), moved(given, SECOND, stay)
    torch.manual_seed(0)  # the second device draws its random numbers as the CPU does
    wanted = step(model, given)
    torch.manual_seed(0)
    WAITS.clear()
    got = step(there, given_there)
    assert len(WAITS) <= waits, WAITS
    assert {x.device for x in tensors(got).values()} == {SECOND}
    for kind, of_cpu in wanted.items():
        largest = max(x.abs().max().item() for x in tensors(of_cpu).values() if x.numel())
        here = {name: x.cpu() for name, x in tensors(got[kind]).items()}
        assert_same(here, tensors(of_cpu), atol=rounding * max(1.0, largest))


def is_masked(given: Given) -> int:
    """Return how often a forward may wait: once, to know its mask."""
    return int("attention_mask" in given)


@pytest.mark.parametrize(
    ("room", "backend", "what"),
    [(*each, what) for each in BACKENDS for what in (*ROWS, *PADDED)]
    + [(*each, what) for each in PACKED for what in ROWS],
)
def test_a_step_is_that_of_the_cpu_and_waits_at_most_once_for_its_mask(room, backend, what):
    given = rows(**{**ROWS, **PADDED}[what]())
    compare(make(room, backend=backend), given, is_masked(given))


@EVERY_BACKEND
@pytest.mark.parametrize(
    ("variant", "gate"),
    [*((each, "no mask") for each in VARIANTS), ("pruned", "head_mask (L, N)"), ("pruned", "head_mask (L, B, N)")],
)
def test_so_is_that_of_another_config_and_of_a_pruned_model(room, backend, variant, gate):
    waits = 2 if backend == "packed" and "relative" in variant else 1  # whether the tokens lie in one piece
    given = rows(**{**ROWS[gate](), "attention_mask": lengths_mask()})
    compare(make(room, backend=backend, **VARIANTS[variant]), given, waits)


@EVERY_ROOM
@pytest.mark.parametrize("backend", ["packed", "auto"])
@pytest.mark.parametrize("stay", [(), ("cu_seqlens",)], ids=["on the device", "on the host"])
@pytest.mark.parametrize("what", ["head_mask (L, B, N)", "first_token_only"])
def test_packed_tokens_are_waited_for_only_to_read_where_sequences_end(room, backend, stay, what):
    ends = torch.tensor([0, 11, 18, 22], dtype=torch.int32)
    given = rows(**{**ROWS[what](), "attention_mask": None}, cu_seqlens=ends)
    packed = {name: x[lengths_mask() == 1] if name in make_batch() else x for name, x in given.items()}
    compare(make(room, backend=backend), packed, waits=0 if stay else 1, stay=stay)


@EVERY_ROOM
@pytest.mark.parametrize("backend", ["sdpa", "packed"])
@pytest.mark.parametrize("name", HEADS)
def test_losses_of_heads_are_those_of_the_cpu(room, backend, name):
    classes = {"num_labels": 6} if "Classification" in name else {}  # as labels_of has them
    compare(make(room, name, backend, **classes), {**inputs_of(name), **labels_of(name)}, 1)


@EVERY_ROOM
def test_other_losses_are_those_of_the_cpu(room):
    several = make(room, CLASSIFIER, problem_type="multi_label_classification", num_labels=2)
    compare(several, rows(labels=torch.rand(B, 2, dtype=torch.float64)))
    number = make(room, CLASSIFIER, problem_type="regression", num_labels=1)
    compare(number, rows(labels=torch.rand(B, dtype=torch.float64)))
    compare(make(room, "BertForMaskedLM"), rows(labels=WORDS, num_items_in_batch=torch.tensor(7)))


def encoded(masked: bool) -> Given:
    """Return what an encoder gave."""
    mask = {"encoder_attention_mask": lengths_mask()[:, :K]} if masked else {}
    return {"encoder_hidden_states": torch.randn(B, K, D, dtype=torch.float64), **mask}


@EVERY_ROOM
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_decoders_are_those_of_the_cpu(room, backend):
    alone = make(room, "BertLMHeadModel", backend, **DECODER, use_cache=False)
    compare(alone, rows())
    compare(alone, rows(attention_mask=lengths_mask(), labels=WORDS), 1)
    compare(alone, rows(logits_to_keep=1))
    crossed = make(room, "BertLMHeadModel", backend, **CROSS, use_cache=False)
    compare(crossed, rows(**encoded(False)))
    compare(crossed, rows(attention_mask=lengths_mask(), **encoded(True)), 2)


def decode(model: Any, given: Given) -> Any:
    """Run 5 tokens, and twice one more with the keys and values of those before."""
    out, start, outs = None, 0, []
    rest = {k: x for k, x in given.items() if k.startswith("encoder")}
    for end in (5, 6, 7):
        here = {k: given[k][:, start:end] for k in ("input_ids", "token_type_ids")}
        if "attention_mask" in given:
            here["attention_mask"] = given["attention_mask"][:, :end]
        past = None if out is None else out.past_key_values
        with torch.no_grad():
            out = model(**here, **rest, past_key_values=past, use_cache=True)
        outs.append(out.logits)
        start = end
    return {"outputs": outs}


@EVERY_ROOM
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_decoding_with_a_cache_is_that_of_the_cpu(room, backend):
    alone, crossed = (make(room, "BertLMHeadModel", backend, **changes) for changes in (DECODER, CROSS))
    compare(alone, rows(), step=decode)
    compare(alone, rows(attention_mask=lengths_mask()), 3, step=decode)
    compare(crossed, rows(**encoded(False)), step=decode)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed"])
@pytest.mark.parametrize(
    ("room", "options", "waits"),
    [
        *((room, options, 1) for room in ROOMS for options in (None, {})),
        ("bertlite", {"every_n_layers": 2}, 1),
        ("bertlite", {"offload": True}, 1 + 2 * L),  # whose inputs come back
    ],
    ids=str,
)
def test_dropout_and_checkpointed_gradients_are_those_of_the_cpu(room, backend, options, waits):
    model = make(room, "BertForMaskedLM", backend, pruned=True).train()
    given = rows(attention_mask=lengths_mask(), head_mask=torch.rand(L, N), labels=WORDS)
    if options is not None:
        enable = f"{CHECKPOINTING if room == 'hf' else 'gradient'}_checkpointing_enable"
        getattr(model, enable)(**options)
    compare(model, given, waits)


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precisions_are_those_of_the_cpu(room, backend, dtype):
    model = make(room, backend=backend).to(dtype)
    compare(model, rows(attention_mask=lengths_mask()), 1, forward, rounding=8 * torch.finfo(dtype).eps)
    if backend == "sdpa":
        compare(model, rows(attention_mask=scores().to(dtype)), 1, forward, rounding=8 * torch.finfo(dtype).eps)


@EVERY_ROOM
@pytest.mark.parametrize("backend", ["eager", "sdpa", "packed"])
def test_under_autocast_too(room, backend):
    def step(model: Any, given: Given) -> Any:
        with torch.autocast(model.device.type, torch.bfloat16):
            return forward(model, given)

    model = make(room, backend=backend).float()
    compare(model, rows(attention_mask=lengths_mask()), 1, step, rounding=0.02)  # the operators it lowers differ


@EVERY_ROOM
def test_a_tied_model_is_moved_saved_and_loaded(room, tmp_path):
    models, _ = ROOMS[room]
    model, name = make(room, "BertForMaskedLM", pruned=True), "BertForMaskedLM"
    there = copy.deepcopy(model).to(SECOND)
    assert there.get_output_embeddings().weight is there.get_input_embeddings().weight
    assert there.device == SECOND
    model.save_pretrained(tmp_path / "cpu")
    there.save_pretrained(tmp_path / "second")
    saved = [load_file(tmp_path / folder / "model.safetensors") for folder in ("cpu", "second")]
    assert_same(*(dict(sorted(each.items())) for each in reversed(saved)), atol=0)
    options = {"device": SECOND} if room == "bertlite" else {}
    loaded = getattr(models, name).from_pretrained(tmp_path / "second", dtype=torch.float64, **options).to(SECOND)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert {p.device for p in loaded.parameters()} == {SECOND}
    given = moved(rows(attention_mask=lengths_mask()), SECOND)
    with torch.device(SECOND):  # as torch.set_default_device has it
        here = getattr(models, name).from_pretrained(tmp_path / "cpu", dtype=torch.float64, **options).to(SECOND)
        for each in (loaded, here):
            assert_same(*(forward(model.eval(), given)["outputs"].logits.cpu() for model in (each, there)), atol=0)
    assert_same(loaded.cpu().state_dict(), model.state_dict(), atol=0)


@EVERY_ROOM
def test_pruning_on_the_device_is_pruning_before_moving(room):
    there = make(room).to(SECOND)
    bertlite.pruning.prune_heads_(there, PRUNED_HEADS)
    bertlite.pruning.prune_neurons_(there, PRUNED_NEURONS)
    assert {p.device for p in there.parameters()} == {SECOND}
    assert_same(there.cpu().state_dict(), make(room, pruned=True).state_dict(), atol=0)


@EVERY_ROOM
def test_head_importance_is_that_of_the_cpu(room):
    batches = [rows(attention_mask=lengths_mask(), labels=CLASSES)]
    model = make(room, CLASSIFIER)
    wanted = bertlite.head_importance(model, batches)
    got = bertlite.head_importance(model.to(SECOND), batches)
    assert_same(got.cpu(), wanted, atol=ROUNDING)


def test_an_optimised_model_is_a_copy_there():
    given, model = rows(attention_mask=lengths_mask()), make().float()
    quick = bertlite.optimize_for_inference(copy.deepcopy(model).to(SECOND))
    assert (quick.backend, quick.device) == ("plain", SECOND)
    got = quick(**moved(given, SECOND)).last_hidden_state
    assert_same(got.cpu(), forward(model, given)["outputs"].last_hidden_state, atol=1e-5)


def test_embedding_waits_for_the_mask_and_the_vectors_of_each_batch(tmp_path, monkeypatch):
    """A GPU copies the vectors by itself, and is waited for when later batches have been launched."""
    pytest.importorskip("sentence_transformers")
    monkeypatch.setattr(Embedder, "optimise", lambda embedder, model: model)  # this device copies no modules
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    make().float().save_pretrained(tmp_path)
    bertlite.BertTokenizer([*words, *(f"[unused{i}]" for i in range(97 - len(words)))]).save_pretrained(tmp_path)
    texts = [" ".join("abcdefgh"[i % 5 : i % 8 + 1] * 3) for i in range(40)]
    here, there = (Embedder(tmp_path, device=str(device), max_tokens=30) for device in ("cpu", SECOND))
    assert there.dimension == D
    WAITS.clear()
    batches: list[int] = []
    found = there.encode(texts, lambda rows: batches.append(len(rows)))
    assert len(batches) > 5
    assert len(WAITS) <= 2 * len(batches), WAITS
    np.testing.assert_allclose(found, here.encode(texts), atol=2e-6)


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x.any()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x[[0, 2]], 1),
        (lambda x: x.index_put_((x > 0,), x[1:]), 1),
        (lambda x: x.unique(), 1),
        (lambda x: x.equal(x + 1), 1),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), 1),
        (lambda x: torch.ones(3).to(x.device, non_blocking=True), 0),
        (lambda x: x.masked_fill(x > 0, 0) * torch.tensor(2.0), 0),
        (lambda x: torch.ones(3, device=x.device)[1:].sum(), 0),
    ],
)
def test_every_wait_is_noted_and_nothing_else(read, waits):
    x = torch.arange(3.0).to(SECOND)
    WAITS.clear()
    read(x)
    assert len(WAITS) == waits, WAITS


@pytest.mark.parametrize(
    "mix", [torch.add, torch.matmul, lambda x, y: torch.cat([x, y]), lambda x, y: x.index_select(0, y.long())]
)
def test_tensors_of_two_devices_are_refused(mix):
    for pair in ((torch.ones(3, device=SECOND), torch.ones(3)), (torch.ones(3), torch.ones(3, device=SECOND))):
        with pytest.raises(RuntimeError, match="two devices"):
            mix(*pair)


def test_memory_that_was_not_written_is_nan():
    assert torch.empty(3, device=SECOND).isnan().all()
    assert torch.empty(3, dtype=torch.long, device=SECOND).tolist() == [-1, -1, -1]
