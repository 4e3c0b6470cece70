"""Errors of the text layer: one line that names the problem and what to do about it."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A vocabulary, a tokenizer model or token ids that cannot be used."""


class ChatTemplateError(ValueError):
    """A chat template that does not compile, or that refuses or fails to render these messages."""


def quote(text: object, limit: int = 80) -> str:
    """``text`` for a one-line message: escaped where it is not printable, cut to ``limit`` characters."""
    shown = str(text)
    if len(shown) > limit:
        shown = shown[: limit - 1] + "…"
    return f"'{shown}'" if shown.isprintable() else ascii(shown)
