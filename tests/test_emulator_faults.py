"""Every planted bug is found, in the mode that promises it, with the kernel, the thread and the line."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from m40llm.device import KernelFault
from m40llm.device.emulator import EmulatorDevice
from m40llm.device.emulator_build import Mode

KERNELS = Path(__file__).parent / "kernels"
SOURCE = (KERNELS / "planted_bugs.cu").read_text().splitlines()
DYNAMIC = {"dynamic_shared_overrun": 512}
GRID = {"write_past_end": 2, "blocks_write_same": 2}

# Of two accesses without order, either may be the one that is reported.
EITHER_SIDE = ("no_barrier_before_overwrite", "no_syncwarp")
# kernel: words of the message, in each mode that finds it
BUGS = {
    "read_past_end": {"fast": "memory fault", "check": "out-of-bounds read", "kasan": "out-of-bounds read"},
    "write_past_end": {"fast": "memory fault", "check": "out-of-bounds write", "kasan": "out-of-bounds write"},
    "read_before_start": {"check": "offset -4 of buffer 'x", "kasan": "offset -4 of buffer 'x"},
    "shared_index": {"check": "index 16 out of bounds"},
    "shared_pointer": {"kasan": "offset 512 of 's' (size 512)"},
    "shared_pointer_in_template": {"kasan": "offset 512 of 's' (size 512)"},
    "dynamic_shared_overrun": {"fast": "past the end of dynamic", "check": "dynamic shared", "kasan": "dynamic shared"},
    "no_barrier_before_read": {"check": "uninitialised s+508"},
    "no_barrier_before_overwrite": {"check": "race: read of s+252"},
    "barrier_in_branch": dict.fromkeys(("fast", "check", "kasan"), "64 wait at __syncthreads"),
    "two_barriers": dict.fromkeys(("fast", "check", "kasan"), "divergent __syncthreads"),
    "exit_before_barrier": dict.fromkeys(("fast", "check", "kasan"), "28 have exited"),
    "shuffle_in_branch": dict.fromkeys(("fast", "check", "kasan"), "arrived 0x0000ffff"),
    "shuffle_with_exited": dict.fromkeys(("fast", "check", "kasan"), "__shfl_*_sync"),
    "shuffle_from_outside_mask": dict.fromkeys(("fast", "check", "kasan"), "reads lane 20, which is not in mask"),
    "shared_not_written": {"check": "uninitialised s+256"},
    "misaligned_float4": {"check": "requires 16-byte alignment"},
    "misaligned_q8_0": {"check": "requires 4-byte alignment"},
    "no_syncwarp": {"check": "race"},
    "blocks_write_same": {"check": "another block's thread"},
    "add_without_atomic": {"check": "race: read of sum"},
    "write_to_const": {"check": "write to read-only buffer 'x", "kasan": "write to read-only buffer 'x"},
    "endless": dict.fromkeys(("fast",), "time limit of 200 ms"),
    "division_by_zero": dict.fromkeys(("fast", "check", "kasan"), "division by zero"),
    "trap": dict.fromkeys(("fast", "check", "kasan"), "__trap() executed"),
}


MODES = ("fast", "check", "kasan")
PROMISES = [(mode, name) for name, modes in BUGS.items() for mode in modes]


@functools.cache
def device_in(mode: Mode) -> EmulatorDevice:
    return EmulatorDevice(mode, kernel_dir=KERNELS, timeout_ms=200)


@pytest.fixture(params=MODES)
def device(request: pytest.FixtureRequest) -> EmulatorDevice:
    return device_in(request.param)


def run(device: EmulatorDevice, name: str) -> np.ndarray:
    """Launches a planted kernel and returns y (128,) float32, NaN where it wrote nothing."""
    kernel = device.kernel("planted_bugs", name)
    with device.alloc(512, "x") as x, device.alloc(512, "y") as y:
        device.upload(x, np.arange(128, dtype=np.float32))
        device.launch(kernel, GRID.get(name, 1), 128, (x, y, np.int32(128)), shared=DYNAMIC.get(name, 0))
        return device.download(y, (128,), np.float32)


@pytest.mark.parametrize(("mode", "name"), PROMISES)
def test_planted_bug_is_found(mode: Mode, name: str) -> None:
    device, expected = device_in(mode), BUGS[name][mode]
    with pytest.raises(KernelFault) as caught:
        run(device, name)
    fault = caught.value
    assert fault.kernel == name
    assert expected in fault.what
    line = next(i for i, text in enumerate(SOURCE, 1) if text.endswith(f"// BUG {name}"))
    if name not in EITHER_SIDE:
        assert fault.source == f"planted_bugs.cu:{line}"


def test_block_and_thread_are_named(device: EmulatorDevice) -> None:
    with pytest.raises(KernelFault) as caught:
        run(device, "trap")
    assert (caught.value.block, caught.value.thread) == ((0, 0, 0), (5, 0, 0))
    with pytest.raises(KernelFault) as caught:
        run(device, "write_past_end")
    assert (caught.value.block, caught.value.thread) == ((1, 0, 0), (0, 0, 0))


def test_correct_kernels_pass(device: EmulatorDevice) -> None:
    x = np.arange(128, dtype=np.float32)
    np.testing.assert_array_equal(run(device, "ok"), x)
    np.testing.assert_array_equal(run(device, "ok_atomic"), np.full(128, 128))
    np.testing.assert_array_equal(run(device, "ok_syncwarp"), np.full(128, 0 + 64 + 1 + 65))


def test_poison_shows_what_was_not_written(device: EmulatorDevice) -> None:
    assert np.flatnonzero(np.isnan(run(device, "element_not_written"))).tolist() == [77]


def test_stack_overflow_hits_a_guard(device: EmulatorDevice) -> None:
    with pytest.raises(KernelFault, match=r"stack of 128 KiB overflowed|wild"):
        run(device, "stack_overflow")


@pytest.mark.parametrize(("name", "fault"), [("ok_last_block", False), ("last_block_no_fence", True)])
def test_order_between_blocks_needs_fence_and_atomic(name: str, fault: bool) -> None:
    device = EmulatorDevice("check", kernel_dir=KERNELS)
    kernel = device.kernel("planted_bugs", name)
    with ExitStack() as stack:
        x, partial, arrived, y = (stack.enter_context(device.alloc(32, n)) for n in ("x", "partial", "arrived", "y"))
        device.upload(x, np.arange(8, dtype=np.float32))
        device.fill(arrived, 0)
        if fault:
            stack.enter_context(pytest.raises(KernelFault, match="another block's thread"))
        device.launch(kernel, 8, 1, (x, partial, arrived, y))
        assert device.download(y, (1,), np.float32)[0] == 28


def test_a_fault_leaves_the_emulator_usable(device: EmulatorDevice) -> None:
    for _ in range(3):
        with pytest.raises(KernelFault):
            run(device, "barrier_in_branch")
        np.testing.assert_array_equal(run(device, "ok"), np.arange(128))


def test_canary_behind_an_odd_buffer() -> None:
    """In fast mode, bytes between a buffer's end and the guard page are watched by a canary."""
    device = EmulatorDevice("fast", kernel_dir=KERNELS)
    with device.alloc(512, "x") as x, device.alloc(500, "y") as y, pytest.raises(KernelFault, match="past the end of"):
        device.launch(device.kernel("planted_bugs", "ok"), 1, 128, (x, y, np.int32(128)))
