"""Find the files of a checkpoint: in a folder, next to a weights file, or on the hub.  Needs no model and no torch.

Files have the names that transformers 4.57.6 and 5.23.0 give them.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Self

from bertlite.checkpoint.faults import MOST_SHOWN, damaged_file
from bertlite.checkpoint.folders import allowed_root
from bertlite.support.files import parse_json_object, read_json_text

log = logging.getLogger("bertlite")
CONFIG_FILES = ("config.json", "bert_config.json")  # the second is the name of 2018
WEIGHT_FILES = (  # the first that is there is read
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER = "adapter_config.json"
SAVE_AGAIN = "load it in transformers 4 with {}=True, and name the folder that save_pretrained writes"
PACKED = {  # {a file of a folder that is no checkpoint: the function that loads the folder}
    "runtime.json": "bertlite.runtime.load",
    "native.safetensors": "bertlite.inference.InferenceModel.load",
}
OTHERS = {  # {ends of names: the format of such a file, and the way out}
    (".gguf",): "GGUF, of llama.cpp, which cannot be loaded: name the checkpoint that it was made from",
    (".onnx",): "ONNX, for onnxruntime and OpenVINO: name the checkpoint that it was exported from",
    (".xml", ".mlmodel", ".mlpackage"): "a graph of OpenVINO or Core ML: name the checkpoint that it was made from",
    (".h5", ".ckpt.index", ".ckpt"): f"of TensorFlow: {SAVE_AGAIN.format('from_tf')}",
    (".msgpack",): f"of Flax: {SAVE_AGAIN.format('from_flax')}",
    (".zip",): "a zip archive: run `unzip FILE -d FOLDER`, and name the folder",
    (".tar", ".tgz", ".gz", ".bz2", ".xz"): "an archive: run `tar -xf FILE`, and name the folder",
    (ADAPTER,): "an adapter of PEFT: save what AutoPeftModel.from_pretrained(FOLDER).merge_and_unload() returns",
}


@dataclass(frozen=True)
class Source:
    """The place of a checkpoint: a folder, a weights file in a folder with its config.json, or a hub id.

    `revision`, `cache_dir`, `token` and `local_files_only` are for the hub; a folder ignores them.  A source can be
    given as a path, its name.  A copy, such as another process unpickles, looks for the files again.
    """

    name: str | os.PathLike[str]
    revision: str | None = None
    subfolder: str | None = None
    variant: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    token: str | bool | None = None
    local_files_only: bool = False

    @classmethod
    def of(cls, given: "str | os.PathLike[str] | Source", *options: Any) -> Self:
        """Return the source with a name and options, in their order; one that is given is itself, as it has its own.

        Raises:
            TypeError: there are options for a source.
        """
        if not isinstance(given, Source):
            return cls(given, *options)
        if stated := [each.name for each, value in zip(fields(cls)[1:], options, strict=False) if value]:
            raise TypeError(f"{given} is opened already: leave out {', '.join(stated)}")
        return given if isinstance(given, cls) else cls(*astuple(given))

    def __fspath__(self) -> str:
        return os.fspath(self.name)

    __str__ = __fspath__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), astuple(self)

    @cached_property
    def place(self) -> "Folder | Repository":
        """The folder or the repository; for a single file, the folder that holds it.

        Raises:
            FileNotFoundError: there is no such file or folder, and the name is not a hub id.
            ValueError: the file is of another format; the message says what to do.
        """
        name, path = str(self.name), Path(self.name).expanduser()
        if path.is_file():
            if self.subfolder or self.variant:
                raise ValueError(f"{path} is a file: leave subfolder and variant out")
            if what := other_format(name):
                raise ValueError(f"{path} is {what}")
            return Folder(path.parent)
        if name and path.is_dir():
            return Folder(path / (self.subfolder or ""))
        if not isinstance(self.name, str) or path.is_absolute() or name.startswith((".", "~")):
            raise FileNotFoundError(f"there is no folder or file {path}")
        if "/" in name and path.parent.is_dir():
            log.warning("there is no folder %s: asking the hub for it", name)
        return Repository(self)

    @cached_property
    def files(self) -> "CheckpointFiles":
        """The files of the model, which are fetched if they are on the hub.

        Raises:
            FileNotFoundError: one of them is missing.
            PermissionError: the repository is gated.
            ConnectionError: one of them was not completely received; the cache then does not have it.
            ValueError: an index is damaged or points outside its folder, or the folder also has an adapter.
        """
        # A name may be a weights file itself, whose config is then next to it.
        path = Path(self.name).expanduser()
        weights: Sequence[str] = WEIGHT_FILES
        if self.variant:
            weights = [f".{self.variant}.".join(name.rsplit(".", 1)) for name in WEIGHT_FILES]
        if path.is_file() and path.name in CONFIG_FILES:
            raise ValueError(f"{path} is only the config: name its folder, {path.parent}, or the weights in it")
        if path.is_file():
            weights = [path.name]

        # An adapter changes every result, and nothing here applies it: weights alone must be asked for by name.
        place = self.place
        config, found = first_existing(place, CONFIG_FILES), first_existing(place, weights)
        if not path.is_file() and (adapter := place.get(ADAPTER)):
            raise ValueError(
                f"{adapter} is an adapter of PEFT, and {found.name} would be loaded without it: merge it with PEFT's"
                " merge_and_unload and save that, or name the weights file to load only the weights"
            )
        return CheckpointFiles(config, found, read_index(found, place) if found.suffix == ".json" else {})


@dataclass(frozen=True)
class CheckpointFiles:
    config: Path
    weights: Path  # or the index of several
    shards: Mapping[Path, set[str]]  # which tensors each file must hold; empty without an index


class Place:
    """The files of a checkpoint, each of which is looked up once; a JSON file is read once."""

    get: Callable[[str], Path | None]  # returns the path of a file; None if there is none
    read: Callable[[Path], str]  # returns the text of a JSON file

    def values(self, name: str) -> dict[str, Any]:
        """Return the values of a JSON file, which the caller may change; none if there is no such file."""
        path = self.get(name)
        return {} if path is None else parse_json_object(path, self.read(path))


class Folder(Place):
    """The files of a folder; a model of sentence-transformers may be in a subfolder that its modules.json names."""

    def __init__(self, path: Path) -> None:
        self.path, self.paths = path, [path]
        self.get, self.read = cache(self.find), cache(read_json_text)
        if not os.path.isfile(path / CONFIG_FILES[0]) and (modules := self.get("modules.json")):
            with suppress(ValueError, TypeError, LookupError):  # `read_modules` names a damaged file
                inner = PurePosixPath(json.loads(self.read(modules))[0]["path"])
                self.paths += [] if inner.is_absolute() or ".." in inner.parts else [path / inner]

    def find(self, name: str) -> Path | None:
        return next((path / name for path in self.paths if os.path.isfile(path / name)), None)  # accepts invalid names

    def not_found(self, wanted: str) -> FileNotFoundError:
        if not self.path.is_dir():
            return FileNotFoundError(f"there is no folder {self.path}")
        names = sorted(entry.name for entry in self.path.iterdir())
        held = ", ".join(names[:MOST_SHOWN]) or "nothing"
        return FileNotFoundError(f"{self.path} has no {wanted}; it holds {held}{self.way_out(names)}")

    def way_out(self, names: Sequence[str]) -> str:
        """Return where the model is instead: in a subfolder, or in a file of another format; or what loads these."""
        for name, load in PACKED.items():
            if name in names:
                made_from = f"name the checkpoint that it was made from{self.packed_from()}"
                return f".  It was packed for {load}(FOLDER): {made_from}"
        if any(map(self.get, WEIGHT_FILES)):
            return ""
        inner = [self.path / name for name in names if any(map(Folder(self.path / name).get, WEIGHT_FILES))]
        if inner:
            return f".  Its model is in a subfolder: name {' or '.join(map(str, inner[:MOST_SHOWN]))}"
        below = sorted(str(each.relative_to(self.path)) for each in self.path.glob("*/*"))  # as onnx/model.onnx
        return next((f".  {name} is {what}" for name in (*names, *below) if (what := other_format(name))), "")

    def packed_from(self) -> str:
        """Return ", " and the checkpoint that a packed folder was made from; empty if the folder names none."""
        try:
            made = json.loads((self.path / "runtime.json").read_text(encoding="utf-8"))["made"]
            return f", {made['checkpoint']}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""


class Repository(Place):
    """The files of a hub repository, from the cache or fetched into it, all of one commit; each is asked for once."""

    def __init__(self, source: Source) -> None:
        self.get, self.read = cache(self.find), cache(read_json_text)
        self.source, self.id = source, str(source.name)
        self.revision = source.revision
        self.reached = False if source.local_files_only else None  # whether the hub answers; None: it was not asked

    def find(self, name: str) -> Path | None:
        """Return the path of a file, which is in the cache then; None if the repository has none."""
        from huggingface_hub import errors, hf_hub_download

        source = self.source
        try:
            if self.reached is None and not self.is_cached(name):
                self.reached = hub_answers()
            path = hf_hub_download(
                self.id,
                name,
                subfolder=source.subfolder,
                revision=self.revision,
                cache_dir=None if source.cache_dir is None else Path(source.cache_dir),
                token=source.token,
                local_files_only=self.reached is False,
            )

        # Each failure has another way out, which its error names.  A missing file is no failure.
        except errors.HFValidationError:
            message = f"there is no folder or file {self.id!r}, and a hub id cannot look like that"
            raise FileNotFoundError(message) from None
        except errors.GatedRepoError as error:
            page = f"https://huggingface.co/{self.id}"
            raise PermissionError(f"{self.id} is gated: ask for access at {page}, then pass token=") from error
        except errors.RepositoryNotFoundError as error:
            raise FileNotFoundError(
                f"{self.id} is neither a folder here nor a repository that the hub shows you; if private, pass token="
            ) from error
        except errors.RevisionNotFoundError as error:
            raise FileNotFoundError(f"{self.id} has no revision {self.revision!r} on the hub") from error

        except errors.LocalEntryNotFoundError:
            self.reached = False
            return None
        except errors.EntryNotFoundError as error:
            headers = getattr(getattr(error, "response", None), "headers", {})
            self.revision = headers.get("X-Repo-Commit", self.revision)  # it is missing in this commit
            return None

        except Exception as error:  # several HTTP libraries are possible
            if isinstance(error, OSError) and error.errno is not None:  # the disk's
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            message = f"{self.id}: {name} was not completely received from the hub ({reason}): try again"
            raise ConnectionError(message) from error

        snapshot = Path(path).parents[len(PurePosixPath(source.subfolder or "", name).parts) - 1]
        self.revision = snapshot.name  # the commit: a push between two files must not mix them
        return Path(path)

    def is_cached(self, name: str) -> bool:
        """Return whether the cache holds a file; if so, hf_hub_download asks the hub once, and does not insist."""
        from huggingface_hub import try_to_load_from_cache

        inner = PurePosixPath(self.source.subfolder or "", name)
        cache = None if self.source.cache_dir is None else Path(self.source.cache_dir)
        return isinstance(try_to_load_from_cache(self.id, str(inner), cache, self.revision), str)

    def not_found(self, wanted: str) -> FileNotFoundError:
        where = self.id + (f"/{self.source.subfolder}" if self.source.subfolder else "")
        if self.reached is not False:
            return FileNotFoundError(f"{where} has no {wanted} on the hub")
        return FileNotFoundError(
            f"there is no folder {where}, the hub's cache has no {wanted} of it, and the hub was not reached. Go"
            " online once, without local_files_only and HF_HUB_OFFLINE, or name the right cache_dir or folder"
        )


def hub_answers() -> bool:
    """Return whether the hub can be reached; hf_hub_download takes half a minute to find out, for each file."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # several HTTP libraries are possible
        return False
    return True


def other_format(name: str) -> str | None:
    """Return the format of a file without tensors to load, with the way out; None if it may hold some."""
    return next((what for ends, what in OTHERS.items() if name.lower().endswith(ends)), None)


def first_existing(place: Folder | Repository, names: Sequence[str]) -> Path:
    found = next(filter(None, map(place.get, names)), None)
    if found is None:
        raise place.not_found(" or ".join(names))
    return found


def read_index(index: Path, place: Folder | Repository) -> dict[Path, set[str]]:
    """Return the files that an index names, all inside its folder, and the tensors that it puts there."""
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, set[str]] = {shard: set() for shard in table.values()}
        for tensor, shard in table.items():
            shards[shard].add(tensor)
        outside = [shard for shard in shards if not shard or re.search(r"^/|\\|:|(^|/)\.\.(/|$)", shard)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged_file(index, error) from None

    # An index is read before anything is trusted, and its names must not lead out of the folder.
    if not shards:
        raise ValueError(f"{index} names no file: fetch it again")
    if outside:
        raise ValueError(f"{index} points outside its folder, to {outside[0]!r}: do not trust this checkpoint")

    # Nor may a link.
    files = {}
    for shard, tensors in shards.items():
        path = place.get(shard)
        if path is None:
            raise FileNotFoundError(f"{index} names {shard}, which is not there: fetch the whole checkpoint again")
        if not path.resolve().is_relative_to(allowed_root(index.parent)):
            raise ValueError(f"{path} is a link out of its folder, to {path.resolve()}: put the file itself there")
        files[path] = tensors
    return files
