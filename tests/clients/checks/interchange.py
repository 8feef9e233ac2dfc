"""transformers itself: checkpoints that go both ways, what version 5 dropped, remote code, and generation."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import bertlite
import bertlite.hf
from tests.clients.checks import common

CHECKPOINTS, DROPPED, GENERATION = "checkpoints", "kept from transformers 4", "generation"


@torch.no_grad()
def outputs(model: Any) -> dict[str, Any]:
    return dict(model.eval()(**common.tiny_batch(), output_hidden_states=True))


def same_as_core(side: common.Side, path: Path) -> common.Observed:
    """Return what a checkpoint computes in float64, and raise unless it is what bertlite's core computes."""
    got = outputs(side.load("BertModel", path, dtype=torch.float64))
    common.equal(
        got, outputs(bertlite.BertModel.from_pretrained(path)), common.ROUNDING, "the model and bertlite's core"
    )
    return got


@common.check(CHECKPOINTS, "a pruned checkpoint computes what bertlite's core computes")
def loads_pruned(side: common.Side, folder: Path) -> common.Observed:
    return same_as_core(side, common.tiny(folder, pruned=True, dtype=torch.float64))


@common.check(CHECKPOINTS, "a relative_key checkpoint computes what bertlite's core computes")
def loads_relative(side: common.Side, folder: Path) -> common.Observed:
    return same_as_core(side, common.tiny(folder, dtype=torch.float64, position_embedding_type="relative_key"))


REMOTE = """
import json, sys
import torch
from transformers import AutoModel, logging
logging.set_verbosity_error()
seen = {}
for name, trust, folder in json.loads(sys.argv[1]):
    try:
        model = AutoModel.from_pretrained(folder, trust_remote_code=trust)
        with torch.no_grad():
            out = model(torch.arange(1, 12)[None]).last_hidden_state
        seen[name] = {"base": type(model).__mro__[1].__module__, "own": type(model).__module__, "out": out.tolist()}
    except Exception as error:
        seen[name] = {"error": f"{type(error).__name__}: {error}"}
json.dump(seen, open(sys.argv[2], "w"))
"""


def elsewhere(folder: Path, *asked: tuple[str, bool, Path]) -> dict[str, Any]:
    """Load checkpoints through AutoModel in a fresh process, which knows nothing of bertlite.

    Args:
        asked: for each a name, whether remote code is trusted, and the checkpoint.
    """
    result = folder / "elsewhere.json"
    words = json.dumps([(name, trust, str(path)) for name, trust, path in asked])
    environ = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", REMOTE, words, str(result)], env=environ, capture_output=True, text=True, check=False
    )
    if not result.exists():
        raise AssertionError(done.stderr[-2000:])
    return dict(json.loads(result.read_text()))


@common.check(CHECKPOINTS, "AutoModel loads a pruned checkpoint in a fresh process (ours with trust_remote_code=True)")
def fresh_process(side: common.Side, folder: Path) -> common.Observed:
    path = common.tiny(folder, pruned=True)
    if side is common.OURS:
        bertlite.hf.export_remote_code(path)
    seen = elsewhere(folder, ("pruned", side is common.OURS, path))["pruned"]
    if "error" in seen:
        raise common.ElsewhereError(seen["error"])
    core = bertlite.BertModel.from_pretrained(path)
    with torch.no_grad():
        wanted = core(torch.arange(1, 12)[None]).last_hidden_state
    common.equal(torch.tensor(seen["out"]), wanted, within=common.ROUNDING32, what="the model and bertlite's core")
    return {"out": seen["out"]}


# What transformers 5 dropped -----------------------------------------------------------------------------------------


@common.check(DROPPED, "output_attentions=True gives attentions, whatever the default attention")
@torch.no_grad()
def attentions(side: common.Side, folder: Path) -> common.Observed:
    model = side.load("BertModel", common.tiny(folder))
    got = model(**common.tiny_batch(), output_attentions=True).attentions
    if not got or len(got) != common.SIZES["num_hidden_layers"]:
        raise AssertionError(f"{len(got or ())} attentions of {common.SIZES['num_hidden_layers']} layers")
    common.equal(
        got[0].sum(-1), torch.ones_like(got[0][..., 0]), within=common.ROUNDING32, what="the sums of the rows and 1"
    )
    return {"attentions": got}


def silenced(model: Any, heads: dict[int, list[int]]) -> Any:
    """Set these heads' columns of the output projection to zero, in place; return the model."""
    size = common.SIZES["hidden_size"] // common.SIZES["num_attention_heads"]
    with torch.no_grad():
        for layer, which in heads.items():
            for head in which:
                model.encoder.layer[layer].attention.output.dense.weight[:, head * size : (head + 1) * size] = 0
    return model


@common.check(DROPPED, "head_mask silences heads")
@torch.no_grad()
def head_mask(side: common.Side, folder: Path) -> common.Observed:
    path, mask = common.tiny(folder, dtype=torch.float64), torch.ones(3, 4)
    for layer, heads in common.GONE.items():
        mask[layer, heads] = 0
    model = side.load("BertModel", path, dtype=torch.float64)
    got = model(**common.tiny_batch(), head_mask=mask).last_hidden_state
    common.differ(got, model(**common.tiny_batch()).last_hidden_state, "head_mask")
    wanted = silenced(model, common.GONE)(**common.tiny_batch()).last_hidden_state
    common.equal(got, wanted, within=common.ROUNDING, what="masked and zeroed heads")
    return {"out": got}


@common.check(DROPPED, "prune_heads, save, load")
@torch.no_grad()
def prune_heads(side: common.Side, folder: Path) -> common.Observed:
    path = common.tiny(folder)
    model = side.load("BertModel", path)
    model.prune_heads(common.GONE)
    width = model.encoder.layer[0].attention.self.query.out_features
    if width != common.SIZES["hidden_size"] // 2:
        raise AssertionError(f"layer 0 has {width} rows of query after losing 2 heads of 4")
    got = outputs(model)
    wanted = outputs(silenced(side.load("BertModel", path), common.GONE))
    common.equal(got, wanted, within=common.ROUNDING32, what="pruned and zeroed heads")
    model.save_pretrained(folder / "pruned")
    again = side.load("BertModel", folder / "pruned")
    common.equal(outputs(again), got, what="the pruned model and its copy from disk")
    return got


@common.check(DROPPED, "a 3-D mask, one row per query")
@torch.no_grad()
def mask_3d(side: common.Side, folder: Path) -> common.Observed:
    model = side.load("BertModel", common.tiny(folder))
    batch = common.tiny_batch()
    mask = torch.ones(2, 11, 11, dtype=torch.long).tril()
    first = model(**{**batch, "attention_mask": mask}).last_hidden_state
    other = {**batch, "input_ids": torch.cat([batch["input_ids"][:, :5], batch["input_ids"][:, 5:].flip(1)], 1)}
    second = model(**{**other, "attention_mask": mask}).last_hidden_state
    common.equal(first[:, :5], second[:, :5], what="tokens before and after a change in those they may not see")
    common.differ(first, model(**{**batch, "attention_mask": mask[:, -1]}).last_hidden_state, "the triangle")
    return {"out": first}


# Generation ----------------------------------------------------------------------------------------------------------


@common.check(GENERATION, "EncoderDecoderModel of two BERTs: greedy", beams=1)
@common.check(GENERATION, "EncoderDecoderModel of two BERTs: beam search", beams=3)
@torch.no_grad()
def encoder_decoder(side: common.Side, folder: Path, beams: int) -> common.Observed:
    encoder = common.tiny(folder / "encoder")
    decoder = common.tiny(folder / "decoder", "BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    with side.loading():
        made = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(encoder, decoder)
        made.save_pretrained(folder / "both")
        model = transformers.EncoderDecoderModel.from_pretrained(folder / "both")
    for part in (made.encoder, made.decoder, model.encoder, model.decoder):
        side.owns(part)
    batch = {name: x for name, x in common.tiny_batch().items() if name != "token_type_ids"}
    tokens = {"decoder_start_token_id": 1, "eos_token_id": 96, "pad_token_id": 0, "max_new_tokens": 15}
    asked = {"num_beams": beams, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    found = {cached: model.generate(**batch, use_cache=cached, **tokens, **asked) for cached in (True, False)}
    common.equal(found[True].sequences, found[False].sequences, what="words written with and without a cache")
    return {"words": found[True].sequences, "scores": found[True].scores}
