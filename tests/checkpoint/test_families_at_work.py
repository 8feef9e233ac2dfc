"""What works on a BERT works on a model of another family, beside transformers' own class of it."""

import copy
import json
import random
import re
import unicodedata
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import F64, assert_same
from test_families import CONFIGS, ROTARY, batch_of, ours_of, theirs_of  # type: ignore[import-not-found]
from torch import Tensor

from bertlite import BertTokenizer, Embedder, head_importance, optimize_for_inference, prune_heads, prune_neurons
from bertlite.causal import ablate, patch
from bertlite.cli import main
from bertlite.commands import attention
from bertlite.experiments.budget.distil import Distillation
from bertlite.experiments.budget.quality import Quality
from bertlite.experiments.budget.search import State
from bertlite.experiments.data import EncodedExamples
from bertlite.parity.reference import unrounded
from bertlite.pruning import neuron_importance
from bertlite.pruning.vocabulary import keep_used_tokens
from bertlite.runtime.library import missing_platform
from bertlite.shipping.onnx import Graph
from bertlite.support.progress import Progress

transformers = pytest.importorskip("transformers")

# With rotary positions, or norms first; others are one of these, as tests/laws shows.
NEW = tuple(kind for kind in ("modernbert", "nomic_bert", "jina_embeddings_v3", "megatron-bert") if kind in CONFIGS)
KINDS = ("roberta", "mpnet", "electra small", "deberta-v2", *NEW)  # others differ from BERT in names alone
EACH = pytest.mark.parametrize("kind", KINDS)
EACH_STUDIED = pytest.mark.parametrize("kind", [*NEW, "xlm-roberta-xl"])
HEADS_READ_BY = r"attn\.Wo|self_attn\.o_proj|attention\.output\.dense"  # names of transformers' modules
NEURONS_READ_BY = r"mlp\.Wo|down_proj|fc2|\d\.output\.dense"
TEXTS = [
    "Der Leuchtturmwärter schrieb jeden Abend das Wetter auf.",
    "Хлеб поднимается, потому что дрожжи превращают сахар в газ.",
    "灯塔守护人每晚记录天气。",
    "L'été dernier, nous étions à la mer.",
    "कल मौसम अच्छा था।",
    "البحر هادئ اليوم",
    "Who moved my coffee?",
    "Nie",
]
VOCABULARY = 300


def save_tokenizer(folder: Path, kind: str) -> None:
    """Write a tokenizer of the family for TEXTS: Unigram as XLM-R's, else WordPiece."""
    if kind != "roberta":
        letters = sorted({letter for text in TEXTS for letter in unicodedata.normalize("NFD", text.lower())} - {" "})
        roles = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        if kind == "mpnet":
            roles = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "mask_token": "<mask>"}
        special = dict.fromkeys([*roles.values(), "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
        BertTokenizer([*special, *letters, *(f"##{letter}" for letter in letters)], **roles).save_pretrained(folder)
        return
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    options = {"vocab_size": VOCABULARY, "special_tokens": special, "show_progress": False}
    backend.train_from_iterator(TEXTS, tokenizers.trainers.UnigramTrainer(unk_token="<unk>", **options))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B:0 </s>", [("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives a model of transformers and its folder, which has a tokenizer for TEXTS."""

    @cache
    def make(kind: str, head: str = "") -> tuple[Any, Path]:
        model = theirs_of(kind, head, vocab_size=VOCABULARY)
        folder = tmp_path_factory.mktemp("world")
        if kind == "mpnet":
            with torch.no_grad():
                model.base_model.encoder.relative_attention_bias.weight.mul_(10)  # so that it matters
        model.save_pretrained(folder)
        save_tokenizer(folder, kind)
        return model, folder

    return make


@pytest.fixture(scope="module", params=["roberta", "mpnet"])
def with_row(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a model whose padding has a position that is not zero, and its folder."""
    theirs, folder = theirs_of(request.param), tmp_path_factory.mktemp("row")
    with torch.no_grad():
        theirs.embeddings.position_embeddings.weight[theirs.config.pad_token_id] = torch.randn(48, dtype=F64)
    theirs.save_pretrained(folder)
    return theirs, folder


@pytest.mark.parametrize("way", ["eager", "sdpa", "packed", "cu_seqlens", "native", "native cu_seqlens"])
@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
def test_positions_have_transformers_numbers_and_padding_its_own_row(way: str, given: bool, with_row: Any) -> None:
    """As RobertaModel and MPNetModel, where padding is attended to as well, as it is without a mask."""
    theirs, folder = with_row
    native = way.startswith("native")
    if native and (reason := missing_platform()):
        pytest.skip(reason)
    batch = batch_of(theirs)
    ids = batch["input_ids"]
    numbers = {"position_ids": torch.randint(1, 42, ids.shape)} if given else {}
    if given:
        numbers["position_ids"][0, :2] = torch.tensor([1, 41])  # padding's, and the last
    model = ours_of(folder, backend=way if way in ("eager", "sdpa", "packed") else "auto")
    model = optimize_for_inference(model.float(), dtype=torch.float32, backend="native") if native else model
    with torch.no_grad():
        wanted = theirs(ids, **numbers).last_hidden_state
        if way.endswith("cu_seqlens"):
            flat = {name: x.flatten() for name, x in numbers.items()}
            found = model(ids.flatten(), cu_seqlens=torch.tensor([0, 33, 66, 99], dtype=torch.int32), **flat)
            found = found.last_hidden_state.view_as(wanted)
        else:
            found = model(ids, **numbers).last_hidden_state
            real, mask = batch["attention_mask"].bool(), batch["attention_mask"]
            masked = model(ids, mask, **numbers).last_hidden_state[real].double()
            assert_same(masked, theirs(ids, mask, **numbers).last_hidden_state[real], atol=1e-4 if native else 1e-12)
    assert_same(found.double(), wanted, atol=1e-4 if native else 1e-12)


def test_padding_with_a_position_is_kept_when_saved_and_resized(with_row: Any, tmp_path: Path) -> None:
    theirs, folder = with_row
    model, ids = ours_of(folder), batch_of(theirs)["input_ids"]
    with torch.no_grad():
        wanted = theirs(ids).last_hidden_state
        model.save_pretrained(tmp_path / "saved")
        assert_same(ours_of(tmp_path / "saved")(ids).last_hidden_state, wanted)
        model.resize_position_embeddings(50)
        model.save_pretrained(tmp_path / "longer")
        assert_same(ours_of(tmp_path / "longer")(ids).last_hidden_state, wanted)
    assert main(["inspect", str(folder)]) == 0
    with pytest.raises((ValueError, KeyError)):  # stock has no place for it
        transformers.BertModel.from_pretrained(tmp_path / "saved")


@EACH
def test_positions_outside_the_table_are_named_in_transformers_numbers(kind: str, worlds: Any) -> None:
    model, ids = ours_of(worlds(kind)[1]), torch.full((1, 3), 7)
    lowest, highest = (1, 41) if kind in ("roberta", "mpnet") else (0, 39)
    for wrong in (lowest - 1, highest + 1):
        with pytest.raises(ValueError, match=f"position_ids holds {wrong}; this model has {lowest} to {highest} "):
            model(ids, position_ids=torch.tensor([[lowest, wrong, highest]]))
    if kind == "deberta-v2":  # which has positions for any length
        assert model(torch.full((1, 41), 7)).last_hidden_state.isfinite().all()
        return
    model(torch.full((1, 40), 7))  # 42 rows of positions, of which two are of no token, or 40
    with pytest.raises(ValueError, match=r"41 .*\b40\b"):
        model(torch.full((1, 41), 7))


@EACH
def test_a_job_embeds_texts_of_many_languages_each_as_alone(kind: str, worlds: Any, tmp_path: Path) -> None:
    """Bit for bit as each text alone, with the native kernels, and as transformers' model of the ids."""
    pq = pytest.importorskip("pyarrow.parquet")
    theirs, folder = worlds(kind)
    texts = [*TEXTS, *(" ".join(pair) for pair in pairwise(TEXTS))]
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    words = ["embed", str(folder), str(tmp_path / "texts.txt"), "--out", str(tmp_path / "out"), "--backend", "native"]
    assert main([*words, "--dtype", "float32", "--max-tokens", "70", "--shard-rows", "5"]) == 0
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.parquet"))
    vectors = [row for path in shards for row in pq.read_table(tmp_path / "out" / path)["vector"].to_pylist()]
    embedder, tokenizer = Embedder(folder, backend="native"), BertTokenizer.from_pretrained(folder)
    for text, vector in zip(texts, vectors, strict=True):
        assert (embedder.encode(text) == np.float32(vector)).all()
        ids = tokenizer(text, truncation=True, max_length=40, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            mean = theirs(ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(torch.tensor(vector, dtype=F64), mean, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "electra small", "deberta-v2", *ROTARY[:1], "megatron-bert"])
def test_a_graph_is_exported(kind: str, worlds: Any) -> None:
    """As torch sees it, for batches and lengths of any size, padding included; tests/laws run those of ONNX."""
    theirs, folder = worlds(kind)
    graph = Graph(ours_of(folder).float())
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    sample = graph.sample(2, 7)
    program = torch.export.export(graph, (), sample, dynamic_shapes=dict.fromkeys(sample, sizes)).module()
    batch = batch_of(theirs)
    given = {name: batch.get(name, torch.zeros_like(batch["input_ids"])) for name in sample}
    with torch.no_grad():
        found = dict(zip(graph.outputs, program(**given), strict=True))
        with unrounded(theirs):
            wanted = theirs(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found["last_hidden_state"][real].double(), wanted[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("roberta", "SequenceClassification"),
        ("mpnet", ""),
        ("deberta-v2", "SequenceClassification"),
        *((kind, "SequenceClassification") for kind in ROTARY[:1]),
        *((kind, "") for kind in ROTARY[1:2]),
    ],
)
def test_it_is_pruned_to_a_budget(
    kind: str, head: str, worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = worlds(kind, head)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = random.Random(0)
    lines = [" ".join(rng.choices(" ".join(TEXTS).split(), k=rng.randint(2, 7))) for _ in range(60)]
    (tmp_path / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    words = ["prune", "to", "60%", str(folder), "--texts", str(tmp_path / "texts.txt"), "--at", "2x16"]
    assert main([*words, "--out", str(tmp_path / "small")]) in (0, 1)  # a random model may be left with one class
    assert json.loads((tmp_path / "small" / "report.json").read_text())["macs"] <= 0.6
    small, given = ours_of(tmp_path / "small", head), ours_of(folder, head)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in given.parameters())
    assert small.config.position_embedding_type == given.config.position_embedding_type
    tokenizer = BertTokenizer.from_pretrained(tmp_path / "small")
    assert tokenizer(TEXTS)["input_ids"] == BertTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]
    batch = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    alone = tokenizer(TEXTS[2], return_tensors="pt")
    with torch.no_grad():
        assert torch.isfinite(small(**batch)[0]).all()
        rows, row = small(**batch)[0][2], small(**alone)[0][0]
    assert_same([rows if head else rows[: len(row)]], [row])


def test_inspect_says_which_family_it_is_and_what_it_becomes(worlds: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "roberta": "roberta, which becomes a BERT: positions without the rows up to padding's",
        "distilbert": "distilbert, which becomes a BERT: segments of zeros; no pooler",
        **{kind: f"{kind}, which becomes a BERT: rotary positions" for kind in ROTARY},
    }
    for kind, line in said.items():
        assert main(["inspect", str(worlds(kind)[1])]) == 0
        printed = capsys.readouterr().out
        assert f"  {line}" in printed
        assert ("does not know 'nomic_bert' models; `bertlite convert`" in printed) is (kind == "nomic_bert"), "in 4"


# What is done with a model after it is loaded, on families with rotary positions or norms first


@EACH_STUDIED
def test_patching_is_as_by_hooks_on_transformers_modules(kind: str, worlds: Any) -> None:
    """One head or sublayer at a time, on the text where its output is read and on another one."""
    theirs, folder = worlds(kind)
    ours, corrupted = ours_of(folder), batch_of(theirs)
    others = torch.randint(4, 97, corrupted["input_ids"].shape)
    clean = {**corrupted, "input_ids": others.where(corrupted["attention_mask"] > 0, corrupted["input_ids"])}

    def metric(out: Any, batch: Any) -> Tensor:
        return (out.last_hidden_state.sin() * batch["attention_mask"][..., None]).sum((1, 2))

    @torch.no_grad()
    def hooked(batch: Any, module: Any, edit: Any) -> Tensor:
        handle = module.register_forward_pre_hook(lambda _, args: edit(args[0]))
        with unrounded(theirs):
            found = metric(theirs(**batch), batch)
        handle.remove()
        return found

    def patched(given: Tensor, x: Tensor, part: slice) -> Tensor:
        return torch.cat([x[..., : part.start], given[..., part], x[..., part.stop :]], -1)

    for site, names, width in (("head", HEADS_READ_BY, 16), ("feed_forward", NEURONS_READ_BY, 37)):
        modules = [part for name, part in theirs.named_modules() if re.search(rf"(^|\.)({names})$", name)]
        found = patch(ours, clean, corrupted, site, metric=metric)
        assert len(modules) == ours.config.num_hidden_layers == found.values.shape[1]
        for (layer, module), unit in product(enumerate(modules), range(3 if site == "head" else 1)):
            read: list[Tensor] = []
            whole = hooked(clean, module, read.append)
            out = hooked(corrupted, module, partial(patched, read[0], part=slice(unit * width, (unit + 1) * width)))
            got = found.values[:, layer, unit] if site == "head" else found.values[:, layer]
            assert_same([got, found.clean], [out, whole], atol=1e-11)  # of sums over all tokens
        own = patch(ours, clean, clean, site, metric=metric)
        assert_same(own.values, own.clean.view(-1, *[1] * (own.values.dim() - 1)).expand_as(own.values), atol=0)
    found = patch(ours, clean, corrupted, "residual", metric=metric)  # the first and the last states are all there is
    assert_same(found.values[:, [0, -1]], found.clean[:, None].expand(-1, 2), atol=0)


@EACH_STUDIED
def test_the_drawn_weights_are_transformers_attentions(kind: str, worlds: Any) -> None:
    theirs, folder = worlds(kind)
    text = "Who moved my coffee?"
    record = attention(folder, text, heads=[0, 2])
    ids = BertTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = theirs(ids, output_attentions=True).attentions
    assert len(wanted) == len(record["weights"])
    for layer, each in enumerate(wanted):
        rows = record["weights"][str(layer)]
        torch.testing.assert_close(torch.tensor([rows["0"], rows["2"]]), each[0, [0, 2]].float(), rtol=0, atol=1e-6)
    assert bool((wanted[1] == 0).any()) == (kind == "modernbert"), "keys outside the window"


@EACH_STUDIED
def test_with_fewer_tokens_outputs_are_the_same(kind: str, worlds: Any, tmp_path: Path) -> None:
    _, folder = worlds(kind, "MaskedLM")
    model, letters = ours_of(folder, "MaskedLM"), BertTokenizer.from_pretrained(folder).get_vocab()
    tokenizer = BertTokenizer([*sorted(letters, key=letters.__getitem__), "sea", "who", "##ved", "the"])
    small, few = keep_used_tokens(model, tokenizer, TEXTS[6:])
    kept = [i for token, i in tokenizer.get_vocab().items() if token in few.get_vocab()]
    kept.sort()
    assert len(kept) == small.config.vocab_size == len(tokenizer) - 2
    small.save_pretrained(tmp_path)
    before, after = (each(TEXTS[6:], padding=True, return_tensors="pt") for each in (tokenizer, few))
    with torch.no_grad():
        wanted = model(**before, output_hidden_states=True)
        for each in (small, ours_of(tmp_path, "MaskedLM")):
            found = each(**after, output_hidden_states=True)
            assert_same(found.hidden_states, wanted.hidden_states, atol=0)
            assert_same(found.logits, wanted.logits[..., kept])
            frozen = {name for name, x in each.named_parameters() if not x.requires_grad}
            assert frozen == {name for name, x in model.named_parameters() if not x.requires_grad}


@EACH_STUDIED
@pytest.mark.parametrize("unit", ["head", "neuron"])
def test_scores_are_what_a_model_without_the_unit_loses(kind: str, unit: str, worlds: Any) -> None:
    """Exactly when it is left out, and to first order when it shrinks."""
    theirs, folder = worlds(kind, "SequenceClassification")
    model = ours_of(folder, "SequenceClassification")
    batch = {**{name: x[:1] for name, x in batch_of(theirs, padded=False).items()}, "labels": torch.tensor([1])}
    score, prune = (head_importance, prune_heads) if unit == "head" else (neuron_importance, prune_neurons)
    left_out, gradients = (score(model, [batch], criterion=name) for name in ("leave_one_out", "michel"))
    if unit == "head":
        assert_same(ablate(model, [batch], "zero").increase, left_out)

    @torch.no_grad()
    def loss_of(model: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    for layer, each in product(range(model.config.num_hidden_layers), (0, 2)):
        assert_same([left_out[layer, each]], [loss_of(prune(model, {layer: [each]})) - loss_of(model)])
        block = model.base_model.encoder.layer[layer]
        part = (block.attention if unit == "head" else block).output.dense
        columns = slice(16 * each, 16 * (each + 1)) if unit == "head" else slice(each, each + 1)
        ends = []
        for gate in (1 + 1e-4, 1 - 1e-4):
            scaled = copy.deepcopy(model)
            name = next(name for name, x in model.named_modules() if x is part)
            scaled.get_submodule(name).weight.data[:, columns] *= gate
            ends.append(loss_of(scaled))
        slope = ((ends[0] - ends[1]) / 2e-4).abs()
        torch.testing.assert_close(gradients[layer, each], slope, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", [*ROTARY[:1], "xlm-roberta-xl"])
def test_a_student_learns_its_teachers_outputs(
    kind: str, worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes, its teacher does not, nor do the zeros for parameters that the family lacks."""
    pytest.importorskip("accelerate")
    teacher = ours_of(worlds(kind, "SequenceClassification")[1], "SequenceClassification").float()
    lacking = {name for name, x in teacher.named_parameters() if not x.requires_grad}
    given, student, draw = copy.deepcopy(teacher), prune_heads(teacher, {0: range(3), 1: [2]}), random.Random(0)
    rows = tuple((tuple(draw.choices(range(4, 97), k=draw.randint(4, 30))), ()) for _ in range(60))
    data = EncodedExamples(rows, (0,) * len(rows))
    held = {name: x for name, x in data.batch(range(20), torch.long).items() if name != "labels"}
    score = Quality(teacher, [held])
    monkeypatch.setattr(Distillation, "plan", lambda *_: {"steps": 8, "step_seconds": 0.01})
    before, distillation = score(student), Distillation(teacher, data, False, "8steps", score)
    distillation.train_(student, State(tmp_path, {}), Progress(None, "steps", shown=False))
    assert 0 > score(student)[1] > before[1], "the negative divergence"
    assert_same(teacher.state_dict(), given.state_dict(), atol=0)
    assert {name for name, x in student.named_parameters() if not x.requires_grad} == lacking
    assert not any(x.any() for name, x in student.named_parameters() if name in lacking)
