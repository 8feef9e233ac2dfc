"""Hatchling's hook: a wheel that holds compiled kernels is for Linux on x86-64, any other for every machine.

It is run by the build; `python -m scripts.make.wheel` compiles the kernels first.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PREBUILT = "bertlite/inference/native/prebuilt"


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]  # of a config that hatchling does not name either
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Tag the wheel and add the kernels, if there are any."""
        if version == "standard" and any(Path(self.root, PREBUILT).glob("*.so")):
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
            build_data["artifacts"].append(f"{PREBUILT}/*.so")
