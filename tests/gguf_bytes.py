"""GGUF files byte by byte, so that a test can write any wrong one."""

import struct
from typing import Any

from m40llm.gguf.types import TensorType, ValueType


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: ValueType, content: Any) -> bytes:
    """A value without its type; an array's content is (element type, list)."""
    if kind is ValueType.STRING:
        return string(content)
    if kind is ValueType.ARRAY:
        element, items = content
        return struct.pack("<IQ", element, len(items)) + b"".join(value(element, item) for item in items)
    return struct.pack("<" + "BbHhIifB..Qqd"[kind], content)


def pair(key: str | bytes, kind: ValueType | int, content: Any) -> bytes:
    """Key, type and value; bytes as content are taken as they are."""
    raw = content if isinstance(content, bytes) else value(ValueType(kind), content)
    return string(key) + struct.pack("<I", kind) + raw


def tensor(name: str | bytes, dims: tuple[int, ...], kind: int, offset: int, n_dims: int | None = None) -> bytes:
    """A tensor record; ``dims`` in file order, contiguous first."""
    count = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def build(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    """The whole file; ``counts`` (tensors, keys) may lie."""
    pairs, tensors = pairs or [], tensors or []
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_pairs) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def small() -> bytes:
    """A valid file with every value type and three tensors: the seed of the mutations."""
    V = ValueType
    pairs = [
        pair("general.architecture", V.STRING, "llama"),
        pair("a.u8", V.UINT8, 255),
        pair("a.i8", V.INT8, -128),
        pair("a.u16", V.UINT16, 65535),
        pair("a.i16", V.INT16, -32768),
        pair("a.u32", V.UINT32, 2**32 - 1),
        pair("a.i32", V.INT32, -(2**31)),
        pair("a.f32", V.FLOAT32, 0.5),
        pair("a.yes", V.BOOL, 1),
        pair("a.u64", V.UINT64, 2**64 - 1),
        pair("a.i64", V.INT64, -(2**63)),
        pair("a.f64", V.FLOAT64, 0.1),
        pair("tokenizer.ggml.tokens", V.ARRAY, (V.STRING, ["a", "", "ü€", "<|im_end|>"])),
        pair("a.ints", V.ARRAY, (V.INT32, [1, -2, 3])),
        pair("a.flags", V.ARRAY, (V.BOOL, [1, 0])),
        pair("a.none", V.ARRAY, (V.FLOAT32, [])),
    ]
    tensors = [
        tensor("token_embd.weight", (32, 4), TensorType.Q8_0, 0),
        tensor("norm.weight", (32,), TensorType.F32, 160),
        tensor("future.weight", (8, 2), 99, 288),
    ]
    return build(pairs, tensors, bytes(range(136)) + bytes(24) + bytes(range(128)) + b"\x07" * 32)
