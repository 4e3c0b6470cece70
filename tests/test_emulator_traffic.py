"""The emulator's traffic mode counts what kernels of known behaviour do: sectors, L2, DRAM, bank conflicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from m40llm.device import DeviceBuffer, DeviceError
from m40llm.device.emulator import EmulatorDevice
from m40llm.device.emulator_traffic import L2_BYTES, SECTOR_BYTES, LaunchTraffic

KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture
def device() -> Iterator[EmulatorDevice]:
    device = EmulatorDevice("traffic", kernel_dir=KERNELS)
    yield device
    for buffer, _ in list(device._live.values()):
        buffer.close()


def zeros(device: EmulatorDevice, nbytes: int, name: str) -> DeviceBuffer:
    buffer = device.alloc(nbytes, name)
    device.fill(buffer, 0)
    return buffer


def run(device: EmulatorDevice, symbol: str, *args: object, grid: int = 1, block: int = 64) -> LaunchTraffic:
    device.launch(device.kernel("traffic", symbol), grid, block, args)  # type: ignore[arg-type]
    return device.traffic.report()[-1]


def test_a_vector_load_is_one_access_and_every_byte_moves_once(device: EmulatorDevice) -> None:
    nbytes = 16 * 64 * 10
    counted = run(device, "copy_f32x4", zeros(device, nbytes, "in"), zeros(device, nbytes, "out"), grid=10)
    assert (counted.loads, counted.stores) == (20, 20)  # two warps of ten blocks
    assert (counted.l2_to_sm, counted.sm_to_l2) == (nbytes, nbytes)
    assert (counted.dram_read, counted.dram_written) == (nbytes, 0)  # the writes are still in L2
    assert device.traffic.dirty_bytes == nbytes
    assert {b.name: (b.l2_to_sm, b.sm_to_l2, b.dram_read) for b in counted.buffers} == {
        "in": (nbytes, 0, nbytes),
        "out": (0, nbytes, 0),
    }


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (3, 12), (8, 32), (16, 32)])
def test_a_strided_load_moves_whole_sectors(device: EmulatorDevice, stride: int, sectors: int) -> None:
    source, out = zeros(device, 64 * stride * 4, "in"), zeros(device, 256, "out")
    counted = run(device, "strided_f32", source, out, np.int32(stride))
    assert counted.l2_to_sm == 2 * sectors * SECTOR_BYTES
    assert counted.loads == 2


def test_lanes_of_different_trip_counts_meet_by_occurrence(device: EmulatorDevice) -> None:
    counted = run(device, "divergent_f32", zeros(device, 8192, "in"), zeros(device, 256, "out"))
    assert counted.loads == 4
    assert counted.l2_to_sm == 2 * (4 + 4) * SECTOR_BYTES  # the odd lanes still touch all four sectors


def test_l2_keeps_what_fits_and_writes_back_what_does_not(device: EmulatorDevice) -> None:
    blocks = L2_BYTES // (16 * 256) // 2
    half = blocks * 16 * 256  # half of L2
    a, b, c, d = (zeros(device, half, name) for name in "abcd")

    def copy(source: DeviceBuffer, target: DeviceBuffer) -> LaunchTraffic:
        return run(device, "copy_f32x4", source, target, grid=blocks, block=256)

    assert copy(a, b).dram_read == half
    again = copy(a, b)
    assert (again.dram_read, again.dram_written, again.l2_to_sm) == (0, 0, half)
    other = copy(c, d)
    assert (other.dram_read, other.dram_written) == (half, half)  # a leaves, and b too, but b is written
    device.traffic.clear(keep_l2=False)
    assert device.traffic.report() == ()
    assert copy(a, b).dram_read == half


@pytest.mark.parametrize(
    ("write_pitch", "read_pitch", "extra"),
    [(1, 1, 0), (33, 1, 0), (2, 1, 1), (1, 32, 31), (1, 0, 0), (4, 8, 3 + 7)],
)
def test_bank_conflicts_of_words(device: EmulatorDevice, write_pitch: int, read_pitch: int, extra: int) -> None:
    counted = run(device, "shared_f32", zeros(device, 256, "out"), np.int32(write_pitch), np.int32(read_pitch))
    assert counted.shared_accesses == 4
    assert counted.bank_conflicts == 2 * extra  # two warps


@pytest.mark.parametrize(
    ("write_pitch", "read_pitch", "extra"),
    # eight lanes at a time: float4 0..7 fill the banks once; every other one meets half of them twice
    [(1, 1, 0), (9, 0, 0), (2, 1, 4 * 1), (8, 1, 4 * 7), (1, 4, 4 * 3)],
)
def test_bank_conflicts_of_vectors(device: EmulatorDevice, write_pitch: int, read_pitch: int, extra: int) -> None:
    counted = run(device, "shared_f32x4", zeros(device, 1024, "out"), np.int32(write_pitch), np.int32(read_pitch))
    assert counted.bank_conflicts == 2 * extra
    if extra:
        line = next(
            number
            for number, text in enumerate((KERNELS / "traffic.cu").read_text().splitlines(), 1)
            if ("make_float4" if write_pitch > 1 else "out[threadIdx.x] = words[") in text and number > 30
        )
        assert counted.conflicts[0].source == f"traffic.cu:{line}"
        assert counted.conflicts[0].extra_passes == 2 * extra


def test_an_atomic_reads_and_writes(device: EmulatorDevice) -> None:
    counter = zeros(device, 4, "counter")
    counted = run(device, "count_u32", counter)
    assert (counted.loads, counted.stores) == (2, 2)
    assert counted.dram_read == SECTOR_BYTES
    assert device.download(counter, (1,), np.uint32).tolist() == [64]  # and the kernel has run


def test_other_modes_count_nothing() -> None:
    with pytest.raises(DeviceError, match='mode "traffic", not "fast"'):
        _ = EmulatorDevice("fast").traffic
