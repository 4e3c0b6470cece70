"""Maxwell machine code as data: nvdisasm's listing of a cubin, parsed.

nvdisasm 13 no longer reads sm_52: the one in the triton 3.5.1 wheel (extra `bench`) does.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

_SECTION = re.compile(r"\s*\.section\s+(?:\.(?P<kind>text|nv\.constant2)\.(?P<kernel>\w+))?")
_BYTES = re.compile(r"\s*/\*(?P<offset>[0-9a-f]+)\*/\s+\.byte\s+(?P<values>.*)")
_LABEL = re.compile(r"(\.L_\w+):")
_INSTRUCTION = re.compile(
    r"\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+\{?\s*(?:@(?P<predicate>!?P\w+)\s+)?\s*(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;}]*)[;}]"
)


def find_nvdisasm() -> Path:
    """nvdisasm of the triton wheel. Raises FileNotFoundError, which says how to get it."""
    spec = find_spec("triton")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "backends/nvidia/bin/nvdisasm"
        if path.is_file():
            return path
    raise FileNotFoundError("no nvdisasm that reads sm_52: pip install triton==3.5.1, or name one with --nvdisasm")


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    predicate: str  # "P0", "!P3" or ""
    opcode: str  # without modifiers
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def bits(self) -> int:
        """Width of a memory access per thread."""
        widths = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
        return next((widths[m] for m in self.modifiers if m in widths), 32)


@dataclass(slots=True)
class Function:
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index of the instruction behind
    literals: bytearray = field(default_factory=bytearray)  # constant bank 2


def disassemble(cubin: Path, nvdisasm: Path) -> dict[str, Function]:
    """Every kernel of a cubin, by symbol. Raises RuntimeError with nvdisasm's message."""
    done = subprocess.run([nvdisasm, cubin], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm cannot read {cubin.name}: {done.stderr.strip()}")
    return parse(done.stdout)


def parse(listing: str) -> dict[str, Function]:
    """Kernels of an nvdisasm listing, by symbol."""
    functions: dict[str, Function] = {}
    current, literals = None, False
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            literals = section["kind"] == "nv.constant2"
            current = functions.setdefault(section["kernel"], Function()) if section["kind"] else None
        elif current is None:
            continue
        elif literals:
            if found := _BYTES.match(line):
                current.literals += bytes(int(value, 16) for value in found["values"].split(","))
        elif label := _LABEL.match(line):
            current.labels[label[1]] = len(current.instructions)
        elif found := _INSTRUCTION.match(line):
            opcode, *modifiers = found["opcode"].split(".")
            operands = tuple(o.strip().replace(".reuse", "") for o in found["operands"].split(",") if o.strip())
            current.instructions.append(
                Instruction(int(found["address"], 16), found["predicate"] or "", opcode, tuple(modifiers), operands)
            )
    return functions
