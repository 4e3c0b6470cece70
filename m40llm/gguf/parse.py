"""Parse the header of one GGUF file: counts, metadata, tensor table; every size is checked before it is believed.

Format: the GGUF specification (ggml-org/ggml, docs/gguf.md). Little-endian versions 2 and 3, whose layout is the same.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from m40llm.gguf.errors import GGUFError, quote
from m40llm.gguf.metadata import ArraySpan
from m40llm.gguf.types import BLOCKS, FOREIGN_BLOCKS, VALUE_DTYPES, TensorType, ValueType

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

# Limits for hostile files, far above any real model (the largest have some 10^6 strings and some 10^4 tensors).
MAX_HEADER_BYTES = 1 << 30
MAX_STRING_BYTES = 1 << 26
MAX_NAME_BYTES = (1 << 16) - 1  # the specification's limit for keys
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_ARRAY_STRINGS = 1 << 24  # of all arrays together: bounds the time of the scan

_RETRY = "The file is damaged or incomplete; download it again"
_MALFORMED = "The file is malformed; convert or download it again"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: ``shape`` in NumPy order, the last dimension (K) contiguous; where its bytes lie.

    ``offset`` counts from the start of the file with the index ``part`` (0 for an unsplit model). For a type of unknown
    size ``nbytes`` is the distance to the next tensor.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    part: int

    @property
    def columns(self) -> int:
        """K, the length of the contiguous dimension, in weights."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Product of all dimensions but the last; 1 for a vector."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows


@dataclass(frozen=True)
class Header:
    """What the header of one file says; ``records`` has the bytes, from start to stop, of each key with its value."""

    version: int
    alignment: int
    entries: dict[str, tuple[ValueType, Any]]
    records: dict[str, tuple[int, int]]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """A read position in the mapped header; knows how to fail in words."""

    def __init__(self, path: str, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.position = 0
        self.strings_left = MAX_ARRAY_STRINGS

    def fail(self, problem: str, remedy: str = _MALFORMED) -> NoReturn:
        raise GGUFError(self.path, problem, remedy)

    def overrun(self, what: str) -> NoReturn:
        if self.limit < self.size:
            self.fail(f"{what} lies beyond the first {MAX_HEADER_BYTES} bytes, the limit for a header")
        self.fail(f"the file ends ({self.size} bytes) inside {what}", _RETRY)

    def take(self, count: int, what: str) -> int:
        """Skip ``count`` bytes; returns where they start."""
        start = self.position
        if count > self.limit - start:
            self.overrun(what)
        self.position = start + count
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.buffer, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.buffer, self.take(8, what))[0]

    def text(self, what: str, limit: int) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            self.fail(f"{what} claims {length} bytes, more than the limit of {limit}")
        start = self.take(length, what)
        try:
            return self.buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def value_type(self, what: str) -> ValueType:
        code = self.u32(f"the type of {what}")
        if code > ValueType.FLOAT64:
            self.fail(f"{what} has the unknown value type {code}")
        return ValueType(code)

    def value(self, kind: ValueType, what: str) -> Any:
        if kind is ValueType.STRING:
            return self.text(what, MAX_STRING_BYTES)
        if kind is ValueType.ARRAY:
            return self.array(what)
        packed = _SCALARS[kind]
        number = packed.unpack_from(self.buffer, self.take(packed.size, what))[0]
        if kind is not ValueType.BOOL:
            return number
        if number > 1:
            self.fail(f"{what} is a boolean with the value {number}, neither 0 nor 1")
        return bool(number)

    def array(self, what: str) -> ArraySpan:
        element = self.value_type(f"the elements of {what}")
        count = self.u64(f"the length of {what}")
        if element is ValueType.ARRAY:
            self.fail(f"{what} is an array of arrays, which m40llm does not read")
        if element is not ValueType.STRING:
            start = self.take(count * VALUE_DTYPES[element].itemsize, f"{what} ({count} values)")
            return ArraySpan(element, count, start, self.position)
        if count > self.strings_left:
            self.fail(f"{what} claims {count} strings, more than the limit of {MAX_ARRAY_STRINGS} per file")
        if count * 8 > self.limit - self.position:
            self.overrun(f"{what} ({count} strings)")
        self.strings_left -= count
        start = position = self.position
        read, buffer = _U64.unpack_from, self.buffer
        try:
            for _ in range(count):
                position += 8 + read(buffer, position)[0]
        except (struct.error, OverflowError):  # a length led past the end: no bounds test needed in the hot loop
            self.overrun(what)
        if position > self.limit:
            self.overrun(what)
        self.position = position
        return ArraySpan(element, count, start, position)


def parse_header(path: str, buffer: mmap.mmap, part: int = 0) -> Header:
    """Parse and check the header of one GGUF file. ``part`` is stored in the tensors' infos. Raises GGUFError."""
    cursor = _Cursor(path, buffer)
    version = _check_magic(cursor)
    tensor_count = cursor.u64("the number of tensors")
    key_count = cursor.u64("the number of metadata keys")
    for count, what, limit, least in (
        (key_count, "metadata keys", MAX_KEYS, _MIN_KEY_BYTES),
        (tensor_count, "tensors", MAX_TENSORS, _MIN_TENSOR_BYTES),
    ):
        if count > limit:
            cursor.fail(f"the header claims {count} {what}, more than the limit of {limit}")
        if count * least > cursor.limit - cursor.position:
            cursor.fail(f"the header claims {count} {what}, more than {cursor.size} bytes can hold", _RETRY)

    entries: dict[str, tuple[ValueType, Any]] = {}
    records: dict[str, tuple[int, int]] = {}
    for index in range(key_count):
        start = cursor.position
        key = cursor.text(f"metadata key {index + 1} of {key_count}", MAX_NAME_BYTES)
        if not key:
            cursor.fail(f"metadata key {index + 1} of {key_count} is empty")
        if key in entries:
            cursor.fail(f"metadata key {quote(key)} occurs twice")
        what = f"metadata value {quote(key)}"
        kind = cursor.value_type(what)
        entries[key] = (kind, cursor.value(kind, what))
        records[key] = (start, cursor.position)

    alignment = _alignment(cursor, entries)
    raw = [_tensor_record(cursor, index, tensor_count) for index in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = _place_tensors(cursor, raw, data_start, alignment, part)
    return Header(version, alignment, entries, records, tensors)


def _check_magic(cursor: _Cursor) -> int:
    head = cursor.buffer[:24]
    if head[:4] != MAGIC:
        if head.startswith(b"version https://git-lfs"):
            cursor.fail("this is a Git LFS pointer, not the model itself", "Fetch the file with 'git lfs pull'")
        if head[:4] in (b"lmgg", b"tjgg", b"fmgg", b"algg"):
            cursor.fail("this is a GGML file from before GGUF", "Convert the model to GGUF, or download a GGUF of it")
        cursor.fail(
            f"this is not a GGUF file (it starts with {head[:4]!r}, not {MAGIC!r})", "Give the path of a .gguf file"
        )
    cursor.position = len(MAGIC)
    version = cursor.u32("the version number")
    if version in (2, 3):
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        cursor.fail("the file is big-endian; m40llm reads little-endian GGUF only", "Use the little-endian file")
    cursor.fail(f"GGUF version {version} is not supported (2 and 3 are)", "Convert the model with current tools")


def _alignment(cursor: _Cursor, entries: dict[str, tuple[ValueType, Any]]) -> int:
    alignment = entries.get("general.alignment", (ValueType.UINT32, DEFAULT_ALIGNMENT))[1]
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 31:
        cursor.fail("metadata value 'general.alignment' is not a power of two")
    return alignment


def _tensor_record(cursor: _Cursor, index: int, count: int) -> tuple[str, TensorType, tuple[int, ...], int]:
    name = cursor.text(f"the name of tensor {index + 1} of {count}", MAX_NAME_BYTES)
    what = f"tensor {quote(name)}"
    n_dims = cursor.u32(f"the dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.fail(f"{what} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
    # the file counts from the contiguous dimension outwards; NumPy the other way round
    shape = tuple(cursor.u64(f"the dimensions of {what}") for _ in range(n_dims))[::-1]
    kind = TensorType(cursor.u32(f"the type of {what}"))
    return name, kind, shape, cursor.u64(f"the offset of {what}")


def _place_tensors(
    cursor: _Cursor,
    raw: list[tuple[str, TensorType, tuple[int, ...], int]],
    data_start: int,
    alignment: int,
    part: int,
) -> dict[str, TensorInfo]:
    """Check sizes and offsets against the file and against each other."""
    tensors: dict[str, TensorInfo] = {}
    unsized: list[str] = []
    for name, kind, shape, offset in raw:
        what = f"tensor {quote(name)}"
        if name in tensors:
            cursor.fail(f"{what} occurs twice")
        if offset % alignment:
            cursor.fail(f"{what} starts at offset {offset}, which is no multiple of the alignment {alignment}")
        elements = 1
        for size in shape:
            elements *= size
        if not 0 < elements < 1 << 63:
            cursor.fail(f"{what} has the impossible shape {shape}")
        block = BLOCKS.get(kind) or FOREIGN_BLOCKS.get(kind)
        if block is None:
            unsized.append(name)
            nbytes = 0
        elif shape[-1] % block.block_size:
            cursor.fail(f"{what} has rows of {shape[-1]} weights, no multiple of {kind.name}'s {block.block_size}")
        else:
            nbytes = elements // block.block_size * block.type_size
        start = data_start + offset
        if start + nbytes > cursor.size:
            cursor.fail(
                f"{what} ({nbytes} bytes at {start}) reaches past the end of the file ({cursor.size} bytes)", _RETRY
            )
        tensors[name] = TensorInfo(name, kind, shape, nbytes, start, part)

    ordered = sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes))
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            cursor.fail(f"tensors {quote(before.name)} and {quote(after.name)} overlap")
    if unsized:
        ends = {t.name: n.offset for t, n in pairwise(ordered)}
        for name in unsized:
            t = tensors[name]
            tensors[name] = TensorInfo(name, t.type, t.shape, ends.get(name, cursor.size) - t.offset, t.offset, part)
    return tensors
