"""BERT on one page, from token ids to the pooled vector and to a word for [MASK], when it is not being trained.

    python notebooks/bert_on_one_page.py FOLDER    # with config.json, model.safetensors and vocab.txt

Attribute names are the names of tensors in checkpoints: `encoder.layer.0.attention.self.query.weight` is a path
through the modules below.  Shapes: B sequences · S positions · D hidden size · N heads · H = D / N.  The papers:
Vaswani et al. 2017 (the layer), Devlin et al. 2018 (BERT).
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F


class Embeddings(nn.Module):
    """x = LayerNorm(word + position + segment): three tables, one row of each for a token."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:  # (B, S), (B, S) -> (B, S, D)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)  # 0, 1, 2, …: the order of the words
        words, positions = self.word_embeddings(input_ids), self.position_embeddings(position_ids)
        return self.LayerNorm(words + positions + self.token_type_embeddings(token_type_ids))


class SelfAttention(nn.Module):
    """In each head: softmax(q·kᵀ / √H) · v.  A query takes the average of all values, weighted by how keys fit it."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)  # all heads side by side, D = N·H
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:  # (B, S, D), (B, S) -> (B, S, D)
        projected = self.query(x), self.key(x), self.value(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in projected)  # (B, N, S, H)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_size)  # (B, N, S queries, S keys)
        scores = scores.masked_fill(~is_token[:, None, None, :], -math.inf)  # exp(-∞) = 0: no token attends to padding
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)  # the heads' results side by side again


class AddAndNormalise(nn.Module):
    """LayerNorm(x + W·y + b): the result is added to the old state, so that each part makes a correction."""

    def __init__(self, width: int, config: SimpleNamespace) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:  # (B, S, width), (B, S, D) -> (B, S, D)
        return self.LayerNorm(x + self.dense(y))


class Layer(nn.Module):
    """Tokens exchange information (attention), then each works on its own (a network with one wide layer)."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.attention = nn.Module()  # only names: attention.self, attention.output, intermediate.dense
        self.attention.self = SelfAttention(config)
        self.attention.output = AddAndNormalise(config.hidden_size, config)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = AddAndNormalise(config.intermediate_size, config)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:  # (B, S, D), (B, S) -> (B, S, D)
        x = self.attention.output(self.attention.self(x, is_token), x)
        return self.output(F.gelu(self.intermediate.dense(x)), x)  # gelu(z) = z · P(a standard normal number < z)


class MaskedWords(nn.Module):
    """Scores of all words for each position: how alike LayerNorm(gelu(W·x + b)) and the vectors of the words are."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.transform = nn.Module()
        self.transform.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)  # its weight: the word embeddings once more

    def forward(self, x: Tensor) -> Tensor:  # (…, D) -> (…, words)
        return self.decoder(self.transform.LayerNorm(F.gelu(self.transform.dense(x))))


class Bert(nn.Module):
    """Embeddings, layers one after the other, and the pooler: tanh(W·x₀ + b) of the first token, [CLS]."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Module()
        self.pooler.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vector of every token, (B, S, D), and of every sequence, (B, D), for three tensors of (B, S).

        The mask is 1 for tokens and 0 for padding; segments (`token_type_ids`) are 0 for the first text and 1 for a
        second.
        """
        x = self.embeddings(input_ids, token_type_ids)
        for layer in self.encoder.layer:
            x = layer(x, attention_mask.bool())
        return x, torch.tanh(self.pooler.dense(x[:, 0]))


def prune_head(layer: Layer, head: int) -> None:
    """Remove a head for good: its rows of query, key and value, and the columns of the matrix that reads it."""
    attention, dense = layer.attention.self, layer.attention.output.dense
    keep = [i for i in range(dense.in_features) if i // attention.head_size != head]
    for part in (attention.query, attention.key, attention.value):
        part.weight, part.bias = nn.Parameter(part.weight[keep]), nn.Parameter(part.bias[keep])
    dense.weight, dense.in_features = nn.Parameter(dense.weight[:, keep]), len(keep)


def load(folder: Path) -> Bert:
    """Build BERT as config.json describes it, and fill it; a tensor that is missing or does not fit is an error.

    If the checkpoint has a head for masked words, it is `cls.predictions`; heads of other tasks are left out.
    """
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    known = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for field, value in {**known, "pruned_heads": {}, "pruned_neurons": {}}.items():
        if (given := getattr(config, field, value)) != value:
            raise ValueError(f"{field} is {given!r}; this page knows {value!r} alone, bertlite.BertModel others")
    bert, tensors = Bert(config), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight")  # as of 2018
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        name = name.replace("cls.predictions.bias", "cls.predictions.decoder.bias")
        if name.startswith(("embeddings.", "encoder.", "pooler.", "cls.predictions.")) and "position_ids" not in name:
            tensors[name] = tensor  # not a head of another task, and not 0, 1, 2, …
    if "cls.predictions.decoder.bias" in tensors:
        bert.cls = nn.Module()
        bert.cls.predictions = MaskedWords(config)
        tensors.setdefault("cls.predictions.decoder.weight", tensors["embeddings.word_embeddings.weight"])
    if missing := sorted({*bert.state_dict()} - {*tensors}):
        raise ValueError(f"it lacks {missing[0]} and {len(missing) - 1} more tensors of this page's BERT")
    bert.load_state_dict(tensors)
    return bert.eval()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python notebooks/bert_on_one_page.py FOLDER")
    folder = Path(sys.argv[1])
    ids = torch.tensor([[101, 1996, 3007, 1997, 2605, 2003, 103, 1012, 102]])  # "the capital of france is [MASK]."
    try:
        bert, batch = load(folder), (ids, torch.ones_like(ids), torch.zeros_like(ids))
    except (OSError, ValueError) as error:
        sys.exit(f"{folder} cannot be read: {error}")
    with torch.no_grad():
        states, pooled = bert(*batch)
        print(f"[CLS] {states[0, 0, :4].tolist()} …\npooled {pooled[0, :4].tolist()} …")
        if hasattr(bert, "cls"):
            words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
            best = bert.cls.predictions(states[0, 6]).topk(5).indices
            print(f"the capital of france is {', '.join(words[i] for i in best)}.")
        else:
            print("[MASK] stays: this checkpoint has no head for masked words; bert-base-uncased has one")
        prune_head(bert.encoder.layer[0], 0)
        moved = (bert(*batch)[0] - states)[0, 0].norm() / states[0, 0].norm()
        print(f"without head 0 of layer 0, [CLS] moves by {moved:.1%}")
