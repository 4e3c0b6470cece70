"""Stand-ins for the prefix cache's tests: a tiny KV format whose content follows from the tokens, so that any block of the
wrong prefix is seen at once."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from m40llm.kv.prefix_cache import BLOCK_TOKENS, CacheIdentity, PrefixCache
from m40llm.kv.prefix_cache.keys import block_key, encode_tokens

IDENTITY = CacheIdentity(b"r" * 16, n_layers=2, n_kv_heads=1, head_dim=3, storage=np.dtype(np.uint16))
OTHER_MODEL = CacheIdentity(b"s" * 16, n_layers=2, n_kv_heads=1, head_dim=3, storage=np.dtype(np.uint16))


def kv_of(tokens: Sequence[int], start: int = 0) -> NDArray[np.uint16]:
    """K and V (2, 2, n, 1, 3) of positions `start ..`: as in a model, those of a position depend on all tokens up to it."""
    rolling = 1
    values = []
    for token in tokens:
        rolling = zlib.crc32(int(token).to_bytes(4, "little"), rolling)
        values.append(rolling)
    base = np.array(values, np.uint64)[None, None, :, None, None]
    planes = np.arange(2 * 2 * 3, dtype=np.uint64).reshape(2, 2, 1, 1, 3)
    return ((base >> planes) & 0xFFFF).astype(np.uint16)[:, :, start:]


def put_chain(cache: PrefixCache, tokens: Sequence[int]) -> bool:
    """Keeps all blocks of a prompt, the incomplete last one too; False as soon as one is refused."""
    parent = cache.identity.root
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = encode_tokens(tokens[start : start + BLOCK_TOKENS])
        key = block_key(parent, block)
        if not cache.holds(key, parent, block) and not cache.put(
            parent, block, kv_of(tokens[: start + BLOCK_TOKENS], start)
        ):
            return False
        parent = key
    return True


def load_all(cache: PrefixCache, tokens: Sequence[int], have: int = 0) -> NDArray[np.uint16]:
    """What the cache gives for a prompt after its first `have` positions, waited for; checked against `kv_of`."""
    import threading

    came = threading.Event()
    load = cache.open_load(tokens, have, have, came.set)
    got = np.empty((2, 2, 0, 1, 3), np.uint16)
    while load is not None and not load.finished:
        came.clear()
        block = load.next()
        if block is None:
            assert load.finished or came.wait(10)
            continue
        start, data = block
        assert start == have + got.shape[2]
        got = np.concatenate((got, data), axis=2)
    if load is not None:
        load.close()
    np.testing.assert_array_equal(got, kv_of(tokens, have)[:, :, : got.shape[2]])
    return got


def blocks(*symbols: int, tail: int = 0) -> list[int]:
    """One block of equal tokens per symbol; with `tail`, the last one has only so many."""
    tokens = [s for s in symbols for _ in range(BLOCK_TOKENS)]
    return tokens[: len(tokens) - BLOCK_TOKENS + tail] if tail else tokens
