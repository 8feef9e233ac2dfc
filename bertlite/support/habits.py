"""Answers to arguments and names that people know from transformers, or from before: the way to the same here."""

from collections.abc import Mapping
from typing import Any

INT8 = 'optimize_for_inference(model, dtype="int8") quantises a loaded model'
ENCODE = "call the tokenizer itself, with a text or a list of texts"
ENCODINGS = "batch.encodings[i] has offsets, word_ids, overflowing, special_tokens_mask and more"
RUST = "tokenizer.backend_tokenizer, the Rust one, can do it"
AUTO = "name the class, or let bertlite.hf.register() make transformers' AutoModel give bertlite's models"
HABITS = {  # {argument or attribute: the way to it here}
    "prune_to_macs": "it is bertlite.pruning.prune_layerwise",
    "prune_vocabulary_of": "it is bertlite.commands.prune_vocabulary",
    "BatchEncoding": "it is bertlite.tokenizer.BatchEncoding",
    "Batches": "it is bertlite.support.batching.Batches",
    "KeyValueCache": "it is bertlite.stack.cache.KeyValueCache",
    "torch_dtype": "here it is dtype=, such as dtype=torch.float16",
    "device_map": 'here it is device=, such as device="cuda"',
    "use_auth_token": "here it is token=",
    "low_cpu_mem_usage": "leave it out: weights stay mapped from the file",
    "trust_remote_code": "leave it out: no code of a checkpoint is run",
    "use_safetensors": "leave it out: safetensors are read first, and a pickle runs no code",
    "use_fast": "leave it out: every tokenizer is the Rust one",
    "safe_serialization": "leave it out: weights are always written as safetensors",
    "max_shard_size": "leave it out: weights are always written into one file",
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "quantization_config", "quantize"), INT8),
    **dict.fromkeys(("AutoModel", "AutoTokenizer"), AUTO),
    "batch_decode": "here it is decode, which takes batches too",
    **dict.fromkeys(("encode_plus", "batch_encode_plus"), ENCODE),
    "pad": "pad while you encode: tokenizer(texts, padding=True)",
    **dict.fromkeys(("return_offsets_mapping", "return_special_tokens_mask", "return_overflowing_tokens"), ENCODINGS),
    **dict.fromkeys(("word_ids", "sequence_ids", "char_to_token", "token_to_chars"), ENCODINGS),
    **dict.fromkeys(("stride", "pad_to_multiple_of", "num_special_tokens_to_add"), RUST),
    "add_special_tokens": "tokenizer.add_tokens(tokens, special_tokens=True) does it",
    "generate": "bertlite.hf.BertLMHeadModel has it, and loads the same checkpoints",
}


def habit_hint(*names: str) -> str:
    """Return the way to what these names are elsewhere, for the end of a message; empty if there is none."""
    return "".join(f"; {HABITS[name]}" for name in names if name in HABITS)


def check_habits(given: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument of transformers; the message names the way to it here."""
    for name in given.keys() & HABITS.keys():
        raise TypeError(f"{name}={given[name]!r:.80} is an argument of transformers{habit_hint(name)}")


def refuse_others(call: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError for any argument, since a call has no more of them; see `check_habits`."""
    check_habits(given)
    for name in given:
        raise TypeError(f"{call}() has no argument {name!r}")
