"""Code of transformers 4 that subclasses BERT, takes it apart or puts its own parts in.

Short programs that make the calls which these projects make, with what they compute under transformers 4.57.6: 5 runs
few of them.  Each imports its classes from one place: transformers, or with that one line changed `bertlite.hf.v4`.
"""

import math
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig
from transformers.models.bert import modeling_bert as stock

from bertlite.hf import v4
from tests.clients.checks.common import (
    OURS,
    ROUNDING,
    Observed,
    Side,
    check,
    differ,
    equal,
    seed,
    tiny,
    tiny_batch,
)

RECORDED = Path(__file__).resolve().parents[1] / "apart-4.57.6.safetensors"
F64 = torch.float64


def bert_of(side: Side) -> Any:
    """Return the module that a program imports BERT from."""
    return v4 if side is OURS else stock


def as_recorded(name: str, observed: Observed) -> Observed:
    """Return what a check observed, and raise unless it is what transformers 4.57.6 gave."""
    if RECORDED.is_file():
        recorded = load_file(RECORDED)
        wanted = {key: recorded[f"{name}.{key}"] for key in observed}
        equal(observed, wanted, ROUNDING, f"{name} and 4.57.6")
    return observed


def trained(model: nn.Module, loss: Callable[[], Tensor], steps: int = 3) -> Tensor:
    """Take steps of gradient descent; return the losses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(loss())
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()


def seeded(model: nn.Module, *names: str) -> None:
    """Draw the matrices of parts that are new, the same in either library."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(names) and parameter.dim() > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=F64))


def again(model: Any, folder: Path, **options: Any) -> Any:
    """Save a model and load it as its own class."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=F64, **options).eval()


# GroundingDINO: a wrapper that holds BERT's parts and runs them itself, with a mask for every query ------------------


class Warper(nn.Module):
    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.config = bert.config
        self.embeddings, self.encoder, self.pooler = bert.embeddings, bert.encoder, bert.pooler
        self.get_extended_attention_mask = bert.get_extended_attention_mask
        self.invert_attention_mask = bert.invert_attention_mask
        self.get_head_mask = bert.get_head_mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, token_type_ids: Tensor) -> Any:
        shape, device = input_ids.size(), input_ids.device
        extended = self.get_extended_attention_mask(attention_mask, shape, device)
        head_mask = self.get_head_mask(None, self.config.num_hidden_layers)
        embedded = self.embeddings(
            input_ids=input_ids,
            position_ids=position_ids,
            token_type_ids=token_type_ids,
            inputs_embeds=None,
            past_key_values_length=0,
        )
        outputs = self.encoder(
            embedded,
            attention_mask=extended,
            head_mask=head_mask,
            encoder_hidden_states=None,
            encoder_attention_mask=None,
            past_key_values=None,
            use_cache=False,
            output_attentions=self.config.output_attentions,
            output_hidden_states=True,
            return_dict=True,
        )
        return outputs[0], self.pooler(outputs[0]), outputs.hidden_states


@check("GroundingDINO", "its BertModelWarper: parts run from outside, a mask for every query")
@torch.no_grad()
def warper(side: Side, folder: Path) -> Observed:
    bert = bert_of(side).BertModel.from_pretrained(tiny(folder, dtype=F64), dtype=F64).eval()
    batch = tiny_batch()
    phrase = torch.arange(11) // 4  # a phrase sees itself
    mask = (phrase[:, None] == phrase).expand(2, 11, 11)
    positions = (torch.arange(11) % 4).expand(2, 11)
    last, pooled, states = Warper(bert)(batch["input_ids"], mask, positions, batch["token_type_ids"])
    return as_recorded("warper", {"last": last, "pooled": pooled, "second": states[2]})


# PABEE: a classifier after every layer, and patience -----------------------------------------------------------------


def pabee_class(bert: Any) -> type[Any]:
    class EncoderWithPabee(bert.BertEncoder):
        def adaptive_forward(
            self, hidden_states: Tensor, current_layer: int, attention_mask: Any, head_mask: Any
        ) -> Any:
            return self.layer[current_layer](hidden_states, attention_mask, head_mask[current_layer])[0]

    class ModelWithPabee(bert.BertModel):
        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.encoder = EncoderWithPabee(config)
            self.init_weights()
            self.patience, self.layers_run = 0, 0

        def forward(self, input_ids: Tensor, attention_mask: Tensor, dropout: Any, classifiers: Any) -> list[Tensor]:
            extended = self.get_extended_attention_mask(attention_mask, input_ids.size(), input_ids.device)
            head_mask = self.get_head_mask(None, self.config.num_hidden_layers)
            x = self.embeddings(input_ids=input_ids, position_ids=None, token_type_ids=None, inputs_embeds=None)
            found: list[Tensor] = []
            agreed = 0
            for i in range(self.config.num_hidden_layers):
                x = self.encoder.adaptive_forward(x, i, attention_mask=extended, head_mask=head_mask)
                found.append(classifiers[i](dropout(self.pooler(x))))
                if self.training or not self.patience:
                    continue
                same = i > 0 and bool((found[-1].argmax(1) == found[-2].argmax(1)).all())
                agreed = agreed + 1 if same else 0
                if agreed == self.patience:
                    break
            self.layers_run = len(found)
            return found

    class ClassifierWithPabee(bert.BertPreTrainedModel):
        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.num_labels = config.num_labels
            self.bert = ModelWithPabee(config)
            self.dropout = nn.Dropout(config.hidden_dropout_prob)
            self.classifiers = nn.ModuleList(
                [nn.Linear(config.hidden_size, config.num_labels) for _ in range(config.num_hidden_layers)]
            )
            self.init_weights()

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            found = self.bert(input_ids, attention_mask, self.dropout, self.classifiers)
            if labels is None:
                return found[-1]
            losses = [F.cross_entropy(logits, labels) * (i + 1) for i, logits in enumerate(found)]
            return sum(losses) / sum(range(1, len(found) + 1))

    return ClassifierWithPabee


@check("PABEE", "a classifier after every layer: trained, saved, loaded, stopped early by patience")
def pabee(side: Side, folder: Path) -> Observed:
    path = tiny(folder, dtype=F64)
    model = pabee_class(bert_of(side)).from_pretrained(path, dtype=F64, num_labels=3).train()
    seeded(model, "classifiers")
    ids, mask = (tiny_batch()[name] for name in ("input_ids", "attention_mask"))
    losses = trained(model, lambda: model(ids, mask, torch.tensor([0, 2])))
    model = again(model, folder / "pabee")
    with torch.no_grad():
        whole = model(ids, mask)
        model.bert.patience = 1
        early = model(ids, mask)
    ran = torch.tensor(model.bert.layers_run)
    return as_recorded("pabee", {"losses": losses, "whole": whole, "early": early, "layers": ran})


# DeeBERT: an encoder of one's own, made of BertLayer, with exits by entropy ------------------------------------------


def entropy(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, 1) - (logits * logits.softmax(1)).sum(1)


class ExitError(Exception):
    def __init__(self, logits: Tensor, layer: int) -> None:
        super().__init__()
        self.logits, self.layer = logits, layer


def dee_encoder_class(bert: Any) -> type[Any]:
    class Highway(nn.Module):
        def __init__(self, config: BertConfig) -> None:
            super().__init__()
            self.pooler = bert.BertPooler(config)
            self.classifier = nn.Linear(config.hidden_size, config.num_labels)

        def forward(self, encoder_outputs: Any) -> Tensor:
            return self.classifier(self.pooler(encoder_outputs[0]))

    class DeeEncoder(nn.Module):
        def __init__(self, config: BertConfig) -> None:
            super().__init__()
            self.layer = nn.ModuleList([bert.BertLayer(config) for _ in range(config.num_hidden_layers)])
            self.highway = nn.ModuleList([Highway(config) for _ in range(config.num_hidden_layers)])
            self.early_exit_entropy = [-1.0] * config.num_hidden_layers

        def forward(self, hidden_states: Tensor, attention_mask: Tensor, head_mask: Any) -> tuple[Any, ...]:
            exits: tuple[Tensor, ...] = ()
            states: tuple[Tensor, ...] = (hidden_states,)
            for i, layer in enumerate(self.layer):
                hidden_states = layer(hidden_states, attention_mask, head_mask[i], None, None)[0]
                states += (hidden_states,)
                logits = self.highway[i]((hidden_states, states))
                exits += (logits,)
                if not self.training and bool((entropy(logits) < self.early_exit_entropy[i]).all()):
                    raise ExitError(logits, i)
            return hidden_states, states, exits

    return DeeEncoder


def deebert_class(bert: Any) -> type[Any]:
    class DeeModel(bert.BertPreTrainedModel):
        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.embeddings = bert.BertEmbeddings(config)
            self.encoder = dee_encoder_class(bert)(config)
            self.pooler = bert.BertPooler(config)
            self.init_weights()

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            extended = self.get_extended_attention_mask(attention_mask, input_ids.size(), input_ids.device)
            head_mask = self.get_head_mask(None, self.config.num_hidden_layers)
            embedded = self.embeddings(input_ids=input_ids, position_ids=None, token_type_ids=None, inputs_embeds=None)
            return self.encoder(embedded, attention_mask=extended, head_mask=head_mask)

    class DeeClassifier(bert.BertPreTrainedModel):
        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.bert = DeeModel(config)
            self.classifier = nn.Linear(config.hidden_size, config.num_labels)
            self.init_weights()

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            try:
                last, _, exits = self.bert(input_ids, attention_mask)
            except ExitError as early:
                return early.logits, early.layer
            logits = self.classifier(self.bert.pooler(last))
            if labels is None:
                return logits, len(exits)
            return F.cross_entropy(logits, labels) + sum(F.cross_entropy(each, labels) for each in exits[:-1])

    return DeeClassifier


@check("DeeBERT", "an encoder of BertLayer(config) with exits: trained, saved, loaded, left early")
def deebert(side: Side, folder: Path) -> Observed:
    path = tiny(folder, dtype=F64)
    model = deebert_class(bert_of(side)).from_pretrained(path, dtype=F64, num_labels=3).train()
    seeded(model, "classifier", "bert.encoder.highway")
    ids, mask = (tiny_batch()[name] for name in ("input_ids", "attention_mask"))
    losses = trained(model, lambda: model(ids, mask, torch.tensor([0, 2])))
    model = again(model, folder / "deebert")
    with torch.no_grad():
        whole, _ = model(ids, mask)
        model.bert.encoder.early_exit_entropy = [math.log(3), *[-1.0] * 2]
        early, layer = model(ids, mask)
    return as_recorded("deebert", {"losses": losses, "whole": whole, "early": early, "layer": torch.tensor(layer)})


# ColBERT and SimCSE: classes of one's own around BertModel -----------------------------------------------------------


def colbert_class(bert: Any) -> type[Any]:
    class ColBERT(bert.BertPreTrainedModel):
        def __init__(self, config: BertConfig, dim: int = 7) -> None:
            super().__init__(config)
            self.bert = bert.BertModel(config)
            self.linear = nn.Linear(config.hidden_size, dim, bias=False)
            self.init_weights()

        def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            vectors = self.linear(self.bert(input_ids, attention_mask=attention_mask)[0])
            return F.normalize(vectors * attention_mask[..., None], p=2, dim=2)

        def forward(self, query: tuple[Tensor, Tensor], documents: tuple[Tensor, Tensor]) -> Tensor:
            return (self.encode(*query) @ self.encode(*documents).permute(0, 2, 1)).max(2).values.sum(1)

    return ColBERT


@check("ColBERT", "a class of one's own: its options, trained, pruned, saved, loaded")
def colbert(side: Side, folder: Path) -> Observed:
    model = colbert_class(bert_of(side)).from_pretrained(tiny(folder, dtype=F64), dtype=F64, dim=5).train()
    seeded(model, "linear")
    pairs = [tuple(tiny_batch(seed=i)[name] for name in ("input_ids", "attention_mask")) for i in (1, 2)]
    losses = trained(model, lambda: F.softplus(-model(*pairs)).mean())
    scores = model.eval()(*pairs)
    torch.set_default_dtype(F64)  # transformers 4 makes the smaller matrices in the default dtype
    try:
        model.prune_heads({0: [1, 3]})
    finally:
        torch.set_default_dtype(torch.float32)
    pruned = model(*pairs)
    differ(pruned, scores, "pruning")
    loaded = again(model, folder / "colbert", dim=5)(*pairs)
    equal(loaded, pruned, ROUNDING, "the loaded model and the saved one")
    return as_recorded("colbert", {"losses": losses, "scores": scores.detach(), "pruned": pruned.detach()})


def simcse_class(bert: Any) -> type[Any]:
    class BertForCL(bert.BertPreTrainedModel):
        def __init__(self, config: BertConfig, *, temperature: float = 0.05, mlm_weight: float = 0.1) -> None:
            super().__init__(config)
            self.temperature, self.mlm_weight = temperature, mlm_weight
            self.bert = bert.BertModel(config, add_pooling_layer=False)
            self.lm_head = bert.BertLMPredictionHead(config)
            self.mlp = nn.Linear(config.hidden_size, config.hidden_size)
            self.init_weights()

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
            rows = input_ids.size(0)
            flat = (x[:, None].expand(-1, 2, -1).reshape(2 * rows, -1) for x in (input_ids, attention_mask))
            outputs = self.bert(
                *flat,
                token_type_ids=None,
                position_ids=None,
                head_mask=None,
                inputs_embeds=None,
                output_attentions=None,
                output_hidden_states=False,
                return_dict=True,
            )
            first, second = self.mlp(outputs.last_hidden_state[:, 0]).tanh().view(rows, 2, -1).unbind(1)
            similar = F.cosine_similarity(first[:, None], second[None], dim=-1) / self.temperature
            words = self.lm_head(outputs.last_hidden_state[::2])
            mlm = F.cross_entropy(words.flatten(0, 1), labels.flatten())
            return F.cross_entropy(similar, torch.arange(rows)) + self.mlm_weight * mlm

    return BertForCL


@check("SimCSE", "contrastive learning from dropout, with a language modelling head")
def simcse(side: Side, folder: Path) -> Observed:
    fields: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    options = {"dtype": F64, "attn_implementation": "eager"}
    model = simcse_class(bert_of(side)).from_pretrained(tiny(folder, dtype=F64, **fields), **options).train()
    seeded(model, "lm_head", "mlp")
    batch = tiny_batch(rows=3)
    seed(3)  # of the dropout
    losses = trained(model, lambda: model(batch["input_ids"], batch["attention_mask"], batch["input_ids"]))
    return as_recorded("simcse", {"losses": losses})


# Q-Former: all parts of one's own; queries look at an image, under a config that is no decoder's ---------------------


class QueryAttention(nn.Module):
    def __init__(self, config: BertConfig, cross: bool = False) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.size, self.pruned_heads = width // self.heads, set[int]()
        inner, seen = self.heads * self.size, config.encoder_width if cross else width
        self.query, self.key, self.value = nn.Linear(width, inner), nn.Linear(seen, inner), nn.Linear(seen, inner)
        self.dense, self.LayerNorm = nn.Linear(inner, width), nn.LayerNorm(width, eps=config.layer_norm_eps)

    def prune_heads(self, heads: Any) -> None:
        gone, index = v4.find_pruneable_heads_and_indices(heads, self.heads, self.size, self.pruned_heads)
        for name in ("query", "key", "value"):
            setattr(self, name, v4.prune_linear_layer(getattr(self, name), index))
        self.dense = v4.prune_linear_layer(self.dense, index, dim=1)
        self.heads -= len(gone)
        self.pruned_heads |= gone

    def forward(self, x: Tensor, mask: Tensor, states: Tensor | None = None) -> Tensor:
        seen = x if states is None else states
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, seen), (self.value, seen))
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(self.size) + mask).softmax(-1)
        return self.LayerNorm(x + self.dense((weights @ v).transpose(1, 2).flatten(2)))


class QueryLayer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention, self.crossattention = QueryAttention(config), QueryAttention(config, cross=True)
        self.words, self.queries = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, states: Tensor, states_mask: Tensor, queries: int) -> Tensor:
        x = self.attention(x, mask)
        seen = self.crossattention(x[:, :queries], states_mask, states) if queries else x[:, :0]
        return torch.cat([seen + F.gelu(self.queries(seen)), x[:, queries:] + F.gelu(self.words(x[:, queries:]))], 1)


def qformer_classes(bert: Any) -> tuple[type[Any], type[Any]]:
    class QueryModel(bert.BertPreTrainedModel):
        embeddings: Any
        encoder: Any
        query_tokens: Any

        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.embeddings, self.encoder = nn.Module(), nn.Module()
            self.embeddings.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
            self.encoder.layer = nn.ModuleList([QueryLayer(config) for _ in range(config.num_hidden_layers)])
            self.query_tokens = nn.Parameter(torch.zeros(1, config.query_length, config.hidden_size))
            self.init_weights()

        def get_input_embeddings(self) -> nn.Embedding:
            return self.embeddings.word_embeddings

        def set_input_embeddings(self, value: nn.Embedding) -> None:
            self.embeddings.word_embeddings = value

        def _prune_heads(self, heads_to_prune: dict[int, list[int]]) -> None:
            for layer, heads in heads_to_prune.items():
                self.encoder.layer[layer].attention.prune_heads(heads)

        def forward(self, ids: Tensor | None, mask: Tensor | None, states: Tensor, queries: bool = True) -> Tensor:
            shown = (
                self.query_tokens.expand(len(states), -1, -1)
                if queries
                else states[:, :0, :1].expand(-1, -1, self.config.hidden_size)
            )
            x = shown if ids is None else torch.cat([shown, self.embeddings.word_embeddings(ids)], 1)
            seen = torch.ones(shown.shape[:2], dtype=torch.long)
            mask = self.invert_attention_mask(seen if mask is None else torch.cat([seen, mask], 1))
            states_mask = self.invert_attention_mask(torch.ones(states.shape[:2], dtype=torch.long))
            for layer in self.encoder.layer:
                x = layer(x, mask, states, states_mask, shown.shape[1])
            return x

    class QueryWriter(bert.BertPreTrainedModel):
        _tied_weights_keys: ClassVar = {  # 5 ties by this table alone, 4 by the embeddings that are asked for too
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        }

        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.bert = QueryModel(config)
            self.cls = bert.BertOnlyMLMHead(config)
            self.init_weights()

        def get_output_embeddings(self) -> nn.Linear:
            return self.cls.predictions.decoder

        def forward(self, *inputs: Any) -> Tensor:
            return self.cls(self.bert(*inputs))

    return QueryModel, QueryWriter


@check("Q-Former", "a decoder of one's own: queries, text, both, words, pruned, saved, loaded")
def qformer(side: Side, folder: Path) -> Observed:
    path = tiny(folder, dtype=F64)
    config = BertConfig.from_pretrained(path, hidden_act="gelu")
    config.add_cross_attention, config.encoder_width, config.query_length = True, 29, 5
    torch.set_default_dtype(F64)  # transformers 4 makes the smaller matrices in the default dtype
    try:
        model = qformer_classes(bert_of(side))[1](config).eval()
        seeded(model, "")
        ids, mask = (tiny_batch()[name] for name in ("input_ids", "attention_mask"))
        states = torch.randn(2, 7, 29, generator=torch.Generator().manual_seed(9), dtype=F64)
        calls = {"queries": (None, None, states), "text": (ids, mask, states, False), "both": (ids, mask, states)}
        with torch.no_grad():
            seen = {name: model.bert(*inputs) for name, inputs in calls.items()}
            seen["words"] = model(ids, mask, states)
            model.prune_heads({0: [1, 3]})
            seen["pruned"] = model(ids, mask, states)
            differ(seen["pruned"], seen["words"], "pruning")
            equal(again(model, folder / "qformer")(ids, mask, states), seen["pruned"], ROUNDING, "loaded and saved")
    finally:
        torch.set_default_dtype(torch.float32)
    return as_recorded("qformer", {name: x[..., :7].contiguous() for name, x in seen.items()})


# Parts of one's own put in -------------------------------------------------------------------------------------------


class WindowedSelfAttention(nn.Module):
    """Attention of a Longformer's kind, in place of `attention.self`: a token sees its neighbours and the first."""

    def __init__(self, old: Any, window: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.window = old.query, old.key, old.value, window
        self.heads, self.size = old.num_attention_heads, old.attention_head_size

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        assert attention_mask is not None
        padding = attention_mask.squeeze(dim=2).squeeze(dim=1) < 0  # (B, S)
        length = hidden_states.shape[1]
        at = torch.arange(length)
        seen = ((at[:, None] - at).abs() <= self.window) | (at == 0) | (at == 0)[:, None]
        q, k, v = (
            layer(hidden_states).view(-1, length, self.heads, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size)
        scores = scores.masked_fill(~seen | padding[:, None, None], -1e9)
        weights = scores.softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2), weights


@check("Longformer", "attention.self replaced in every layer: run, with attentions, trained")
def swapped(side: Side, folder: Path) -> Observed:
    options = {"dtype": F64, "attn_implementation": "eager"}
    model = bert_of(side).BertModel.from_pretrained(tiny(folder, dtype=F64), **options)
    plain = model(**tiny_batch())[0].detach()
    for layer in model.encoder.layer:
        layer.attention.self = WindowedSelfAttention(layer.attention.self, 2)
    out = model(**tiny_batch(), output_attentions=True)
    differ(out[0].detach(), plain, "the window")
    losses = trained(model, lambda: model(**tiny_batch()).pooler_output.square().mean())
    seen = {"last": out[0].detach(), "attention": out.attentions[1].detach(), "losses": losses}
    return as_recorded("swapped", seen)


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.relu(self.down(x)))


class AdaptedOutput(nn.Module):
    """In place of `layer.output`."""

    def __init__(self, output: nn.Module, width: int) -> None:
        super().__init__()
        self.base, self.adapter = output, Bottleneck(width)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.adapter(self.base(hidden_states, input_tensor))


def adapt_layer(layer: Any, width: int) -> None:
    """Put a function around a layer's forward, which reads its mask as transformers 4 hands it on."""
    layer.adapter = Bottleneck(width)
    plain = layer.forward

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **options: Any) -> Any:
        assert attention_mask.dim() == 4
        outputs = plain(hidden_states, attention_mask, *args, **options)
        return (self.adapter(outputs[0]), *outputs[1:])

    layer.forward = MethodType(forward, layer)


@check("adapters", "bottlenecks around a layer's output and around its forward: trained alone")
def bottlenecks(side: Side, folder: Path) -> Observed:
    options = {"dtype": F64, "attn_implementation": "eager"}
    model = bert_of(side).BertModel.from_pretrained(tiny(folder, dtype=F64), **options).requires_grad_(False)
    width = model.config.hidden_size
    layers = model.encoder.layer
    layers[0].output = AdaptedOutput(layers[0].output, width)
    layers[0].output.base.requires_grad_(False)
    adapt_layer(layers[1], width)
    adapters = ("encoder.layer.0.output.adapter", "encoder.layer.1.adapter")
    model.double()
    seeded(model, *adapters)
    losses = trained(model, lambda: model(**tiny_batch()).last_hidden_state.square().mean())
    learning = {name for name, p in model.named_parameters() if p.grad is not None}
    if not learning or not all(name.startswith(adapters) for name in learning):
        raise AssertionError(f"{sorted(learning)} learned")
    return as_recorded("bottlenecks", {"losses": losses, "last": model(**tiny_batch())[0].detach()})
