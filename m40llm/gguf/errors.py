"""Errors of the GGUF layer: one line that names the file, the problem and the remedy."""

from __future__ import annotations

import os

_QUOTE_LIMIT = 80


class GGUFError(ValueError):
    """A GGUF file that cannot be used, or a request that the file cannot satisfy.

    The message is one line: ``PATH: PROBLEM. REMEDY``.
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, remedy: str) -> None:
        super().__init__(f"{os.fspath(path)}: {problem}. {remedy}")
        self.path = os.fspath(path)
        self.problem = problem
        self.remedy = remedy


class UnsupportedTypeError(GGUFError):
    """A tensor whose block format m40llm cannot read; the message names the tensor and the type."""


def quote(text: str) -> str:
    """Text from a file, safe for a one-line message: escaped and cut to 80 characters."""
    shown = text if len(text) <= _QUOTE_LIMIT else text[: _QUOTE_LIMIT - 1] + "…"
    return ascii(shown) if not shown.isprintable() else f"'{shown}'"
