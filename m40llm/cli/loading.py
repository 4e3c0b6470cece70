"""Opening an engine or a model with what the user should see meanwhile: a bar, and a word about the first compilation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from m40llm.cli.progress import StageBar

if TYPE_CHECKING:
    from m40llm.config import RuntimeOptions
    from m40llm.engine import Engine
    from m40llm.model import Model


def compile_notice() -> Callable[[str], None]:
    """For `on_compile`: says once that kernels are being compiled, and that this happens once."""
    said = False

    def notice(name: str) -> None:
        nonlocal said
        if not said:
            said = True
            print("compiling CPU kernels for this machine (once, some seconds; cached afterwards)", file=sys.stderr)

    return notice


@contextmanager
def open_engine(path: Path, options: RuntimeOptions) -> Iterator[Engine]:
    """An `Engine` on the model at `path`, closed at the end. Raises what `Engine.load` raises."""
    from m40llm.engine import Engine

    with StageBar("loading", unit="bytes") as bar:
        engine = Engine.load(path, options, progress=bar.update, on_compile=compile_notice())
    print(f"device: {engine.model.device_reason}", file=sys.stderr)
    with engine:
        yield engine


@contextmanager
def open_model(path: Path, options: RuntimeOptions, *, logit_rows: int) -> Iterator[Model]:
    """A `Model` without an engine, for scoring: `logit_rows` rows of a step may ask for logits."""
    from m40llm.model import Model

    with StageBar("loading", unit="bytes") as bar:
        model = Model.open(path, options, logit_rows=logit_rows, progress=bar.update, on_compile=compile_notice())
    print(f"device: {model.device_reason}", file=sys.stderr)
    with model:
        yield model
