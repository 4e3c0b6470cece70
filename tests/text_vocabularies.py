"""Vocabularies built in memory, as GGUF metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte, written out again from its definition (openai/gpt-2, encoder.py)."""
    kept = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    chars, extra = [], 0
    for byte in range(256):
        chars.append(chr(byte if byte in kept else 256 + extra))
        extra += byte not in kept
    return chars


def bpe_metadata(merges: list[str], extra: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    """A gpt2 vocabulary: the 256 bytes, the products of ``merges``, then ``extra`` tokens with their types."""
    tokens = byte_alphabet()
    for merge in merges:
        product = merge.replace(" ", "", 1)
        if product not in tokens:
            tokens.append(product)
    types = [NORMAL] * len(tokens) + list((extra or {}).values())
    tokens += list(extra or {})
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return metadata


def spm_metadata(pieces: dict[str, float], extra: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    """A llama vocabulary: <unk>, <s>, </s>, the 256 byte tokens, ``pieces`` with their scores, then ``extra`` tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *(extra or {})]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + list((extra or {}).values())
    scores = [0.0] * 259 + list(pieces.values()) + [0.0] * len(extra or {})
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return metadata
