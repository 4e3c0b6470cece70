"""A device on the CPU: runs the CUDA sources themselves, thread by thread, and watches what they do.

For tests and for finding bugs, not for speed. Modes:

* `fast`: guard pages and canaries around buffers, poisoned memory, deadlocks and divergent barriers.
* `check`: every access: races, bounds of buffers and shared variables, alignment, uninitialised shared memory.
* `kasan`: red zones around shared arrays, for overruns from one into its neighbour through a pointer.
* `traffic`: bytes between multiprocessors, L2 and DRAM, and bank conflicts: `device.traffic.report()`, a row a launch.

Everything runs at once when it is enqueued, so orders between streams are not checked.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import platformdirs

from m40llm.device.buffers import DeviceBuffer, DeviceMemory, DevicePointer, as_pointer
from m40llm.device.emulator_build import Mode, build
from m40llm.device.emulator_memory import GuardedMemory
from m40llm.device.emulator_module import LaunchOptions, LaunchStatistics, LoadedModule
from m40llm.device.emulator_traffic import Traffic
from m40llm.device.errors import DeviceError, KernelFault, OutOfDeviceMemory
from m40llm.device.protocol import Argument, Counters, Dim, Kernel, three
from m40llm.device.signature import check_block
from m40llm.device.sources import KERNEL_DIR
from m40llm.device.transfers import check_arguments, check_gemm, check_range, contiguous_bytes

M40_MEMORY = 24 << 30


def default_cache_dir() -> Path:
    """Where built modules are kept unless the caller says otherwise."""
    return platformdirs.user_cache_path("m40llm") / "emulator"


class EmulatorStream:
    """Work runs when it is enqueued: a stream is only a name."""

    def __init__(self, device: EmulatorDevice):
        self._device = device

    def synchronize(self) -> None:
        self._device.synchronize()


class EmulatorEvent:
    """The time at which it was recorded."""

    def __init__(self, device: EmulatorDevice):
        self._device = device
        self.time = 0.0

    def synchronize(self) -> None:
        self._device.synchronize()

    def elapsed_ms(self, earlier: EmulatorEvent) -> float:
        return (self.time - earlier.time) * 1e3


class EmulatorGraph:
    """Recorded work, replayed as it was enqueued."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def close(self) -> None:
        self.work.clear()


class EmulatorDevice:
    """The `Device` protocol on the CPU.

    Args:
        mode: see the module's docstring.
        cache_dir: folder of built modules (None: the user's cache).
        kernel_dir: folder of the `.cu` files.
        order, seed: order of threads and blocks: "forward", "reverse" or "random".
        timeout_ms: limit of one launch; 0 for none.
        memory_bytes: capacity (None: an M40's 24 GB, but at most half of the host's memory).
        on_compile: called with a module's name before it is compiled.

    `fail_at_allocation = n` makes the n-th next `alloc` (1: the next one) raise OutOfDeviceMemory: for tests of clean-up.
    """

    def __init__(
        self,
        mode: Mode = "fast",
        *,
        cache_dir: Path | None = None,
        kernel_dir: Path = KERNEL_DIR,
        order: str = "forward",
        seed: int = 0,
        timeout_ms: int = 0,
        memory_bytes: int | None = None,
        on_compile: Callable[[str], None] | None = None,
    ):
        self.name = f"emulator ({mode})"
        self.arch = "sm_52"
        self.multiprocessors = 24
        self.counters = Counters()
        self.mode: Mode = mode
        self.options = LaunchOptions(order, seed, mode == "check", timeout_ms)
        self.last_launch: LaunchStatistics | None = None
        self._traffic = Traffic() if mode == "traffic" else None
        self.fail_at_allocation: int | None = None
        self._cache_dir = default_cache_dir() if cache_dir is None else cache_dir
        self._kernel_dir = kernel_dir
        self._on_compile = on_compile
        host_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._total = min(M40_MEMORY, host_memory // 2) if memory_bytes is None else memory_bytes
        self._modules: dict[str, LoadedModule] = {}
        self._live: dict[int, tuple[DeviceBuffer, GuardedMemory]] = {}  # by address
        self._capturing: EmulatorGraph | None = None

    @property
    def traffic(self) -> Traffic:
        """What launches have moved. Raises DeviceError in another mode."""
        if self._traffic is None:
            raise DeviceError(f'the emulator counts traffic in mode "traffic", not "{self.mode}"')
        return self._traffic

    # ---- memory --------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, name: str) -> DeviceBuffer:
        if nbytes < 1:
            raise DeviceError(f"buffer '{name}': {nbytes} bytes")
        free, total = self.memory_info()
        if self.fail_at_allocation is not None:
            self.fail_at_allocation -= 1
            if self.fail_at_allocation == 0:
                self.fail_at_allocation = None
                raise OutOfDeviceMemory(name, nbytes, 0, total)
        if nbytes > free:
            raise OutOfDeviceMemory(name, nbytes, free, total)
        try:
            memory = GuardedMemory(nbytes)
        except MemoryError:
            raise OutOfDeviceMemory(name, nbytes, 0, total) from None
        buffer = DeviceBuffer(self, memory.address, nbytes, name, lambda: self._release(memory))
        self._live[memory.address] = buffer, memory
        self.counters.allocations += 1
        return buffer

    def _release(self, memory: GuardedMemory) -> None:
        del self._live[memory.address]
        self.counters.frees += 1
        memory.free()

    def live_buffers(self) -> list[str]:
        """Names of the buffers that are open, oldest first."""
        return [buffer.name for buffer, _ in self._live.values()]

    def memory_info(self) -> tuple[int, int]:
        return self._total - sum(buffer.nbytes for buffer, _ in self._live.values()), self._total

    def upload(self, dst: DeviceMemory, src: npt.NDArray[Any], offset: int = 0, stream: Any = None) -> None:
        if self._capturing:
            raise DeviceError("upload() reads host memory at once, which a capture cannot repeat")
        data = contiguous_bytes(src)
        target = check_range(self, dst, offset, data.nbytes).ptr
        self.counters.h2d_copies += 1
        self.counters.h2d_bytes += data.nbytes
        _move(target, data.ctypes.data, data.nbytes)

    def download(
        self, src: DeviceMemory, shape: Sequence[int], dtype: npt.DTypeLike, offset: int = 0, stream: Any = None
    ) -> npt.NDArray[Any]:
        if self._capturing:
            raise DeviceError("download() waits for the device, which a capture does not allow")
        result: npt.NDArray[Any] = np.empty(tuple(shape), dtype)
        source = check_range(self, src, offset, result.nbytes).ptr
        _move(result.ctypes.data, source, result.nbytes)
        self.counters.d2h_copies += 1
        self.counters.d2h_bytes += result.nbytes
        self.counters.synchronisations += 1
        return result

    def copy(self, dst: DeviceMemory, src: DeviceMemory, nbytes: int, stream: Any = None) -> None:
        target, source = check_range(self, dst, 0, nbytes).ptr, check_range(self, src, 0, nbytes).ptr
        if target < source + nbytes and source < target + nbytes:
            raise DeviceError(f"copy of {nbytes} bytes between overlapping places")
        self.counters.d2d_copies += 1
        self.counters.d2d_bytes += nbytes
        self._enqueue(lambda: _move(target, source, nbytes))

    def fill(self, dst: DeviceMemory, byte: int, stream: Any = None) -> None:
        pointer = check_range(self, dst, 0, as_pointer(dst).nbytes)
        target, nbytes = pointer.ptr, pointer.nbytes
        self._enqueue(lambda: _set(target, byte, nbytes))

    # ---- kernels -------------------------------------------------------------------------------------------------------

    def kernel(self, module: str, symbol: str) -> Kernel:
        loaded = self._modules.get(module)
        if loaded is None:
            built = build(module, self.mode, self._cache_dir, self._kernel_dir, on_compile=self._on_compile)
            loaded = LoadedModule(built)
            self._modules[module] = loaded
        if symbol not in loaded.kernels:
            raise DeviceError(f"{module}.cu has no kernel '{symbol}'; it has {', '.join(sorted(loaded.kernels))}")
        return Kernel(module, loaded.kernels[symbol], loaded)

    def launch(
        self, kernel: Kernel, grid: Dim, block: Dim, args: Sequence[Argument], shared: int = 0, stream: Any = None
    ) -> None:
        arguments = check_arguments(self, kernel.signature, args)
        dimensions = (*three(grid), *three(block))
        check_block(kernel.signature, dimensions[3] * dimensions[4] * dimensions[5])
        self.counters.launches += 1
        self._enqueue(lambda: self._run(kernel, dimensions, shared, arguments))

    def _run(
        self,
        kernel: Kernel,
        dimensions: tuple[int, int, int, int, int, int],
        shared: int,
        arguments: Sequence[DevicePointer | np.generic | None],
    ) -> None:
        loaded: LoadedModule = kernel.handle
        self.last_launch = loaded.launch(kernel.symbol, dimensions, shared, arguments, self.options, self._traffic)
        for argument in arguments:
            if isinstance(argument, DevicePointer):
                _, memory = self._live[argument.buffer.ptr]
                overrun = memory.overrun()
                if overrun is not None:
                    what = f"wrote {overrun + 1} byte(s) past the end of buffer '{argument.name}'"
                    raise KernelFault(kernel.symbol, (0, 0, 0), (0, 0, 0), None, f"some thread {what}")

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
        lda, ldb, ldc = lda or k, ldb or k, ldc or n
        pointers = check_gemm(self, (a, b, c), (m, n, k), (lda, ldb, ldc), np.dtype(dtype))
        array_a = _as_array(pointers[0].ptr, m, k, lda, dtype)
        array_b = _as_array(pointers[1].ptr, n, k, ldb, dtype)
        array_c = _as_array(pointers[2].ptr, m, n, ldc, np.float32)
        self.counters.gemms += 1
        self._enqueue(lambda: _gemm(array_a, array_b, array_c, accumulate))

    # ---- streams, events, graphs ---------------------------------------------------------------------------------------

    def stream(self, priority: int = 0) -> EmulatorStream:
        return EmulatorStream(self)

    def event(self) -> EmulatorEvent:
        return EmulatorEvent(self)

    def record(self, event: EmulatorEvent, stream: Any = None) -> None:
        event.time = time.perf_counter()

    def wait(self, event: EmulatorEvent, stream: Any = None) -> None:
        """Nothing to wait for: what comes before the event has run."""

    def synchronize(self) -> None:
        if self._capturing:
            raise DeviceError("the host cannot wait for the device during a capture")
        self.counters.synchronisations += 1

    @contextmanager
    def capture(self, stream: Any = None) -> Iterator[EmulatorGraph]:
        if self._capturing:
            raise DeviceError("a capture is already running")
        graph = self._capturing = EmulatorGraph()
        try:
            yield graph
        finally:
            self._capturing = None

    def replay(self, graph: EmulatorGraph, stream: Any = None) -> None:
        self.counters.replays += 1
        for work in graph.work:
            work()

    def _enqueue(self, work: Callable[[], None]) -> None:
        if self._capturing is None:
            work()
        else:
            self._capturing.work.append(work)

    def close(self) -> None:
        if self._live:
            raise DeviceError(f"the device is closed while buffers are open: {', '.join(self.live_buffers())}")
        self._modules.clear()


def _move(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


def _set(target: int, byte: int, nbytes: int) -> None:
    ctypes.memset(target, byte, nbytes)


def _as_array(address: int, rows: int, columns: int, pitch: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """(rows, columns) view of device memory with a row pitch in elements."""
    count = (rows - 1) * pitch + columns
    kind = np.dtype(dtype)
    memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    flat = np.frombuffer(memoryview(memory), kind, count)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (pitch * kind.itemsize, kind.itemsize))


def _gemm(a: npt.NDArray[Any], b: npt.NDArray[Any], c: npt.NDArray[Any], accumulate: bool) -> None:
    product = a.astype(np.float32, copy=False) @ b.astype(np.float32, copy=False).T
    c[...] = c + product if accumulate else product
