"""Launchers of kernels/attention_decode.cu (or attention_decode_ldg.cu) and kernels/attention_prefill.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from m40llm.device.protocol import Device
from m40llm.kv.layout import KVLayout
from m40llm.ops.cuda.rope import layer_of
from m40llm.ops.cuda.staged import Staged, batch_of
from m40llm.ops.cuda.tensor import DeviceTensor
from m40llm.ops.protocol import KVCache

HEAD_SIZES = (64, 128, 256)
_DECODE_THREADS = 128
_HEADS_PER_BLOCK = (1, 4, 8)  # instances of the decode kernel
_KEYS_PER_SHARE = 128  # DECODE_SHARE in attention_decode.cuh
# Two resident blocks for each multiprocessor, twice: short sequences leave some of them without work.
_BLOCKS_PER_MULTIPROCESSOR = 4
_MAX_SPLITS = 64  # DECODE_SPLITS in attention_decode.cuh
_PREFILL_THREADS = 128
_PREFILL_ROWS = {64: 64, 128: 32, 256: 32}  # query rows (tokens x heads of a group) of a block


@dataclass(frozen=True, slots=True)
class Segments:
    """The plan's view of a step: cu_seqlens_q (S+1,), kv_lens (S,), slots (S,), all int32 on the device."""

    cu_seqlens_q: DeviceTensor
    kv_lens: DeviceTensor
    slots: DeviceTensor

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Partial results of split keys: `out` (floats,) and `stats` (pairs, 2), both float32; `done` (S * KH * head blocks,)
    uint32 counts arrivals and must be zero before the first launch."""

    out: DeviceTensor
    stats: DeviceTensor
    done: DeviceTensor


def check_heads(n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    """Raises ValueError for attention that no kernel computes."""
    if head_dim not in HEAD_SIZES:
        known = ", ".join(map(str, HEAD_SIZES))
        raise ValueError(f"the CUDA attention kernels are made for heads of {known}, not {head_dim}; use --device cpu")
    if n_heads % n_kv_heads or n_heads // n_kv_heads > _PREFILL_ROWS[head_dim]:
        raise ValueError(
            f"{n_heads} query heads over {n_kv_heads} KV heads: the CUDA attention kernels take whole groups of at most "
            f"{_PREFILL_ROWS[head_dim]}; use --device cpu"
        )


def splits_for(device: Device, segments: int, kv_heads: int, group: int, context: int) -> int:
    """How many blocks share the keys of one KV head (grid.y of the decode kernel)."""
    head_blocks = counters_per_segment(1, group)
    target = _BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors
    wanted = -(-target // (segments * kv_heads * head_blocks))
    return max(1, min(wanted, -(-context // _KEYS_PER_SHARE), _MAX_SPLITS))


def counters_per_segment(kv_heads: int, group: int) -> int:
    """Blocks over which a segment's heads are spread (grid.x of the decode kernel), each with an arrival counter."""
    return kv_heads * -(-group // _heads_per_block(group))


def scratch_places(device: Device, segments: int, n_heads: int, kv_heads: int, context: int) -> int:
    """Partial results of the step that has most of them, among steps of up to `segments` segments."""
    group = n_heads // kv_heads
    return n_heads * max(s * splits_for(device, s, kv_heads, group, context) for s in range(1, segments + 1))


def attention_decode(
    device: Device,
    q: DeviceTensor,
    kv: KVCache,
    layer: int,
    segments: Segments,
    scratch: Scratch,
    out: DeviceTensor | Staged,
    *,
    window: int = 0,
    splits: int | None = None,
    ldg: bool = False,
    stream: Any = None,
) -> None:
    """out (T, H*HD) = attention of q (T, H*HD) for the segments of one row; rows of other segments stay as they are.

    `window`: positions that a query sees, its own included (0: all). `splits` overrides `splits_for`. `ldg` takes the
    variant that loads K and V through the read-only cache.

    Raises:
        ValueError: another shape or dtype, a head size or group that no kernel computes, too little scratch.
    """
    layout = kv.layout
    n_heads, group = _heads(q, layout)
    count = len(segments)
    parts = splits_for(device, count, layout.n_kv_heads, group, layout.context) if splits is None else splits
    places, blocks = count * n_heads * parts, counters_per_segment(layout.n_kv_heads, group)
    if parts > _MAX_SPLITS:
        raise ValueError(f"{parts} splits; the decode kernel merges up to {_MAX_SPLITS}")
    if parts > 1 and (len(scratch.out) < places * layout.head_dim or len(scratch.stats) < places):
        raise ValueError(f"{places} partial results do not fit into scratch for {len(scratch.stats)}")
    if len(scratch.done) < count * blocks:
        raise ValueError(f"{count * blocks} blocks do not fit into {len(scratch.done)} arrival counters")
    args = (
        q.memory,
        layer_of(kv.k, layout, layer),
        layer_of(kv.v, layout, layer),
        *_segments(segments),
        out.require("out", q.shape),
        scratch.out.memory,
        scratch.stats.memory,
        scratch.done.memory,
        np.int64(layout.slot_stride),
        np.int32(layout.n_kv_heads),
        np.int32(group),
        np.int32(window),
        np.float32(layout.head_dim**-0.5),
        np.int32(batch_of(len(out)) if isinstance(out, Staged) else 0),
        np.int32(out.types[0] if isinstance(out, Staged) else -1),
    )
    module = "attention_decode_ldg" if ldg else "attention_decode"
    kernel = device.kernel(module, f"attention_decode_hd{layout.head_dim}_g{_heads_per_block(group)}")
    device.launch(kernel, (blocks, parts, count), _DECODE_THREADS, args, stream=stream)


def attention_prefill(
    device: Device,
    q: DeviceTensor,
    kv: KVCache,
    layer: int,
    segments: Segments,
    longest: int,
    out: DeviceTensor,
    *,
    window: int = 0,
    stream: Any = None,
) -> None:
    """out (T, H*HD) = causal attention of q (T, H*HD) for the segments of more than one row; other rows stay as they are.

    `longest`: rows of the longest segment, or more. `window` as for `attention_decode`.

    Raises:
        ValueError: another shape or dtype, a head size or group that no kernel computes.
    """
    layout = kv.layout
    _, group = _heads(q, layout)
    tokens = _PREFILL_ROWS[layout.head_dim] // group
    args = (
        q.memory,
        layer_of(kv.k, layout, layer),
        layer_of(kv.v, layout, layer),
        *_segments(segments),
        out.require("out", q.shape),
        np.int64(layout.slot_stride),
        np.int32(group),
        np.int32(window),
        np.float32(layout.head_dim**-0.5),
    )
    kernel = device.kernel("attention_prefill", f"attention_prefill_hd{layout.head_dim}")
    grid = (-(-longest // tokens), layout.n_kv_heads, len(segments))
    device.launch(kernel, grid, _PREFILL_THREADS, args, stream=stream)


def _heads_per_block(group: int) -> int:
    return next((n for n in _HEADS_PER_BLOCK if n >= group), _HEADS_PER_BLOCK[-1])


def _heads(q: DeviceTensor, layout: KVLayout) -> tuple[int, int]:
    """(H, query heads of a KV head)."""
    rows, width = q.shape
    n_heads = width // layout.head_dim
    q.require("q", (rows, n_heads * layout.head_dim))
    check_heads(n_heads, layout.n_kv_heads, layout.head_dim)
    return n_heads, n_heads // layout.n_kv_heads


def _segments(segments: Segments) -> tuple[Any, Any, Any]:
    count = len(segments)
    return (
        segments.cu_seqlens_q.require("cu_seqlens_q", (count + 1,), np.int32),
        segments.kv_lens.require("kv_lens", (count,), np.int32),
        segments.slots.require("slots", (count,), np.int32),
    )
