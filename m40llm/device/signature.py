"""Kernel signatures, parsed from the source, and the check of a launch's arguments against them.

The CUDA driver checks nothing: an int64 where the kernel declares an int shifts every argument behind it. So each launch
is compared with the declaration, on the card as in the emulator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from m40llm.device.errors import DeviceError, LaunchError

# One letter a type, as kernels/host/kernel_entry.h computes it from the C++ type.
POINTER = "P"
CONST_POINTER = "C"
SCALAR_TYPES: dict[str, type[np.generic]] = {
    "f": np.float32,
    "d": np.float64,
    "b": np.int8,
    "B": np.uint8,
    "h": np.int16,
    "H": np.uint16,
    "i": np.int32,
    "I": np.uint32,
    "q": np.int64,
    "Q": np.uint64,
}
_C_TYPES = {
    "float": "f",
    "double": "d",
    "bool": "B",
    "char": "b",
    "signed char": "b",
    "unsigned char": "B",
    "short": "h",
    "unsigned short": "H",
    "int": "i",
    "signed": "i",
    "unsigned": "I",
    "unsigned int": "I",
    "long": "q",
    "long long": "q",
    "unsigned long": "Q",
    "unsigned long long": "Q",
    "size_t": "Q",
}
_KERNEL = re.compile(
    r'extern\s*"C"\s*__global__\s+(?:(?:void|__launch_bounds__\s*\((?P<bounds>[^()]*(?:\([^()]*\)[^()]*)*)\))\s*)+'
    r"(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: its name and its type's letter."""

    name: str
    letter: str

    @property
    def is_pointer(self) -> bool:
        return self.letter in (POINTER, CONST_POINTER)

    @property
    def description(self) -> str:
        if self.letter == POINTER:
            return "a pointer"
        return "a pointer to const" if self.letter == CONST_POINTER else f"np.{SCALAR_TYPES[self.letter].__name__}"


@dataclass(frozen=True)
class KernelSignature:
    """A kernel's symbol, its parameters in order, and the block size of its `__launch_bounds__` (None: not declared)."""

    symbol: str
    parameters: tuple[Parameter, ...]
    max_threads: int | None = None

    @property
    def letters(self) -> str:
        return "".join(p.letter for p in self.parameters)


def parse_kernels(source: Path, include_dirs: Sequence[Path], arch: int = 520) -> dict[str, KernelSignature]:
    """Signatures of every `extern "C" __global__` kernel in `source`, macros expanded, by symbol.

    `arch` is the compute capability times ten (520 for sm_52). Raises DeviceError for a source that declares none or uses
    a parameter type that cannot cross a launch (a struct by value, a reference).
    """
    from m40llm.device.preprocess import expand  # not at the top: only who compiles kernels pays for pcpp

    text = expand(source, include_dirs, arch)
    kernels = {}
    for match in _KERNEL.finditer(text):
        symbol = match["name"]
        bounds = re.match(r"\s*(\d+)", match["bounds"] or "")
        kernels[symbol] = KernelSignature(
            symbol, _parse_parameters(symbol, match["parameters"]), int(bounds[1]) if bounds else None
        )
    if not kernels:
        raise DeviceError(f'{source}: no `extern "C" __global__` kernel in it')
    return kernels


def _parse_parameters(symbol: str, text: str) -> tuple[Parameter, ...]:
    parameters = []
    for declaration in filter(str.strip, text.split(",")):
        cleaned = re.sub(r"__restrict__|__grid_constant__|\bvolatile\b", " ", declaration)
        if "*" in cleaned:
            before, name = cleaned.rsplit("*", 1)
            letter = CONST_POINTER if re.search(r"\bconst\b", before) else POINTER
            parameters.append(Parameter(name.replace("const", "").strip(), letter))
            continue
        *words, name = re.sub(r"\bconst\b", " ", cleaned).split()
        found = _C_TYPES.get(" ".join(words))
        if found is None:
            raise DeviceError(f"kernel {symbol}: parameter '{declaration.strip()}' has a type that no launch can pass")
        parameters.append(Parameter(name, found))
    return tuple(parameters)


def check_scalar_or_refuse(where: str, argument: Any) -> None:
    """Raises LaunchError for a value that has no C type of its own (Python's int, float, bool; arrays; anything else)."""
    if isinstance(argument, bool | int | float) and not isinstance(argument, np.generic):
        raise LaunchError(
            f"{where} is a bare Python {type(argument).__name__}; pass a typed scalar such as "
            f"np.int32({argument!r}) or np.float32({argument!r})"
        )
    raise LaunchError(f"{where} is a {type(argument).__name__}; pass a DeviceBuffer, a DevicePointer or a NumPy scalar")


def check_scalar(signature: KernelSignature, index: int, argument: Any) -> None:
    """Raises LaunchError unless `argument` is a NumPy scalar of parameter `index`'s type."""
    parameter = signature.parameters[index]
    where = f"{signature.symbol}: argument {index} ('{parameter.name}')"
    if not isinstance(argument, np.generic):
        check_scalar_or_refuse(where, argument)
    expected = SCALAR_TYPES.get(parameter.letter)
    # np.float64 is also a Python float: it is a typed scalar all the same.
    if expected is None or not (
        isinstance(argument, expected) or (parameter.letter == "B" and isinstance(argument, np.bool_))
    ):
        raise LaunchError(f"{where} is np.{type(argument).__name__}; the kernel declares {parameter.description}")


def check_count(signature: KernelSignature, count: int) -> None:
    """Raises LaunchError unless the kernel has `count` parameters."""
    if count != len(signature.parameters):
        names = ", ".join(p.name for p in signature.parameters)
        raise LaunchError(f"{signature.symbol}: {count} arguments for {len(signature.parameters)} parameters ({names})")


def check_block(signature: KernelSignature, threads: int) -> None:
    """Raises LaunchError if the block is larger than the kernel's `__launch_bounds__`."""
    if signature.max_threads is not None and threads > signature.max_threads:
        raise LaunchError(
            f"{signature.symbol}: {threads} threads in a block, __launch_bounds__ allows {signature.max_threads}"
        )
