"""A progress bar on stderr for one stage of work; silent where stderr is not a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class StageBar:
    """Context manager; `update(done, total)` may be called often and from any thread. The bar vanishes at the end."""

    def __init__(self, label: str, *, unit: str = "") -> None:
        self._label = label
        self._unit = unit
        self._rich: Progress | None = None
        self._task: TaskID | None = None

    def update(self, done: int, total: int) -> None:
        if self._rich is None or self._task is None:
            if not sys.stderr.isatty():
                return
            self._start(total)
        if self._rich is not None and self._task is not None:
            self._rich.update(self._task, completed=done, total=total)

    def _start(self, total: int) -> None:
        # imported late: most runs are over before a bar would show
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn

        count = DownloadColumn() if self._unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), count)
        self._rich = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._rich.add_task(self._label, total=total)
        self._rich.start()

    def close(self) -> None:
        """Removes the bar; may be called twice."""
        if self._rich is not None:
            self._rich.stop()
            self._rich = None

    def __enter__(self) -> StageBar:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
