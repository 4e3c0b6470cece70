"""Tool calls out of a model's text while it streams."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from m40llm.server.tools.body import Body, Piece, Status, held_back
from m40llm.server.tools.forms import ToolForm
from m40llm.server.tools.spec import Tool


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Part of call number `index`: `id` and `name` with its first delta, then pieces of the JSON of its arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | CallDelta


class ToolCallParser:
    """Text pieces in, deltas out; how the text was cut into pieces does not matter for what comes out in the end.

    * Text that may still become a marker stays private, and so does white space that may belong to a call.
    * Markup that turns out not to be a call is content; a marker that is a control token is left out of it.
    * `eager` hands out a call's name and arguments as they are written. Should its markup break after that, the call stays
      incomplete and the rest is content. Otherwise a call comes out when it is complete, so that broken markup is content
      to the last character.

    Args:
        form: the markup of the model's template.
        tools: what may be called, by name; a call of anything else is content.
        limit: calls after which markup is content.
        forced: the answer is nothing but calls, as a grammar saw to: what is left of one that was cut off is not content.
    """

    def __init__(
        self,
        form: ToolForm,
        tools: Mapping[str, Tool],
        *,
        eager: bool,
        limit: int | None = None,
        forced: bool = False,
    ) -> None:
        self._form = form
        self._tools = tools
        self._eager = eager
        self._limit = limit
        self._forced = forced
        self._pending = ""  # not looked at yet
        self._gap = ""  # white space: content if content follows, nothing if a call does
        self._raw = ""  # markup that is not a call yet
        self._body: Body | None = None
        self._held: list[Piece] = []
        self._said = False
        self._started = 0
        self.complete = 0  # calls that are complete

    def push(self, text: str) -> list[Delta]:
        """Takes the next piece of text."""
        self._pending += text
        out: list[Delta] = []
        while self._pending and (self._read_call(out) if self._body is not None else self._read_content(out)):
            pass
        return _merged(out)

    def finish(self) -> list[Delta]:
        """The text ended: what was private comes out as what it is."""
        out: list[Delta] = []
        while True:
            while self._pending and (self._read_call(out) if self._body is not None else self._read_content(out)):
                pass
            if self._body is None:
                break
            status = self._body.end()
            self._take(out)
            if status is Status.FAILED:
                self._fail(out)
            else:
                self._body = None
        self._say(self._pending, out)
        self._pending = ""
        if self._gap and not self.complete:
            out.append(ContentDelta(self._gap))
            self._gap = ""
        return _merged(out)

    def _read_content(self, out: list[Delta]) -> bool:
        """Content up to the next marker; False when all that is left must wait."""
        at, marker = self._find()
        if marker:
            self._say(self._pending[:at], out)
            self._pending = self._pending[at + len(marker) :]
            body = self._form.body(marker, self._tools)
            if body is None:
                return True  # a control token without a meaning here
            self._body, self._raw, self._held = body, marker, []
            if marker == self._form.start:
                self._pending, self._raw = marker + self._pending, ""
            return True
        keep = held_back(self._pending, self._form.markers)
        self._say(self._pending[: len(self._pending) - keep], out)
        self._pending = self._pending[len(self._pending) - keep :]
        return False

    def _find(self) -> tuple[int, str]:
        best, found = len(self._pending), ""
        if self.complete == self._limit:
            return best, found
        start = self._form.start
        if start and not self._said and not self._started:
            text = self._pending.lstrip()
            if text.startswith(start):
                best, found = len(self._pending) - len(text), start
        for marker in self._form.markers:
            at = self._pending.find(marker)
            if 0 <= at < best or (at == best and len(marker) > len(found)):
                best, found = at, marker
        return best, found

    def _read_call(self, out: list[Delta]) -> bool:
        assert self._body is not None
        for used, character in enumerate(self._pending, 1):
            status = self._body.step(character)
            if status is not Status.BEFORE:
                self._raw += character
            self._take(out)
            if status is Status.OPEN:
                continue
            self._pending = self._pending[used - (status is Status.BEFORE) :]
            if status is Status.FAILED:
                self._fail(out)
            else:
                self._body = None
            return True
        self._pending = ""
        return False

    def _take(self, out: list[Delta]) -> None:
        """Passes on what the body has found: at once, or when a call is complete."""
        assert self._body is not None
        if not self._body.pieces:
            return
        self._held += self._body.pieces
        self._body.pieces.clear()
        if not self._eager and not any(piece.ends for piece in self._held):
            return
        for piece in self._held:
            if piece.name is not None:
                out.append(CallDelta(self._started, f"call_{secrets.token_hex(12)}", piece.name, piece.arguments))
                self._started += 1
            elif piece.arguments:
                out.append(CallDelta(self._started - 1, None, None, piece.arguments))
            self.complete += piece.ends
        self._held = []
        self._raw = self._gap = ""

    def _fail(self, out: list[Delta]) -> None:
        """The markup is content after all; a marker inside of it gets its own chance."""
        raw, self._raw, self._body = self._raw, "", None
        if any(raw.startswith(marker) and marker in self._form.control for marker in self._form.markers):
            marker = max((m for m in self._form.markers if raw.startswith(m)), key=len)
            self._pending = raw[len(marker) :] + self._pending
            self._say("", out)
            self._said = True
        else:
            self._say(raw[:1], out)
            self._pending = raw[1:] + self._pending

    def _say(self, text: str, out: list[Delta]) -> None:
        """Content, but for white space at its end."""
        if self._forced:
            return
        text = self._gap + text
        end = len(text.rstrip())
        self._gap = text[end:]
        if end:
            self._said = True
            out.append(ContentDelta(text[:end]))


def _merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours that belong together as one. A call's first delta stays alone: clients expect the name first."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            out[-1] = ContentDelta(last.text + delta.text)
        elif (
            isinstance(delta, CallDelta)
            and isinstance(last, CallDelta)
            and delta.index == last.index
            and delta.id is None
            and last.id is None
        ):
            out[-1] = replace(last, arguments=last.arguments + delta.arguments)
        else:
            out.append(delta)
    return out
