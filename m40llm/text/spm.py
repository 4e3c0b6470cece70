"""SentencePiece vocabularies (``tokenizer.ggml.model = "llama"``) by the sentencepiece library.

The file's tokens, scores and types become a SentencePiece BPE model. Control and user-defined tokens are cut out of the text
before (special.py), as llama.cpp does, so the model knows user-defined tokens as plain pieces and control tokens not at all.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import sentencepiece

from m40llm.text.errors import TokenizerError

SPACE = "▁"

# Field numbers and enum values of sentencepiece_model.proto.
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_MODEL_TYPE_BPE = 2


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


class SentencePieceEncoder:
    """Token ids of text in which no special token is left.

    Args:
        tokens: (V,) texts.
        scores: (V,) float32; the pair whose product scores best is joined first.
        hidden: (V,) bool, True for tokens that text never becomes (control, unknown).
        byte_tokens: byte → id, complete or empty.
        unknown_id: id for a character that is neither a piece nor bytes.

    Raises:
        TokenizerError: sentencepiece refuses the vocabulary.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: np.ndarray,
        hidden: np.ndarray,
        byte_tokens: dict[int, int],
        unknown_id: int,
    ) -> None:
        kinds = np.where(hidden, _CONTROL, _NORMAL)
        kinds[list(byte_tokens.values())] = _BYTE
        kinds[unknown_id] = _UNKNOWN
        packed = np.ascontiguousarray(scores, "<f4").tobytes()
        parts = []
        for index, (token, kind) in enumerate(zip(tokens, kinds.tolist(), strict=True)):
            text = token.encode("utf-8", "surrogateescape")
            score = packed[4 * index : 4 * index + 4]
            size = len(text)
            head = b"\x0a" + (bytes((size,)) if size < 128 else _varint(size))
            piece = head + text + b"\x15" + score + bytes((0x18, kind))
            size = len(piece)
            parts.append(b"\x0a" + (bytes((size,)) if size < 128 else _varint(size)) + piece)
        trainer = _int_field(3, _MODEL_TYPE_BPE) + _int_field(4, len(tokens)) + _int_field(35, int(bool(byte_tokens)))
        trainer += _int_field(40, unknown_id) + b"".join(_varint(n << 3) + _NO_ID for n in (41, 42, 43))
        # No normalisation, no added space, no removed spaces, no escaping: llama.cpp's rules are applied by encode().
        normalizer = _bytes_field(1, b"identity") + b"".join(_int_field(number, 0) for number in (3, 4, 5))
        model = b"".join(parts) + _bytes_field(2, trainer) + _bytes_field(3, normalizer)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            raise TokenizerError(f"sentencepiece refuses this file's vocabulary: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; spaces are looked up as ``▁``."""
        return self._processor.encode(text.replace(" ", SPACE))


_NO_ID = struct.pack("10B", *[0xFF] * 9, 0x01)  # int32 -1 as a varint
