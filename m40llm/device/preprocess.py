"""Expands the macros of a kernel source, so that kernels which macros declare can be found in the text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pcpp

from m40llm.device.errors import DeviceError


class _Preprocessor(pcpp.Preprocessor):
    """Expands macros and the project's own headers; leaves system headers and unknown conditions alone."""

    def __init__(self, include_dirs: Sequence[Path], arch: int):
        super().__init__()
        self.line_directive = None
        self.problems: list[str] = []
        for directory in include_dirs:
            self.add_path(str(directory))
        self.define(f"__CUDA_ARCH__ {arch}")

    def on_include_not_found(self, is_malformed: bool, is_system: bool, curdir: str, includepath: str) -> None:
        if is_malformed or not is_system:
            self.problems.append(f"header {includepath} not found")
        raise pcpp.OutputDirective(pcpp.Action.IgnoreAndPassThrough)

    def on_error(self, file: str, line: int, msg: str) -> None:
        self.problems.append(f"{file}:{line}: {msg}")


def expand(source: Path, include_dirs: Sequence[Path], arch: int) -> str:
    """The text of `source` after preprocessing for `__CUDA_ARCH__` = `arch`; system headers are left out.

    Raises DeviceError for a header of the project's own that is missing, or a malformed directive.
    """
    preprocessor = _Preprocessor(include_dirs, arch)
    preprocessor.parse(source.read_text(encoding="utf-8"), str(source))
    expanded = io.StringIO()
    preprocessor.write(expanded)
    if preprocessor.problems:
        raise DeviceError(f"{source.name}: {'; '.join(preprocessor.problems)}")
    return expanded.getvalue()
