"""Launchers of kernels/rope.cu: rotary position embedding, and the append of K and V to the FP16 cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from m40llm.device.buffers import DevicePointer
from m40llm.device.protocol import Device
from m40llm.kv.layout import KVLayout
from m40llm.ops.cuda.tensor import DeviceTensor
from m40llm.ops.protocol import KVCache

_THREADS = 128
_ELEMENTS = 4  # of a thread


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosine and sine, each (positions, pairs) float32. `interleaved`: pairs are neighbours, otherwise halves."""

    cos: DeviceTensor
    sin: DeviceTensor
    interleaved: bool

    @property
    def pairs(self) -> int:
        return self.cos.shape[1]


@dataclass(frozen=True, slots=True)
class Positions:
    """Where each row stands: device arrays (T,) int32 or, without them, consecutive positions of one slot from `first` on."""

    pos: DeviceTensor | None = None
    row_slot: DeviceTensor | None = None
    first: int = 0
    slot: int = 0


def rope(
    device: Device, x: DeviceTensor, table: RopeTable, positions: Positions, head_dim: int, stream: Any = None
) -> None:
    """Rotates x (T, heads * head_dim) float32 in place.

    Raises:
        ValueError: another shape or dtype, a head size or a number of pairs that the kernel does not take.
    """
    rows, width = x.shape
    heads = width // head_dim
    _check(table, head_dim)
    args = (
        x.require("x", (rows, heads * head_dim)),
        table.cos.memory,
        table.sin.memory,
        _positions(positions.pos, "pos", rows),
        np.int32(positions.first),
        np.int32(heads),
        np.int32(head_dim),
        np.int32(table.pairs),
    )
    kernel = device.kernel("rope", f"rope_{_pairing(table)}_f32")
    device.launch(kernel, (rows, _blocks(heads, head_dim)), _THREADS, args, stream=stream)


def rope_append(
    device: Device,
    q: DeviceTensor | None,
    k: DeviceTensor,
    v: DeviceTensor,
    table: RopeTable,
    positions: Positions,
    kv: KVCache,
    layer: int,
    stream: Any = None,
) -> None:
    """Rotates q (T, H*HD) in place; rounds rotated k and v (T, KH*HD) to FP16 into `layer` of the cache. k stays as it is.

    Without `q` only K and V are handled.

    Raises:
        ValueError: another shape or dtype, a head size or a number of pairs that the kernel does not take.
    """
    layout = kv.layout
    head_dim, rows = layout.head_dim, len(k)
    heads = 0 if q is None else q.shape[1] // head_dim
    _check(table, head_dim)
    args = (
        None if q is None else q.require("q", (rows, heads * head_dim)),
        k.require("k", (rows, layout.pos_stride)),
        v.require("v", (rows, layout.pos_stride)),
        table.cos.memory,
        table.sin.memory,
        _positions(positions.pos, "pos", rows),
        _positions(positions.row_slot, "row_slot", rows),
        np.int32(positions.first),
        np.int32(positions.slot),
        layer_of(kv.k, layout, layer),
        layer_of(kv.v, layout, layer),
        np.int64(layout.slot_stride),
        np.int32(heads),
        np.int32(layout.n_kv_heads),
        np.int32(head_dim),
        np.int32(table.pairs),
    )
    kernel = device.kernel("rope", f"rope_append_{_pairing(table)}_f16")
    grid = (rows, _blocks(heads + 2 * layout.n_kv_heads, head_dim))
    device.launch(kernel, grid, _THREADS, args, stream=stream)


def layer_of(cache: DeviceTensor, layout: KVLayout, layer: int) -> DevicePointer:
    """The memory of one layer of K or V (slots, positions, KH, HD) FP16. ValueError for another layout or storage."""
    cache.require("the KV cache", layout.shape, np.uint16)
    return cache[layer : layer + 1].memory


def _pairing(table: RopeTable) -> str:
    return "interleaved" if table.interleaved else "half"


def _blocks(heads: int, head_dim: int) -> int:
    return -(-(heads * head_dim // _ELEMENTS) // _THREADS)


def _positions(array: DeviceTensor | None, name: str, rows: int) -> DevicePointer | None:
    return None if array is None else array.require(name, (rows,), np.int32)


def check_pairs(pairs: int, head_dim: int) -> None:
    """Raises ValueError for a head that the kernels do not rotate."""
    if head_dim % _ELEMENTS or pairs % 2 or 2 * pairs > head_dim:
        raise ValueError(
            f"RoPE over {pairs} pairs of a head of {head_dim}: the CUDA kernel needs an even number of pairs, at most "
            f"half of the head, and heads of a multiple of {_ELEMENTS}; use --device cpu"
        )


def _check(table: RopeTable, head_dim: int) -> None:
    table.sin.require("the sine table", table.cos.shape)
    check_pairs(table.pairs, head_dim)
