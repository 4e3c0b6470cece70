"""Counted traffic: what the launches of an emulated device move between multiprocessors, L2 and DRAM.

How it is counted, and what the model leaves out (kernels/host/traffic.h does the work):

* A warp access is what the lanes of a warp do at one place in the code between two points where they meet. Each distinct
  32-byte sector of it is 32 bytes between L2 and the multiprocessor.
* L2 holds 3 MB (GM200) of sectors, least recently used out first, from launch to launch. Reads that miss are DRAM bytes;
  written sectors are not fetched, and go to DRAM when they are evicted (`Traffic.dirty_bytes` is what is still to come).
* Blocks that share the card, `RESIDENT_REGISTERS` assumed, take turns with one warp access each.
* There is no L1: data that a block reads twice comes from L2 twice. Maxwell's read-only cache would save some of that, so
  L2-to-multiprocessor bytes are an upper bound.
* Copies and fills are not counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SECTOR_BYTES = 32
L2_BYTES = 3 << 20  # GM200
MULTIPROCESSORS = 24
RESIDENT_REGISTERS = 64  # of a thread: how many blocks share a multiprocessor
_MOST_PLACES = 4096


class _RangeTraffic(ctypes.Structure):
    _fields_ = (("read", ctypes.c_uint64), ("written", ctypes.c_uint64), ("dram_read", ctypes.c_uint64))


class _PlaceTraffic(ctypes.Structure):
    _fields_ = (
        ("pc", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("passes", ctypes.c_uint64),
        ("least", ctypes.c_uint64),
    )


class _Traffic(ctypes.Structure):
    """`EmuTraffic` in kernels/host/runtime.h."""

    _fields_ = (
        ("l2", ctypes.c_void_p),
        ("blocks_at_once", ctypes.c_uint64),
        ("ranges", ctypes.POINTER(_RangeTraffic)),
        ("places", ctypes.POINTER(_PlaceTraffic)),
        ("place_capacity", ctypes.c_uint64),
        ("place_count", ctypes.c_uint64),
        ("loads", ctypes.c_uint64),
        ("stores", ctypes.c_uint64),
        ("dram_read", ctypes.c_uint64),
        ("dram_written", ctypes.c_uint64),
        ("shared_accesses", ctypes.c_uint64),
        ("shared_passes", ctypes.c_uint64),
        ("shared_least", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class BufferTraffic:
    """Bytes of one buffer in one launch: L2 to multiprocessors, back, and DRAM to L2."""

    name: str
    l2_to_sm: int
    sm_to_l2: int
    dram_read: int


@dataclass(frozen=True, slots=True)
class BankConflicts:
    """Warp accesses of shared memory at one place that took more passes than their width asks for."""

    source: str  # "project.cuh:147"
    accesses: int
    extra_passes: int


@dataclass(frozen=True, slots=True)
class LaunchTraffic:
    """One launch. Bytes, but for `loads` and `stores` (warp accesses of device memory) and the counts of shared memory."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    loads: int
    stores: int
    l2_to_sm: int
    sm_to_l2: int
    dram_read: int
    dram_written: int
    shared_accesses: int
    shared_passes: int
    bank_conflicts: int  # passes beyond those that the accesses' width asks for
    buffers: tuple[BufferTraffic, ...]
    conflicts: tuple[BankConflicts, ...]  # most extra passes first

    @property
    def dram(self) -> int:
        return self.dram_read + self.dram_written


@dataclass
class Counting:
    """The structures of one launch while it runs; they own the memory that the runtime writes."""

    names: Sequence[str]
    dimensions: tuple[int, int, int, int, int, int]
    ranges: ctypes.Array[_RangeTraffic]
    places: ctypes.Array[_PlaceTraffic]
    structure: _Traffic


class Traffic:
    """The launches of one device, and the state of its L2 (`l2_bytes` bytes of it)."""

    def __init__(self, l2_bytes: int = L2_BYTES):
        self._sectors = l2_bytes // SECTOR_BYTES
        self._l2: ctypes.Array[ctypes.c_char] | None = None
        self._library: ctypes.CDLL | None = None
        self._launches: list[LaunchTraffic] = []

    def report(self) -> tuple[LaunchTraffic, ...]:
        """The launches since the last `clear`, oldest first."""
        return tuple(self._launches)

    def clear(self, *, keep_l2: bool = True) -> None:
        """Forgets the launches and, unless `keep_l2`, what L2 holds."""
        self._launches.clear()
        if not keep_l2:
            self._l2 = None

    @property
    def dirty_bytes(self) -> int:
        """Bytes that L2 has still to write to DRAM."""
        if self._l2 is None or self._library is None:
            return 0
        self._library.emu_l2_dirty.restype = ctypes.c_uint64
        return self._library.emu_l2_dirty(self._l2) * SECTOR_BYTES

    def begin(
        self,
        library: ctypes.CDLL,
        names: Sequence[str],
        dimensions: tuple[int, int, int, int, int, int],
        shared_bytes: int,
    ) -> Counting:
        """For the emulator: structures for a launch with buffers `names`."""
        if self._l2 is None:
            library.emu_l2_bytes.restype = ctypes.c_uint64
            size = library.emu_l2_bytes(ctypes.c_uint32(self._sectors))
            self._l2 = ctypes.create_string_buffer(size)
            library.emu_l2_clear(self._l2, ctypes.c_uint32(self._sectors))
        self._library = library
        ranges = (_RangeTraffic * max(1, len(names)))()
        places = (_PlaceTraffic * _MOST_PLACES)()
        structure = _Traffic(
            l2=ctypes.addressof(self._l2),
            blocks_at_once=MULTIPROCESSORS * _blocks_per_sm(dimensions[3:], shared_bytes),
            ranges=ranges,
            places=places,
            place_capacity=_MOST_PLACES,
        )
        return Counting(names, dimensions, ranges, places, structure)

    def add(self, kernel: str, counting: Counting, source_of: Callable[[int], str | None]) -> None:
        """For the emulator: the launch is done."""
        total = counting.structure
        counted = [(p, p.passes - p.least) for p in counting.places[: total.place_count]]
        conflicts = [BankConflicts(source_of(p.pc) or "?", p.accesses, extra) for p, extra in counted if extra]
        # one buffer may come in through several parameters
        by_name: dict[str, BufferTraffic] = {}
        for name, r in zip(counting.names, counting.ranges, strict=False):
            old = by_name.get(name, BufferTraffic(name, 0, 0, 0))
            by_name[name] = BufferTraffic(
                name, old.l2_to_sm + r.read, old.sm_to_l2 + r.written, old.dram_read + r.dram_read
            )
        self._launches.append(
            LaunchTraffic(
                kernel=kernel,
                grid=counting.dimensions[:3],
                block=counting.dimensions[3:],
                loads=total.loads,
                stores=total.stores,
                l2_to_sm=sum(b.l2_to_sm for b in by_name.values()),
                sm_to_l2=sum(b.sm_to_l2 for b in by_name.values()),
                dram_read=total.dram_read * SECTOR_BYTES,
                dram_written=total.dram_written * SECTOR_BYTES,
                shared_accesses=total.shared_accesses,
                shared_passes=total.shared_passes,
                bank_conflicts=total.shared_passes - total.shared_least,
                buffers=tuple(by_name.values()),
                conflicts=tuple(sorted(conflicts, key=lambda c: -c.extra_passes)),
            )
        )


def _blocks_per_sm(block: Sequence[int], shared_bytes: int) -> int:
    """Blocks that share a GM200 multiprocessor: 2048 threads, 65536 registers, 96 KB of (dynamic) shared memory, 32 blocks."""
    threads = -(-block[0] * block[1] * block[2] // 32) * 32
    bounds = [32, 2048 // threads, 65536 // (RESIDENT_REGISTERS * threads)]
    if shared_bytes:
        bounds.append((96 << 10) // shared_bytes)
    return max(1, min(bounds))
