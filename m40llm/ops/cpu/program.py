"""Programs: recorded lists of CPU kernels, replayed by one compiled call per thread.

It is the CPU's twin of a CUDA graph. ``forward`` records kernels once per step shape; whatever varies between steps
(token ids, positions, KV lengths) is read from arrays at fixed addresses. A barrier between two kernels costs 0.05 us
with two threads, and Python is not entered until the program ends.

A kernel is a function ``(args, tid, threads)`` of int64: the address of its argument record, and which thread of how
many it is. The record's layout is declared beside it:

    SCALE = layout(x=pointer(np.float32), n=np.int64, factor=np.float32)

    @kernel(SCALE)
    def scale(args, tid, threads):
        a = record(args, SCALE)
        x = f32(a.x, a.n)
        for i in range(tid * a.n // threads, (tid + 1) * a.n // threads):
            x[i] *= a.factor

    program.add(scale, x=array, n=array.size, factor=2.0)
"""

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.ccallback import CFunc

from m40llm.ops.cpu.cache import use_cache_for
from m40llm.ops.cpu.intrinsics import (
    atomic_add,
    atomic_exchange,
    call_kernel,
    compare_exchange,
    i64,
    load_acquire,
    pause,
    sched_yield,
    sem_post,
    sem_wait,
    store_release,
    usleep,
)

__all__ = ["Kernel", "NativeFunction", "Program", "Workers", "aligned_empty", "kernel", "layout", "pointer"]

SIGNATURE = types.void(types.int64, types.int64, types.int64)
SIGNATURE_C = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)  # a call releases the GIL
MAX_THREADS = 256
CACHE_LINE = 64

# the synchronisation block, in bytes from its start; each word has a cache line of its own
ARRIVED, GENERATION, PROGRAM, CLOSED, STATES = (CACHE_LINE * i for i in range(5))
SEMAPHORE = 8  # a worker's state word is followed by its sem_t (32 bytes on Linux)
PARKED, SPINNING, WORK = 0, 1, 2
BARRIER_SPINS = 2_000  # about 25 us; then the processor is offered to others between looks
BARRIER_YIELDS = 100
BARRIER_SLEEP_US = 20  # on a busy machine the thread waited for may need this very processor
IDLE_SPINS = 20_000  # about 400 us: more than the gap between two steps; then a worker sleeps

OPERATION = 3  # words of a table row: kernel address, arguments' address, barrier after it


def aligned_empty(shape: int | tuple[int, ...], dtype: Any, alignment: int = CACHE_LINE) -> np.ndarray:
    """An uninitialised C-contiguous array whose address is a multiple of ``alignment``."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def pointer(dtype: Any) -> np.dtype:
    """A record field that holds the address of an array of ``dtype``."""
    return np.dtype(np.int64, metadata={"points_to": np.dtype(dtype)})


def layout(**fields: Any) -> np.dtype:
    """The dtype of an argument record: a NumPy dtype or ``pointer(dtype)`` per field, C-aligned."""
    return np.dtype(list(fields.items()), align=True)


class _AnnouncedCFunc(CFunc):
    """A cfunc that says so when it is not in the disk cache."""

    on_compile: Callable[[], None]

    def _compile_uncached(self) -> Any:
        self.on_compile()
        return super()._compile_uncached()  # type: ignore[misc]


class NativeFunction:
    """A function of int64 arguments that compiles to machine code on first use and is called by address.

    ``name`` is what progress displays show.
    """

    def __init__(self, name: str, signature: Any, function: Callable[..., None]) -> None:
        self.name, self.signature, self.function = name, signature, function
        self._address = 0

    def address(self, on_compile: Callable[[str], None] | None = None) -> int:
        """The machine code's address; ``on_compile(name)`` is called first where the disk cache does not have it."""
        if not self._address:
            use_cache_for(self.function.__code__.co_filename)
            compiled = _AnnouncedCFunc(self.function, (self.signature.args, self.signature.return_type), {}, _OPTIONS)
            compiled.on_compile = lambda: on_compile(self.name) if on_compile else None
            compiled.enable_caching()
            compiled.compile()
            self._compiled = compiled  # owns the machine code
            self._address = int(compiled.address or 0)
        return self._address


class Kernel(NativeFunction):
    """A function ``(args, tid, threads)`` and the layout of its argument record."""

    def __init__(self, name: str, fields: np.dtype, function: Callable[[int, int, int], None]) -> None:
        super().__init__(name, SIGNATURE, function)
        self.fields = fields


# Without NRT, arrays made from addresses carry no reference counting; NumPy's error model has no branch at divisions.
_OPTIONS = {"_nrt": False, "error_model": "numpy", "boundscheck": False, "no_cpython_wrapper": True}


def kernel(fields: np.dtype, name: str | None = None) -> Callable[[Callable[[int, int, int], None]], Kernel]:
    """Decorator: a function of (args, tid, threads) becomes a :class:`Kernel` with this argument record."""
    return lambda function: Kernel(name or function.__name__, fields, function)


@numba.njit(inline="never", **{key: value for key, value in _OPTIONS.items() if key != "no_cpython_wrapper"})
def _run(program, tid, threads, sync):
    """Call every kernel of a program as thread ``tid``, meeting the other threads at its barriers."""
    header = i64(program, 2)
    count = header[1]
    table = i64(header[0], OPERATION * count)
    for i in range(count):
        call_kernel(table[OPERATION * i], table[OPERATION * i + 1], tid, threads)
        if threads > 1 and table[OPERATION * i + 2] != 0:
            generation = load_acquire(sync + GENERATION)
            if atomic_add(sync + ARRIVED, 1) == threads - 1:
                store_release(sync + ARRIVED, 0)
                store_release(sync + GENERATION, generation + 1)
            else:
                spins = 0
                while load_acquire(sync + GENERATION) == generation:
                    spins += 1
                    if spins <= BARRIER_SPINS:
                        pause()
                    elif spins <= BARRIER_SPINS + BARRIER_YIELDS:
                        sched_yield()
                    else:
                        usleep(BARRIER_SLEEP_US)


@kernel(layout(), "serve")
def _serve(sync, tid, threads):
    """A worker's life: wait for a program, run it, again, until closed. Sleeps after a short spin."""
    state = sync + STATES + CACHE_LINE * tid
    while True:
        spins = 0
        while load_acquire(state) != WORK:
            spins += 1
            pause()
            if spins > IDLE_SPINS and compare_exchange(state, SPINNING, PARKED):
                while load_acquire(state) == PARKED:  # sem_wait may return early on a signal
                    sem_wait(state + SEMAPHORE)
        if load_acquire(sync + CLOSED) != 0:
            return
        # The caller cannot post again before the program's last barrier, so the state may be reset now.
        store_release(state, SPINNING)
        _run(load_acquire(sync + PROGRAM), tid, threads, sync)


@kernel(layout(), "launch")
def _launch(sync, program, threads):
    """Post a program to every worker, waking those that sleep, and take part as thread 0."""
    store_release(sync + PROGRAM, program)
    for tid in range(1, threads):
        state = sync + STATES + CACHE_LINE * tid
        if atomic_exchange(state, WORK) == PARKED:
            sem_post(state + SEMAPHORE)
    if load_acquire(sync + CLOSED) == 0:
        _run(program, 0, threads, sync)


class Workers:
    """The threads that replay programs: the caller's and ``threads - 1`` of ours.

    One caller at a time. Idle workers spin for about 400 us, then sleep in the kernel. ``close()`` ends them; a program
    that runs is finished first.
    """

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"threads is {threads}; it must lie between 1 and {MAX_THREADS}")
        self.threads = threads
        self._sync = aligned_empty(STATES + CACHE_LINE * threads, np.uint8)
        self._sync[:] = 0  # all zeros is also an initialised sem_t of value 0 on Linux
        self._sync[STATES::CACHE_LINE] = SPINNING
        self._launch = SIGNATURE_C(_launch.address())
        serve = SIGNATURE_C(_serve.address())
        sync = self._sync.ctypes.data
        self._threads = [
            threading.Thread(target=serve, args=(sync, tid, threads), name=f"m40llm-cpu-{tid}", daemon=True)
            for tid in range(1, threads)
        ]
        for thread in self._threads:
            thread.start()
        # Compiled code must not be running while the interpreter unloads it: also at exit, close first.
        self._finalizer = weakref.finalize(self, _close, self._launch, self._sync, self._threads)

    def run(self, header: np.ndarray) -> None:
        """Run a program, given its header; blocks until every thread has passed its last barrier."""
        if not self._finalizer.alive:
            raise RuntimeError("these workers are closed")
        self._launch(self._sync.ctypes.data, header.ctypes.data, self.threads)

    def close(self) -> None:
        """End the threads; again is harmless."""
        self._finalizer()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(launch: Callable[[int, int, int], None], sync: np.ndarray, threads: list[threading.Thread]) -> None:
    sync[CLOSED] = 1
    launch(sync.ctypes.data, 0, len(threads) + 1)
    for thread in threads:
        thread.join()


class Program:
    """A recorded sequence of kernels; replay it any number of times with :meth:`run`.

    ``on_compile(name)`` is called before a kernel is compiled for the first time on this machine.
    """

    def __init__(self, on_compile: Callable[[str], None] | None = None) -> None:
        self.on_compile = on_compile
        self._rows: list[list[int]] = []
        self._names: list[str] = []
        self._kept: list[np.ndarray] = []  # records and arrays: their addresses are in the table
        self._table = np.zeros((0, OPERATION), np.int64)
        self._header = np.zeros(2, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, kernel: Kernel, barrier: bool = True, **fields: Any) -> None:
        """Append a kernel. ``fields`` fill its argument record: arrays for pointers (kept alive), scalars for the rest.

        barrier: threads wait for each other after it; False where the next kernel does not depend on this one.
        Raises TypeError for a missing or unknown field and for an array of another dtype than the layout states.
        """
        expected: Any = kernel.fields.fields or {}
        if fields.keys() != expected.keys():
            raise TypeError(f"kernel {kernel.name} takes {sorted(expected)}, not {sorted(fields)}")
        arguments = np.zeros(1, kernel.fields)
        for name, value in fields.items():
            points_to = (expected[name][0].metadata or {}).get("points_to")
            if points_to is None:
                arguments[name] = value
            elif value is None:
                arguments[name] = 0
            elif not isinstance(value, np.ndarray) or value.dtype != points_to:
                raise TypeError(
                    f"kernel {kernel.name}, {name}: {getattr(value, 'dtype', type(value))}, not {points_to}"
                )
            else:
                arguments[name] = value.ctypes.data
                self._kept.append(value)
        self._kept.append(arguments)
        self._rows.append([kernel.address(self.on_compile), arguments.ctypes.data, int(barrier)])
        self._names.append(kernel.name)

    def run(self, workers: Workers) -> None:
        """Replay all kernels in order on all threads; returns when the last one has ended on all of them."""
        if not self._rows:
            return
        if len(self._table) != len(self._rows):
            self._table = np.array(self._rows, np.int64)
            self._table[-1, 2] = 1  # the caller may read results and replay only when every thread is done
            self._header[:] = self._table.ctypes.data, len(self._table)
        workers.run(self._header)

    def profile(self, workers: Workers) -> dict[str, tuple[int, float]]:
        """Replay once, one kernel at a time: {kernel name: (calls, seconds)}. Each call adds a launch, 1 to 2 us."""
        times: dict[str, tuple[int, float]] = {}
        for name, row in zip(self._names, self._rows, strict=True):
            single = np.array([[*row[:2], 1]], np.int64)
            header = np.array([single.ctypes.data, 1], np.int64)
            start = time.perf_counter()
            workers.run(header)
            calls, seconds = times.get(name, (0, 0.0))
            times[name] = calls + 1, seconds + time.perf_counter() - start
        return times
