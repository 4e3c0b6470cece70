"""CudaOps that counts, and times, what each group of operations asks of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m40llm.device.protocol import Counters, Device, Event
from m40llm.ops.cuda.ops import CudaOps
from m40llm.ops.cuda.steps import EagerStep, GraphStep
from m40llm.ops.profile import StepLogs, StepProfile
from m40llm.ops.protocol import Workspace
from m40llm.plan import StepPlan, StepShape


class _CountedGraph:
    """A decode step as one group: what a graph replays is neither counted nor timed by operation."""

    def __init__(self, step: GraphStep, counter: GroupCounter):
        self._step = step
        self._counter = counter

    def run(self) -> None:
        with self._counter.group("decode graph"):
            self._step.run()


class GroupCounter:
    """Attributes what happens between entering and leaving a group to it. A group inside another belongs to the outer one.

    With `timed`, events around each group give its time on the device; they are read when the device has been waited for.
    """

    def __init__(self, device: Device, profile: StepProfile, timed: bool):
        self.profile = profile
        self.step: dict[str, Counters] = {}  # of the step that runs
        self._device = device
        self._timed = timed
        self._inside = False
        self._events: list[Event] = []
        self._pending: list[str] = []  # groups whose events 2i and 2i + 1 are not read yet

    @contextmanager
    def group(self, name: str, *, timed: bool = True) -> Iterator[None]:
        """Counts the body as `name`. `timed` false: it waits for the device, or does nothing there."""
        if self._inside:
            yield
            return
        self._inside = True
        before = self._device.counters.snapshot()
        try:
            if self._timed and timed:
                start, end = self._pair()
                self._device.record(start)
                yield
                self._device.record(end)
                self._pending.append(name)
            else:
                yield
        finally:
            self._inside = False
        asked = self._device.counters - before
        self.profile.group(name).add(asked)
        self.step[name] = self.step[name] + asked if name in self.step else asked

    def _pair(self) -> tuple[Event, Event]:
        at = 2 * len(self._pending)
        while len(self._events) < at + 2:
            self._events.append(self._device.event())
        return self._events[at], self._events[at + 1]

    def read_times(self) -> None:
        """Adds the times of all groups so far; the device must have been waited for."""
        for i, name in enumerate(self._pending):
            milliseconds = self._events[2 * i + 1].elapsed_ms(self._events[2 * i])
            self.profile.group(name).add_seconds(milliseconds / 1e3)
        self._pending.clear()


class CountedOps(CudaOps):
    """As `CudaOps`; `profile` has the totals, and `logs` says which lines each step writes to the logger "m40llm.steps".

    Args:
        timed: measure groups by events. Without it only counters are read, which costs microseconds.
        emulated: the device's events are the host's clock.
    """

    def __init__(self, device: Device, *, timed: bool, emulated: bool, logs: StepLogs, **options: Any) -> None:
        super().__init__(device, **options)
        self.profile = StepProfile("host clock (emulator)" if emulated else "events", has_counters=True)
        self._logs = logs
        self._counter = GroupCounter(device, self.profile, timed)
        self._rows = 0
        self._loaded = False

    # -- a step --------------------------------------------------------------------------------------
    def upload(self, ws: Workspace, plan: StepPlan) -> None:
        if not self._loaded:
            self._loaded = True
            self._logs.write("loading", {"all": self._device.counters.snapshot()})
        self._counter.step = {}
        self._rows = len(plan.token_ids)
        with self._counter.group("plan", timed=False):
            super().upload(ws, plan)

    def record(self, shape: StepShape, body: Callable[[], None]) -> Any:
        step: EagerStep | GraphStep = super().record(shape, body)
        return _CountedGraph(step, self._counter) if isinstance(step, GraphStep) else step

    def read_ids(self, ws: Workspace, rows: int) -> NDArray[np.int32]:
        with self._counter.group("ids", timed=False):
            ids = super().read_ids(ws, rows)
        if rows:
            self._counter.read_times()
        self.profile.steps += 1
        counted = "1 row" if self._rows == 1 else f"{self._rows} rows"
        self._logs.write(f"step {self.profile.steps} ({counted})", self._counter.step)
        return ids

    def read_logits(self, ws: Workspace, rows: int) -> NDArray[np.float32]:
        return self._between("logits to host", super().read_logits, ws, rows)

    def read_candidates(self, *args: Any, **kwargs: Any) -> Any:
        return self._between("candidates to host", super().read_candidates, *args, **kwargs)

    # -- between steps -------------------------------------------------------------------------------
    def read_kv(self, *args: Any, **kwargs: Any) -> NDArray[Any]:
        return self._between("KV to host", super().read_kv, *args, **kwargs)

    def write_kv(self, *args: Any, **kwargs: Any) -> None:
        self._between("KV from host", super().write_kv, *args, **kwargs)

    def copy_kv(self, *args: Any, **kwargs: Any) -> None:
        self._between("KV copies", super().copy_kv, *args, **kwargs)

    def _between(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._counter.step = {}
        with self._counter.group(name, timed=False):
            result = function(*args, **kwargs)
        self._logs.write(f"after step {self.profile.steps}", self._counter.step)
        return result

    # -- inside `record`: arguments are CudaOps' ------------------------------------------------------
    def embed(self, *args: Any, **kwargs: Any) -> None:
        with self._counter.group("embed"):
            super().embed(*args, **kwargs)

    def rmsnorm(self, *args: Any, **kwargs: Any) -> None:
        with self._counter.group("norm"):
            super().rmsnorm(*args, **kwargs)

    def qkv(self, *args: Any, **kwargs: Any) -> None:
        with self._counter.group("qkv"):
            super().qkv(*args, **kwargs)

    def rope_append(self, *args: Any, **kwargs: Any) -> None:
        with self._counter.group("rope + append"):
            super().rope_append(*args, **kwargs)

    def attention(self, *args: Any, **kwargs: Any) -> None:
        with self._counter.group("attention"):
            super().attention(*args, **kwargs)

    def project(self, h: Any, weight: Any, *args: Any, **kwargs: Any) -> None:
        with self._counter.group(weight.name.split(".")[-2]):  # blk.3.ffn_down.weight: ffn_down
            super().project(h, weight, *args, **kwargs)

    def gate_up_swiglu(self, *args: Any, **kwargs: Any) -> None:
        with self._counter.group("gate + up"):
            super().gate_up_swiglu(*args, **kwargs)

    def logits(self, *args: Any, **kwargs: Any) -> None:
        with self._counter.group("logits + argmax"):
            super().logits(*args, **kwargs)
