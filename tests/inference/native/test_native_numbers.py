"""bertlite/inference/native: how far from the truth numbers are, which of them are bit-equal, and what is refused."""

import copy
import re
import statistics
from pathlib import Path

import pytest
import torch
from conftest import SIZES, assert_same, make, make_batch
from natively import DTYPES, check, dtypes, kernels_or_skip, make_native, native, natively
from torch import Tensor, nn

from bertlite import BertConfig, BertModel, BertTokenizer, optimize_for_inference
from bertlite.inference import InferenceModel
from bertlite.inference.native import choice
from bertlite.inference.native.encoder import NativeEncoder
from bertlite.inference.native.linear import NativeLinear
from bertlite.parity.command import demo_checkpoint
from bertlite.parity.compare import distance, largest, rms_distance
from bertlite.runtime import structs
from bertlite.runtime.library import INSTRUCTION_SETS, usable_sets
from bertlite.runtime.packed import FILE, read_packed
from bertlite.runtime.structs import Batch

pytestmark = native
SENTENCES = (
    "Oil prices soar to an all-time record, posing a new menace to the economy three months before the elections.",
    "A company founded by a chemistry researcher won a grant to develop a method of producing better peptides.",
    "The lighthouse keeper wrote down the weather every evening, in a book that no one has read since.",
    "Scientists have taught dogs to sniff out bladder cancer, which could one day lead to an early test.",
)


def relative(ours: Tensor, truth: Tensor) -> float:
    """Return the root mean square of the error, relative to that of the truth."""
    return rms_distance(ours, truth) / rms_distance(truth, torch.zeros_like(truth))


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_errors_of_a_model_as_it_is_made(name):
    """Weights of the size that training leaves; those of the other tests are larger, and let errors grow."""
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 500}
    model = BertModel(BertConfig(**{**SIZES, **sizes}, attn_implementation="packed")).double().eval()
    batch = make_batch(3, 40, lengths=(40, 17, 1))
    with torch.no_grad():
        truth = model(**batch).last_hidden_state
        theirs = copy.deepcopy(model).bfloat16()(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    found = {dtype: natively(model, dtype, name)(**batch).last_hidden_state for dtype in DTYPES}
    assert distance(found[torch.float32], truth) <= 1e-5 * largest(truth)
    assert rms_distance(found[torch.bfloat16], truth) <= rms_distance(theirs, truth)
    assert relative(found[torch.int8], truth) <= 3e-2
    assert torch.cosine_similarity(found[torch.int8].double(), truth, dim=-1)[real].min() > 0.99
    assert relative(found[torch.int8], truth) > 1e-4, "it did not round"


@torch.no_grad()
def test_outliers_of_a_trained_model_do_not_take_the_range_of_8_bits():
    """Without rotation their mean cosine is below .999."""
    folder = demo_checkpoint() or pytest.skip("the MiniLM checkpoint is not installed")
    model, tokenizer = BertModel.from_pretrained(folder).eval(), BertTokenizer.from_pretrained(folder)
    quick, cosines = natively(model, torch.int8), []
    for text in SENTENCES:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        vectors = [each(ids).last_hidden_state.mean(1) for each in (quick, model)]
        cosines.append(torch.cosine_similarity(*vectors).item())
    assert sum(cosines) / len(cosines) > 0.9994


@dtypes
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_sentence_does_not_depend_on_the_rest_of_its_batch_nor_on_threads(name, dtype, set_threads):
    """Also if weights and rows are multiplied in parts, and if there is more than a thread takes at a time.

    One thread may take whole sequences; others share out tokens, or the outputs of few tokens, to add up alike.
    """
    long = (300, 100, 9) if name == usable_sets()[0].name else (90, 59, 1)
    many = (*range(33, 0, -1), 5, 9, 17, 3, 1, 30, 12)
    for sizes, lengths in (
        ({"max_position_embeddings": 300, "intermediate_size": 1700}, long),
        ({"hidden_size": 144, "num_attention_heads": 3, "intermediate_size": 101}, many),
    ):
        model, batch = make_native(**sizes), make_batch(len(lengths), lengths[0], lengths=lengths)
        quick, outs = natively(model, dtype, name), []
        for threads in (1, 4):  # with 4, 150 tokens are rows of one product
            set_threads(threads)
            outs.append([quick(**batch, output_hidden_states=True), quick(**batch, first_token_only=True)])
        assert_same(outs[0], outs[1], atol=0)
        for i in {0, 1, 2, len(lengths) // 2, len(lengths) - 1}:
            alone = quick(**{key: x[i : i + 1, : lengths[i]] for key, x in batch.items()}).last_hidden_state
            assert torch.equal(alone[0], outs[0][0].last_hidden_state[i, : lengths[i]])
        check(model, dtype, name, **batch)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@torch.no_grad()
def test_long_sums_are_as_near_to_the_truth_as_torchs(name):
    """One sum of so many products, each rounded to the step of all that came before, is off by twice as much."""
    random = torch.Generator().manual_seed(0)
    linear, x = nn.Linear(3072, 70), torch.rand(50, 3072, generator=random)
    linear.weight.copy_(torch.rand(70, 3072, generator=random))
    truth = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    ours = NativeLinear(linear, torch.float32, kernels_or_skip(name))(x)
    assert rms_distance(ours, truth) < 1.5 * rms_distance(linear(x), truth)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@torch.no_grad()
def test_gelu_of_a_large_number_is_this_number_or_none(name):
    """A step less at a neuron of 30, as trained models have at every token, would add up over the layers."""
    linear = NativeLinear(nn.Linear(64, 64, bias=False), torch.float32, kernels_or_skip(name))
    linear.weight.copy_(linear.pack(torch.eye(64)))
    linear.activate("gelu")
    x = torch.linspace(5.7, 300, 640).view(10, 64)
    assert torch.equal(linear(x), x)
    assert not linear(-x).any()


# Float32 as the sum of three bfloat16 -------------------------------------------------------------------------------


def by_parts(linear: nn.Linear, x: Tensor, reproducible: bool = False) -> Tensor:
    return NativeLinear(linear, torch.float32, kernels_or_skip("amx", reproducible))(x)


@torch.no_grad()
def test_tiles_are_nearer_to_the_truth_than_float32():
    """Of trained weights and real inputs the error is at most torch's, and at most half of it in the median."""
    model = BertModel.from_pretrained(demo_checkpoint() or pytest.skip("the MiniLM checkpoint is not installed"))
    linears = [part for part in model.encoder.modules() if isinstance(part, nn.Linear)]
    inputs = {each: [] for each in linears}
    hooks = [each.register_forward_hook(lambda part, args, _: inputs[part].append(args[0][0, :3])) for each in linears]
    for word in range(2000, 18000, 1000):  # one text may be lucky in the sum that its largest neuron decides
        model(torch.tensor([[101, word, word + 9, 1012, 102]]))
    for hook in hooks:
        hook.remove()
    shares = []
    for linear in linears:
        x = torch.cat(inputs[linear])
        truth = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
        shares.append(rms_distance(by_parts(linear, x), truth) / rms_distance(linear(x), truth))
    assert max(shares) < 1
    assert statistics.median(shares) < 0.5


@pytest.mark.parametrize("inputs", [1, 31, 129, 1025])
@pytest.mark.parametrize("outputs", [16, 70, 1100])
@torch.no_grad()
def test_a_row_has_the_same_bits_alone(inputs, outputs):
    random = torch.Generator().manual_seed(0)
    linear, x = nn.Linear(inputs, outputs), torch.randn(131, inputs, generator=random)
    whole, truth = by_parts(linear, x), nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(whole.double(), truth, rtol=0, atol=1e-6)
    for rows in (1, 15, 17, 50):
        assert torch.equal(by_parts(linear, x[-rows:].contiguous()), whole[-rows:])


@pytest.mark.parametrize("number", [3e38, -2e38, 1e-30, 1e-40, 0.0, float("inf"), float("-inf"), float("nan")])
@torch.no_grad()
def test_numbers_beyond_the_parts_are_multiplied_as_float32(number):
    """In one row, while the others stay as they are, and in one weight."""
    random = torch.Generator().manual_seed(0)
    linear, x = nn.Linear(40, 48), torch.randn(20, 40, generator=random)
    usual = by_parts(linear, x)
    x[7] = number
    found, exact = by_parts(linear, x), by_parts(linear, x, reproducible=True)
    same_numbers(found[7], exact[7])
    others = [row for row in range(20) if row != 7]
    assert torch.equal(found[others], usual[others])
    assert not torch.equal(usual[others], exact[others])  # it was multiplied in parts
    x[7] = 1
    linear.weight.fill_(number)
    same_numbers(by_parts(linear, x), by_parts(linear, x, reproducible=True))


def same_numbers(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


# Numbers that are not finite ----------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(
    ("name", "bad"),
    [(None, torch.nan), (None, torch.inf), (None, -torch.inf), ("baseline", torch.nan), ("avx2", torch.inf)],
)
@torch.no_grad()
def test_a_weight_that_is_not_finite_is_not_swallowed(name, bad, dtype):
    batch, parts = make_batch(), make_native().encoder.layer[1].named_modules()
    for matrix in [name for name, x in parts if isinstance(x, nn.Linear) and "key" not in name]:
        for part in ("weight", "bias"):
            model = make_native(attn_implementation="packed")
            getattr(model.encoder.layer[1].get_submodule(matrix), part).view(-1)[7] = bad
            plain = copy.deepcopy(model).float()(**batch).last_hidden_state
            ours = natively(model, dtype, name)(**batch).last_hidden_state
            assert not plain.isfinite().all(), f"{matrix}.{part}: the plain model is finite"
            lost = ~plain.isfinite() & ours.isfinite()
            assert not lost.any(), f"{matrix}.{part}: {int(lost.sum())} numbers are finite that are not in the model"


@dtypes
@pytest.mark.parametrize(
    ("name", "bad"), [(None, torch.nan), (None, torch.inf), ("baseline", torch.inf), ("avx2", torch.nan)]
)
def test_a_token_that_is_not_finite_spoils_its_own_sequence_alone(name, bad, dtype):
    x = torch.randn(2, 11, 80, generator=torch.Generator().manual_seed(0))
    quick = natively(make_native(), dtype, name)
    x = x.to(quick.dtype)
    wanted = quick(inputs_embeds=x).last_hidden_state
    x[0, 3, 5] = bad
    got = quick(inputs_embeds=x).last_hidden_state
    assert got[0].isnan().all()
    assert torch.equal(got[1], wanted[1])


@dtypes
@pytest.mark.parametrize("number", [0.0, 1e-40, 3.4e38])
def test_rows_of_zeros_and_of_numbers_beyond_a_dtype(number, dtype):
    """The norm of one layer makes them, for the matmuls of the next."""
    model, batch = make_native(), make_batch()
    norm = model.encoder.layer[0].output.LayerNorm
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.fill_(number)
    if number < 1:
        check(model, dtype, **batch)
    else:
        found = natively(model, dtype)(**batch).last_hidden_state
        assert not found[batch["attention_mask"].bool()].isfinite().any()


# What is taken and what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "native"])
@dtypes
def test_they_are_taken_where_they_can_run_the_model_and_hold_no_matrix_twice(backend, dtype, monkeypatch):
    monkeypatch.setattr(choice, "kernels_are_faster", lambda *_: True)  # on any processor
    model = make(hidden_size=128, num_attention_heads=2, intermediate_size=192).float()
    quick = optimize_for_inference(model, dtype=dtype, backend=backend)
    assert (quick.backend, quick.compute_dtype, quick.device.type) == ("native", dtype, "cpu")
    assert quick.dtype == (torch.float32 if dtype == torch.int8 else dtype)
    assert not quick(**make_batch()).last_hidden_state.requires_grad
    assert not any(isinstance(part, nn.Linear) for part in quick.modules())
    assert not {x.data_ptr() for x in model.parameters()} & {x.data_ptr() for x in quick.parameters()}
    names = [name for name, _ in quick.named_parameters()]
    assert all("embeddings" in name for name in names), names
    linears = [name for name, part in quick.named_modules() if isinstance(part, NativeLinear)]
    assert linears == ["model.pooler.dense"]
    encoder = quick.model.encoder
    assert isinstance(encoder, NativeEncoder)
    per_layer = 4 * 128 * 128 + 2 * 128 * 192  # of numbers in matrices
    size = {torch.float32: 4, torch.bfloat16: 2, torch.int8: 1}[dtype]
    vectors = 4 * (4 * 128 + (3 * 128 + 128 + 192 + 128) * (3 if dtype == torch.int8 else 1))
    assert encoder.weights.data.numel() <= 3 * (size * per_layer + vectors + 64 * 20)


def test_a_trace_is_refused_and_a_function_around_it_is_compiled():
    quick, ids = natively(make_native(), torch.float32), make_batch()["input_ids"]
    compiled = torch.compile(lambda ids: quick(ids).last_hidden_state + 1, backend="eager")
    for each in (ids, ids[:1, :5]):
        assert torch.equal(compiled(each), quick(each).last_hidden_state + 1)
    tracing = "native kernels cannot be traced, exported or mapped; use the original model"
    with pytest.raises(RuntimeError, match=tracing):
        torch.jit.trace(lambda ids: quick(ids).last_hidden_state, (ids,))
    with pytest.raises(RuntimeError, match=tracing):
        torch.func.vmap(lambda ids: quick(ids[None]).last_hidden_state)(ids)
    with pytest.raises(RuntimeError, match=tracing):
        torch.export.export(quick, (ids,), strict=False)


@dtypes
@pytest.mark.parametrize("convert", ["half", "double", "bfloat16", "float"])
def test_a_copy_whose_dtype_is_changed_runs_or_says_so(convert, dtype):
    quick = natively(make_native(), dtype)
    wanted = quick(**make_batch()).last_hidden_state
    getattr(quick.model, convert)()
    if convert in ("half", "double"):
        with pytest.raises(RuntimeError, match=rf"float32 or bfloat16 on the CPU, not 80 of {quick.model.dtype}"):
            quick(**make_batch())
    else:
        assert distance(quick(**make_batch()).last_hidden_state, wanted) < 0.2  # some steps of bfloat16


def test_shorter_tables_are_read_to_their_end_alone():
    quick = natively(make_native(), torch.float32)
    table = quick.model.embeddings.position_embeddings
    table.weight = nn.Parameter(table.weight[:5])
    with pytest.raises(IndexError):
        quick(**make_batch())
    quick.model.pooler.dense.inputs = 81
    with pytest.raises(RuntimeError, match="takes 81 numbers on the CPU, not 80"):
        quick.model.pooler.dense(torch.ones(1, 80))


def test_too_little_memory_is_an_error():
    kernels, quick = kernels_or_skip(), natively(make_native(), torch.float32)
    model, before = quick.model, quick(**make_batch()).last_hidden_state
    starts = torch.tensor([0, 2**45])
    batch = Batch(tokens=2**45, sequences=1, starts=starts.data_ptr())  # more than any machine has memory for
    with pytest.raises(MemoryError, match="the native kernels found no memory for this batch: use a smaller one"):
        kernels.run(model.encoder.weights.model, batch, 2)
    assert torch.equal(quick(**make_batch()).last_hidden_state, before)


@pytest.mark.parametrize(
    ("where", "field", "message"),
    [
        *((where, "size", "structs of other sizes") for where in ("model", "batch", "layer")),
        ("layer", "dtype", "dtype 99 is unknown"),
        ("model", "activation", "activation 99 is unknown"),
    ],
)
def test_structs_that_the_library_does_not_know_are_an_error(where, field, message, monkeypatch):
    weights, batch = natively(make_native(), torch.float32).model.encoder.weights, Batch()
    setattr({"model": weights.model, "batch": batch, "layer": weights.model.layers[2]}[where], field, 99)
    with pytest.raises(RuntimeError, match=message):
        kernels_or_skip().run(weights.model, batch, 1)
    monkeypatch.setitem(structs.NUMBERS, "float32", 99)
    with pytest.raises(RuntimeError, match="dtype 99 is unknown"):
        natively(make_native(), torch.float32)


@dtypes
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@torch.no_grad()
def test_a_variance_beyond_floats_gives_nan(name, dtype):
    """torch's LayerNorm then gives nan, or the shift alone, as if its input were a constant."""
    batch, outcomes = make_batch(), []
    for exponent in (15, 18, 19, 20, 25, 30, 37):
        model = make_native(num_hidden_layers=1)
        bias = model.encoder.layer[0].attention.output.dense.bias
        bias.data = torch.randn(80, dtype=torch.float64) * 10.0**exponent
        truth, plain = model(**batch).last_hidden_state, copy.deepcopy(model).float()(**batch).last_hidden_state
        ours = natively(model, dtype, name)(**batch).last_hidden_state[batch["attention_mask"].bool()]
        outcomes.append(bool(ours.isfinite().all()))
        if outcomes[-1]:
            assert relative(ours, truth[batch["attention_mask"].bool()]) < 0.05
        else:
            assert ours.isnan().all()
            assert not distance(plain, truth) < 0.1 * largest(truth), "torch gives what is right"
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes[0]
    assert not outcomes[-1]


def test_packed_weights_are_asked_onto_huge_pages_wherever_they_are_made(tmp_path):
    maps, offered = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not (maps.exists() and offered.exists()):
        pytest.skip("this Linux has no transparent huge pages")
    large = make_native(hidden_size=640, intermediate_size=2000)  # some 50 MB
    quick = natively(large, torch.float32)
    quick.save(tmp_path / "saved")
    loaded = InferenceModel.load(tmp_path / "saved")
    weights = [model.model.encoder.weights.data.numpy() for model in (quick, loaded)]
    weights.append(read_packed(tmp_path / "saved" / FILE).layers)
    areas = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", maps.read_text(), re.MULTILINE | re.DOTALL)
    for packed in weights:
        middle = packed.ctypes.data + packed.nbytes // 2
        (flags,) = [flags for start, end, flags in areas if int(start, 16) <= middle < int(end, 16)]
        assert "hg" in flags.split()
