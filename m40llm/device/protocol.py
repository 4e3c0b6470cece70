"""What the operations need of a device. Two implementations: cuda.py (a card, through CuPy) and emulator.py (a CPU)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from m40llm.device.buffers import DeviceBuffer, DeviceMemory
from m40llm.device.signature import KernelSignature

Dim = int | tuple[int, ...]  # x, or (x, y), or (x, y, z)
# None is a null pointer: an optional operand (bias, residual) that is absent.
Argument = DeviceMemory | np.generic | None


@dataclass(slots=True)
class Counters:
    """What a device was asked to do since it was opened. `after - before` is what happened in between."""

    launches: int = 0
    gemms: int = 0  # cuBLAS calls
    replays: int = 0  # of captured graphs; their launches and gemms are not counted again
    synchronisations: int = 0  # times the host waited for the device
    allocations: int = 0
    frees: int = 0
    h2d_copies: int = 0
    h2d_bytes: int = 0
    d2h_copies: int = 0
    d2h_bytes: int = 0
    d2d_copies: int = 0
    d2d_bytes: int = 0

    def snapshot(self) -> Counters:
        """A copy that stays as it is."""
        return Counters(**self.as_dict())

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __sub__(self, before: Counters) -> Counters:
        earlier = before.as_dict()
        return Counters(**{name: value - earlier[name] for name, value in self.as_dict().items()})

    def __add__(self, other: Counters) -> Counters:
        more = other.as_dict()
        return Counters(**{name: value + more[name] for name, value in self.as_dict().items()})


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel. `handle` belongs to the device that loaded it."""

    module: str
    signature: KernelSignature
    handle: Any

    @property
    def symbol(self) -> str:
        return self.signature.symbol


class Stream(Protocol):
    """Work in one stream runs in order; two streams are ordered by events only."""

    def synchronize(self) -> None:
        """Waits, on the host, for everything enqueued so far. Counted as one synchronisation."""


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Waits, on the host, until the point is reached. Counted as one synchronisation."""

    def elapsed_ms(self, earlier: Any) -> float:
        """Milliseconds between two reached events of this device."""


class Graph(Protocol):
    """Captured work, for `replay`. Holds the addresses of its buffers, which must stay open."""

    def close(self) -> None:
        """Frees the graph; a second call does nothing."""


class Device(Protocol):
    """A device as the operations see it. Offsets and sizes are bytes. `stream=None` is the device's default stream."""

    name: str  # "Tesla M40 24GB", "emulator (check)"
    arch: str  # "sm_52"
    multiprocessors: int  # 24 on a Tesla M40: what grids are sized for
    counters: Counters

    def alloc(self, nbytes: int, name: str) -> DeviceBuffer:
        """Uninitialised memory, aligned to 256 bytes. Raises OutOfDeviceMemory; DeviceError for nbytes < 1."""
        ...

    def upload(self, dst: DeviceMemory, src: npt.NDArray[Any], offset: int = 0, stream: Any = None) -> None:
        """Enqueues a copy of `src` (made contiguous) to byte `offset` of `dst`. `src` may be changed afterwards."""
        ...

    def download(
        self, src: DeviceMemory, shape: Sequence[int], dtype: npt.DTypeLike, offset: int = 0, stream: Any = None
    ) -> npt.NDArray[Any]:
        """Waits for the stream and returns a new array read from byte `offset`. One synchronisation, one D2H copy."""
        ...

    def copy(self, dst: DeviceMemory, src: DeviceMemory, nbytes: int, stream: Any = None) -> None:
        """Enqueues a copy between two places of this device that do not overlap."""
        ...

    def fill(self, dst: DeviceMemory, byte: int, stream: Any = None) -> None:
        """Enqueues setting every byte of `dst` to `byte` (0 to 255)."""
        ...

    def kernel(self, module: str, symbol: str) -> Kernel:
        """The kernel `symbol` of `kernels/<module>.cu`, compiled if need be. Raises KernelCompileError, DeviceError."""
        ...

    def launch(
        self, kernel: Kernel, grid: Dim, block: Dim, args: Sequence[Argument], shared: int = 0, stream: Any = None
    ) -> None:
        """Enqueues a kernel with `shared` bytes of dynamic shared memory.

        Arguments are DeviceBuffer, DevicePointer, None (a null pointer) and NumPy scalars of exactly the declared C type;
        LaunchError for anything else, also for a bare Python number.
        """
        ...

    def gemm(
        self,
        a: DeviceMemory,
        b: DeviceMemory,
        c: DeviceMemory,
        m: int,
        n: int,
        k: int,
        *,
        dtype: npt.DTypeLike = np.float32,
        accumulate: bool = False,
        lda: int | None = None,
        ldb: int | None = None,
        ldc: int | None = None,
        stream: Any = None,
    ) -> None:
        """Row-major C (m, n) float32 = A (m, k) @ B (n, k)^T [+ C if `accumulate`], summed in float32.

        `dtype` is the type of both A and B, float32 or float16: cuBLAS multiplies equal types only. `lda`, `ldb`, `ldc`
        are row pitches in elements (None: k, k, n).
        """
        ...

    def stream(self, priority: int = 0) -> Stream:
        """A new stream; a lower number is served first."""
        ...

    def event(self) -> Event:
        """A new event, to be recorded."""
        ...

    def record(self, event: Any, stream: Any = None) -> None:
        """Puts the event behind everything enqueued in the stream."""
        ...

    def wait(self, event: Any, stream: Any = None) -> None:
        """Lets the stream, not the host, wait for the event."""
        ...

    def synchronize(self) -> None:
        """Waits, on the host, for everything. Counted as one synchronisation."""
        ...

    def capture(self, stream: Any = None) -> AbstractContextManager[Graph]:
        """`with device.capture(stream) as graph:` collects what is enqueued in the stream instead of running it."""
        ...

    def replay(self, graph: Any, stream: Any = None) -> None:
        """Enqueues a captured graph."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        ...

    def close(self) -> None:
        """Releases the device. Buffers must be closed before."""
        ...


def three(dim: Dim) -> tuple[int, int, int]:
    """(x, y, z) of a grid or block."""
    values = (dim,) if isinstance(dim, int) else tuple(dim)
    x, y, z = (*values, 1, 1, 1)[:3] if len(values) <= 3 else values
    return int(x), int(y), int(z)
