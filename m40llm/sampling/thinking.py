"""Reasoning models: a budget of thinking tokens, and a constraint that only starts behind the closing marker."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from m40llm.sampling.constraint import Constraint
from m40llm.text import Tokenizer


class ThinkingConstraint:
    """Follows an answer through its reasoning.

    The answer may start with ``opening`` (or the prompt already ends with it: ``inside``). Reasoning is free; after
    ``budget`` tokens of it the closing marker is forced, and behind the marker ``then`` rules.

    Args:
        tokenizer: the vocabulary.
        opening, closing: the markers, such as ``<think>`` and ``</think>``, each one token or several.
        inside: the prompt opened the reasoning.
        budget: most tokens between the markers (0: closed at once), or None.
        then: what the answer proper must satisfy. With it, reasoning cannot be the end of the answer, and it can only be
            opened where the marker is one token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        opening: str,
        closing: str,
        *,
        inside: bool,
        budget: int | None = None,
        then: Constraint | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._opening, self._closing = opening.encode(), closing.encode()
        start = tokenizer.encode(opening, bos=False)
        self._opening_id = start[0] if len(start) == 1 else None
        self._close_ids = tokenizer.encode(f"\n{closing}\n\n", bos=False)
        self._ends = np.array(sorted(tokenizer.eog_ids), np.intp)
        self._budget = budget
        self._then = then
        self._state: Literal["before", "inside", "closing", "after"] = "before"
        self._seen = b""
        self._spent = 0
        self._forced: list[int] = []
        if inside:
            self._open()

    @property
    def active(self) -> bool:
        return self._state == "closing" or (self._then is not None and (self._state != "after" or self._then.active))

    @property
    def finished(self) -> bool:
        return self._state == "after" and self._then is not None and self._then.finished

    def restrict(self, logits: NDArray[np.float32]) -> None:
        if self._state == "closing":
            forced = logits[self._forced[0]]
            logits[:] = -np.inf
            logits[self._forced[0]] = forced
        elif self._then is not None and self._state == "inside":
            logits[self._ends[self._ends < len(logits)]] = -np.inf
        elif self._then is not None:
            opening = None if self._opening_id is None else logits[self._opening_id]
            self._then.restrict(logits)
            if opening is not None and self._state == "before":
                logits[self._opening_id] = opening

    def accept(self, token_id: int) -> None:
        if self._state == "before":
            self._start(token_id)
        elif self._state == "inside":
            self._spent += 1
            self._seen = (self._seen + self._tokenizer.token_bytes(token_id))[-256:]
            if self._closing in self._seen:
                self._state = "after"
            else:
                self._check_budget()
        elif self._state == "closing":
            self._forced.pop(0)
            if not self._forced:
                self._state = "after"
        elif self._then is not None:
            self._then.accept(token_id)

    def _start(self, token_id: int) -> None:
        if self._then is not None:
            if token_id == self._opening_id:
                self._open()
            else:
                self._state = "after"
                self._then.accept(token_id)
            return
        self._seen += self._tokenizer.token_bytes(token_id)
        text = self._seen.lstrip()
        if text.startswith(self._opening):
            self._open()
        elif not self._opening.startswith(text):
            self._state = "after"

    def _open(self) -> None:
        self._state, self._seen = "inside", b""
        self._check_budget()

    def _check_budget(self) -> None:
        if self._budget is not None and self._spent >= self._budget:
            self._state, self._forced = "closing", list(self._close_ids)
