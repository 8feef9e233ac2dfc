"""The C++ compiler that torch.compile needs on the CPU."""

import pytest


def require_cpp_compiler() -> None:
    """Skip a test where the machine has no C++ compiler, which is looked for as torch does: in CXX, then g++."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("torch.compile needs a C++ compiler, and this machine has none: set CXX or install g++")
