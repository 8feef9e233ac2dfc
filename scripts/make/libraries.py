"""Read compiled libraries: the libraries and versions that they need, and the functions that they offer.

Only the forms that kernels are compiled to, 64-bit and little-endian: ELF of Linux, Mach-O of macOS, PE of Windows.
"""

import struct
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from scripts.make.wheel_hook import ELF, MACH_O, PE

ELF_DYNAMIC, ELF_SYMBOLS, ELF_VERSIONS = 6, 11, 0x6FFFFFFE  # types of sections
MACH_SYMBOLS, MACH_SYSTEM, MACH_SIGNATURE = 0x2, 0x32, 0x1D  # load commands
MACH_LIBRARIES = (0xC, 0x20, 0x80000018, 0x8000001F, 0x80000023)  # and those that name a library


class Library(NamedTuple):
    """A compiled library.

    Args:
        needs: the names of the libraries that the system must have.
        versions: the newest version that it needs of each interface: {"GLIBC": (2, 17)}; for macOS the oldest system.
        functions: the names of those that can be called.
        signed: whether it is signed, as macOS asks on ARM.
    """

    needs: frozenset[str]
    versions: dict[str, tuple[int, ...]]
    functions: frozenset[str]
    signed: bool = False


def read_library(code: bytes) -> Library:
    """Return the needs and the functions of a compiled library.

    Raises:
        ValueError: it is of no known form.
    """
    for start, read in ((ELF, read_elf), (MACH_O, read_mach_o), (PE, read_pe)):
        if code.startswith(start):
            return read(code)
    raise ValueError(f"begins with {code[:4]!r}: not a library of Linux, macOS or Windows")


def read_elf(code: bytes) -> Library:
    """Return the needs and the functions of a library of Linux."""
    [table], (size, count) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + size * i) for i in range(count)]
    needs, versions, functions = set(), dict[str, tuple[int, ...]](), set()
    for _, kind, _, _, at, length, link, *_ in sections:
        strings = sections[link][4]
        if kind == ELF_DYNAMIC:
            needs |= {text(code, strings + value) for tag, value in rows("<qQ", code, at, length) if tag == 1}
        if kind == ELF_SYMBOLS:  # defined, and global or weak
            symbols = [(name, info, section) for name, info, _, section, *_ in rows("<IBBHQQ", code, at, length)]
            functions |= {text(code, strings + name) for name, info, section in symbols if section and info >> 4}
        if kind == ELF_VERSIONS:
            for name in version_names(code, at, strings):
                interface, _, version = name.rpartition("_")
                numbers = tuple(int(part) for part in version.split(".")) if version[0].isdigit() else (sys.maxsize,)
                versions[interface] = max(versions.get(interface, ()), numbers)
    return Library(frozenset(needs), versions, frozenset(functions))


def version_names(code: bytes, at: int, strings: int) -> Iterator[str]:
    """Yield the versions that a section of ELF asks of each library: lists in a list, linked by distances."""
    while True:
        _, _, _, first, step = struct.unpack_from("<HHIII", code, at)
        inner = at + first
        while True:
            _, _, _, name, inner_step = struct.unpack_from("<IHHII", code, inner)
            yield text(code, strings + name)
            if not inner_step:
                break
            inner += inner_step
        if not step:
            break
        at += step


def read_mach_o(code: bytes) -> Library:
    """Return the needs and the functions of a library of macOS."""
    needs, versions, functions, signed = set(), dict[str, tuple[int, ...]](), set(), False
    [count], at = struct.unpack_from("<I", code, 16), 32
    for _ in range(count):
        kind, size, first, second, third = struct.unpack_from("<IIIII", code, at)
        if kind in MACH_LIBRARIES:
            needs.add(text(code, at + first))
        if kind == MACH_SYSTEM:
            versions["macOS"] = (second >> 16, second >> 8 & 255)
        if kind == MACH_SYMBOLS:  # defined in a section, and external, but not to this library alone
            symbols = rows("<IBBHQ", code, first, second * 16)
            functions |= {text(code, third + name + 1) for name, info, *_ in symbols if info & 0x1F == 0xF}
        signed |= kind == MACH_SIGNATURE
        at += size
    return Library(frozenset(needs), versions, frozenset(functions), signed)


def read_pe(code: bytes) -> Library:
    """Return the needs and the functions of a library of Windows."""
    [header] = struct.unpack_from("<I", code, 60)
    [count], [optional] = struct.unpack_from("<H", code, header + 6), struct.unpack_from("<H", code, header + 20)
    sections = [struct.unpack_from("<8xIIII", code, header + 24 + optional + 40 * i) for i in range(count)]

    def place(address: int) -> int:
        """Return where in the file an address in memory is."""
        return next(at + address - first for size, first, _, at in sections if first <= address < first + size)

    exported, _, imported, _ = struct.unpack_from("<IIII", code, header + 24 + 112)
    count, names = struct.unpack_from("<I4xI", code, place(exported) + 24) if exported else (0, 0)
    functions = {text(code, place(name)) for (name,) in rows("<I", code, place(names), 4 * count)} if count else set()
    needs, at = set(), place(imported)
    while name := struct.unpack_from("<I", code, at + 12)[0]:
        needs.add(text(code, place(name)))
        at += 20
    return Library(frozenset(needs), {}, frozenset(functions))


def rows(form: str, code: bytes, at: int, length: int) -> Iterator[tuple[Any, ...]]:
    """Return the rows of a table of so many bytes."""
    return struct.iter_unpack(form, code[at : at + length])


def text(code: bytes, at: int) -> str:
    """Return a text that ends at a zero."""
    return code[at : code.index(0, at)].decode()
