"""Ways to run one model, and the kinds of models that they run.

A way is made from a model of bertlite in float64.  It gives a row for each text: {place: tensor}, without padding.

Shapes:  B texts · S tokens of a text, from [CLS] to [SEP]
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import torch
from conftest import DISENTANGLED, EXACT, SIZES, SPECIAL, make, tensors
from natively import in_integers, kernels_or_skip, natively
from simulated import graphed
from torch import Tensor

from bertlite import BertConfig, BertModel, BertTokenizer, optimize_for_inference
from bertlite.checkpoint.families import Origin
from bertlite.inference import InferenceModel
from bertlite.pruning import scatter_heads
from bertlite.runtime import load
from bertlite.shipping.onnx import INPUTS, PACKAGES, Graph, load_onnx, write_onnx
from bertlite.shipping.pack import pack

Row = dict[str, Tensor]
Texts = Sequence[Tensor]  # token ids, (S,) each
STATES = {"output_hidden_states": True}
BOTH = {**STATES, "output_attentions": True}
HOME = TemporaryDirectory(prefix="bertlite-laws-")  # of the files of ways
KINDS: dict[str, dict[str, Any]] = {  # what a config.json states in addition to the sizes
    "bert": {},
    "pruned": {"pruned_heads": {0: [1, 3], 1: range(4)}, "pruned_neurons": {0: range(37), 2: [1, 5]}},
    "relative_key": {"position_embedding_type": "relative_key"},
    "relative_key_query": {"position_embedding_type": "relative_key_query"},
    "roberta": {"model_type": "roberta"},
    "mpnet": {"model_type": "mpnet"},
    "electra small": {"model_type": "electra", "embedding_size": 24},
    "deberta-v2": {"model_type": "deberta-v2", "relative_attention": True, **DISENTANGLED},
    "modernbert": {"model_type": "modernbert", "local_attention": 4, "pad_token_id": 0},  # windows in layers 1 and 2
    "nomic_bert": {"model_type": "nomic_bert"},
    "jina_embeddings_v3": {"model_type": "jina_embeddings_v3", "pad_token_id": 0},
    "xlm-roberta-xl": {"model_type": "xlm-roberta-xl"},
    "megatron-bert": {"model_type": "megatron-bert"},
    "deberta-v2 apart": {"model_type": "deberta-v2", "relative_attention": True, "embedding_size": 24, **DISENTANGLED},
}


def config_of(**fields: Any) -> BertConfig:
    """Return the BERT that a config.json of any family describes."""
    return Origin.of("config.json", {**SIZES, **fields}).config("BertModel")


@cache
def model_of(kind: str) -> BertModel:
    """Return the model of a kind, in float64; nobody changes it."""
    model: BertModel = make(config=config_of(**KINDS[kind]))
    for name, x in model.named_parameters():
        if "distance_embedding" in name or "rel_embeddings" in name:
            x.data *= 5  # so that distances matter
    return model


def text_of(length: int, seed: int = 0) -> Tensor:
    """Return the token ids of a text of random words."""
    draw = torch.Generator().manual_seed(97 * seed + length)
    ids = torch.randint(len(SPECIAL), SIZES["vocab_size"], (length,), generator=draw, device="cpu")
    ids[0], ids[-1] = 2, 3
    return ids


def batch_of(texts: Texts, config: Any, left: int = 0, right: int = 0) -> dict[str, Tensor]:
    """Return a batch with padding on the left, and on the right beyond the longest text."""
    length, skips = left + max(map(len, texts)) + right, getattr(config, "positions_skip_padding", False)
    ids = torch.full((len(texts), length), config.pad_token_id, dtype=torch.long, device="cpu")
    mask = torch.zeros_like(ids)
    for i, text in enumerate(texts):
        ids[i, left : left + len(text)] = text
        mask[i, left : left + len(text)] = 1
    batch = {"input_ids": ids, "token_type_ids": ids * mask % config.type_vocab_size}
    if not mask.all():
        batch["attention_mask"] = mask
    if left and not skips:
        batch["position_ids"] = (torch.arange(length, device="cpu") - left).clamp(min=0).expand(ids.shape)
    return batch


@torch.no_grad()
def rows_of_batch(made: Any, texts: Texts, left: int = 0, right: int = 0, **options: Any) -> list[Row]:
    """Run one batch; return what its outputs say of each text, of heads under their numbers before pruning."""
    out = dict(made(**batch_of(texts, made.config, left, right), **options))
    if out.get("attentions"):
        out["attentions"] = scatter_heads(out["attentions"], made.config)

    def row_of(i: int, real: slice) -> Row:
        row = {place: x[i] for place, x in tensors(out).items()}
        if left:
            row.pop(".pooler_output")  # which reads the first place
        by_keys = {place: x[:, real, real] for place, x in row.items() if "attentions" in place}
        return {place: x[real] if x.dim() > 1 else x for place, x in row.items()} | by_keys

    return [row_of(i, slice(left, left + len(text))) for i, text in enumerate(texts)]


def rows_of_texts(made: Any, texts: Texts) -> list[Row]:
    """Encode texts; the vector is the mean of their states."""
    words = [" ".join(f"w{i}" for i in text[1:-1].tolist()) for text in texts]
    return [{"vector": torch.from_numpy(x)} for x in made.encode(words)]


@torch.no_grad()
def means_of_texts(model: BertModel, texts: Texts, **options: Any) -> list[Row]:
    """Compute what `rows_of_texts` gives, by a model itself."""
    return [{"vector": model(text[None], **options).last_hidden_state[0].mean(0)} for text in texts]


@dataclass(frozen=True)
class Way:
    """A way to run a model.

    Args:
        make: returns what runs, for a model and a new folder.
        within: the largest distance of two runs that should give the same; 0 means bit for bit.
        asks: options that ask for all outputs that it gives.
        load: returns what runs, for what was saved and its folder.
        again: returns what runs, opened again; by default it is made again.
        rows: returns the rows of texts.
        is_model: it is called as a model is, with gates and positions.
        takes_masks: it takes a mask for every query too.
        rounded: returns a model that rounds as much, for a copy of the model; None: it computes in float64.
    """

    make: Callable[[BertModel, Path], Any]
    within: float = EXACT
    asks: Mapping[str, Any] = field(default_factory=dict)
    load: Callable[[Any, Path], Any] | None = None
    again: Callable[[Any], Any] | None = None
    rows: Callable[..., list[Row]] = rows_of_batch
    is_model: bool = True
    takes_masks: bool = True
    rounded: Callable[[BertModel], BertModel] | None = None


def with_attention(name: str, model: BertModel, folder: Path) -> BertModel:
    made = copy.deepcopy(model)
    made.set_attn_implementation(name)
    made.gradient_checkpointing_enable(every_n_layers=2)  # for training alone
    return made


def as_hf(model: BertModel, folder: Path) -> Any:
    pytest.importorskip("transformers")
    hf = pytest.importorskip("bertlite.hf")
    model.save_pretrained(folder)
    return hf.BertModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def load_as(made: Any, folder: Path) -> Any:
    """Return the model in a folder, as one that was saved there runs."""
    name = getattr(made.config, "attn_implementation", None) or made.config._attn_implementation
    return type(made).from_pretrained(folder, dtype=torch.float64, attn_implementation=name)


def native(dtype: torch.dtype, is_fitted: bool = False) -> Way:
    """Return the kernels' way, which gives the same bits whatever the batch."""

    def make(model: BertModel, folder: Path) -> InferenceModel:
        texts = [text_of(4 + i, seed=9) for i in range(25)]  # to which int8 is fitted
        segments = [(text % model.config.type_vocab_size).tolist() for text in texts]
        sample = {"input_ids": [text.tolist() for text in texts], "token_type_ids": segments}
        return natively(model, dtype, sample=sample if is_fitted else None)

    def rounded(model: BertModel) -> BertModel:
        return in_integers(model).float() if dtype == torch.int8 else model.to(dtype)

    again = copy.deepcopy if is_fitted else None  # the fit adds in the order of torch's threads
    return Way(
        make, within=0, asks=STATES, load=lambda _, folder: InferenceModel.load(folder), again=again, rounded=rounded
    )


def write_checkpoint(model: BertModel, folder: Path) -> Path:
    """Write a model in float32, and a tokenizer whose word w12 is token 12."""
    pytest.importorskip("sentence_transformers")
    kernels_or_skip()
    copy.deepcopy(model).float().save_pretrained(folder)
    names, padding = [*SPECIAL, *(f"w{i}" for i in range(5, SIZES["vocab_size"]))], model.config.pad_token_id
    names[0], names[padding] = names[padding], names[0]
    BertTokenizer(names).save_pretrained(folder)
    return folder


def as_runtime(model: BertModel, folder: Path) -> Any:
    pack(write_checkpoint(model, folder / "model"), folder / "packed", texts=["w7 w8"])
    return load(folder / "packed", threads=1, batch_tokens=50)


def as_embedder(model: BertModel, folder: Path) -> Any:
    from bertlite import Embedder

    return Embedder(write_checkpoint(model, folder), backend="native", max_tokens=9)


class Onnx:
    """A file that onnxruntime runs, called as a model is."""

    def __init__(self, path: Path, config: Any, outputs: Sequence[str]) -> None:
        self.path, self.config, self.outputs, self.run = path, config, outputs, load_onnx(path)

    @classmethod
    def of(cls, model: BertModel, folder: Path) -> "Onnx":
        for package in PACKAGES:
            pytest.importorskip(package)
        graph = Graph(model)
        write_onnx(graph, folder / "model.onnx")
        return cls(folder / "model.onnx", model.config, graph.outputs)

    def again(self) -> "Onnx":
        return Onnx(self.path, self.config, self.outputs)

    def __call__(self, input_ids: Tensor, **inputs: Tensor) -> Row:
        given = {"attention_mask": torch.ones_like(input_ids), **inputs, "input_ids": input_ids}
        return dict(zip(self.outputs, self.run({name: given[name] for name in INPUTS}), strict=True))


TEXTS: dict[str, Any] = {"within": 0, "rows": rows_of_texts, "is_model": False, "rounded": BertModel.float}
WAYS: dict[str, Way] = {
    "eager": Way(partial(with_attention, "eager"), asks=BOTH, load=load_as),
    "sdpa": Way(partial(with_attention, "sdpa"), asks=BOTH, load=load_as),
    "packed": Way(partial(with_attention, "packed"), asks=STATES, load=load_as, takes_masks=False),
    "auto": Way(partial(with_attention, "auto"), asks=BOTH, load=load_as),
    "hf": Way(as_hf, asks=BOTH, load=load_as, again=copy.deepcopy),  # transformers loads nothing by default on meta
    "plain": Way(lambda model, _: optimize_for_inference(model, backend="plain"), asks=BOTH),
    "native float32": native(torch.float32),
    "native bfloat16": native(torch.bfloat16),
    "native int8": native(torch.int8),
    "native int8 fitted": native(torch.int8, is_fitted=True),
    "graphs": Way(lambda model, _: graphed(model, packs=model.config.position_embedding_type == "absolute")),
    "runtime": Way(as_runtime, again=lambda made: load(made.folder, threads=torch.get_num_threads()), **TEXTS),
    "Embedder": Way(as_embedder, again=replace, **TEXTS),
    "ONNX": Way(Onnx.of, 2e-5, again=Onnx.again, is_model=False, rounded=BertModel.float),  # float32, in other orders
}


def make_way(name: str, model: BertModel) -> Any:
    return WAYS[name].make(model, Path(mkdtemp(dir=HOME.name)))


@cache
def made_of(name: str, kind: str) -> Any:
    """Return what runs a kind's model in a way; nobody changes it."""
    return make_way(name, model_of(kind))


def made_again(name: str, kind: str) -> Any:
    again = WAYS[name].again
    return make_way(name, model_of(kind)) if again is None else again(made_of(name, kind))
