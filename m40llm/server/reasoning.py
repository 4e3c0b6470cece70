"""Reasoning models: what a model thinks, apart from what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from m40llm.server.tools.body import held_back
from m40llm.text import Tokenizer

# (opening, closing) of the models that think aloud: Qwen3, DeepSeek-R1 and their kin; Magistral.
_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))

Kind = Literal["reasoning", "content"]
Stage = Literal["before", "inside", "closed"]


@dataclass(frozen=True)
class ReasoningForm:
    """The markers around reasoning; `written`: those that are control tokens, which the detokenizer must write out."""

    opening: str
    closing: str
    written: frozenset[int]

    def stage(self, prompt: str) -> Stage:
        """Where the end of a rendered prompt leaves the answer: some templates open the reasoning, or rule it out."""
        prompt = prompt.rstrip()
        return "inside" if prompt.endswith(self.opening) else "closed" if prompt.endswith(self.closing) else "before"


def reasoning_form(source: str | None, tokenizer: Tokenizer) -> ReasoningForm | None:
    """The reasoning markers of a model: those that its template's source names, or that are tokens of their own; or None."""
    for opening, closing in _MARKERS:
        ids = [tokenizer.encode(text, bos=False) for text in (opening, closing)]
        tokens = [i[0] for i in ids if len(i) == 1]
        if closing in (source or "") or len(tokens) == 2:
            return ReasoningForm(opening, closing, frozenset(i for i in tokens if tokenizer.is_control(i)))
    return None


class ReasoningSplitter:
    """Cuts a streamed answer in two: reasoning, then content. White space around the markers belongs to neither.

    Reasoning is looked for at the start only: an answer that quotes a marker later keeps it.
    """

    def __init__(self, form: ReasoningForm, *, inside: bool) -> None:
        self._form = form
        self._state: Literal["before", "reasoning", "gap", "content"] = "reasoning" if inside else "before"
        self._pending = ""
        self._started = False
        self.thought = inside  # whether there was reasoning

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """Takes the next piece of text; answers (kind, text) pairs that are certain."""
        self._pending += text
        out: list[tuple[Kind, str]] = []
        if self._state == "before":
            self._before()
        if self._state == "reasoning":
            self._reasoning(out)
        if self._state == "gap":
            self._pending = self._pending.lstrip()
            if self._pending:
                self._state = "content"
        if self._state == "content" and self._pending:
            out.append(("content", self._pending))
            self._pending = ""
        return out

    def finish(self) -> list[tuple[Kind, str]]:
        """The text ended."""
        text, self._pending = self._pending, ""
        if self._state == "reasoning":
            text = text.rstrip()
        kind: Kind = "reasoning" if self._state == "reasoning" else "content"
        return [(kind, text)] if text and self._state != "gap" else []

    def _before(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(self._form.opening):
            self._pending, self._state = text[len(self._form.opening) :], "reasoning"
            self.thought = True
        elif not self._form.opening.startswith(text):
            self._state = "content"

    def _reasoning(self, out: list[tuple[Kind, str]]) -> None:
        if not self._started:
            self._pending = self._pending.lstrip()
        at = self._pending.find(self._form.closing)
        if at >= 0:
            text, self._pending = self._pending[:at].rstrip(), self._pending[at + len(self._form.closing) :]
            self._state = "gap"
        else:
            certain = self._pending[: len(self._pending) - held_back(self._pending, (self._form.closing,))]
            text = certain.rstrip()
            self._pending = self._pending[len(text) :]
        if text:
            self._started = True
            out.append(("reasoning", text))
