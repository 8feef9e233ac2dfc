"""Load a model: find the files, read them, rename, check, and give the tensors to a model made for them.

Nothing is guessed: whatever does not fit is an error that names it.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from bertlite.checkpoint.checks import (
    NONFINITE,
    fit_tensors_,
    implausible_sizes,
    nonfinite_tensors,
    parse_dtype,
)
from bertlite.checkpoint.faults import raise_faults
from bertlite.checkpoint.files import Source, find_checkpoint
from bertlite.checkpoint.names import optional_part
from bertlite.checkpoint.reading import State, read_tensors
from bertlite.checkpoint.skeleton import Model, assign_tensors_, init_missing, make_skeleton, place_tensors
from bertlite.config import BertConfig

log = logging.getLogger("bertlite")


def load_model(
    cls: type[Model],
    source: "Source",
    *,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any],
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
) -> Model:
    """`BertPreTrainedModel.from_pretrained`, which see."""
    asked = parse_dtype(dtype)
    files = find_checkpoint(source)
    config = BertConfig.from_json_file(files.config, **overrides)
    state = read_tensors(files)
    raise_faults(f"{files.weights} does not fit {files.config.name}:", implausible_sizes(state, config))
    model = make_skeleton(cls, config, options)
    wanted: State = model.state_dict()

    fit = fit_tensors_(state, wanted, model, config, drop_decoder=bool(overrides.get("tie_word_embeddings")))
    absent, faults = fit.absent, fit.faults + (fit.mixed_dtypes if asked is None else [])
    raise_faults(f"{files.weights} does not fit {cls.__name__} as {files.config.name} describes it:", faults)
    log.debug("%s: not used: %s", files.weights, ", ".join(sorted(state.keys() - wanted.keys())) or "nothing")

    for part in absent:
        state = {**init_missing(model, part, fit.dtype), **state}
    tensors = place_tensors(state, wanted, asked, device)
    raise_faults(
        f"{files.weights} {NONFINITE}",
        nonfinite_tensors({k: t for k, t in tensors.items() if optional_part(k) not in absent}),
    )
    assign_tensors_(model, tensors)
    model.tie_weights()
    if absent:
        empty = [name for name, p in model.named_parameters() if optional_part(name) in absent and p.isnan().any()]
        raise_faults(f"nothing initialises these of {cls.__name__}; give their module a reset_parameters:", empty)
        parts = " and no ".join(sorted(absent))
        log.warning("%s has no %s: initialised at random, to be trained before use", files.weights, parts)
    return model.eval()
