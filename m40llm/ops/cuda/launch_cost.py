"""What a recorded launch costs: the cycles of its warps, from the table of kernel costs, and the bytes that it reads from DRAM.

Steps of the inner loops, as the table counts them: 1024 columns of a projection (`COLUMNS`), 32 keys of attention (`KEYS`).
Kernels that are not in the table (norms, RoPE, embedding, argmax) move activations only: they count as a launch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m40llm.device.buffers import DevicePointer
from m40llm.device.errors import DeviceError
from m40llm.device.recording import RecordedLaunch
from m40llm.device.roofline import Cycles, KernelCost, Work
from m40llm.gguf import TensorType
from m40llm.ops.cuda.pack import FORMATS

COLUMNS = 1024
KEYS = 32
_PROJECT = re.compile(r"project_\w+_r(\d+)$")
_ATTENTION = re.compile(r"attention_(decode|prefill)_hd(\d+)")
_ROWS_PER_BLOCK = 32  # of weights: 8 warps with 4 each
_WARPS = {"project": 8, "gemm": 4, "attention": 4}
_KEYS_PER_SHARE = 128  # of decode attention: a block's keys are a multiple of it
_FLOAT_BYTES = 4
_KV_BYTES = 2 * 2  # K and V of one element, float16


@dataclass(frozen=True, slots=True)
class SegmentLength:
    """A segment of the step: its rows, and the positions that its last row attends to."""

    rows: int
    kv_len: int


def launch_work(launch: RecordedLaunch, costs: Mapping[str, KernelCost], segments: Sequence[SegmentLength]) -> Work:
    """Cycles (of all multiprocessors together) and DRAM bytes of one launch.

    Raises:
        DeviceError: a projection or attention kernel that the table does not have.
    """
    if _PROJECT.match(launch.symbol):
        return Work.of_launch(*_projection(launch, costs))
    if launch.symbol.startswith("gemm_"):
        return Work.of_launch(*_gemm(launch, costs))
    if found := _ATTENTION.match(launch.symbol):
        attention = _decode_attention if found[1] == "decode" else _prefill_attention
        return Work.of_launch(*attention(launch, costs, segments, int(found[2])))
    return Work.of_launch(Cycles(), 0.0)


def cost_name(symbol: str, module: str, kind: TensorType, staged: bool) -> str:
    """Key of a projection in the table.

    Kernels that handle several formats have an entry for each, and kernels whose input may come staged by its producer one
    for that.
    """
    name = FORMATS[kind].name
    return (symbol if module == f"project_{name}" else f"{symbol}:{name}") + "+staged" * staged


def _cost(costs: Mapping[str, KernelCost], name: str) -> KernelCost:
    if name not in costs:
        raise DeviceError(f"the table of kernel costs has no '{name}'; bench/sm52_model.py --write renews it")
    return costs[name]


def _projection(launch: RecordedLaunch, costs: Mapping[str, KernelCost]) -> tuple[Cycles, float]:
    rows, columns = launch.integer("rows"), launch.integer("columns")
    batches, staged = launch.grid[1], bool(launch.arguments.get("staged"))
    cycles, nbytes = Cycles(), float(rows * columns * _FLOAT_BYTES)
    for i in range(3):
        weights = launch.arguments[f"w{i}"]
        if not isinstance(weights, DevicePointer):
            continue
        n = launch.integer(f"n{i}")  # gate and up share their blocks, but each costs what it would alone
        kind = TensorType(launch.integer(f"type{i}"))
        cost = _cost(costs, cost_name(launch.symbol, launch.module, kind, staged))
        warps = -(-n // _ROWS_PER_BLOCK) * _WARPS["project"] * batches
        cycles += cost.warp(-(-columns // COLUMNS)) * warps
        nbytes += weights.nbytes * batches + rows * n * _FLOAT_BYTES
    return cycles, nbytes


def _gemm(launch: RecordedLaunch, costs: Mapping[str, KernelCost]) -> tuple[Cycles, float]:
    rows, columns, n = (launch.integer(name) for name in ("rows", "columns", "n"))
    weights = launch.arguments["w"]
    assert isinstance(weights, DevicePointer)
    warps = math.prod(launch.grid) * _WARPS["gemm"]
    cycles = _cost(costs, launch.symbol).warp(columns / COLUMNS) * warps
    # blocks of the same weights follow each other, so that L2 serves all but the first
    return cycles, weights.nbytes + rows * (columns + n) * _FLOAT_BYTES


def _heads(launch: RecordedLaunch) -> int:
    """KV heads of an attention launch."""
    return launch.integer("KH") if "KH" in launch.arguments else launch.grid[1]


def _decode_attention(
    launch: RecordedLaunch, costs: Mapping[str, KernelCost], segments: Sequence[SegmentLength], head_dim: int
) -> tuple[Cycles, float]:
    cost, splits = _cost(costs, launch.symbol), launch.grid[1]
    cycles, nbytes = Cycles(), 0.0
    for segment in segments:
        if segment.rows != 1:
            continue
        visible = _visible(launch, segment.kv_len)
        share = _round_up(_round_up(visible, splits) // splits, _KEYS_PER_SHARE)
        warps = launch.grid[0] * -(-visible // share) * _WARPS["attention"]
        cycles += cost.warp(share / _KEYS_PER_SHARE) * warps
        nbytes += visible * _heads(launch) * head_dim * _KV_BYTES
    return cycles, nbytes


def _prefill_attention(
    launch: RecordedLaunch, costs: Mapping[str, KernelCost], segments: Sequence[SegmentLength], head_dim: int
) -> tuple[Cycles, float]:
    cost = _cost(costs, launch.symbol)
    cycles, nbytes = Cycles(), 0.0
    for segment in segments:
        if segment.rows == 1:
            continue
        tokens = -(-segment.rows // launch.grid[0])  # of a block, or a little fewer
        start = segment.kv_len - segment.rows
        for first in range(0, segment.rows, tokens):
            keys = _visible(launch, start + min(first + tokens, segment.rows))
            cycles += cost.warp(-(-keys // KEYS)) * (_heads(launch) * _WARPS["attention"])
        nbytes += segment.kv_len * _heads(launch) * head_dim * _KV_BYTES
    return cycles, nbytes


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _visible(launch: RecordedLaunch, kv_len: int) -> int:
    window = launch.integer("window")
    return min(kv_len, window) if window else kv_len
