"""What steps cost, by group of operations: totals of a run, and one line per step for the logs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from m40llm.device.protocol import Counters

log = logging.getLogger("m40llm.steps")


@dataclass(slots=True)
class GroupTotals:
    """One group of operations. `seconds` is time on the device (None: not measured), `counters` what it was asked to do."""

    calls: int = 0
    seconds: float | None = None
    counters: Counters = field(default_factory=Counters)

    def add(self, other: Counters) -> None:
        """One more call, with what it asked for."""
        self.calls += 1
        self.counters += other

    def add_seconds(self, seconds: float) -> None:
        self.seconds = (self.seconds or 0.0) + seconds


@dataclass(slots=True)
class StepProfile:
    """Totals by group, in the order of first use. `timed_by` says how seconds were measured.

    On a device a group is an operation of the forward pass and has counters; on the CPU it is a kernel, with calls and seconds.
    """

    timed_by: str
    has_counters: bool
    steps: int = 0
    groups: dict[str, GroupTotals] = field(default_factory=dict)

    def group(self, name: str) -> GroupTotals:
        """The totals of a group, zero at first."""
        return self.groups.setdefault(name, GroupTotals())

    def as_dict(self) -> dict[str, Any]:
        """For JSON: steps, timed_by, groups; seconds is null where nothing was measured."""
        groups: dict[str, Any] = {}
        for name, totals in self.groups.items():
            groups[name] = {"calls": totals.calls, "seconds": totals.seconds}
            if self.has_counters:
                groups[name] |= totals.counters.as_dict()
        return {"steps": self.steps, "timed_by": self.timed_by, "groups": groups}


@dataclass(frozen=True, slots=True)
class StepLogs:
    """Which lines are written for a step."""

    launches: bool = False
    syncs: bool = False
    allocations: bool = False

    @property
    def any(self) -> bool:
        return self.launches or self.syncs or self.allocations

    def write(self, what: str, groups: dict[str, Counters]) -> None:
        """`what` names the step, `groups` is what each group asked for."""
        if self.launches:
            log.info("%s: %s", what, _line(groups, ("launches", "gemms", "replays"), "launches"))
        if self.syncs:
            log.info("%s: %s", what, _line(groups, _SYNC, "synchronisations"))
        if self.allocations:
            log.info("%s: %s", what, _line(groups, ("allocations", "frees"), "allocations"))


_SYNC = ("synchronisations", "h2d_copies", "h2d_bytes", "d2h_copies", "d2h_bytes", "d2d_copies", "d2d_bytes")


def _line(groups: dict[str, Counters], names: tuple[str, ...], by_group: str) -> str:
    """Sums of the named counters, then the groups that `by_group` is not zero in."""
    sums = ", ".join(f"{name} {sum(getattr(c, name) for c in groups.values())}" for name in names)
    parts = ", ".join(f"{group} {getattr(c, by_group)}" for group, c in groups.items() if getattr(c, by_group))
    return f"{sums} ({parts})" if parts else sums
