"""Llama 3's form: the whole answer is `{"name": …, "parameters": {…}}`, or such objects follow `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Mapping

from m40llm.server.tools.body import Piece, Status
from m40llm.server.tools.json_stream import JsonCall
from m40llm.server.tools.spec import Tool, json_call_rule

PYTHON_TAG = "<|python_tag|>"
BRACE = "{"  # a marker at the very start of an answer, and part of the call itself


class Llama3Body:
    """Call objects with white space, `;` or `,` between them, to the end of the text."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.pieces: list[Piece] = []
        self._tools = tools
        self._calls = 0
        self._new_call()

    def _new_call(self) -> None:
        self._call: JsonCall | None = JsonCall(self._tools)
        self._call.pieces = self.pieces

    def step(self, character: str) -> Status:
        if self._call is None:
            if character.isspace() or character in ";,":
                return Status.OPEN
            if character != "{":
                return Status.BEFORE
            self._new_call()
        assert self._call is not None
        status = self._call.step(character)
        if status is Status.DONE:
            self._call = None
            self._calls += 1
            return Status.OPEN
        return status

    def end(self) -> Status:
        return Status.DONE if self._call is None else Status.FAILED


def grammar(tools: list[Tool]) -> str:
    """Lark rule `calls`: one call, as these models were trained to make them."""
    return "calls: " + " | ".join(json_call_rule(tool, "parameters") for tool in tools) + "\n"
