"""Hatchling's hook: a wheel that holds compiled kernels is for Linux and their machine, any other for every machine.

It is run by the build; `python -m scripts.make.wheel` compiles the kernels first.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PREBUILT = ("bertlite/runtime/prebuilt", "bertlite_runtime/prebuilt")  # of bertlite, and of the runtime alone
MACHINES = {62: "x86_64", 183: "aarch64"}  # by the number in the head of an ELF file
SYSTEM = "manylinux_2_27"  # what the kernels need, by auditwheel; torch's own wheels need 2_28


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]  # of a config that hatchling does not name either
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Tag the wheel and add the kernels, if there are any."""
        libraries = [path for folder in PREBUILT for path in Path(self.root, folder).glob("*.so")]
        if version == "standard" and libraries:
            [machine] = {MACHINES[library.read_bytes()[18]] for library in libraries}
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{SYSTEM}_{machine}"
            build_data["artifacts"] += [f"{folder}/*.so" for folder in PREBUILT]
