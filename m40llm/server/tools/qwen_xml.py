"""Qwen3-Coder's form: `<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>`.

Values are plain text; the tool's schema says what they become in the JSON of the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from m40llm.sampling.grammar import json_rule
from m40llm.server.tools.body import Literal, Piece, Status, held_back
from m40llm.server.tools.spec import Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION = "<function="
_FUNCTION_END, _PARAMETER, _PARAMETER_END = "</function>", "<parameter=", "</parameter>"
_MAX_TAG = 256
_PYTHON = {"True": True, "False": False, "None": None}  # the form's own template writes these words


class QwenXmlBody:
    """One call. `in_function`: the marker was `<function=` itself, without the outer element."""

    def __init__(self, tools: Mapping[str, Tool], *, in_function: bool) -> None:
        self.pieces: list[Piece] = []
        self._tools = tools
        self._outer = not in_function
        self._next: Callable[[str], Status] = self._tag
        self._buffer = FUNCTION if in_function else ""
        self._name: str | None = None
        self._properties: Mapping[str, Any] = {}
        self._key = ""
        self._keys: set[str] = set()
        self._streamed = False
        self._closing = Literal(CLOSING)

    def step(self, character: str) -> Status:
        return self._next(character)

    def end(self) -> Status:
        if self._next != self._outer_end:
            return Status.FAILED
        self.pieces.append(Piece(ends=True))
        return Status.DONE

    def _tag(self, character: str) -> Status:
        """Outside of values: white space, then a tag to its `>`."""
        if not self._buffer and character.isspace():
            return Status.OPEN
        self._buffer += character
        if character != ">":
            return Status.OPEN if self._buffer[0] == "<" and len(self._buffer) < _MAX_TAG else Status.FAILED
        tag, self._buffer = self._buffer, ""
        if self._name is None:
            return self._function(tag)
        if tag == _FUNCTION_END:
            return self._function_ends()
        key = tag[len(_PARAMETER) : -1].strip()
        if not tag.startswith(_PARAMETER) or not key or key in self._keys:
            return Status.FAILED
        self._key, self._streamed, self._next = key, False, self._value
        return Status.OPEN

    def _function(self, tag: str) -> Status:
        name = tag[len(FUNCTION) : -1].strip()
        if not tag.startswith(FUNCTION) or name not in self._tools:
            return Status.FAILED
        self._name = name
        parameters = self._tools[name].parameters
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        self._properties = properties if isinstance(properties, dict) else {}
        return Status.OPEN

    def _value(self, character: str) -> Status:
        self._buffer += character
        if self._buffer.endswith(_PARAMETER_END):
            self._value_ends(self._buffer.removesuffix(_PARAMETER_END))
            self._buffer, self._next = "", self._tag
        elif self._is_text():
            self._stream_text()
        return Status.OPEN

    def _is_text(self) -> bool:
        schema = self._properties.get(self._key)
        return isinstance(schema, dict) and schema.get("type") == "string"

    def _stream_text(self) -> None:
        """Passes on what is certain of a string; a line break may be the one before the closing tag."""
        if self._buffer == "\n" and not self._streamed:
            return
        keep = held_back(self._buffer, ("\n" + _PARAMETER_END, _PARAMETER_END))
        ready, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        if ready:
            self._text(ready)

    def _text(self, text: str) -> None:
        if not self._streamed:
            self._streamed = True
            self._start_key('"')
            text = text.removeprefix("\n")
        self.pieces.append(Piece(arguments=json.dumps(text, ensure_ascii=False)[1:-1]))

    def _value_ends(self, text: str) -> None:
        text = text.removesuffix("\n")
        if self._is_text():
            self._text(text)
            self.pieces.append(Piece(arguments='"'))
        else:
            value = _typed(text.removeprefix("\n"), self._properties.get(self._key))
            self._start_key(json.dumps(value, ensure_ascii=False))
        self._keys.add(self._key)

    def _start_key(self, value: str) -> None:
        if not self._keys:
            self.pieces.append(Piece(name=self._name))
        opening = ", " if self._keys else "{"
        self.pieces.append(Piece(arguments=f"{opening}{json.dumps(self._key, ensure_ascii=False)}: {value}"))

    def _function_ends(self) -> Status:
        if not self._keys:
            self.pieces += [Piece(name=self._name), Piece(arguments="{")]
        self.pieces.append(Piece(arguments="}"))
        if self._outer:
            self._next = self._outer_end
            return Status.OPEN
        self.pieces.append(Piece(ends=True))
        return Status.DONE

    def _outer_end(self, character: str) -> Status:
        status = self._closing.step(character)
        if status is Status.DONE:
            self.pieces.append(Piece(ends=True))
        return status


def _typed(text: str, schema: Any) -> Any:
    """The value that `text` stands for: by the schema where it names a type, else JSON if it is JSON."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    plain = text.strip()
    if plain in _PYTHON and not (kinds and "boolean" not in kinds and "null" not in kinds):
        return _PYTHON[plain]
    try:
        value = json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return value if value in schema["enum"] else text
    if "string" in kinds and not isinstance(value, (dict, list)):
        named = {"null": value is None, "boolean": isinstance(value, bool), "integer": isinstance(value, int)}
        named["number"] = isinstance(value, (int, float)) and not isinstance(value, bool)
        return value if any(named.get(kind) for kind in kinds) else text
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def grammar(tools: list[Tool], *, several: bool) -> str:
    """Lark rule `calls`: one call, or `several`."""
    more = ' ("\\n" call)*' if several else ""
    return f'calls: call{more}\ncall: "{OPENING}" rest\n{rest_rule(tools)}'


def rest_rule(tools: list[Tool]) -> str:
    """Lark rule `rest`: a call behind its opening tag. Of a string's schema only `enum` is enforced: it is not quoted here."""
    rules, values = [], []
    for i, tool in enumerate(tools):
        properties = tool.parameters.get("properties") if isinstance(tool.parameters, dict) else None
        required = tool.parameters.get("required") if isinstance(tool.parameters, dict) else None
        terms = []
        for j, (key, schema) in enumerate((properties or {}).items()):
            if any(c in key for c in "<>\n"):
                continue
            values.append(f"value_{i}_{j}: {_value_rule(schema)}")
            terms.append(f"({json.dumps(f'{_PARAMETER}{key}>')} value_{i}_{j}){'' if key in (required or ()) else '?'}")
        rules.append(f'{json.dumps(f"{FUNCTION}{tool.name}>")} "\\n" {" ".join(terms)} {json.dumps(_FUNCTION_END)}')
    lines = [f'rest: "\\n" function "\\n{CLOSING}"', "function: " + " | ".join(rules)]
    text = f"raw_text[suffix={json.dumps(chr(10) + _PARAMETER_END + chr(10))}]: /(.|\\n)*/"
    return "\n".join([*lines, *values, text, ""])


def _value_rule(schema: Any) -> str:
    end = json.dumps(f"\n{_PARAMETER_END}\n")
    kind = schema.get("type") if isinstance(schema, dict) else None
    choices = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(choices, list) and choices and all(isinstance(c, str) and "<" not in c for c in choices):
        return f'"\\n" ({" | ".join(json.dumps(c) for c in choices)}) {end}'
    if kind in ("integer", "number", "boolean", "null", "object", "array"):
        return f'"\\n" {json_rule(schema)} {end}'
    return '"\\n" raw_text'
