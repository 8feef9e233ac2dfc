"""A second device, `second`, that is not the CPU: device.cpp compiled once, and a note of each wait for it.

torch takes a new device only before its first backward pass, and for the rest of the process, so that tests on it run
in a process of their own: `tests/test_device.py` starts it.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

import bertlite
from bertlite.runtime.library import cache_folder, find_compiler, own_folder

SOURCE = Path(__file__).with_name("device.cpp")
ROOT = SOURCE.parents[2]
PACKAGE = Path(bertlite.__file__).parent
TORCH = Path(torch.__file__).parent
ABI = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared", "-w", ABI, "-ltorch_cpu", "-lc10")
PLACES = (  # which checkouts of one machine need not share; torch is loaded before the library
    *(f"-I{TORCH / 'include' / inner}" for inner in ("", "torch/csrc/api/include")),
    *(f"-I{sysconfig.get_paths()['include']}", f"-L{TORCH / 'lib'}"),
)
SECOND = torch.device("privateuseone", 0)  # printed as second:0 once it is started


class HeadersDoNotFitError(RuntimeError):
    """Raised where device.cpp does not compile with a torch that it was not written for."""


def compiled() -> Path:
    """Return the library, compiled if it is not in the user's cache.

    Raises:
        HeadersDoNotFitError: it cannot be compiled with this torch, which is not the one of constraints.txt.
        NativeKernelsError: there is no compiler.
    """
    compiler = find_compiler()
    digest = hashlib.sha256(repr((compiler, FLAGS, torch.__version__)).encode() + SOURCE.read_bytes()).hexdigest()
    path = own_folder(cache_folder()) / f"device-{digest[:16]}.so"

    # Built next to its place and then moved, as another process may look for it.
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder, path.name)
            command = [*compiler, str(SOURCE), *PLACES, *FLAGS, "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode:
                release = f"torch=={torch.__version__.partition('+')[0]}"
                pinned = release in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
                kind = AssertionError if pinned else HeadersDoNotFitError
                raise kind(f"device.cpp does not compile with {release}: {done.stderr[:2000]}")
            os.replace(built, path)
    return path


def start() -> list[str]:
    """Make the device known to torch in this process; return the list to which each wait for it is added."""
    waits: list[str] = []
    note = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda what: waits.append(f"{line_of_package()}: {what.decode()}"))
    library = ctypes.CDLL(str(compiled()))
    library.start(note)
    rename_privateuse1_backend("second")

    module: Any = ModuleType("torch.second")  # what torch asks a device for
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device = lambda: 1, lambda: 0
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # the CPU draws the random numbers
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module._is_in_bad_fork, module.manual_seed_all = lambda: False, lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]

    module.note = note  # it must live as long as the device
    torch._register_device_module("second", module)
    return waits


def line_of_package() -> str:
    """Return the innermost line of bertlite that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE.parent)}:{frame.f_lineno}"
        frame = frame.f_back
    return "no line of bertlite"
