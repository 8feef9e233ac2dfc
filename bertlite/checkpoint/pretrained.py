"""The methods of a model that read and write checkpoints, as transformers calls them.

Nothing is guessed: whatever does not fit is an error that names it.
"""

import logging
from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Never, Self, cast

import torch

from bertlite.checkpoint.checks import (
    DTYPES,
    NONFINITE,
    Fit,
    fit_tensors_,
    implausible_sizes,
    nonfinite_tensors,
    parse_dtype,
)
from bertlite.checkpoint.families import BERT, Origin
from bertlite.checkpoint.faults import MOST_SHOWN, raise_faults
from bertlite.checkpoint.files import Source
from bertlite.checkpoint.hub import push_folder
from bertlite.checkpoint.names import DECODER, LoadableModel, optional_part
from bertlite.checkpoint.reading import State, read_tensors
from bertlite.checkpoint.saving import save_model
from bertlite.checkpoint.skeleton import Model, assign_tensors_, init_missing, make_skeleton, place_tensors
from bertlite.support.contexts import own_context
from bertlite.support.habits import check_habits, refuse_others
from bertlite.support.kinds import checked

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

log = logging.getLogger("bertlite")


class Pretrained:
    """The part of a model class that loads, saves and publishes checkpoints."""

    @classmethod
    @checked
    def from_pretrained(
        cls,
        source: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        attn_implementation: str = "auto",
        add_pooling_layer: bool | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        variant: str | None = None,
        cache_dir: str | PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        **overrides: Any,
    ) -> Self:
        """Load the model of a checkpoint, in eval mode.

        Args:
            source: a hub id, a folder, or a weights file in a folder with its config.json.
            dtype: the dtype of the weights; by default the file's own.
            device: by default the CPU, where weights stay mapped from the file and shared with other processes.  They
                are read once to check for nan.  A matrix that is not at a multiple of 64 bytes in the file is copied;
                `save_pretrained` aligns all of them.
            attn_implementation: a name of `bertlite.stack.attention.BACKENDS`, or "auto".
            add_pooling_layer: whether a BertModel has a pooler.
            revision, subfolder, variant, cache_dir, token, local_files_only: as for `huggingface_hub`.
            overrides: fields of the config to replace, such as num_labels=3.

        Raises:
            FileNotFoundError: there is no such checkpoint, or a file of it is missing.
            ValueError: config.json or the tensors do not fit this model; every fault is listed, with the file's name.
            TypeError: an override that is not a field of BertConfig; the way to an argument of transformers is named.
        """
        check_habits(overrides)
        options = {} if add_pooling_layer is None else {"add_pooling_layer": add_pooling_layer}
        place = Source.of(source, revision, subfolder, variant, cache_dir, token, local_files_only)
        overrides = {"attn_implementation": attn_implementation, **overrides}
        return load_model(cast(Any, cls), place, options, overrides, dtype, device)

    @checked
    def save_pretrained(self: LoadableModel, folder: str | PathLike[str], **habits: Never) -> None:
        """Write config.json and safetensors that bertlite and transformers load.

        The folder is replaced in one step: a crash leaves the old one or the new one.  Other files in it are kept.
        If it is the working directory, its files are replaced one after another, and a crash leaves a folder that
        does not load.
        """
        refuse_others("save_pretrained", habits)
        save_model(self, folder)

    def push_to_hub(
        self: LoadableModel, repo_id: str, *, commit_message: str = "Upload model", **options: Any
    ) -> "CommitInfo":
        """Upload what `save_pretrained` writes to a repository of the hub, in one commit.

        A missing repository or branch is created.  Other files in the repository are kept.

        Args:
            repo_id: such as "me/my-bert".
            options: `private`: make a new repository private (by default as your account or organisation is set).
                `token`: by default from `hf auth login`.  `revision`: the branch, by default main.  `create_pr`: open
                a pull request in place of a commit.

        Returns:
            The commit; `commit_url` has its address.

        Raises:
            ValueError: as for `save_pretrained`, before anything is written to the hub.
            huggingface_hub.errors.HfHubHTTPError: the hub rejects the upload.
        """
        return push_folder(partial(save_model, self), repo_id, commit_message=commit_message, **options)


@own_context()
def load_model(
    cls: type[Model],
    source: Source,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any],
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    *,
    whole: bool = False,
) -> Model:
    """Find the files, read them, rename, check, and give the tensors to a model made for them.

    Args:
        whole: raise ValueError if a part would be initialised at random; a base model gets no pooler then.
    """
    # Tensors stay mapped from their files.  Only another family's are converted at once: it may add tensors, which
    # must not have a narrower dtype.
    asked, files, origin = parse_dtype(dtype), source.files, Origin.read(source)
    stored = read_tensors(files)
    if asked is not None and origin.family is not BERT:
        stored = {name: t.to(asked) if t.dtype in DTYPES.values() else t for name, t in stored.items()}

    # An encoder is whole without a pooler: its hidden states do not depend on one.
    model, state, fit = fit_model(cls, source, stored, options, overrides)
    if whole and "pooler" in fit.absent and not hasattr(cls, "needs_pooler"):
        options = {"add_pooling_layer": False, **options}
        model, state, fit = fit_model(cls, source, stored, options, overrides)

    # All faults of names and shapes are raised together, before the model gets its weights.
    named = f"{files.weights}" + ("" if origin.family is BERT else f", a {origin.kind!r} model under BERT's names,")
    wanted, absent, faults = model.state_dict(), fit.absent, fit.faults + (fit.mixed_dtypes if asked is None else [])
    parts = " and no ".join(sorted(absent))
    if whole and absent:
        way_out = "train it first, with `bertlite prune finetune`"
        raise ValueError(f"{source} has no {parts}, which would be random: {way_out}")
    raise_faults(f"{named} does not fit {cls.__name__} as {files.config.name} describes it:", faults)

    log.debug("%s: not used: %s", files.weights, ", ".join(sorted(state.keys() - wanted.keys())) or "nothing")
    if fit.unused:
        names = ", ".join(map(repr, fit.unused[:MOST_SHOWN]))
        log.warning("%s has %d tensors that are not a BERT's and not used: %s", files.weights, len(fit.unused), names)

    # Only tensors from the files can be damaged; a part that is made here is checked below.
    for part in absent:
        state = {**init_missing(model, part, fit.dtype), **state}
    tensors = place_tensors(state, wanted, asked, device)
    read = {name: t for name, t in tensors.items() if optional_part(name) not in absent}
    raise_faults(f"{named} {NONFINITE}", nonfinite_tensors(read))
    assign_tensors_(model, tensors)
    model.tie_weights()

    # A subclass may add modules that nothing here knows how to initialise.
    if absent:
        empty = [name for name, p in model.named_parameters() if optional_part(name) in absent and p.isnan().any()]
        raise_faults(f"nothing initialises these of {cls.__name__}; give their module a reset_parameters:", empty)
        log.warning("%s has no %s: initialised at random, to be trained before use", files.weights, parts)
    return model.eval()


def fit_model(
    cls: type[Model], source: Source, stored: State, options: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[Model, State, Fit]:
    """Return a model without memory for the tensors of a checkpoint, these under its names, and how they fit.

    Raises:
        ValueError: a size in the config is implausible, or the tensors cannot be named.
    """
    files, origin = source.files, Origin.read(source)
    options, config = origin.build(cls, options, overrides, stored)
    raise_faults(f"{files.weights} does not fit {files.config.name}:", implausible_sizes(stored, config))
    model = make_skeleton(cls, config, options)
    wanted: State = model.state_dict()
    try:
        state = origin.as_bert(dict(stored), wanted)
    except ValueError as error:
        raise ValueError(f"{files.weights} does not fit {cls.__name__}: {error}") from None
    if overrides.get("tie_word_embeddings"):  # a decoder of its own is dropped
        state = {name: tensor for name, tensor in state.items() if not name.endswith(DECODER)}
    return model, state, fit_tensors_(state, wanted, model)
