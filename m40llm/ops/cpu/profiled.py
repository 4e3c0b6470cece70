"""CpuOps that runs every step one kernel at a time and keeps each kernel's calls and seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from m40llm.ops.cpu.ops import CpuOps, RecordedStep
from m40llm.ops.profile import StepProfile
from m40llm.plan import StepShape


@dataclass(frozen=True, slots=True)
class _ProfiledStep(RecordedStep):
    """Runs the recorded kernels apart: each costs a launch of its own, 1 to 2 us more."""

    profile: StepProfile

    def run(self) -> None:
        self.profile.steps += 1
        for name, (calls, seconds) in self.program.profile(self.workers).items():
            totals = self.profile.group(name)
            totals.calls += calls
            totals.add_seconds(seconds)


class ProfiledCpuOps(CpuOps):
    """As `CpuOps`, slower by the launches; `profile` has the sums."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.profile = StepProfile("host clock, kernel by kernel", has_counters=False)

    def record(self, shape: StepShape, body: Callable[[], None]) -> RecordedStep:
        step = super().record(shape, body)
        return _ProfiledStep(step.program, step.workers, self.profile)
