"""Mistral's forms: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since late 2024 `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from m40llm.sampling.grammar import json_rule
from m40llm.server.tools.body import Piece, Status
from m40llm.server.tools.json_stream import JsonCall, JsonValue
from m40llm.server.tools.spec import Tool, as_object, json_call_rule, text_rule

OPENING, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralBody:
    """What follows `[TOOL_CALLS]`: an array of calls, or one name with its arguments."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.pieces: list[Piece] = []
        self._tools = tools
        self._next: Callable[[str], Status] = self._first
        self._head = ""
        self._value = JsonValue()

    def step(self, character: str) -> Status:
        return self._next(character)

    def end(self) -> Status:
        return Status.FAILED

    def _first(self, character: str) -> Status:
        if character.isspace():
            return Status.OPEN
        self._next = self._before_call if character == "[" else self._name
        return Status.OPEN if character == "[" else self._name(character)

    def _before_call(self, character: str) -> Status:
        if character.isspace():
            return Status.OPEN
        self._call = JsonCall(self._tools)
        self._call.pieces = self.pieces
        self._next = self._in_call
        return self._in_call(character)

    def _in_call(self, character: str) -> Status:
        status = self._call.step(character)
        if status is Status.DONE:
            self._next = self._after_call
            return Status.OPEN
        return status

    def _after_call(self, character: str) -> Status:
        if character.isspace():
            return Status.OPEN
        if character == ",":
            self._next = self._before_call
            return Status.OPEN
        return Status.DONE if character == "]" else Status.FAILED

    def _name(self, character: str) -> Status:
        if character != "{":
            self._head += character
            return Status.OPEN if len(self._head) < 256 else Status.FAILED
        name = self._head.removesuffix(ARGUMENTS).partition(CALL_ID)[0].strip()
        if name not in self._tools:
            return Status.FAILED
        self.pieces.append(Piece(name=name))
        self._next = self._arguments
        return self._arguments(character)

    def _arguments(self, character: str) -> Status:
        status = self._value.step(character)
        if status is not Status.FAILED:
            self.pieces.append(Piece(arguments=character, ends=status is Status.DONE))
        return status


def grammar(tools: list[Tool], control: Mapping[str, int], *, named: bool, several: bool) -> str:
    """Lark rule `calls`. `control`: ids of the markers that are control tokens; `named`: the newer form."""
    more = "+" if several and named else ""
    rest = rest_rule(tools, control, named=named, several=several)
    return f"calls: call{more}\ncall: {text_rule(OPENING, control)} rest\n{rest}"


def rest_rule(tools: list[Tool], control: Mapping[str, int], *, named: bool, several: bool) -> str:
    """Lark rule `rest`: what follows the marker."""
    if named:
        calls = [f'"{t.name}" {text_rule(ARGUMENTS, control)} {json_rule(as_object(t.parameters))}' for t in tools]
        return f"rest: {' | '.join(calls)}\n"
    objects = " | ".join(json_call_rule(tool, "arguments") for tool in tools)
    more = ' (", " object)*' if several else ""
    return f'rest: " "? "[" object{more} "]"\nobject: {objects}\n'
