"""A device that is a card, through CuPy. Kernels are our own cubins (nvrtc.py); CuPy gives memory, streams and graphs."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m40llm.device import nvrtc
from m40llm.device.buffers import DeviceBuffer, DeviceMemory, DevicePointer, as_pointer
from m40llm.device.cublas import WORKSPACE_BYTES, Cublas
from m40llm.device.driver import Card
from m40llm.device.errors import DeviceError, DeviceUnavailable, OutOfDeviceMemory, install_extra
from m40llm.device.nvml import other_compute_processes
from m40llm.device.protocol import Argument, Counters, Dim, Kernel, three
from m40llm.device.signature import check_block
from m40llm.device.sources import KERNEL_DIR, kernel_source
from m40llm.device.transfers import check_arguments, check_gemm, check_range, contiguous_bytes

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


def import_cupy(arch: str) -> Any:
    """The cupy package. Raises DeviceUnavailable that names the extra for `arch`, also for a CuPy too new for the card."""
    remedy = install_extra(nvrtc.extra_for(arch))
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise DeviceUnavailable(f"CuPy cannot be imported ({first_line})", remedy) from None
    check_runtime_version(cupy.cuda.runtime.runtimeGetVersion(), arch)
    return cupy


def check_runtime_version(version: int, arch: str) -> None:
    """`version` is 1000 × major + 10 × minor of CuPy's CUDA. Raises DeviceUnavailable if it has dropped `arch`."""
    if version >= 13000 and nvrtc.parse_arch(arch) < 75:
        raise DeviceUnavailable(
            f"CuPy is built for CUDA {version // 1000}, which does not support {arch}",
            f"pip uninstall cupy-cuda13x, then {install_extra('cuda12')}",
        )


class CudaStream:
    """A non-blocking stream (it does not wait for the legacy default stream)."""

    def __init__(self, device: CudaDevice, raw: Any):
        self._device = device
        self.raw = raw

    def synchronize(self) -> None:
        self._device.counters.synchronisations += 1
        self.raw.synchronize()


class CudaEvent:
    """An event with timing."""

    def __init__(self, device: CudaDevice, raw: Any, elapsed: Any):
        self._device = device
        self._elapsed = elapsed
        self.raw = raw

    def synchronize(self) -> None:
        self._device.counters.synchronisations += 1
        self.raw.synchronize()

    def elapsed_ms(self, earlier: CudaEvent) -> float:
        return float(self._elapsed(earlier.raw, self.raw))


class CudaGraph:
    """An instantiated CUDA graph, complete when the `with` block of `capture` has ended."""

    def __init__(self) -> None:
        self.raw: Any = None

    def close(self) -> None:
        self.raw = None  # CuPy destroys it with its last reference


class CudaDevice:
    """The `Device` protocol on one card.

    Args:
        card: from `driver.find_cards`.
        cache_dir: folder of cubins (None: the user's cache).
        kernel_dir: folder of the `.cu` files.
        on_compile: called with a module's name before it is compiled.

    Raises DeviceUnavailable if CuPy is missing or does not fit the card. May be used from several threads, one at a time.
    """

    def __init__(
        self,
        card: Card,
        *,
        cache_dir: Path | None = None,
        kernel_dir: Path = KERNEL_DIR,
        on_compile: Callable[[str], None] | None = None,
    ):
        cupy = import_cupy(card.arch)
        self.name = card.name
        self.arch = card.arch
        self.multiprocessors = card.multiprocessors
        self.card = card
        self.counters = Counters()
        self._cuda = cupy.cuda
        self._runtime = cupy.cuda.runtime
        self._cache_dir = cache_dir
        self._kernel_dir = kernel_dir
        self._on_compile = on_compile
        self._threads: set[int] = set()
        self._live: dict[int, DeviceBuffer] = {}
        self._modules: dict[str, tuple[nvrtc.Compiled, Any]] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        self._cublas: Cublas | None = None
        self._workspace = 0  # of cuBLAS: not a buffer that the program asked for
        self._capturing = False
        try:
            self._enter()
            self._default = CudaStream(self, self._cuda.Stream(non_blocking=True))
        except self._runtime.CUDARuntimeError as error:
            raise DeviceUnavailable(f"{card.name} cannot be opened ({error})", "check nvidia-smi") from None
        others = other_compute_processes(card.pci_bus_id)
        if others is None:
            log.info("NVML does not say whether others compute on %s", card.name)
        elif others:
            log.warning("%s is shared: processes %s compute on it too", card.name, ", ".join(map(str, others)))

    def _enter(self) -> None:
        """Makes the card current in this thread (CUDA keeps it per thread)."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._runtime.setDevice(self.card.index)
            self._threads.add(thread)

    def _stream(self, stream: CudaStream | None) -> Any:
        self._enter()
        return (stream or self._default).raw

    # ---- memory --------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, name: str) -> DeviceBuffer:
        if nbytes < 1:
            raise DeviceError(f"buffer '{name}': {nbytes} bytes")
        address = self._malloc(nbytes, name)
        buffer = DeviceBuffer(self, address, nbytes, name, lambda: self._release(address))
        self._live[address] = buffer
        self.counters.allocations += 1
        return buffer

    def _malloc(self, nbytes: int, name: str) -> int:
        self._enter()
        try:
            return int(self._runtime.malloc(nbytes))
        except self._runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise DeviceError(f"allocation of buffer '{name}' failed: {error}") from error
            free, total = self.memory_info()
            raise OutOfDeviceMemory(name, nbytes, free, total) from None

    def _release(self, address: int) -> None:
        self._enter()
        del self._live[address]
        self.counters.frees += 1
        self._runtime.free(address)

    def live_buffers(self) -> list[str]:
        """Names of the buffers that are open, oldest first."""
        return [buffer.name for buffer in self._live.values()]

    def memory_info(self) -> tuple[int, int]:
        self._enter()
        free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def upload(
        self, dst: DeviceMemory, src: npt.NDArray[Any], offset: int = 0, stream: CudaStream | None = None
    ) -> None:
        if self._capturing:
            raise DeviceError("upload() reads host memory at once, which a capture cannot repeat")
        data = contiguous_bytes(src)
        target = check_range(self, dst, offset, data.nbytes).ptr
        self.counters.h2d_copies += 1
        self.counters.h2d_bytes += data.nbytes
        # From pageable memory the driver stages the bytes before it returns: src may change afterwards.
        self._runtime.memcpyAsync(
            target, data.ctypes.data, data.nbytes, self._runtime.memcpyHostToDevice, self._stream(stream).ptr
        )

    def download(
        self,
        src: DeviceMemory,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        offset: int = 0,
        stream: CudaStream | None = None,
    ) -> npt.NDArray[Any]:
        if self._capturing:
            raise DeviceError("download() waits for the device, which a capture does not allow")
        result: npt.NDArray[Any] = np.empty(tuple(shape), dtype)
        source = check_range(self, src, offset, result.nbytes).ptr
        raw = self._stream(stream)
        self._runtime.memcpyAsync(result.ctypes.data, source, result.nbytes, self._runtime.memcpyDeviceToHost, raw.ptr)
        self.counters.d2h_copies += 1
        self.counters.d2h_bytes += result.nbytes
        self.counters.synchronisations += 1
        raw.synchronize()
        return result

    def copy(self, dst: DeviceMemory, src: DeviceMemory, nbytes: int, stream: CudaStream | None = None) -> None:
        target, source = check_range(self, dst, 0, nbytes).ptr, check_range(self, src, 0, nbytes).ptr
        if target < source + nbytes and source < target + nbytes:
            raise DeviceError(f"copy of {nbytes} bytes between overlapping places")
        self.counters.d2d_copies += 1
        self.counters.d2d_bytes += nbytes
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDeviceToDevice, self._stream(stream).ptr)

    def fill(self, dst: DeviceMemory, byte: int, stream: CudaStream | None = None) -> None:
        pointer = check_range(self, dst, 0, as_pointer(dst).nbytes)
        self._runtime.memsetAsync(pointer.ptr, byte, pointer.nbytes, self._stream(stream).ptr)

    # ---- kernels -------------------------------------------------------------------------------------------------------

    def kernel(self, module: str, symbol: str) -> Kernel:
        self._enter()
        if module not in self._modules:
            source = kernel_source(module, self._kernel_dir)
            compiled = nvrtc.compile(source, self.arch, cache_dir=self._cache_dir, on_compile=self._on_compile)
            loaded = self._cuda.function.Module()
            loaded.load(compiled.cubin)
            self._modules[module] = compiled, loaded
        compiled, loaded = self._modules[module]
        if symbol not in compiled.signatures:
            raise DeviceError(f"{module}.cu has no kernel '{symbol}'; it has {', '.join(sorted(compiled.signatures))}")
        function = self._functions.get((module, symbol))
        if function is None:
            function = self._functions[module, symbol] = loaded.get_function(symbol)
        return Kernel(module, compiled.signatures[symbol], function)

    def launch(
        self,
        kernel: Kernel,
        grid: Dim,
        block: Dim,
        args: Sequence[Argument],
        shared: int = 0,
        stream: CudaStream | None = None,
    ) -> None:
        arguments = [_raw_argument(a) for a in check_arguments(self, kernel.signature, args)]
        blocks, threads = three(grid), three(block)
        if min(*blocks, *threads) < 1:  # CuPy would silently launch one
            raise DeviceError(f"{kernel.symbol}: grid {blocks} block {threads}")
        check_block(kernel.signature, threads[0] * threads[1] * threads[2])
        self.counters.launches += 1
        try:
            kernel.handle(blocks, threads, arguments, shared, self._stream(stream))
        except self._cuda.driver.CUDADriverError as error:
            raise DeviceError(f"{kernel.symbol}: grid {blocks} block {threads} shared {shared}: {error}") from error

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
        stream: CudaStream | None = None,
    ) -> None:
        kind = np.dtype(dtype)
        pitch_a, pitch_b, pitch_c = lda or k, ldb or k, ldc or n
        pa, pb, pc = check_gemm(self, (a, b, c), (m, n, k), (pitch_a, pitch_b, pitch_c), kind)
        raw = self._stream(stream)
        cublas = self._open_cublas()
        self.counters.gemms += 1
        cublas.multiply(
            (m, n, k),
            (pa.ptr, pb.ptr, pc.ptr),
            (pitch_a, pitch_b, pitch_c),
            half=kind == np.float16,
            accumulate=accumulate,
            stream=raw.ptr,
        )

    def _open_cublas(self) -> Cublas:
        """Created at the first use. Raises DeviceUnavailable if the library is missing."""
        if self._cublas is None:
            if self._capturing:
                raise DeviceError("cuBLAS is initialised by the first gemm, which must run before a capture")
            self._workspace = self._workspace or self._malloc(WORKSPACE_BYTES, "cuBLAS workspace")
            self._cublas = Cublas(self._runtime.runtimeGetVersion() // 1000, self._workspace)
        return self._cublas

    # ---- streams, events, graphs ---------------------------------------------------------------------------------------

    def stream(self, priority: int = 0) -> CudaStream:
        self._enter()
        return CudaStream(self, self._cuda.Stream(non_blocking=True, priority=priority))

    def event(self) -> CudaEvent:
        self._enter()
        return CudaEvent(self, self._cuda.Event(), self._cuda.get_elapsed_time)

    def record(self, event: CudaEvent, stream: CudaStream | None = None) -> None:
        event.raw.record(self._stream(stream))

    def wait(self, event: CudaEvent, stream: CudaStream | None = None) -> None:
        self._stream(stream).wait_event(event.raw)

    def synchronize(self) -> None:
        if self._capturing:
            raise DeviceError("the host cannot wait for the device during a capture")
        self._enter()
        self.counters.synchronisations += 1
        self._runtime.deviceSynchronize()

    @contextmanager
    def capture(self, stream: CudaStream | None = None) -> Iterator[CudaGraph]:
        if self._capturing:
            raise DeviceError("a capture is already running")
        raw = self._stream(stream)
        graph = CudaGraph()
        raw.begin_capture()
        self._capturing = True
        try:
            yield graph
        finally:
            self._capturing = False
            graph.raw = raw.end_capture()

    def replay(self, graph: CudaGraph, stream: CudaStream | None = None) -> None:
        if graph.raw is None:
            raise DeviceError("the graph is closed, or its capture has not ended")
        self.counters.replays += 1
        graph.raw.launch(self._stream(stream))

    def close(self) -> None:
        if self._live:
            raise DeviceError(f"the device is closed while buffers are open: {', '.join(self.live_buffers())}")
        if self._cublas is not None:
            self._cublas.close()
            self._cublas = None
        if self._workspace:
            self._runtime.free(self._workspace)
            self._workspace = 0
        self._functions.clear()
        self._modules.clear()


def _raw_argument(argument: DevicePointer | np.generic | None) -> np.generic:
    """What CuPy copies into the parameter: addresses as 8-byte integers, scalars as they are."""
    if isinstance(argument, np.generic):
        return argument
    return np.uint64(0 if argument is None else argument.ptr)
