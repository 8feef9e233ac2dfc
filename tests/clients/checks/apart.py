"""Code of transformers 4 that subclasses BERT, takes it apart or puts its own parts in.

Short programs that make the calls which these projects make, with what they compute under transformers 4.57.6: 5 runs
few of them.  Each imports its classes from one place: transformers, or with that one line changed `bertlite.hf.v4`.
"""

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig
from transformers.models.bert import modeling_bert as stock

from bertlite.hf import v4
from tests.clients.checks import common

RECORDED = Path(__file__).resolve().parents[1] / "apart-4.57.6.safetensors"
F64 = torch.float64


def bert_of(side: common.Side) -> Any:
    """Return the module that a program imports BERT from."""
    return v4 if side is common.OURS else stock


def as_recorded(name: str, observed: common.Observed) -> common.Observed:
    """Return what a check observed, and raise unless it is what transformers 4.57.6 gave."""
    if RECORDED.is_file():
        recorded = load_file(RECORDED)
        wanted = {key: recorded[f"{name}.{key}"] for key in observed}
        common.equal(observed, wanted, common.ROUNDING, f"{name} and 4.57.6")
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


@common.check("ColBERT", "a class of one's own: its options, trained, pruned, saved, loaded")
def colbert(side: common.Side, folder: Path) -> common.Observed:
    model = colbert_class(bert_of(side)).from_pretrained(common.tiny(folder, dtype=F64), dtype=F64, dim=5).train()
    seeded(model, "linear")
    pairs = [tuple(common.tiny_batch(seed=i)[name] for name in ("input_ids", "attention_mask")) for i in (1, 2)]
    losses = trained(model, lambda: F.softplus(-model(*pairs)).mean())
    scores = model.eval()(*pairs)
    torch.set_default_dtype(F64)  # transformers 4 makes the smaller matrices in the default dtype
    try:
        model.prune_heads({0: [1, 3]})
    finally:
        torch.set_default_dtype(torch.float32)
    pruned = model(*pairs)
    common.differ(pruned, scores, "pruning")
    loaded = again(model, folder / "colbert", dim=5)(*pairs)
    common.equal(loaded, pruned, common.ROUNDING, "the loaded model and the saved one")
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


@common.check("SimCSE", "contrastive learning from dropout, with a language modelling head")
def simcse(side: common.Side, folder: Path) -> common.Observed:
    fields: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    options = {"dtype": F64, "attn_implementation": "eager"}
    model = simcse_class(bert_of(side)).from_pretrained(common.tiny(folder, dtype=F64, **fields), **options).train()
    seeded(model, "lm_head", "mlp")
    batch = common.tiny_batch(rows=3)
    common.seed(3)  # of the dropout
    losses = trained(model, lambda: model(batch["input_ids"], batch["attention_mask"], batch["input_ids"]))
    return as_recorded("simcse", {"losses": losses})


# Parts of one's own put in -------------------------------------------------------------------------------------------


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


@common.check("adapters", "bottlenecks around a layer's output and around its forward: trained alone")
def bottlenecks(side: common.Side, folder: Path) -> common.Observed:
    options = {"dtype": F64, "attn_implementation": "eager"}
    model = bert_of(side).BertModel.from_pretrained(common.tiny(folder, dtype=F64), **options).requires_grad_(False)
    width = model.config.hidden_size
    layers = model.encoder.layer
    layers[0].output = AdaptedOutput(layers[0].output, width)
    layers[0].output.base.requires_grad_(False)
    adapt_layer(layers[1], width)
    adapters = ("encoder.layer.0.output.adapter", "encoder.layer.1.adapter")
    model.double()
    seeded(model, *adapters)
    losses = trained(model, lambda: model(**common.tiny_batch()).last_hidden_state.square().mean())
    learning = {name for name, p in model.named_parameters() if p.grad is not None}
    if not learning or not all(name.startswith(adapters) for name in learning):
        raise AssertionError(f"{sorted(learning)} learned")
    return as_recorded("bottlenecks", {"losses": losses, "last": model(**common.tiny_batch())[0].detach()})
