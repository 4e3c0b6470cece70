"""JSON read as it arrives: a value's end and its errors are known at the character where they happen (RFC 8259)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from m40llm.server.tools.body import Piece, Status

_MAX_DEPTH = 200  # deeper than any tool needs, shallower than a client's recursive parser
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_SPACES = " \t\n\r"

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")


class JsonValue:
    """One JSON value, checked character by character; nothing is kept of it but where in it we are."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expect = "value"
        self._word = ""
        self._is_key = False

    def step(self, character: str) -> Status:
        if self._expect == "string":
            return self._string(character)
        if self._expect == "escape":
            self._expect = "string" if character in '"\\/bfnrt' else "hex"
            self._word = ""
            return Status.OPEN if character in '"\\/bfnrtu' else Status.FAILED
        if self._expect == "hex":
            self._word += character
            if len(self._word) == 4:
                self._expect = "string"
            return Status.OPEN if character in "0123456789abcdefABCDEF" else Status.FAILED
        if self._expect == "number":
            return self._number(character)
        if self._expect == "literal":
            if character != self._word[0]:
                return Status.FAILED
            self._word = self._word[1:]
            return Status.OPEN if self._word else self._value_ends()
        if character in _SPACES:
            return Status.OPEN
        return self._structure(character)

    def _string(self, character: str) -> Status:
        if character == "\\":
            self._expect = "escape"
        elif character == '"':
            if not self._is_key:
                return self._value_ends()
            self._expect, self._is_key = "colon", False
        elif character < " ":
            return Status.FAILED
        return Status.OPEN

    def _number(self, character: str) -> Status:
        if character in "+-0123456789.eE":
            self._word += character
            return Status.OPEN
        if not _NUMBER.fullmatch(self._word):
            return Status.FAILED
        ended = self._value_ends()
        return Status.BEFORE if ended is Status.DONE else self.step(character)

    def _structure(self, character: str) -> Status:
        expect = self._expect
        if expect == "colon":
            self._expect = "value"
            return Status.OPEN if character == ":" else Status.FAILED
        if self._stack and character == _CLOSERS[self._stack[-1]] and expect in ("comma", "first"):
            self._stack.pop()
            return self._value_ends()
        if expect == "comma":
            self._expect = "key" if self._stack[-1] == "{" else "value"
            return Status.OPEN if character == "," else Status.FAILED
        if expect == "key" or (expect == "first" and self._stack[-1] == "{"):
            self._expect, self._is_key = "string", True
            return Status.OPEN if character == '"' else Status.FAILED
        return self._value_starts(character)

    def _value_starts(self, character: str) -> Status:
        if character in _CLOSERS:
            self._stack.append(character)
            self._expect = "first"
            return Status.OPEN if len(self._stack) <= _MAX_DEPTH else Status.FAILED
        if character == '"':
            self._expect = "string"
        elif character in "-0123456789":
            self._expect, self._word = "number", character
        elif character in _LITERALS:
            self._expect, self._word = "literal", _LITERALS[character][1:]
        else:
            return Status.FAILED
        return Status.OPEN

    def _value_ends(self) -> Status:
        self._expect = "comma"
        return Status.OPEN if self._stack else Status.DONE


class JsonCall:
    """`{"name": …, "arguments": {…}}`, the object of one call; keys in any order, `parameters` and `function` as synonyms.

    The name's piece appears once the call is certain: a name that `names` knows and arguments that begin as an object. From
    there on the arguments are passed on as the model writes them. The object may stand in a second pair of braces: Qwen2.5's
    template shows it so by mistake, and models repeat it.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.pieces: list[Piece] = []
        self._names = names
        self._next: Callable[[str], Status] = self._open
        self._value = JsonValue()
        self._raw = ""
        self._key = ""
        self._seen: set[str] = set()
        self._name: str | None = None
        self._arguments: str | None = None  # kept until the name is known
        self._started = False
        self._doubled = False

    def step(self, character: str) -> Status:
        return self._next(character)

    def _open(self, character: str) -> Status:
        if character in _SPACES:
            return Status.OPEN
        self._next = self._before_key
        return Status.OPEN if character == "{" else Status.FAILED

    def _before_key(self, character: str) -> Status:
        if character in _SPACES:
            return Status.OPEN
        if character == "{" and not self._doubled and not self._seen:
            self._doubled = True
            return Status.OPEN
        self._value, self._raw, self._next = JsonValue(), "", self._in_key
        return self._in_key(character) if character == '"' else Status.FAILED

    def _in_key(self, character: str) -> Status:
        self._raw += character
        status = self._value.step(character)
        if status is not Status.DONE:
            return status
        key = json.loads(self._raw)
        if key not in (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS):
            return Status.FAILED
        kind = "name" if key in _NAME_KEYS else "arguments" if key in _ARGUMENT_KEYS else key
        if kind in self._seen:
            return Status.FAILED
        self._seen.add(kind)
        self._key, self._next = kind, self._colon
        return Status.OPEN

    def _colon(self, character: str) -> Status:
        if character in _SPACES:
            return Status.OPEN
        self._value, self._raw, self._next = JsonValue(), "", self._before_value
        return Status.OPEN if character == ":" else Status.FAILED

    def _before_value(self, character: str) -> Status:
        if character in _SPACES:
            return Status.OPEN
        self._next = self._in_value
        if self._key == "arguments":
            if character not in '{"':
                return Status.FAILED
            if character == "{" and self._name is not None:
                self._start()
        return self._in_value(character)

    def _in_value(self, character: str) -> Status:
        status = self._value.step(character)
        if status in (Status.OPEN, Status.DONE):
            if self._started and self._key == "arguments":
                self.pieces.append(Piece(arguments=character))
            else:
                self._raw += character
        if status in (Status.OPEN, Status.FAILED):
            return status
        self._next = self._after_value
        if not self._value_complete():
            return Status.FAILED
        return self._after_value(character) if status is Status.BEFORE else Status.OPEN

    def _value_complete(self) -> bool:
        if self._key == "name":
            self._name = json.loads(self._raw)
            return isinstance(self._name, str) and self._name in self._names
        if self._key == "arguments" and not self._started:
            text = self._raw
            if text.startswith('"'):  # some models write the object as a string
                text = json.loads(text)
                try:
                    if not isinstance(json.loads(text), dict):
                        return False
                except (ValueError, RecursionError):
                    return False
            self._arguments = text
        return True

    def _after_value(self, character: str) -> Status:
        if character in _SPACES:
            return Status.OPEN
        if character == ",":
            self._next = self._before_key
            return Status.OPEN
        if character != "}" or self._name is None:
            return Status.FAILED
        if self._doubled:
            self._doubled = False
            return Status.OPEN
        if not self._started:
            self._start()
            self.pieces.append(Piece(arguments=self._arguments or "{}"))
        self.pieces.append(Piece(ends=True))
        return Status.DONE

    def _start(self) -> None:
        self._started = True
        self.pieces.append(Piece(name=self._name))
