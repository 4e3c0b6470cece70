"""Prototype: a kernel that stays on the device and takes its work from a mailbox, instead of one launch per piece of work.

Nothing in the runtime uses it; `bench/bench_persistent.py` measures it against launches. Its one kind of work is
y = a·x + y, small enough for the hand-over to be what is measured.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from m40llm.device.buffers import DeviceMemory, as_pointer
from m40llm.device.errors import DeviceError
from m40llm.device.protocol import Device

_THREADS, _WORDS = 256, 8  # as in kernels/persistent.cu
_STOP, _AXPY = 0, 1
_DONE_AT = 4  # byte of the mailbox: the device's count; the host's is the first


class PersistentWorker:
    """start, submit, poll, stop. Owns its mailbox; `area` is the float32 memory that work refers to, and the caller's.

    Entries are done in order, block by block: two that are in flight together must not depend on each other.

    Args:
        capacity: entries in flight.
        blocks: of the launch, at most as many as are resident at once (None: one a multiprocessor).
        concurrent: whether a launch returns before it ends. In the emulator it does not: everything, and the stop, is posted
            before the start.
    """

    def __init__(
        self,
        device: Device,
        area: DeviceMemory,
        *,
        capacity: int = 64,
        blocks: int | None = None,
        concurrent: bool = True,
    ):
        if capacity < 1:
            raise DeviceError(f"a mailbox of {capacity} entries")
        self._device = device
        self._area = as_pointer(area)
        self._capacity = capacity
        self._blocks = blocks or device.multiprocessors
        self._concurrent = concurrent
        self._posted = 0
        self._started = self._stopped = False
        self._mail = device.stream(priority=-1)  # copies must not wait behind the kernel
        self._work = device.stream()
        with ExitStack() as opened:
            self._control = opened.enter_context(device.alloc(8, "persistent: counts"))
            self._entries = opened.enter_context(device.alloc(4 * _WORDS * capacity, "persistent: entries"))
            self._arrived = opened.enter_context(device.alloc(4 * capacity, "persistent: arrivals"))
            for buffer in (self._control, self._entries, self._arrived):
                device.fill(buffer, 0)
            device.synchronize()
            self._open = opened.pop_all()

    def start(self) -> None:
        """Launches the kernel, once. DeviceError in the emulator before the stop is posted: the kernel would wait forever."""
        if self._started:
            raise DeviceError("the persistent worker was started before")
        if not self._concurrent and not self._stopped:
            raise DeviceError("this device runs a launch to its end: post the work and the stop before the start")
        args = (self._control, self._entries, self._arrived, self._area, np.int32(self._capacity))
        kernel = self._device.kernel("persistent", "persistent_worker")
        self._started = True
        self._device.launch(kernel, self._blocks, _THREADS, args, stream=self._work)

    def submit(self, scale: float, x: int, y: int, count: int) -> int:
        """Posts area[y : y + count] += scale * area[x : x + count]; returns its number, counted from 1, for `wait`.

        Raises:
            DeviceError: outside the area, stopped, or `capacity` entries are in flight.
        """
        limit = self._area.nbytes // 4
        if min(x, y, count) < 0 or max(x, y) + count > limit:
            raise DeviceError(f"{count} values at {x} and {y} leave an area of {limit}")
        scalar = int(np.float32(scale).view(np.uint32))
        return self._post(_AXPY, count, x, y, scalar)

    def poll(self) -> int:
        """How many entries are done. Waits for a copy of four bytes, not for the kernel."""
        return int(self._device.download(self._control, (1,), np.uint32, _DONE_AT, stream=self._mail)[0])

    def wait(self, number: int, timeout_s: float = 10.0) -> None:
        """Polls until entry `number` is done. Raises DeviceError after `timeout_s`."""
        end = time.perf_counter() + timeout_s
        while self.poll() < number:
            if time.perf_counter() > end:
                raise DeviceError(f"entry {number} of the persistent worker was not done within {timeout_s:g} s")

    def stop(self) -> None:
        """Posts the end; the kernel finishes what was posted before. A second call does nothing."""
        if not self._stopped:
            self._post(_STOP, 0, 0, 0, 0)
            self._stopped = True

    def _post(self, *words: int) -> int:
        if self._stopped:
            raise DeviceError("the persistent worker has been stopped")
        if self._posted >= self._capacity and self._posted - self.poll() >= self._capacity:
            raise DeviceError(f"{self._capacity} entries are in flight; poll until one is done")
        entry = np.zeros(_WORDS, np.uint32)
        entry[: len(words)] = words
        at = self._posted % self._capacity * entry.nbytes
        self._device.upload(self._entries, entry, at, stream=self._mail)
        self._posted += 1
        # the same stream: the device sees the count after the entry
        self._device.upload(self._control, np.array([self._posted], np.uint32), stream=self._mail)
        return self._posted

    def close(self) -> None:
        """Stops a kernel that runs, waits for its end and frees the mailbox; may be called twice."""
        if self._started and self._concurrent and not self._stopped:
            self.wait(max(0, self._posted - self._capacity + 1))  # room for the stop
            self.stop()
        if self._started:
            self._work.synchronize()
            self._started, self._stopped = False, True
        self._open.close()

    def __enter__(self) -> PersistentWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
