"""GGUF metadata as a mapping: scalars decoded when the file is opened, arrays when they are first asked for."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from m40llm.gguf.errors import GGUFError, quote
from m40llm.gguf.types import VALUE_DTYPES, ValueType

T = TypeVar("T", int, float, bool, str, list, np.ndarray)

_KIND_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    str: "a string",
    list: "an array of strings",
    np.ndarray: "an array of numbers",
}
# Vocabulary entries are byte strings by nature: a token may hold half a UTF-8 sequence. Everything else must be text.
_BYTE_STRING_KEYS = "tokenizer."


@dataclass(frozen=True)
class ArraySpan:
    """Where an array of ``count`` values of type ``element`` lies: bytes ``start`` to ``stop`` of the file."""

    element: ValueType
    count: int
    start: int
    stop: int


class Metadata(Mapping[str, Any]):
    """Key → ``int | float | bool | str``, NumPy array (numeric arrays) or ``list[str]`` (string arrays).

    Arrays are decoded once, on first access, and then no longer need the open file. Strings in ``tokenizer.*`` arrays
    that are no valid UTF-8 are decoded with ``surrogateescape`` (so the bytes can be had back); any other one is a
    GGUFError.
    """

    def __init__(
        self,
        path: str,
        buffer: mmap.mmap,
        entries: dict[str, tuple[ValueType, Any]],
        records: dict[str, tuple[int, int]],
    ) -> None:
        self._path = path
        self._buffer: mmap.mmap | None = buffer
        self._entries = entries
        self._records = records
        self._arrays: dict[str, np.ndarray | list[str]] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._entries[key][1]
        if not isinstance(value, ArraySpan):
            return value
        if key not in self._arrays:
            self._arrays[key] = self._decode(key, value)
        return self._arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries  # Mapping's own would decode the array to find out

    def __repr__(self) -> str:
        return f"Metadata({self._path!r}, {len(self)} keys)"

    def value_type(self, key: str) -> tuple[ValueType, ValueType | None]:
        """The stored type of ``key`` and, for an array, that of its elements. KeyError if there is no such key."""
        kind, value = self._entries[key]
        return kind, value.element if isinstance(value, ArraySpan) else None

    def array_length(self, key: str) -> int:
        """Number of elements of an array, without decoding it. KeyError: no such key; GGUFError: not an array."""
        value = self._entries[key][1]
        if not isinstance(value, ArraySpan):
            raise GGUFError(
                self._path, f"metadata key {quote(key)} is not an array", "The file is malformed; convert it again"
            )
        return value.count

    def require(self, key: str, kind: type[T]) -> T:
        """The value of ``key`` as ``kind``: int, float (converts integers), bool, str, list (of str) or np.ndarray.

        GGUFError names the file and the key when it is missing or of another type.
        """
        if key not in self._entries:
            raise GGUFError(
                self._path,
                f"required metadata key {quote(key)} is missing",
                "The model file is incomplete; convert or download it again",
            )
        value = self[key]
        if kind is float and type(value) is int:
            value = float(value)
        # bool is an int to isinstance(), but a flag where a count is due is a broken file
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            stored, element = self.value_type(key)
            found = stored.name if element is None else f"ARRAY of {element.name}"
            raise GGUFError(
                self._path,
                f"metadata key {quote(key)} must be {_KIND_NAMES[kind]} but is stored as {found}",
                "The model file is malformed; convert or download it again",
            )
        return value

    def optional(self, key: str, kind: type[T], default: T) -> T:
        """As `require`, but ``default`` where the key is missing. A value of the wrong type still raises."""
        return self.require(key, kind) if key in self._entries else default

    def record(self, key: str) -> bytes:
        """The key with its type and value exactly as the file stores them, for copying. KeyError: no such key."""
        return self._read(key, *self._records[key])

    def release(self) -> None:
        """Forget the file's buffer; arrays that were never decoded become an error on access."""
        self._buffer = None

    def _read(self, key: str, start: int, stop: int) -> bytes:
        if self._buffer is None:
            raise GGUFError(
                self._path, f"metadata value {quote(key)} was first asked for after close()", "Read it before"
            )
        return self._buffer[start:stop]

    def _decode(self, key: str, span: ArraySpan) -> np.ndarray | list[str]:
        raw = self._read(key, span.start, span.stop)
        if span.element is ValueType.STRING:
            return self._decode_strings(key, span.count, raw)
        values = np.frombuffer(raw, dtype=VALUE_DTYPES[span.element])
        if span.element is not ValueType.BOOL:
            return values
        if values.size and values.max() > 1:
            raise GGUFError(
                self._path,
                f"metadata array {quote(key)} holds a boolean that is neither 0 nor 1",
                "The file is damaged; download it again",
            )
        return values.astype(np.bool_)

    def _decode_strings(self, key: str, count: int, raw: bytes) -> list[str]:
        errors = "surrogateescape" if key.startswith(_BYTE_STRING_KEYS) else "strict"
        out: list[str] = []
        append = out.append
        from_bytes = int.from_bytes
        position = 0
        try:
            for _ in range(count):
                start = position + 8
                position = start + from_bytes(raw[position:start], "little")
                append(raw[start:position].decode("utf-8", errors))
        except UnicodeDecodeError as error:
            raise GGUFError(
                self._path,
                f"element {len(out)} of metadata array {quote(key)} is not valid UTF-8",
                "The file is damaged; download or convert it again",
            ) from error
        return out
