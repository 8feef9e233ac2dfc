"""The commit, the versions and the machine that the figures of a record were measured with.

A record is a JSON file with an "environment": versions, processor, and under "git" the commit of the code.
"""

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("bertlite", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "huggingface_hub", "numpy")
# `bertlite env` names these too.
CLIENTS = ("sentence-transformers", "datasets", "peft", "onnxruntime", "openvino", "optimum")
ROOT = Path(__file__).resolve().parents[2]  # the checkout, if this is one
RESULTS = "scripts/results"  # the folder of the checkout's records


def run_git(*words: str) -> str:
    """Return the output of a git command, run in the checkout of this package.

    Raises:
        OSError, subprocess.CalledProcessError: git is not installed, this is not a checkout, or the command fails.
    """
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout


def git_state() -> dict[str, Any] | None:
    """Return the commit that this package is checked out at, and whether any file differs from it ("dirty").

    Records in scripts/results do not count, or the second of two new records would always be dirty.  Outside a
    checkout, such as in an installed package, it is the commit that BERTLITE_COMMIT names, or None.
    """
    named = os.environ.get("BERTLITE_COMMIT")  # set for an archive, which has no git
    outside = {"commit": named, "dirty": False} if named else None
    try:
        if Path(run_git("rev-parse", "--show-toplevel").rstrip("\n")).resolve() != ROOT:
            return outside  # installed in a folder of another repository
        changed = run_git("status", "--porcelain", "--", ".", f":(exclude){RESULTS}")
        return {"commit": run_git("rev-parse", "HEAD").strip(), "dirty": bool(changed.strip())}
    except (OSError, subprocess.CalledProcessError):
        return outside


def commit_of(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the "commit" that a record was made from, and whether its tree was "dirty"; None if it names none.

    Older records and runs have it outside the environment.
    """
    return record.get("environment", {}).get("git") or record.get("git")


# variables that keep torch, oneDNN, MKL and the native kernels from a processor's newer instructions
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "BERTLITE_NATIVE")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return the machine, the versions and the commit that a figure is measured with; JSON-ready."""
    import torch

    versions = {name: version_of(name) for name in PACKAGES} | {"torch": torch.__version__}
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "versions": versions,
        "git": git_state(),
    }

    # Facts that are there only on some machines.
    if limited := {name: os.environ[name] for name in LIMITS if name in os.environ}:
        facts["limits"] = limited
    if device.startswith("cuda"):
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpu_memory": torch.cuda.get_device_properties(device).total_memory,
            "cuda": torch.version.cuda,
            "driver": nvidia_driver(),
        }
    return facts


def env() -> dict[str, Any]:
    """Return the versions, the processor, and the sets of kernels that it runs, the best first; JSON-ready.

    Nothing is compiled.  If no kernels can run, `kernels` has the reason instead.
    """
    import torch

    from bertlite.runtime.library import NativeKernelsError, missing_platform, usable_sets

    try:
        kernels = missing_platform() or ", ".join(each.name for each in usable_sets())
    except NativeKernelsError as error:  # BERTLITE_NATIVE names a set that cannot run here
        kernels = str(error)
    facts = environment("cuda" if torch.cuda.is_available() else "cpu")
    facts["versions"] |= {name: version_of(name) for name in CLIENTS}
    return {"what": "bertlite env", **facts, "kernels": kernels}


def summary_lines(record: Mapping[str, Any], out: object) -> Iterator[str]:
    """Yield a line for each entry."""
    for name, value in record.items():
        inner = [f"{key} {each}" for key, each in value.items() if each is not None] if isinstance(value, dict) else []
        yield f"{name}: {', '.join(inner) if inner else value}"


def nvidia_driver() -> str | None:
    """Return the version of NVIDIA's driver; None if nvidia-smi is missing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the processor's name with its vector extensions; virtual machines often hide the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd")
    has = [flag for flag in wanted if flag in (facts.get("flags") or facts.get("Features") or "").split()]
    return f"{facts.get('model name', platform.processor())} ({' '.join(has)})"
