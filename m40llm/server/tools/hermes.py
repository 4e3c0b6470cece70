"""Hermes' and Qwen's form: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one element for each call."""

from __future__ import annotations

from collections.abc import Mapping

from m40llm.server.tools.body import Literal, Piece, Status
from m40llm.server.tools.json_stream import JsonCall
from m40llm.server.tools.spec import Tool, json_call_rule

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FENCE, FENCE_END = "```json", "```"  # what Qwen2.5-Coder writes, whatever its template asks for


class HermesBody:
    """What stands between the tags, or in a fence. The closing one may be missing where the text ends."""

    def __init__(self, tools: Mapping[str, Tool], closing: str = CLOSING) -> None:
        self.pieces: list[Piece] = []
        self._call = JsonCall(tools)
        self._call.pieces = self.pieces
        self._end = closing
        self._closing: Literal | None = None

    def step(self, character: str) -> Status:
        if self._closing is None:
            status = self._call.step(character)
            if status is Status.DONE:
                self.pieces.pop()  # it ends with the tag
                self._closing = Literal(self._end)
                return Status.OPEN
            return status
        status = self._closing.step(character)
        if status is Status.DONE:
            self.pieces.append(Piece(ends=True))
        return status

    def end(self) -> Status:
        if self._closing is None:
            return Status.FAILED
        self.pieces.append(Piece(ends=True))
        return Status.DONE


def grammar(tools: list[Tool], *, several: bool) -> str:
    """Lark rule `calls`: one call, or `several`."""
    more = ' ("\\n" call)*' if several else ""
    return f'calls: call{more}\ncall: "{OPENING}" rest\n{rest_rule(tools)}'


def rest_rule(tools: list[Tool]) -> str:
    """Lark rule `rest`: a call behind its opening tag."""
    objects = " | ".join(json_call_rule(tool, "arguments") for tool in tools)
    return f'rest: "\\n" object "\\n{CLOSING}"\nobject: {objects}\n'
