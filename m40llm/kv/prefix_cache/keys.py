"""Names of blocks: a block's key chains its parent's key with its token ids, so one key stands for a whole prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

Key = bytes  # KEY_BYTES long; the root of all chains is the cache's identity

KEY_BYTES = 16
TOKEN_BYTES = 4

# Tokens of a block. 64 tokens of a 0.1–1.5B model are 1.5–1.8 MB: large enough that a file or a copy is mostly payload,
# small enough that one block is copied in well under a decode step. Only the last block of a chain may be shorter.
BLOCK_TOKENS = 64


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return np.asarray(tokens, "<i4").tobytes()


def block_key(parent: Key, tokens: bytes) -> Key:
    """Key of the block that holds `tokens` (encoded) after the prefix named by `parent`."""
    return hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES, person=b"m40llm-block").digest()


def shared_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two encoded lists have in common."""
    n = min(len(a), len(b)) // TOKEN_BYTES
    differ = np.frombuffer(a, "<i4", n) != np.frombuffer(b, "<i4", n)
    return int(differ.argmax()) if differ.any() else n
