"""Instruction sets for projections: which this machine has, and how each multiplies bytes by 16-bit integers.

An activation is an integer v, |v| <= 127 * 256 + 127. With VPDPBUSD (AVX512-VNNI, AVX-VNNI) it is split into two signed
bytes, v = 256 * hi + lo; elsewhere it stays int16. Every variant computes the same integer sums exactly.

Per quad of four weights the activation takes 8 bytes: ``hi hi hi hi lo lo lo lo`` for the VNNI sets, and int16
``v0 v2 v1 v3`` for the others, so that the even and the odd bytes of a dword each meet their pair.
"""

from enum import IntEnum

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

__all__ = ["ISA", "IsaError", "choose_isa", "supported_isas"]

I8, I16, I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)


class IsaError(ValueError):
    """An instruction set that this machine lacks, or an unknown name."""


class ISA(IntEnum):
    """Instruction sets, best first."""

    AVX512VNNI = 0
    AVXVNNI = 1
    AVX2 = 2
    GENERIC = 3

    @property
    def vnni(self) -> bool:
        """Activations are two signed bytes, not int16."""
        return self in (ISA.AVX512VNNI, ISA.AVXVNNI)

    @property
    def registers_512(self) -> bool:
        return self is ISA.AVX512VNNI


def supported_isas() -> tuple[ISA, ...]:
    """The instruction sets that this machine can run, best first; GENERIC always."""
    has = llvm.get_host_cpu_features().get
    able = {
        ISA.AVX512VNNI: has("avx512vnni") and has("avx512bw") and has("avx512vl"),
        ISA.AVXVNNI: has("avx2") and (has("avxvnni") or (has("avx512vnni") and has("avx512vl"))),
        ISA.AVX2: has("avx2") and has("fma"),
        ISA.GENERIC: True,
    }
    return tuple(isa for isa in ISA if able[isa])


def choose_isa(name: str = "auto") -> ISA:
    """The instruction set of that name (case-insensitive), or the best one for "auto".

    Raises IsaError for an unknown name and for one that this machine lacks.
    """
    supported = supported_isas()
    if name == "auto":
        return supported[0]
    names = {isa.name.lower(): isa for isa in ISA}
    choices = "auto, " + ", ".join(isa.name.lower() for isa in supported)
    if name.lower() not in names:
        raise IsaError(f"unknown instruction set '{name}'; choose one of {choices}")
    if names[name.lower()] not in supported:
        raise IsaError(f"this processor has no {name.lower()}; choose one of {choices}")
    return names[name.lower()]


class Dot:
    """Emits the integer part of a tile for one instruction set: sums over ``lanes`` rows of weight bytes times v.

    A sum is a pair of int32 vectors: (hi, lo) for VNNI, (sum, unused) elsewhere.
    """

    def __init__(self, builder: ir.IRBuilder, isa: ISA, lanes: int) -> None:
        self.b, self.isa, self.lanes = builder, isa, lanes
        self.ints = ir.VectorType(I32, lanes)

    def constant(self, value: int) -> ir.Constant:
        return ir.Constant(self.ints, [value] * self.lanes)

    def load_splat(self, address: ir.Value, scalar: ir.Type) -> ir.Value:
        """All lanes = the scalar at an address."""
        pointer = self.b.inttoptr(address, scalar.as_pointer())
        vector = ir.VectorType(scalar, self.lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        loaded = self.b.load(pointer)
        loaded.align = 4
        first = self.b.insert_element(undefined, loaded, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(self.ints, [0] * self.lanes))

    def call(self, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
        kind = ir.FunctionType(result, [a.type for a in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def prepare(self, weights: ir.Value) -> tuple[ir.Value, ...]:
        """What of a vector of weight bytes every token shares."""
        if self.isa.vnni:
            return (weights,)
        even = self.b.and_(weights, self.constant(0x00FF00FF))
        odd = self.b.and_(self.b.lshr(weights, self.constant(8)), self.constant(0x00FF00FF))
        return even, odd

    def add(
        self, sums: tuple[ir.Value, ir.Value], prepared: tuple[ir.Value, ...], x: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """sums + weights * the quad of activations at address x."""
        four = ir.Constant(x.type, 4)
        first, second = self.load_splat(x, I32), self.load_splat(self.b.add(x, four), I32)
        if self.isa.vnni:
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            hi, lo = (
                self.call(name, self.ints, s, prepared[0], part) for s, part in zip(sums, (first, second), strict=True)
            )
            return hi, lo
        total = self.b.add(sums[0], self._pairs(prepared[0], first))
        return self.b.add(total, self._pairs(prepared[1], second)), sums[1]

    def _pairs(self, weights: ir.Value, x: ir.Value) -> ir.Value:
        """Sums of neighbouring int16 products, as int32."""
        shorts = ir.VectorType(I16, 2 * self.lanes)
        w16, x16 = self.b.bitcast(weights, shorts), self.b.bitcast(x, shorts)
        if self.isa is ISA.AVX2:
            return self.call("llvm.x86.avx2.pmadd.wd", self.ints, w16, x16)
        wide = ir.VectorType(I32, 2 * self.lanes)
        products = self.b.mul(self.b.sext(w16, wide), self.b.sext(x16, wide))
        undefined = ir.Constant(wide, ir.Undefined)
        even, odd = (
            self.b.shuffle_vector(products, undefined, ir.Constant(self.ints, [2 * i + p for i in range(self.lanes)]))
            for p in (0, 1)
        )
        return self.b.add(even, odd)

    def total(self, sums: tuple[ir.Value, ir.Value]) -> ir.Value:
        """The sums as one int32 vector."""
        if not self.isa.vnni:
            return sums[0]
        return self.b.add(self.b.shl(sums[0], self.constant(8)), sums[1])

    def start(self, initial: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """Sums that begin at zero, or at an int32 vector."""
        zero = self.constant(0)
        if initial is None:
            return zero, zero
        return (zero, initial) if self.isa.vnni else (initial, zero)

    def lookup(self, nibbles: ir.Value, table: list[int]) -> ir.Value:
        """Replace every byte 0..15 by an entry of a table of 16 bytes."""
        bytes_type = ir.VectorType(I8, 4 * self.lanes)
        index = self.b.bitcast(nibbles, bytes_type)
        if self.isa is not ISA.GENERIC:
            shuffle = "llvm.x86.avx512.pshuf.b.512" if self.lanes == 16 else "llvm.x86.avx2.pshuf.b"
            entries = ir.Constant(bytes_type, table * (self.lanes // 4))
            return self.b.bitcast(self.call(shuffle, bytes_type, entries, index), self.ints)
        found = ir.Constant(bytes_type, [0] * (4 * self.lanes))
        for i, entry in enumerate(table):
            hit = self.b.icmp_unsigned("==", index, ir.Constant(bytes_type, [i] * (4 * self.lanes)))
            found = self.b.select(hit, ir.Constant(bytes_type, [entry] * (4 * self.lanes)), found)
        return self.b.bitcast(found, self.ints)
