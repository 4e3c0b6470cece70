"""What every form's reader owes the parser: markup in, one character at a time, pieces of calls out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Status(Enum):
    OPEN = "open"  # more must come
    DONE = "done"  # complete with this character
    BEFORE = "before"  # was complete before this character, which belongs to what follows
    FAILED = "failed"  # not what it seemed to be


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a call: `name` starts it, `ends` completes it, `arguments` is JSON text in between."""

    name: str | None = None
    arguments: str = ""
    ends: bool = False


class Body(Protocol):
    """Reads the markup that follows one marker; `pieces` holds what it has found since it was last emptied."""

    pieces: list[Piece]

    def step(self, character: str) -> Status: ...

    def end(self) -> Status:
        """The text ended here: DONE or FAILED."""


class Literal:
    """`text` after optional white space; `spaces` False: at once."""

    def __init__(self, text: str, *, spaces: bool = True) -> None:
        self._rest = text
        self._spaces = spaces

    def step(self, character: str) -> Status:
        if self._spaces and character.isspace():
            return Status.OPEN
        self._spaces = False
        if character != self._rest[0]:
            return Status.FAILED
        self._rest = self._rest[1:]
        return Status.OPEN if self._rest else Status.DONE


def held_back(text: str, markers: Collection[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[len(text) - length :]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0
