"""When a request ends: end-of-generation tokens, and stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class StopChecker:
    """Streams text and cuts it before the first stop string, however the text was split into pieces.

    What has been emitted in the end equals the whole text cut at the lowest index at which any stop string occurs. Text
    is held back only while it could still become a stop string; with stop strings "b" and "abc", an "ab" waits for its
    next character, because "abc" would cut earlier than "b".

    ``matched`` is the stop string that ended the text (of several at one place the shortest), or None.
    """

    def __init__(self, stop_strings: Sequence[str], eog_ids: Iterable[int] = (), *, ignore_eos: bool = False) -> None:
        """Stop strings must not be empty (ValueError). ``ignore_eos`` makes ``ends`` answer False for every token."""
        if any(not stop for stop in stop_strings):
            raise ValueError("a stop string is empty; leave it out or give at least one character")
        self._stops = sorted(set(stop_strings), key=lambda stop: (len(stop), stop))
        self._eog_ids = frozenset() if ignore_eos else frozenset(eog_ids)
        self._held = ""
        self.matched: str | None = None

    def ends(self, token_id: int) -> bool:
        """Whether this token ends the generation (and is not part of its text)."""
        return token_id in self._eog_ids

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece of text; answers (text to emit now, whether a stop string ended it)."""
        if self.stopped or not self._stops:
            return ("", True) if self.stopped else (text, False)
        text = self._held + text
        match, stop = self._first_match(text)
        open_at = self._first_open(text)
        if stop is not None and match <= open_at:
            return self._stop(text[:match], stop)
        self._held = text[open_at:]
        return text[:open_at], False

    def flush(self) -> tuple[str, bool]:
        """The generation ended: what was held back, cut where a stop string turns out to be complete in it."""
        text, self._held = self._held, ""
        if self.stopped:
            return "", True
        match, stop = self._first_match(text)
        return (text, False) if stop is None else self._stop(text[:match], stop)

    def _stop(self, emit: str, stop: str) -> tuple[str, bool]:
        self._held, self.matched = "", stop
        return emit, True

    def _first_match(self, text: str) -> tuple[int, str | None]:
        """Lowest index of a complete stop string and that string; (len(text), None) without one."""
        best, found = len(text), None
        for stop in self._stops:  # shortest first: at one index it wins, whatever the pieces
            at = text.find(stop, 0, best + len(stop) - 1) if found else text.find(stop)
            if at >= 0:
                best, found = at, stop
        return best, found

    def _first_open(self, text: str) -> int:
        """Lowest index from which the rest of the text is an incomplete stop string; len(text) without one."""
        best = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), best)
            while at >= 0:
                if stop.startswith(text[at:]):
                    best = at
                    break
                at = text.find(stop[0], at + 1, best)
        return best
