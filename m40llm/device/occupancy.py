"""How many blocks of a kernel one multiprocessor holds, from ptxas' numbers alone.

Limits and allocation units: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the CUDA
Occupancy Calculator of the toolkit.
"""

from __future__ import annotations

from dataclasses import dataclass

from m40llm.device.errors import DeviceError

_WARP = 32
_WARPS_PER_ALLOCATION = 4  # warps of a block are placed on the four schedulers in turn
_REGISTER_UNIT = 256  # registers, per warp
_MAX_REGISTERS_PER_THREAD = 255


@dataclass(frozen=True)
class ArchLimits:
    """Of one multiprocessor: threads, blocks, shared memory (bytes); of one block: shared memory; allocation unit."""

    max_threads: int
    max_blocks: int
    shared_bytes: int
    shared_per_block: int
    shared_unit: int
    shared_reserved: int  # taken from every block by the system, from 8.0 on
    registers: int = 65536


_KIB = 1024
LIMITS = {
    "sm_50": ArchLimits(2048, 32, 64 * _KIB, 48 * _KIB, 256, 0),
    "sm_52": ArchLimits(2048, 32, 96 * _KIB, 48 * _KIB, 256, 0),
    "sm_60": ArchLimits(2048, 32, 64 * _KIB, 48 * _KIB, 256, 0),
    "sm_61": ArchLimits(2048, 32, 96 * _KIB, 48 * _KIB, 256, 0),
    "sm_70": ArchLimits(2048, 32, 96 * _KIB, 96 * _KIB, 256, 0),
    "sm_75": ArchLimits(1024, 16, 64 * _KIB, 64 * _KIB, 256, 0),
    "sm_80": ArchLimits(2048, 32, 164 * _KIB, 163 * _KIB, 128, 1024),
    "sm_86": ArchLimits(1536, 16, 100 * _KIB, 99 * _KIB, 128, 1024),
    "sm_89": ArchLimits(1536, 24, 100 * _KIB, 99 * _KIB, 128, 1024),
    "sm_90": ArchLimits(2048, 32, 228 * _KIB, 227 * _KIB, 128, 1024),
}


@dataclass(frozen=True)
class Occupancy:
    """`blocks` and `warps` resident on a multiprocessor, `fraction` of the most warps it could hold, and what limits it."""

    blocks: int
    warps: int
    fraction: float
    limited_by: str  # "threads", "blocks", "registers" or "shared memory"


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def occupancy(registers: int, shared_bytes: int, threads: int, arch: str) -> Occupancy:
    """Occupancy of a kernel with `registers` per thread, `shared_bytes` per block (static + dynamic), `threads` per block.

    DeviceError for an unknown `arch` ("sm_52") or a block that cannot run at all.
    """
    limits = LIMITS.get(arch)
    if limits is None:
        raise DeviceError(f"no occupancy limits for {arch}; known: {', '.join(LIMITS)}")
    if (
        not 1 <= threads <= 1024
        or not 0 <= registers <= _MAX_REGISTERS_PER_THREAD
        or shared_bytes > limits.shared_per_block
    ):
        raise DeviceError(
            f"a block of {threads} threads, {registers} registers, {shared_bytes} B shared cannot run on {arch}"
        )
    warps = -(-threads // _WARP)
    max_warps = limits.max_threads // _WARP
    bounds = {"threads": max_warps // warps, "blocks": limits.max_blocks}
    if registers:
        per_warp = _round_up(registers * _WARP, _REGISTER_UNIT)
        resident_warps = limits.registers // per_warp // _WARPS_PER_ALLOCATION * _WARPS_PER_ALLOCATION
        bounds["registers"] = resident_warps // _round_up(warps, _WARPS_PER_ALLOCATION)
    if shared_bytes + limits.shared_reserved:
        bounds["shared memory"] = limits.shared_bytes // _round_up(
            shared_bytes + limits.shared_reserved, limits.shared_unit
        )
    limited_by = min(bounds, key=lambda name: bounds[name])
    blocks = bounds[limited_by]
    return Occupancy(blocks, blocks * warps, blocks * warps / max_warps, limited_by)
