"""The file and the config.json entries that let transformers load a folder with bertlite's classes."""

import json
from os import PathLike
from pathlib import Path

from bertlite.checkpoint.saving import CODE_MODULE
from bertlite.models.heads import HEADS
from bertlite.support.extras import install_hint
from bertlite.support.files import write_json, write_text
from bertlite.support.kinds import checked

AUTO_CLASSES = {  # {class of transformers 4.57 and 5: the class of bertlite.hf that it loads a BERT as}
    **dict.fromkeys(("AutoModel", "AutoModelForTextEncoding"), "BertModel"),
    **{name.replace("Bert", "AutoModel"): name for name in HEADS if name.startswith("BertFor")},
    "AutoModelForCausalLM": "BertLMHeadModel",
    "AutoModelWithLMHead": "BertForMaskedLM",
}
CODE = '''"""Loads this checkpoint with bertlite, where transformers is told trust_remote_code=True."""

from bertlite.hf import {names}  # {install}
'''


@checked
def export_remote_code(folder: str | PathLike[str]) -> None:
    """Make transformers load a saved checkpoint with bertlite, if that is installed, with trust_remote_code=True.

    This is the way to share a pruned checkpoint with users of transformers 5, which cannot load one by itself.
    Without trust_remote_code transformers uses its own class, as before.

    Raises:
        FileNotFoundError: there is no config.json in the folder.
    """
    folder = Path(folder).expanduser()
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = {auto: f"{CODE_MODULE}.{name}" for auto, name in sorted(AUTO_CLASSES.items())}
    names = ", ".join(sorted(set(AUTO_CLASSES.values())))
    code = CODE.format(names=names, install=install_hint("hf", elsewhere=True))
    write_text(folder / f"{CODE_MODULE}.py", code)
    write_json(path, config)  # last, since it names the other file
