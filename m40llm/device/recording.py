"""A device that only writes down what it is asked to do: memory has addresses but no content, launches do not run.

For planning: the launches of a step, with their grids and arguments as the real launchers make them, and the bytes that a model
takes, on a card that is not here and from weights that need not be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m40llm.device.buffers import DeviceBuffer, DeviceMemory, DevicePointer
from m40llm.device.errors import DeviceError, OutOfDeviceMemory
from m40llm.device.protocol import Argument, Counters, Dim, Kernel, three
from m40llm.device.signature import KernelSignature, check_block, parse_kernels
from m40llm.device.sources import KERNEL_DIR, include_dirs, kernel_source
from m40llm.device.transfers import check_arguments, check_gemm, check_range

_FIRST_ADDRESS = 1 << 32
_ALIGNMENT = 256  # as cudaMalloc


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """One launch: `arguments` by parameter name, None for a null pointer."""

    module: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: Mapping[str, DevicePointer | np.generic | None]

    def integer(self, name: str) -> int:
        """The value of an integer argument. Raises DeviceError for a pointer or a missing one."""
        value = self.arguments.get(name)
        if not isinstance(value, np.integer):
            raise DeviceError(f"{self.symbol} has no integer argument '{name}'")
        return int(value)


class _Nothing:
    """A stream, event or graph of a device on which nothing runs."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def elapsed_ms(self, earlier: Any) -> float:
        return 0.0

    def close(self) -> None:
        """There is nothing to free."""


class RecordingDevice:
    """The `Device` protocol without a device.

    Args:
        multiprocessors: of the card that is planned for: some launchers choose their grids by it.
        memory_bytes: capacity; None: no limit.
    """

    def __init__(
        self,
        multiprocessors: int = 24,
        memory_bytes: int | None = None,
        *,
        arch: str = "sm_52",
        kernel_dir: Path = KERNEL_DIR,
    ):
        self.name = "recording"
        self.arch = arch
        self.multiprocessors = multiprocessors
        self.counters = Counters()
        self.launches: list[RecordedLaunch] = []
        self._kernel_dir = kernel_dir
        self._total = memory_bytes if memory_bytes is not None else 1 << 62
        self._next = _FIRST_ADDRESS
        self._live: dict[int, DeviceBuffer] = {}
        self._signatures: dict[str, dict[str, KernelSignature]] = {}

    def alloc(self, nbytes: int, name: str) -> DeviceBuffer:
        if nbytes < 1:
            raise DeviceError(f"buffer '{name}': {nbytes} bytes")
        free, total = self.memory_info()
        if nbytes > free:
            raise OutOfDeviceMemory(name, nbytes, free, total)
        address = self._next
        self._next += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = DeviceBuffer(self, address, nbytes, name, lambda: self._release(address))
        self._live[address] = buffer
        self.counters.allocations += 1
        return buffer

    def _release(self, address: int) -> None:
        del self._live[address]
        self.counters.frees += 1

    def buffers(self) -> list[tuple[str, int]]:
        """(name, bytes) of the buffers that are open, oldest first."""
        return [(buffer.name, buffer.nbytes) for buffer in self._live.values()]

    def memory_info(self) -> tuple[int, int]:
        return self._total - sum(buffer.nbytes for buffer in self._live.values()), self._total

    def upload(self, dst: DeviceMemory, src: npt.NDArray[Any], offset: int = 0, stream: Any = None) -> None:
        check_range(self, dst, offset, src.nbytes)
        self.counters.h2d_copies += 1
        self.counters.h2d_bytes += src.nbytes

    def download(
        self, src: DeviceMemory, shape: Sequence[int], dtype: npt.DTypeLike, offset: int = 0, stream: Any = None
    ) -> npt.NDArray[Any]:
        """Zeros of the asked shape."""
        result: npt.NDArray[Any] = np.zeros(tuple(shape), dtype)
        check_range(self, src, offset, result.nbytes)
        self.counters.d2h_copies += 1
        self.counters.d2h_bytes += result.nbytes
        self.counters.synchronisations += 1
        return result

    def copy(self, dst: DeviceMemory, src: DeviceMemory, nbytes: int, stream: Any = None) -> None:
        check_range(self, dst, 0, nbytes)
        check_range(self, src, 0, nbytes)
        self.counters.d2d_copies += 1
        self.counters.d2d_bytes += nbytes

    def fill(self, dst: DeviceMemory, byte: int, stream: Any = None) -> None:
        check_range(self, dst, 0, 0)

    def kernel(self, module: str, symbol: str) -> Kernel:
        if module not in self._signatures:
            source = kernel_source(module, self._kernel_dir)
            self._signatures[module] = parse_kernels(source, include_dirs(self._kernel_dir), 520)
        if symbol not in self._signatures[module]:
            raise DeviceError(f"{module}.cu has no kernel '{symbol}'")
        return Kernel(module, self._signatures[module][symbol], None)

    def launch(
        self, kernel: Kernel, grid: Dim, block: Dim, args: Sequence[Argument], shared: int = 0, stream: Any = None
    ) -> None:
        arguments = check_arguments(self, kernel.signature, args)
        threads = three(block)
        check_block(kernel.signature, threads[0] * threads[1] * threads[2])
        self.counters.launches += 1
        names = (parameter.name for parameter in kernel.signature.parameters)
        named = dict(zip(names, arguments, strict=True))
        self.launches.append(RecordedLaunch(kernel.module, kernel.symbol, three(grid), threads, named))

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
        check_gemm(self, (a, b, c), (m, n, k), (lda or k, ldb or k, ldc or n), np.dtype(dtype))
        self.counters.gemms += 1

    def stream(self, priority: int = 0) -> _Nothing:
        return _Nothing()

    def event(self) -> _Nothing:
        return _Nothing()

    def record(self, event: Any, stream: Any = None) -> None:
        """Nothing runs that an event could mark."""

    def wait(self, event: Any, stream: Any = None) -> None:
        """Nothing runs that could be waited for."""

    def synchronize(self) -> None:
        self.counters.synchronisations += 1

    @contextmanager
    def capture(self, stream: Any = None) -> Iterator[_Nothing]:
        yield _Nothing()

    def replay(self, graph: Any, stream: Any = None) -> None:
        self.counters.replays += 1

    def close(self) -> None:
        if self._live:
            names = ", ".join(name for name, _ in self.buffers())
            raise DeviceError(f"the device is closed while buffers are open: {names}")
