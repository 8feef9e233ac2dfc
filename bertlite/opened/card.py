"""The reading of a model card, README.md."""

import warnings
from typing import Any

from bertlite.checkpoint.files import Folder, Source

CARD = "README.md"
CARRIED = ("license", "license_name", "license_link", "language")  # entries that a derived model's card takes over


def read_card(source: Source) -> dict[str, Any]:
    """Return the data of the source's card that also apply to a derived model, and the hub id.

    For a folder, the hub id is the "base_model" of its card, if any.
    """
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    place = source.place
    path = place.get(CARD)
    known: dict[str, Any] = {}
    if path is not None:
        try:
            known = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
        except (ValueError, YAMLError) as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(f"{path} has no readable YAML at its top ({reason}): its license is left out", stacklevel=3)
    found = {name: known[name] for name in CARRIED if known.get(name)}
    stated = known.get("base_model") if isinstance(place, Folder) else str(source.name)
    listed = stated if isinstance(stated, list) else [stated] if stated else []
    base = [each for each in listed if is_hub_id(each)]
    if len(base) < len(listed):
        wrong = next(each for each in listed if not is_hub_id(each))
        warnings.warn(f"{path}: its base_model {wrong!r} is not a hub id and is left out", stacklevel=3)
    return {**found, "base_model": base if len(base) > 1 else base[0]} if base else found


def is_hub_id(name: Any) -> bool:
    """Return whether a value is the name of a repository on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
