"""GGML tensor types, their block sizes, and GGUF metadata value types.

The numbers are those of ``enum ggml_type`` and ``enum gguf_type`` in ggml's public headers and of the GGUF
specification (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np


class TensorType(IntEnum):
    """Every GGML type id that was ever given out, so that a file can be described even if it cannot be computed.

    An id outside this list becomes a pseudo-member named ``type_<id>``: files are opened and listed anyway.
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q4_2 = 4
    Q4_3 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    Q4_0_4_4 = 31
    Q4_0_4_8 = 32
    Q4_0_8_8 = 33
    TQ1_0 = 34
    TQ2_0 = 35
    IQ4_NL_4_4 = 36
    IQ4_NL_4_8 = 37
    IQ4_NL_8_8 = 38
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    @classmethod
    def _missing_(cls, value: object) -> TensorType | None:
        if not isinstance(value, int) or not 0 <= value < 2**32:
            return None
        member = int.__new__(cls, value)
        member._name_ = f"type_{value}"
        member._value_ = value
        return member


class BlockFormat(NamedTuple):
    """Size of one block: ``block_size`` weights stored in ``type_size`` bytes."""

    block_size: int
    type_size: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` weights; ``columns`` must be a multiple of ``block_size``."""
        if columns % self.block_size:
            raise ValueError(f"a row of {columns} weights is no multiple of the block of {self.block_size}")
        return columns // self.block_size * self.type_size


BLOCKS: dict[TensorType, BlockFormat] = {
    TensorType.F32: BlockFormat(1, 4),
    TensorType.F16: BlockFormat(1, 2),
    TensorType.BF16: BlockFormat(1, 2),
    TensorType.Q8_0: BlockFormat(32, 34),
    TensorType.Q4_0: BlockFormat(32, 18),
    TensorType.Q4_1: BlockFormat(32, 20),
    TensorType.Q5_0: BlockFormat(32, 22),
    TensorType.Q5_1: BlockFormat(32, 24),
    TensorType.Q2_K: BlockFormat(256, 84),
    TensorType.Q3_K: BlockFormat(256, 110),
    TensorType.Q4_K: BlockFormat(256, 144),
    TensorType.Q5_K: BlockFormat(256, 176),
    TensorType.Q6_K: BlockFormat(256, 210),
    TensorType.IQ4_NL: BlockFormat(32, 18),
    TensorType.IQ4_XS: BlockFormat(256, 136),
}
"""Block formats of the supported types: these, and only these, can be dequantised and computed with."""

FOREIGN_BLOCKS: dict[TensorType, BlockFormat] = {
    TensorType.Q8_1: BlockFormat(32, 36),
    TensorType.Q8_K: BlockFormat(256, 292),
    TensorType.IQ2_XXS: BlockFormat(256, 66),
    TensorType.IQ2_XS: BlockFormat(256, 74),
    TensorType.IQ3_XXS: BlockFormat(256, 98),
    TensorType.IQ1_S: BlockFormat(256, 50),
    TensorType.IQ3_S: BlockFormat(256, 110),
    TensorType.IQ2_S: BlockFormat(256, 82),
    TensorType.IQ1_M: BlockFormat(256, 56),
    TensorType.I8: BlockFormat(1, 1),
    TensorType.I16: BlockFormat(1, 2),
    TensorType.I32: BlockFormat(1, 4),
    TensorType.I64: BlockFormat(1, 8),
    TensorType.F64: BlockFormat(1, 8),
    TensorType.TQ1_0: BlockFormat(256, 54),
    TensorType.TQ2_0: BlockFormat(256, 66),
    TensorType.MXFP4: BlockFormat(32, 17),
    TensorType.NVFP4: BlockFormat(64, 36),
    TensorType.Q1_0: BlockFormat(128, 18),
}
"""Known sizes of types that are listed but not computed with. (Q8_1 only ever lives in memory: 2 + 2 + 32 bytes.)"""


class ValueType(IntEnum):
    """Type ids of GGUF metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


VALUE_DTYPES: dict[ValueType, np.dtype] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("u1"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}
"""Little-endian dtype of every fixed-size metadata value; BOOL is a byte that must be 0 or 1."""
