"""The vocabulary in a GGUF file's metadata, checked once so that the tokenizer can rely on it.

Keys and token types: the GGUF specification (``docs/gguf.md`` of ggml-org/ggml) and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from m40llm.text.errors import TokenizerError, quote

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_SUPPORTED = "'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
_RAW_UTF8_PRE = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
_ID_NAMES = "bos eos eot eom unknown seperator padding mask fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep"
_ID_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in _ID_NAMES.split())
_SPM_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of one file.

    Attributes:
        model: ``gpt2`` or ``llama``.
        pre: name of the pre-tokenization rule, None where the file has none.
        tokens: (V,) texts, all different and not empty.
        token_ids: text → id.
        types: (V,) int64, NORMAL to BYTE.
        scores: (V,) float32.
        merges: BPE merges in order; empty for ``llama``.
        named_ids: ``tokenizer.ggml.*_token_id`` → id.
        byte_tokens: byte → id of ``<0x..>`` tokens, complete or empty.
        unknown_id: id of the unknown token.
    """

    model: str
    pre: str | None
    tokens: list[str]
    token_ids: dict[str, int]
    types: np.ndarray
    scores: np.ndarray
    merges: list[str]
    named_ids: dict[str, int]
    byte_tokens: dict[int, int]
    unknown_id: int

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Reads and checks the vocabulary.

        Raises:
            TokenizerError: a part is missing, has the wrong type or length, or contradicts another part.
        """
        model = _string(metadata, "tokenizer.ggml.model")
        if model is None:
            raise TokenizerError(
                "the file has no tokenizer.ggml.model: it holds no tokenizer; use a complete model file"
            )
        pre = _string(metadata, "tokenizer.ggml.pre")
        if model not in ("gpt2", "llama"):
            raise TokenizerError(f"the tokenizer model {quote(model)} is not supported; supported are {_SUPPORTED}")
        if model == "gpt2" and pre in _RAW_UTF8_PRE:
            raise TokenizerError(f"the pre-tokenizer {quote(pre)} (BPE on raw UTF-8) is not supported")
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        if not tokens:
            raise TokenizerError("tokenizer.ggml.tokens is missing or empty; use a complete model file")
        if "" in tokens:
            tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        token_ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(token_ids) != len(tokens):
            again = next(i for i, token in enumerate(tokens) if token_ids[token] != i)
            raise TokenizerError(
                f"tokenizer.ggml.tokens[{again}] and [{token_ids[tokens[again]]}] are both {quote(tokens[again])}; "
                "tokens must differ: convert the file again"
            )
        types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), "iu")
        scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens), "fiu")
        merges: list[str] = []
        if model == "gpt2":
            merges = _strings(metadata, "tokenizer.ggml.merges")
            if "tokenizer.ggml.merges" not in metadata:
                raise TokenizerError(
                    "tokenizer.ggml.merges is missing; a gpt2 tokenizer needs it: convert the file again"
                )
        elif scores is None:
            raise TokenizerError("tokenizer.ggml.scores is missing; a llama tokenizer needs it: convert the file again")
        types = np.full(len(tokens), NORMAL, np.int64) if types is None else types.astype(np.int64)
        scores = np.zeros(len(tokens), np.float32) if scores is None else scores.astype(np.float32)
        if not np.isfinite(scores).all():
            raise TokenizerError("tokenizer.ggml.scores holds a value that is not finite; convert the file again")
        named_ids = _named_ids(metadata, model, len(tokens))
        return cls(
            model=model,
            pre=pre,
            tokens=tokens,
            token_ids=token_ids,
            types=types,
            scores=scores,
            merges=merges,
            named_ids=named_ids,
            byte_tokens=_byte_tokens(tokens, token_ids, types),
            unknown_id=named_ids.get("tokenizer.ggml.unknown_token_id", 0),
        )


def flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """A boolean of the metadata, ``default`` where it is missing. Raises TokenizerError for any other type."""
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, (bool, np.bool_)):
        raise TokenizerError(f"{key} is {quote(value)}, not a boolean; convert the file again")
    return bool(value)


def _string(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{key} is not a string; convert the file again")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or set(map(type, value)) - {str}:
        raise TokenizerError(f"{key} is not an array of strings; convert the file again")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, count: int, kinds: str) -> np.ndarray | None:
    value = metadata.get(key)
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise TokenizerError(f"{key} is not an array of numbers; convert the file again")
    if len(array) != count:
        raise TokenizerError(f"{key} has {len(array)} entries for {count} tokens; convert or download the file again")
    return array


def _named_ids(metadata: Mapping[str, Any], model: str, count: int) -> dict[str, int]:
    named = {}
    if model == "llama":
        named = {f"tokenizer.ggml.{name}_token_id": i for name, i in _SPM_DEFAULT_IDS.items() if i < count}
    for key in _ID_KEYS:
        value = metadata.get(key)
        if value is None:
            continue
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TokenizerError(f"{key} is {quote(value)}, not a token id; convert the file again")
        if value in (-1, 0xFFFFFFFF):  # some converters write "none" so
            named.pop(key, None)
            continue
        if not 0 <= value < count:
            raise TokenizerError(
                f"{key} is {value}, outside of the vocabulary of {count} tokens; convert the file again"
            )
        named[key] = int(value)
    return named


def _byte_tokens(tokens: list[str], token_ids: dict[str, int], types: np.ndarray) -> dict[int, int]:
    wrong = [i for i in np.flatnonzero(types == BYTE).tolist() if not _is_byte(tokens[i])]
    if wrong:
        raise TokenizerError(
            f"tokenizer.ggml.tokens[{wrong[0]}] is {quote(tokens[wrong[0]])} but its type says a byte, <0x00> to <0xFF>; "
            "convert the file again"
        )
    found = {byte: token_ids[f"<0x{byte:02X}>"] for byte in range(256) if f"<0x{byte:02X}>" in token_ids}
    return found if len(found) == 256 else {}


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token[:3] == "<0x" and token[5] == ">" and not set(token[3:5]) - set("0123456789ABCDEF")
