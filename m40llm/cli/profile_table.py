"""--profile as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m40llm.ops.profile import GroupTotals, StepProfile


def profile_table(profile: StepProfile) -> str:
    """One line a group of operations, the costliest first, then the sum. Times are of the whole run."""
    total = sum(totals.seconds or 0.0 for totals in profile.groups.values())
    order = sorted(profile.groups.items(), key=lambda item: -(item[1].seconds or 0.0))
    columns = _DEVICE if profile.has_counters else _CPU
    rows = [("group", *(title for title, _ in columns), "ms", "share")]
    for name, totals in order:
        rows.append((name, *(f"{value(totals):,}" for _, value in columns), *_times(totals.seconds, total)))
    sums = (f"{sum(value(totals) for totals in profile.groups.values()):,}" for _, value in columns)
    rows.append(("all", *sums, *_times(total, total)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"profile: {profile.steps} steps, times by {profile.timed_by}"]
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _times(seconds: float | None, total: float) -> tuple[str, str]:
    if seconds is None:
        return "-", "-"
    return f"{seconds * 1e3:,.2f}", f"{seconds / total:.1%}" if total else "-"


def _copies(totals: GroupTotals) -> int:
    c = totals.counters
    return c.h2d_copies + c.d2h_copies + c.d2d_copies


def _bytes(totals: GroupTotals) -> int:
    c = totals.counters
    return c.h2d_bytes + c.d2h_bytes + c.d2d_bytes


_CPU = (("calls", lambda t: t.calls),)
_DEVICE = (
    ("calls", lambda t: t.calls),
    ("launches", lambda t: t.counters.launches),
    ("gemms", lambda t: t.counters.gemms),
    ("replays", lambda t: t.counters.replays),
    ("waits", lambda t: t.counters.synchronisations),
    ("copies", _copies),
    ("bytes", _bytes),
)
