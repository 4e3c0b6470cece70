"""One warp walked through a kernel's Maxwell machine code (nvdisasm.py), and its instructions counted.

The counts are exact as far as control flow follows from the kernel's arguments, its block and its thread. The walk computes
with integers (and the reciprocals that divisions take): what is loaded from memory is unknown unless `memory` knows it, and so
is everything that follows from an unknown value. A branch that depends on one is not taken, an exit is; each is noted in
`Walked.guesses`.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nvdisasm import Function, Instruction

MASK = 0xFFFFFFFF
PARAMETERS_AT = 0x140  # of bank 0, on Maxwell and Pascal
_GEOMETRY_AT = 0x8  # blockDim x, y, z, gridDim x, y, z
_CONSTANT = re.compile(r"c\s*\[(0x\w+)\]\s*\[(0x\w+)\]")
_TARGET = re.compile(r"\((\.L_\w+)\)")
_REGISTER = re.compile(r"R(\d+)$")
_ADDRESS = re.compile(r"\[(?P<register>R\d+|RZ)?(?P<offset>\+?-?0x[0-9a-f]+)?\]")


@dataclass(frozen=True, slots=True)
class Walked:
    """Warp instructions by (opcode, bits of a memory access or 0), and the branches that had to be guessed."""

    counts: Counter[tuple[str, int]]
    guesses: tuple[str, ...]


Memory = Callable[[int], int | None]  # the 32-bit word at an address of device memory


@dataclass(frozen=True, slots=True)
class Launch:
    """Where the walked thread is, and bank 0: byte offset → 32-bit word."""

    thread: tuple[int, int, int]
    block: tuple[int, int, int]
    threads: tuple[int, int, int]
    blocks: tuple[int, int, int]
    constants: Mapping[int, int]


def walk(function: Function, launch: Launch, memory: Memory, limit: int = 5_000_000) -> Walked:
    """Follows one warp, through the eyes of its thread `launch.thread`. RuntimeError beyond `limit` instructions."""
    return _Walker(function, launch, memory).run(limit)


class _Walker:
    def __init__(self, function: Function, launch: Launch, memory: Memory):
        self._function = function
        self._memory = memory
        self._registers: dict[str, int | None] = {}
        self._predicates: dict[str, bool | None] = {"PT": True}
        self._carry: int | None = None
        self._low: tuple[int, int] | None = None  # operands of the low half of a 64-bit comparison
        self._stack: list[int] = []  # where SYNC and BRK go
        geometry = (*launch.threads, *launch.blocks)
        self._constants = {_GEOMETRY_AT + 4 * i: v for i, v in enumerate(geometry)} | dict(launch.constants)
        self._special = {
            f"SR_{name}.{axis}": value
            for name, values in (("TID", launch.thread), ("CTAID", launch.block))
            for axis, value in zip("XYZ", values, strict=True)
        } | {"SR_LANEID": launch.thread[0] & 31}
        self._guesses: list[str] = []

    def run(self, limit: int) -> Walked:
        counts: Counter[tuple[str, int]] = Counter()
        at, steps = 0, 0
        while True:
            instruction = self._function.instructions[at]
            steps += 1
            if steps > limit:
                raise RuntimeError(f"still running after {limit} instructions at {instruction.address:#x}")
            memory = instruction.opcode in ("LDG", "LD", "STG", "ST", "LDS", "STS", "LDL", "STL", "LDC")
            counts[instruction.opcode, instruction.bits if memory else 0] += 1
            holds = self._predicate(instruction.predicate) if instruction.predicate else True
            target = self._jump(instruction, holds)
            if target == _END:
                return Walked(counts, tuple(self._guesses))
            if target is None:
                if holds is not False:
                    self._execute(instruction, known=holds is True)
                at += 1
            else:
                at = target

    # ---- control ----

    def _jump(self, instruction: Instruction, holds: bool | None) -> int | None:
        """Index of the next instruction, _END, or None for the one behind."""
        opcode = instruction.opcode
        if opcode in ("SSY", "PBK", "PCNT"):
            self._stack.append(self._label(instruction))
            return None
        if opcode not in ("BRA", "EXIT", "SYNC", "BRK", "CONT", "RET"):
            return None
        if holds is None:
            self._guesses.append(f"{opcode} at {instruction.address:#x}")
            holds = opcode in ("EXIT", "RET")
        if not holds:
            return None
        if opcode in ("EXIT", "RET"):
            return _END
        if opcode == "BRA":
            return self._label(instruction)
        return self._stack.pop() if opcode != "CONT" else self._stack[-1]

    def _label(self, instruction: Instruction) -> int:
        found = _TARGET.search(instruction.operands[-1])
        assert found is not None, instruction
        return self._function.labels[found[1]]

    # ---- values ----

    def _predicate(self, name: str) -> bool | None:
        value = self._predicates.get(name.lstrip("!"))
        return value if value is None or not name.startswith("!") else not value

    def _value(self, operand: str) -> int | None:
        invert = operand.startswith("~")
        negate = operand.startswith("-") and not operand[1:2].isdigit()
        body = operand.lstrip("~") if invert else operand[1:] if negate else operand
        half = None
        if body.endswith((".H0", ".H1", ".B0", ".B1", ".B2", ".B3")):
            body, _, half = body.rpartition(".")
        value = self._plain_value(body.strip("|"))
        if value is None:
            return None
        if body.startswith("|"):
            value = abs(_signed(value, 32))
        if half is not None:
            width = 16 if half[0] == "H" else 8
            value = value >> width * int(half[1]) & ((1 << width) - 1)
        return (~value if invert else -value if negate else value) & MASK

    def _plain_value(self, body: str) -> int | None:
        if constant := _CONSTANT.match(body):
            bank, offset = int(constant[1], 16), int(constant[2], 16)
            if bank == 2:
                return int.from_bytes(self._function.literals[offset : offset + 4], "little")
            return self._constants.get(offset, 0) & MASK if bank == 0 else None
        if body == "RZ":
            return 0
        if _REGISTER.match(body):
            return self._registers.get(body)
        if body.startswith("SR_"):
            return self._special.get(body)
        try:
            return int(body, 0) & MASK
        except ValueError:
            return None  # a float

    def _values(self, operands: Sequence[str]) -> list[int] | None:
        values = [self._value(o) for o in operands]
        return None if any(v is None for v in values) else [v for v in values if v is not None]

    # ---- effects ----

    def _execute(self, instruction: Instruction, known: bool) -> None:
        opcode, operands = instruction.opcode, instruction.operands
        if not operands or opcode in ("STG", "ST", "STS", "STL", "BAR", "RED", "DEPBAR", "TEXDEPBAR"):
            return
        if opcode in ("ISETP", "PSETP", "FSETP") or re.match(r"P[\dT]", operands[0]):
            self._set_predicates(instruction, known)
            return
        target = operands[0].removesuffix(".CC")
        if not _REGISTER.match(target) and target != "RZ":
            return
        carries = operands[0].endswith(".CC")
        if opcode in ("LDG", "LD"):
            self._load(instruction, target)
            return
        if opcode in ("LDS", "LDC", "LDL"):
            self._set_range(target, [None] * max(1, instruction.bits // 32))
            return
        value = self._result(instruction)
        if carries:
            self._carry = None if value is None else value >> 32 & 1
            if target == "RZ" and len(operands) == 3:  # the low half of a comparison: a - b
                pair = self._values([o.lstrip("-") for o in operands[1:]])
                self._low = (
                    None if pair is None else (pair[0], pair[1]) if operands[2][0] == "-" else (pair[1], pair[0])
                )
        if target != "RZ":
            self._registers[target] = value & MASK if value is not None and known else None

    def _set_range(self, first: str, values: Sequence[int | None]) -> None:
        number = int(first[1:]) if first != "RZ" else -1
        if number >= 0:
            for i, value in enumerate(values):
                self._registers[f"R{number + i}"] = value

    def _load(self, instruction: Instruction, target: str) -> None:
        words = max(1, instruction.bits // 32)
        found = _ADDRESS.search(",".join(instruction.operands[1:]))
        address = None
        if found is not None and instruction.bits >= 32:
            offset = int(found["offset"].lstrip("+"), 16) if found["offset"] else 0
            if found["register"] in (None, "RZ"):
                address = offset
            else:
                low = self._registers.get(found["register"])
                high = self._registers.get(f"R{int(found['register'][1:]) + 1}")
                address = None if low is None or high is None else (high << 32 | low) + offset
        self._set_range(target, [None if address is None else self._memory(address + 4 * i) for i in range(words)])

    def _set_predicates(self, instruction: Instruction, known: bool) -> None:
        operands, modifiers = instruction.operands, instruction.modifiers
        if instruction.opcode == "ISETP":
            value = self._compare(modifiers, operands[2], operands[3])
            value = _combine(modifiers, value, self._predicate(operands[4]))
        elif instruction.opcode == "PSETP":
            value = _combine(modifiers[:1], self._predicate(operands[2]), self._predicate(operands[3]))
            value = _combine(modifiers[1:], value, self._predicate(operands[4]))
        elif instruction.opcode in ("LOP", "LOP32I") and len(operands) == 4:
            pair = self._values(operands[2:])
            result = None if pair is None else _LOGIC[modifiers[0]](pair[0], pair[1])
            value = None if result is None else (result != 0) == ("NZ" in modifiers)
            if operands[1] != "RZ":
                self._registers[operands[1]] = result
        else:  # of floats, votes: unknown
            value = None
            if len(operands) > 1 and _REGISTER.match(operands[1]):
                self._registers[operands[1]] = None
        value = value if known else None
        for name, result in ((operands[0], value), (operands[1], None if value is None else not value)):
            if re.match(r"P\d", name):
                self._predicates[name] = result

    def _compare(self, modifiers: Sequence[str], left: str, right: str) -> bool | None:
        pair = self._values((left, right))
        if pair is None:
            return None
        bits = 32
        if "X" in modifiers:  # the high half of a 64-bit comparison
            if self._low is None:
                return None
            pair = [pair[0] << 32 | self._low[0], pair[1] << 32 | self._low[1]]
            bits = 64
        if "U32" not in modifiers:
            pair = [_signed(v, bits) for v in pair]
        return _COMPARISONS[modifiers[0]](*pair)

    def _result(self, instruction: Instruction) -> int | None:
        """The value of an integer instruction, with its carry in bit 32; None if unknown."""
        opcode, modifiers, sources = instruction.opcode, instruction.modifiers, instruction.operands[1:]
        if opcode in ("MOV", "MOV32I", "S2R"):
            return self._value(sources[0])
        if opcode == "SEL":
            chosen = self._predicate(sources[2])
            return None if chosen is None else self._value(sources[0 if chosen else 1])
        if opcode == "IMNMX":
            smaller, pair = self._predicate(sources[2]), self._values(sources[:2])
            if smaller is None or pair is None:
                return None
            ordered = sorted(pair, key=lambda v: v if "U32" in modifiers else _signed(v, 32))
            return ordered[0 if smaller else 1]
        if opcode == "ISET":
            value = _combine(modifiers, self._compare(modifiers, sources[0], sources[1]), self._predicate(sources[2]))
            return None if value is None else MASK if value else 0
        if opcode == "PSET":
            first = _combine(modifiers[:1], self._predicate(sources[0]), self._predicate(sources[1]))
            both = _combine(modifiers[1:], first, self._predicate(sources[2]))
            return None if both is None else MASK if both else 0
        values = self._values([s for s in sources if not re.match(r"!?P", s)])
        if values is None:
            return None
        if opcode in _OF_DIVISIONS:
            return _division_step(opcode, modifiers, values[0])
        if opcode == "IADD3" and "RS" in modifiers:
            return ((values[0] + values[1]) >> 16) + values[2]
        if opcode in ("IADD", "IADD32I", "IADD3"):
            if "X" in modifiers and self._carry is None:
                return None
            return sum(values) + (self._carry or 0 if "X" in modifiers else 0)
        if opcode in ("ISCADD", "ISCADD32I") or (opcode == "LEA" and "HI" not in modifiers):
            return ((values[0] << (values[2] if len(values) > 2 else 0)) & MASK) + values[1]
        if opcode == "LEA":  # HI: the high half of a 64-bit sum, with the low half's carry
            if "X" in modifiers and self._carry is None:
                return None
            shifted = ((values[2] << 32 | values[0]) << values[3]) >> 32 & MASK
            return shifted + values[1] + (self._carry or 0 if "X" in modifiers else 0)
        if opcode == "SHF":  # of a 64-bit value: low half, distance, high half
            whole, distance = values[2] << 32 | values[0], min(values[1], 32)
            return whole << distance >> 32 & MASK if "L" in modifiers else whole >> distance & MASK
        if opcode == "SHL":
            return (values[0] << min(values[1], 32)) & MASK
        if opcode == "SHR":
            return (
                values[0] >> min(values[1], 32) if "U32" in modifiers else _signed(values[0], 32) >> min(values[1], 31)
            )
        if opcode in ("LOP", "LOP32I"):
            return _LOGIC[modifiers[0]](values[0], values[1])
        if opcode == "LOP3":
            return _lookup(values[0], values[1], values[2], values[3])
        if opcode == "BFE":
            position, length = values[1] & 255, values[1] >> 8 & 255
            result = values[0] >> position & ((1 << length) - 1)
            return result if "U32" in modifiers or not length else _signed(result, length)
        if opcode == "BFI":  # the low bits of the first operand, put into the third
            position, length = values[1] & 255, values[1] >> 8 & 255
            mask = ((1 << length) - 1) << position
            return values[2] & ~mask & MASK | values[0] << position & mask
        if opcode == "XMAD":
            factor = self._value(sources[1].removesuffix(".H1").removesuffix(".H0"))
            return None if factor is None else _xmad(modifiers, values[0], values[1], values[2], factor)
        return None


_END = -1
_LOGIC: dict[str, Callable[[int, int], int]] = {
    "AND": lambda a, b: a & b,
    "OR": lambda a, b: a | b,
    "XOR": lambda a, b: a ^ b,
    "PASS_B": lambda a, b: b,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def _combine(modifiers: Sequence[str], a: bool | None, b: bool | None) -> bool | None:
    """The logical operation among the modifiers; one known operand may settle it."""
    how = next((m for m in modifiers if m in ("AND", "OR", "XOR")), "AND")
    if how == "AND" and (a is False or b is False):
        return False
    if how == "OR" and (a is True or b is True):
        return True
    if a is None or b is None:
        return None
    return a != b if how == "XOR" else a and b if how == "AND" else a or b


_OF_DIVISIONS = ("I2F", "F2I", "I2I", "MUFU")


def _division_step(opcode: str, modifiers: Sequence[str], value: int) -> int | None:
    """Conversions and the reciprocal, on the bits of a float32; None for another use of them."""
    if opcode == "I2I":
        return value
    if opcode == "I2F" and "F64" not in modifiers and "F16" not in modifiers:
        number = _signed(value, 32) if "S32" in modifiers else value
        return int.from_bytes(struct.pack("<f", number), "little")
    number = struct.unpack("<f", value.to_bytes(4, "little"))[0]
    if opcode == "MUFU" and "RCP" in modifiers and number:
        return int.from_bytes(struct.pack("<f", 1 / number), "little")
    if opcode == "F2I" and "TRUNC" in modifiers and abs(number) < 1 << 32:
        return int(number) & MASK
    return None


def _lookup(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result & MASK


def _xmad(modifiers: Sequence[str], a: int, b: int, c: int, whole_b: int) -> int | None:
    """16 x 16 bits + 32, the step of a 32-bit product; `whole_b` is b's register. None for a form that is not needed."""
    if not set(modifiers) <= {"MRG", "PSL", "CHI", "CBCC", "CLO"}:
        return None
    product = (a & 0xFFFF) * (b & 0xFFFF)
    if "PSL" in modifiers:
        product = product << 16 & MASK
    addend = c >> 16 if "CHI" in modifiers else c & 0xFFFF if "CLO" in modifiers else c
    if "CBCC" in modifiers:
        addend = c + (whole_b << 16)
    result = (product + addend) & MASK
    return result & 0xFFFF | (whole_b & 0xFFFF) << 16 if "MRG" in modifiers else result
