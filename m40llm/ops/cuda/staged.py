"""Activations as the projections of a few rows want them: scaled and permuted by the kernel that produces them.

kernels/staged.cuh has the layout. A producer that knows which matrices will read its result asks `Staging.target` where to write,
a projection asks `Staging.source` what to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m40llm.device.buffers import DevicePointer
from m40llm.gguf import TensorType
from m40llm.ops.cuda.pack import FORMATS, CudaMatrix
from m40llm.ops.cuda.tensor import DeviceTensor

MOST_ROWS = 8  # that one pass of a projection serves
_CHUNK, _SUMS = 1024, 64  # floats of a row in a chunk: values, sums
FLOATING = ("f32", "f16", "bf16")  # read x as it is

# Formats that one kernel handles together, each pair in alphabetical order, and the files whose layers mix them: V has more bits
# than Q and K. Where the width is no multiple of 256, Q5_0, Q5_1, Q8_0 and IQ4_NL (packed as q8_0) stand for the K-quants. Other
# mixtures take a launch per type.
MIXED = (
    ("q4_k", "q6_k"),  # Q4_K_M
    ("q5_k", "q6_k"),  # Q5_K_M
    ("q4_k", "q5_k"),  # Q4_K_S
    ("q3_k", "q5_k"),  # Q3_K_L, the first layers of Q3_K_M
    ("q3_k", "q4_k"),  # the others of Q3_K_M
    ("q2_k", "q4_k"),  # Q2_K of models with four or more query heads to a KV head
    ("q2_k", "q3_k"),  # Q2_K of others
    ("iq4_xs", "q5_k"),  # IQ4_XS
    ("q5_k", "q8_0"),  # IQ4_NL
    ("q5_0", "q8_0"),  # Q4_K_M and Q3_K_M of such widths
    ("q5_1", "q8_0"),  # Q5_K_M of such widths
    ("q5_0", "q5_1"),  # Q4_K_S of such widths
)


def batch_of(rows: int) -> int:
    """Rows of x that one block of a projection kernel serves."""
    return 1 if rows == 1 else 4 if rows <= 4 else 8


def kernel_formats(matrices: Sequence[CudaMatrix]) -> tuple[str, ...]:
    """The formats of the kernel that handles all of these together, in its order; () if there is none."""
    formats = tuple(sorted({m.fmt.name for m in matrices}))
    return formats if len(formats) == 1 or formats in MIXED else ()


def staged_floats(columns: int, rows: int) -> int:
    """Size of one version of x (rows, columns), in float32 values."""
    return -(-columns // _CHUNK) * batch_of(rows) * (_CHUNK + _SUMS)


@dataclass(frozen=True, slots=True)
class Staged:
    """x (T, K) staged for one or two formats."""

    memory: DevicePointer
    shape: tuple[int, int]
    formats: tuple[str, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def require(self, what: str, shape: tuple[int, ...]) -> DevicePointer:
        """The memory, for a launch. Raises ValueError, naming `what`, for another shape."""
        if self.shape != shape:
            raise ValueError(f"{what} is staged {self.shape}; the kernel needs {shape}")
        return self.memory

    @property
    def types(self) -> tuple[int, int]:
        """The formats' GGML numbers as kernels take them: -1 for none."""
        numbers = [int(_TYPES[name]) for name in self.formats]
        return numbers[0], numbers[1] if len(numbers) > 1 else -1


_TYPES: dict[str, TensorType] = {fmt.name: fmt.ggml for fmt in FORMATS.values()}


def staged_formats(rows: int, readers: Sequence[CudaMatrix]) -> tuple[str, ...]:
    """What a result of `rows` rows is staged for, if these matrices are all that reads it; () for a plain tensor."""
    formats = kernel_formats(readers) if readers and rows <= MOST_ROWS else ()
    return () if set(formats) & set(FLOATING) else formats


class Staging:
    """Which tensors of a workspace hold their values staged, and where. Host state: it follows the order of launches.

    Args:
        buffers: for the tensors that may be staged, by address, float32 scratch of `staged_floats` for each version.
    """

    def __init__(self, buffers: Mapping[int, DeviceTensor]):
        self._buffers = buffers
        self._staged: dict[int, Staged] = {}

    def target(self, out: DeviceTensor, readers: Sequence[CudaMatrix]) -> DeviceTensor | Staged:
        """Where the producer of `out` (T, K) writes, when `readers` are all the matrices that read it."""
        address = out.memory.ptr
        self._staged.pop(address, None)
        formats = staged_formats(len(out), readers)
        buffer = self._buffers.get(address)
        if buffer is None or not formats:
            return out
        rows, columns = out.shape
        needed = len(formats) * staged_floats(columns, rows)
        if needed > len(buffer):
            raise ValueError(f"{needed} staged values do not fit into scratch of {len(buffer)}")
        staged = self._staged[address] = Staged(buffer.memory, (rows, columns), formats)
        return staged

    def source(self, h: DeviceTensor) -> DeviceTensor | Staged:
        """What a projection of `h` reads."""
        return self._staged.get(h.memory.ptr, h)
