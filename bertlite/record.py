"""What a figure needs beside it to mean anything: where it was measured, with what, and a file that holds it."""

import json
import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("bertlite", "torch", "transformers", "safetensors", "tokenizers", "huggingface_hub")


def environment(device: str = "cpu") -> dict[str, Any]:
    """The machine and the versions a figure was measured with; JSON-ready."""
    import torch

    versions = {name: version_of(name) for name in PACKAGES}
    versions["torch"] = torch.__version__
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "versions": versions,
    }
    if device.startswith("cuda"):
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return facts


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's features say more about a timing than its name, which virtual machines often hide."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd")
    has = [flag for flag in wanted if flag in (said.get("flags") or said.get("Features") or "").split()]
    return f"{said.get('model name', platform.processor())} ({' '.join(has)})"


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file that is never half there."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file that is never half there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
