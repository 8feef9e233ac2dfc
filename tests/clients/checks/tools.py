"""The optional tier: torchao, captum, bertviz, TextPruner."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bertlite
from tests.clients.checks.common import (
    ROUNDING32,
    SIZES,
    V5,
    Observed,
    Side,
    check,
    dense_and_pruned,
    differ,
    equal,
    tiny,
    tiny_batch,
)

CAPTUM = ("captum", "matplotlib")  # which it imports
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}  # int8 kernels want sizes that divide


@dense_and_pruned("torchao", "int8 weights: quantised, run, saved, loaded", "torchao")
@torch.no_grad()
def int8(side: Side, folder: Path, pruned: bool = False) -> Observed:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    cls = "BertForSequenceClassification"
    path = tiny(folder, cls, pruned, **WIDE)
    model = side.load(cls, path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig())).eval()
    side.owns(model)
    quantised = [name for name, p in model.named_parameters() if type(p) is not nn.Parameter]
    if len(quantised) < 6 * SIZES["num_hidden_layers"]:
        raise AssertionError(f"only {quantised} are quantised")
    got, plain = model(**tiny_batch()).logits, side.load(cls, path).eval()(**tiny_batch()).logits
    differ(got, plain, "quantising")
    equal(got, plain, within=0.05 * float(plain.abs().max()), what="int8 and float32")
    pickled = {} if V5 else {"safe_serialization": False}  # transformers 4 writes torchao's tensors no other way
    model.save_pretrained(folder / "int8", **pickled)
    again = side.load(cls, folder / "int8").eval()
    equal(again(**tiny_batch()).logits, got, what="the quantised model and its copy from disk")
    return {"logits": got}


@dense_and_pruned("captum", "integrated gradients of the embeddings add up", *CAPTUM)
def integrated_gradients(side: Side, folder: Path, pruned: bool = False) -> Observed:
    from captum.attr import LayerIntegratedGradients

    cls = "BertForSequenceClassification"
    model = side.load(cls, tiny(folder, cls, pruned, torch.float64), dtype=torch.float64).eval()
    batch = tiny_batch()
    ids, mask = batch["input_ids"], batch["attention_mask"]

    def score(ids: Tensor, mask: Tensor) -> Tensor:
        return model(ids, attention_mask=mask).logits[:, 1]

    explained = LayerIntegratedGradients(score, model.bert.embeddings)
    attributions, left = explained.attribute(
        ids, torch.zeros_like(ids), additional_forward_args=(mask,), n_steps=300, return_convergence_delta=True
    )
    if left.abs().max() > 0.01:
        raise AssertionError(f"attributions miss the change in score by {left.abs().max():.3g}")
    return {"attributions": attributions}


@dense_and_pruned("bertviz", "head_view shows every head", "bertviz", "IPython")
@torch.no_grad()
def head_view(side: Side, folder: Path, pruned: bool = False) -> Observed:
    from bertviz import head_view as view

    model = side.load("BertModel", tiny(folder, pruned=pruned)).eval()
    ids = tiny_batch()["input_ids"][:1]
    weights = model(ids, output_attentions=True).attentions
    if pruned:
        weights = bertlite.scatter_heads(weights, model.config)
    html = view(weights, [str(int(i)) for i in ids[0]], html_action="return").data
    shown = re.search(r'"attn": (\[\[\[\[.*?\]\]\]\])', html)
    if shown is None:
        raise AssertionError(f"no attentions in {html[:200]}")
    layers = json.loads(shown[1])
    if [len(layer) for layer in layers] != [SIZES["num_attention_heads"]] * SIZES["num_hidden_layers"]:
        raise AssertionError(f"heads shown: {[len(layer) for layer in layers]}")
    equal(torch.tensor(layers), torch.stack(tuple(weights))[:, 0], within=ROUNDING32, what="shown and given")
    return {"layers": layers}


@check("TextPruner", "heads and neurons by importance, iteratively", "textpruner")
def text_pruner(side: Side, folder: Path) -> Observed:
    from textpruner import GeneralConfig, TransformerPruner, TransformerPruningConfig

    cls = "BertForSequenceClassification"
    path = tiny(folder, cls)
    batch = {**tiny_batch(4), "labels": torch.tensor([0, 1, 1, 0])}

    def pruner(model: Any) -> Any:
        return TransformerPruner(
            model,
            TransformerPruningConfig(
                target_ffn_size=20, target_num_of_heads=2, pruning_method="iterative", n_iters=2, multiple_of=1
            ),
            GeneralConfig(use_device="cpu", output_dir=str(folder / "pruned")),
        )

    model = side.load(cls, path).eval()
    run = pruner(model)
    run.prune([batch], save_model=False)
    heads = [layer.attention.self.num_attention_heads for layer in model.bert.encoder.layer]
    if sum(heads) != 2 * SIZES["num_hidden_layers"]:
        raise AssertionError(f"{heads} heads are left; the target was 2 a layer")
    masked = side.load(cls, path).eval()
    pruner(masked).prune_with_masks(run.head_mask, run.ffn_mask, keep_shape=True, set_masks=True)
    with torch.no_grad():
        got, wanted = model(**batch).logits, masked(**batch).logits
    equal(got, wanted, within=ROUNDING32, what="pruned and masked by TextPruner")
    return {"heads": heads, "logits": got}
