"""Where a token's key and value live: `[layer][slot][position][kv_head][head_dim]`, one allocation each for K and V."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from m40llm.config import KVDtype, ModelConfig


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Sizes and strides of the dense KV cache (elements, not bytes, unless named so)."""

    n_layers: int
    n_slots: int
    context: int
    n_kv_heads: int
    head_dim: int
    dtype: KVDtype

    @classmethod
    def for_model(cls, config: ModelConfig, n_slots: int, context: int, dtype: KVDtype) -> KVLayout:
        return cls(config.n_layers, n_slots, context, config.n_kv_heads, config.head_dim, dtype)

    @property
    def storage(self) -> np.dtype:
        """FP16 travels as its bits in uint16: neither Numba nor Maxwell has half arithmetic."""
        return np.dtype(np.uint16 if self.dtype == "f16" else np.float32)

    @property
    def pos_stride(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def slot_stride(self) -> int:
        return self.context * self.pos_stride

    @property
    def layer_stride(self) -> int:
        return self.n_slots * self.slot_stride

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.n_layers, self.n_slots, self.context, self.n_kv_heads, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return 2 * self.n_layers * self.layer_stride * self.storage.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one position over all layers."""
        return 2 * self.n_layers * self.pos_stride * self.storage.itemsize

    def offset(self, layer: int, slot: int, pos: int) -> int:
        """Element offset of the first KV head's vector.

        Raises:
            IndexError: outside the cache.
        """
        for name, value, size in (
            ("layer", layer, self.n_layers),
            ("slot", slot, self.n_slots),
            ("position", pos, self.context),
        ):
            if not 0 <= value < size:
                raise IndexError(f"{name} {value} is outside 0..{size - 1}")
        return layer * self.layer_stride + slot * self.slot_stride + pos * self.pos_stride
