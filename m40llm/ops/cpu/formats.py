"""How packed matrices lie in memory: one layout for all instruction sets, 16 rows interleaved, a vector lane = a row.

Quantised types. A weight is an unsigned integer ``q`` made of bit planes; its value is ``scale * q + min``. Blocks of 32
weights of a row are cut into eight quads of four; per group of 16 rows and block, every plane of ``b`` bits is ``b``
vectors of 16 dwords. Field ``f`` of vector ``e`` holds quad ``e * 8/b + f``: byte ``i`` of a lane's dword, bits ``b*f``
and up, is weight ``4 * quad + i`` of that lane's row. So one shift and one mask unpack 64 weights into bytes.

Scales, in an array of their own. Types with one scale per 32 weights: per block 16 FP16 scales, then 16 FP16 minimums.
Types with blocks of 256: per block 16 FP16 super-scales (then super-minimums, negated), then per 16 or 32 weights
16 int8 scales (then 16 int8 minimums). Symmetric types store no minimum: it is ``-2**bias_bits * scale``.

Float types: per group, for every k, the 16 rows' elements.
"""

from dataclasses import dataclass
from functools import cached_property

from m40llm.gguf import BLOCKS, TensorType

__all__ = ["BLOCK", "FLOATS", "FORMATS", "ROWS", "Format"]

ROWS = 16  # rows of a group
BLOCK = 32  # weights that share one activation scale


@dataclass(frozen=True)
class Format:
    """One quantised type in packed form. ``planes`` lists the bits of each plane, lowest bits of q first."""

    planes: tuple[int, ...]
    bias_bits: int | None  # q - 2**bias_bits is the signed weight; None: minimums are stored
    unit: int = 32  # weights per scale record: 32, or 256 with sub-scales
    sub: int = 32  # weights per scale: 16 or 32
    table: bool = False  # q indexes IQ4_VALUES

    @property
    def has_min(self) -> bool:
        return self.bias_bits is None

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of the planes per group and block of 32."""
        return sum(self.planes) * ROWS * 4

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes of the scale record per group and unit."""
        fields = 2 if self.has_min else 1
        return fields * ROWS * (2 + (0 if self.unit == BLOCK else self.unit // self.sub))

    def group_bytes(self, k: int) -> tuple[int, int]:
        """Bytes of a group of 16 rows of k weights: (planes, scales)."""
        return k // BLOCK * self.block_bytes, k // self.unit * self.unit_bytes


FORMATS: dict[TensorType, Format] = {
    TensorType.Q4_0: Format((4,), 3),
    TensorType.Q4_1: Format((4,), None),
    TensorType.Q5_0: Format((4, 1), 4),
    TensorType.Q5_1: Format((4, 1), None),
    TensorType.Q8_0: Format((8,), 7),
    TensorType.Q2_K: Format((2,), None, 256, 16),
    TensorType.Q3_K: Format((2, 1), 2, 256, 16),
    TensorType.Q4_K: Format((4,), None, 256, 32),
    TensorType.Q5_K: Format((4, 1), None, 256, 32),
    TensorType.Q6_K: Format((4, 2), 5, 256, 16),
    TensorType.IQ4_NL: Format((4,), 7, table=True),
    TensorType.IQ4_XS: Format((4,), 7, 256, 32, table=True),
}

FLOATS: dict[TensorType, int] = {
    kind: BLOCKS[kind].type_size for kind in (TensorType.F32, TensorType.F16, TensorType.BF16)
}
"""Float types and their bytes per weight."""
