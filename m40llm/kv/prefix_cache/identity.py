"""What cached keys and values depend on: the model file, its configuration, the KV format. Another identity, another cache."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from m40llm.config import ModelConfig
from m40llm.gguf import GGUFFile
from m40llm.kv.layout import KVLayout
from m40llm.kv.prefix_cache.keys import BLOCK_TOKENS, KEY_BYTES, Key

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """The root key, and the shape of a block: (2, L, tokens, KH, HD), K first."""

    root: Key
    n_layers: int
    n_kv_heads: int
    head_dim: int
    storage: np.dtype

    @classmethod
    def of(cls, file: GGUFFile, config: ModelConfig, layout: KVLayout, device: str) -> CacheIdentity:
        """Digest of everything that a key or value depends on.

        Of the weights: names, shapes and types of all tensors and a first, middle and last row of each, which two files
        with different weights do not share; reading all of it would cost more than the cache saves. `device`
        names the backend and its precision, whose rounding differs.
        """
        digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"m40llm-model")
        kv = (layout.n_layers, layout.n_kv_heads, layout.head_dim, layout.dtype)
        digest.update(repr((FORMAT_VERSION, BLOCK_TOKENS, device, kv, config)).encode())  # config has the RoPE settings
        for name, info in file.tensors.items():
            digest.update(repr((name, info.shape, int(info.type), info.nbytes)).encode())
            for row in sorted({0, info.rows // 2, info.rows - 1}):
                digest.update(file.read_rows(name, row, row + 1).tobytes())
        return cls(digest.digest(), layout.n_layers, layout.n_kv_heads, layout.head_dim, layout.storage)

    def block_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        return (2, self.n_layers, tokens, self.n_kv_heads, self.head_dim)

    def block_bytes(self, tokens: int) -> int:
        """Bytes of K and V of `tokens` positions."""
        return math.prod(self.block_shape(tokens)) * self.storage.itemsize
