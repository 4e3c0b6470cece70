"""Launchers of kernels/reduce.cu: the best token of each logit row, and the k best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from m40llm.device.protocol import Device
from m40llm.ops.cuda.tensor import DeviceTensor

_THREADS = 256
_ARGMAX_BLOCKS = 48  # of a row: two for each of a Tesla M40's multiprocessors
_ARGMAX_CHUNK = 4096  # logits of a block, at least
_TOPK_CHUNK = 4096  # TOPK_CHUNK in reduce.cu: logits of a block, and candidates that the last block merges
_MOST_CANDIDATES = 64  # selected one after the other: with many more, copying all logits is quicker


@dataclass(frozen=True, slots=True)
class ReduceScratch:
    """Partial results `partial` (n,) uint64 and arrival counters `done` (R,) uint32, zero before the first launch."""

    partial: DeviceTensor
    done: DeviceTensor


def argmax_blocks(vocab: int) -> int:
    """Blocks, and partial results, of one row in `argmax`."""
    return min(_ARGMAX_BLOCKS, -(-vocab // _ARGMAX_CHUNK))


def most_candidates(vocab: int) -> int:
    """How many of `vocab` logits `topk` is asked for at most: what samplers use, and what the kernel can."""
    return min(_MOST_CANDIDATES, vocab, _TOPK_CHUNK // -(-vocab // _TOPK_CHUNK))


def topk_partials(vocab: int, k: int) -> int:
    """Partial results of one row in `topk`. ValueError if the kernel cannot select `k` of `vocab`."""
    blocks = -(-vocab // _TOPK_CHUNK)
    if not 1 <= k <= vocab or blocks * k > _TOPK_CHUNK:
        raise ValueError(
            f"the {k} best of {vocab} logits: the kernel selects up to {min(vocab, _TOPK_CHUNK // blocks)}"
        )
    return blocks * k


def argmax(device: Device, logits: DeviceTensor, ids: DeviceTensor, scratch: ReduceScratch, stream: Any = None) -> None:
    """ids (R,) int32 = id of the largest of logits (R, V) float32, the lowest among equals; NaN counts as -inf.

    Raises:
        ValueError: another shape or dtype, too little scratch.
    """
    rows, vocab = logits.shape
    blocks = argmax_blocks(vocab)
    _check(scratch, rows, rows * blocks)
    args = (
        logits.require("the logits", (rows, vocab)),
        ids.require("ids", (rows,), np.int32),
        scratch.partial.memory,
        scratch.done.memory,
        np.int32(vocab),
        np.int32(-(-vocab // blocks)),
    )
    device.launch(device.kernel("reduce", "argmax_f32"), (blocks, rows), _THREADS, args, stream=stream)


def topk(
    device: Device,
    logits: DeviceTensor,
    values: DeviceTensor,
    ids: DeviceTensor,
    scratch: ReduceScratch,
    stream: Any = None,
) -> None:
    """values (R, k) float32 and ids (R, k) int32 = the k largest of logits (R, V), descending, equals by ascending id.

    Raises:
        ValueError: another shape or dtype, too little scratch, a k that the kernel cannot select.
    """
    rows, vocab = logits.shape
    k = values.shape[1]
    _check(scratch, rows, rows * topk_partials(vocab, k))
    args = (
        logits.require("the logits", (rows, vocab)),
        values.require("values", (rows, k)),
        ids.require("ids", (rows, k), np.int32),
        scratch.partial.memory,
        scratch.done.memory,
        np.int32(vocab),
        np.int32(k),
    )
    device.launch(device.kernel("reduce", "topk_f32"), (-(-vocab // _TOPK_CHUNK), rows), _THREADS, args, stream=stream)


def _check(scratch: ReduceScratch, rows: int, partials: int) -> None:
    if len(scratch.done) < rows or len(scratch.partial) < partials:
        raise ValueError(f"{rows} rows with {partials} partial results do not fit into the scratch")
