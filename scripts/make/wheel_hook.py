"""Hatchling's hook: a wheel that holds compiled kernels is for their platform, any other for every platform.

It is run by the build; `python -m scripts.make.wheel` compiles the kernels first.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PREBUILT = ("bertlite/runtime/prebuilt", "bertlite_runtime/prebuilt")  # of bertlite, and of the runtime alone
ELF, MACH_O, PE = b"\x7fELF", b"\xcf\xfa\xed\xfe", b"MZ"  # how a library of Linux, macOS and Windows begins
PLATFORMS = {  # by that, and the number of a machine
    (ELF, 62): "manylinux_2_27_x86_64",  # torch's own wheels need 2_28
    (ELF, 183): "manylinux_2_27_aarch64",
    (MACH_O, 7): "macosx_13_0_x86_64",
    (MACH_O, 12): "macosx_13_0_arm64",
    (PE, 0x8664): "win_amd64",
}


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]  # of a config that hatchling does not name either
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Tag the wheel and add the kernels, if there are any."""
        libraries = [path for folder in PREBUILT for path in Path(self.root, folder).glob("*.so")]
        if version == "standard" and libraries:
            build_data["pure_python"] = False
            [build_data["tag"]] = {f"py3-none-{platform_of(library.read_bytes())}" for library in libraries}
            build_data["artifacts"] += [f"{folder}/*.so" for folder in PREBUILT]


def platform_of(library: bytes) -> str:
    """Return the platform of a compiled library, as tags of wheels name it."""
    places = {ELF: 18, MACH_O: 4, PE: 4 + int.from_bytes(library[60:64], "little")}
    [(start, at)] = ((start, at) for start, at in places.items() if library.startswith(start))
    return PLATFORMS[start, int.from_bytes(library[at : at + 2], "little")]
