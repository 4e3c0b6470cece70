"""Opening an engine or a model with what the user should see meanwhile: a bar, and a word about the first compilation."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from m40llm.cli.progress import StageBar

if TYPE_CHECKING:
    from m40llm.config import RuntimeOptions
    from m40llm.engine import Engine
    from m40llm.model import Model


class CompileNotice:
    """For `on_compile`: says once that kernels are being compiled. `kernels` counts them."""

    def __init__(self) -> None:
        self.kernels = 0

    def __call__(self, name: str) -> None:
        if not self.kernels:
            from m40llm.model import COMPILING

            print(COMPILING, file=sys.stderr)
        self.kernels += 1


def _show_step_logs(options: RuntimeOptions) -> None:
    """Sends what --launch-log and its relatives write to stderr, in a process without another log."""
    if options.launch_log or options.sync_log or options.alloc_log or options.decode_graph_diag_sync:
        log = logging.getLogger("m40llm.steps")
        log.handlers = [logging.StreamHandler(sys.stderr)]
        log.setLevel(logging.INFO)
        log.propagate = False


def _say(model: Model) -> None:
    """On which device, and what else was decided on the way."""
    for line in (f"device: {model.device_reason}", *model.notes):
        print(line, file=sys.stderr)


@contextmanager
def open_engine(path: Path, options: RuntimeOptions, on_compile: CompileNotice | None = None) -> Iterator[Engine]:
    """An `Engine` on the model at `path`, closed at the end. Raises what `Engine.load` raises."""
    from m40llm.engine import Engine

    _show_step_logs(options)
    with StageBar("loading", unit="bytes") as bar:
        engine = Engine.load(path, options, progress=bar.update, on_compile=on_compile or CompileNotice())
    _say(engine.model)
    with engine:
        yield engine


@contextmanager
def open_model(path: Path, options: RuntimeOptions, *, logit_rows: int) -> Iterator[Model]:
    """A `Model` without an engine, for scoring: `logit_rows` rows of a step may ask for logits."""
    from m40llm.model import Model

    _show_step_logs(options)
    with StageBar("loading", unit="bytes") as bar:
        model = Model.open(path, options, logit_rows=logit_rows, progress=bar.update, on_compile=CompileNotice())
    _say(model)
    with model:
        yield model
