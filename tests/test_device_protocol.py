"""The device protocol on the emulator: buffers, copies, typed launches, gemm, graphs, counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from m40llm.device import BufferClosed, Counters, Device, DeviceError, LaunchError, OutOfDeviceMemory
from m40llm.device.choose import usable_card
from m40llm.device.emulator import EmulatorDevice
from m40llm.device.signature import parse_kernels

KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture
def emulator() -> Iterator[EmulatorDevice]:
    emulator = EmulatorDevice("fast", kernel_dir=KERNELS)
    yield emulator
    emulator.close()


def open_card() -> Device:
    from m40llm.device.cuda import CudaDevice

    return CudaDevice(usable_card(), kernel_dir=KERNELS)


def open_emulator() -> Device:
    return EmulatorDevice("fast", kernel_dir=KERNELS)


@pytest.fixture(params=[open_emulator, pytest.param(open_card, marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = request.param()
    yield device
    device.close()


def test_the_emulator_is_a_device(emulator: EmulatorDevice) -> None:
    as_protocol: Device = emulator  # checked by mypy
    assert as_protocol.arch == "sm_52"


# ---- buffers -----------------------------------------------------------------------------------------------------------


def test_buffer_frees_once_and_refuses_use_after_close(device: Device) -> None:
    buffer = device.alloc(100, "a")
    pointer = buffer.view(10, 20)
    assert buffer.ptr % 256 == 0
    assert pointer.ptr == buffer.ptr + 10
    buffer.close()
    buffer.close()
    assert device.counters.frees == 1
    for use in (lambda: buffer.ptr, lambda: pointer.ptr, lambda: device.download(buffer, (1,), np.uint8)):
        with pytest.raises(BufferClosed, match="'a' was used after close"):
            use()


def test_views_stay_inside(device: Device) -> None:
    with device.alloc(100, "a") as buffer:
        view = buffer.view(60)
        assert (view.offset, view.nbytes) == (60, 40)
        assert (view + 15).view(5, 20) == buffer.view(80, 20)
        for offset, nbytes in ((0, 101), (-1, 5), (100, 1), (5, -1)):
            with pytest.raises(DeviceError, match="leaves 'a'"):
                buffer.view(offset, nbytes)
        with pytest.raises(DeviceError, match="leaves 'a'"):
            view.view(30, 20)


def test_close_names_what_is_still_open() -> None:
    device = EmulatorDevice("fast")
    with device.alloc(8, "kv"), pytest.raises(DeviceError, match="kv"):
        device.close()


def test_memory_is_counted_and_limited() -> None:
    device = EmulatorDevice("fast", memory_bytes=1000)
    with device.alloc(600, "a"):
        assert device.memory_info() == (400, 1000)
        with pytest.raises(OutOfDeviceMemory, match="'b' wants") as caught:
            device.alloc(401, "b")
        assert (caught.value.wanted, caught.value.free) == (401, 400)
    assert device.memory_info() == (1000, 1000)
    with pytest.raises(DeviceError, match="0 bytes"):
        device.alloc(0, "empty")


def test_injected_allocation_failure(emulator: EmulatorDevice) -> None:
    emulator.fail_at_allocation = 2
    with emulator.alloc(8, "first"):
        with pytest.raises(OutOfDeviceMemory):
            emulator.alloc(8, "second")
        with emulator.alloc(8, "third"):
            assert emulator.live_buffers() == ["first", "third"]


def test_fresh_memory_is_poisoned(emulator: EmulatorDevice) -> None:
    with emulator.alloc(200, "a") as a:
        assert (emulator.download(a, (200,), np.uint8) == 0xFF).all()


def test_copies(device: Device) -> None:
    data = np.arange(24, dtype=np.int32).reshape(4, 6)
    with device.alloc(200, "a") as a, device.alloc(200, "b") as b:
        device.upload(a, data[:, ::2], offset=8)  # strided: made contiguous
        np.testing.assert_array_equal(device.download(a, (4, 3), np.int32, offset=8), data[:, ::2])
        device.copy(b.view(16), a.view(8), 48)
        np.testing.assert_array_equal(device.download(b.view(16, 48), (4, 3), np.int32), data[:, ::2])
        device.fill(b.view(0, 16), 0)
        np.testing.assert_array_equal(device.download(b, (5,), np.int32), [0, 0, 0, 0, 0])
        with pytest.raises(DeviceError, match="leaves 'a'"):
            device.upload(a, data, offset=150)
        with pytest.raises(DeviceError, match="leaves 'a'"):
            device.download(a, (51,), np.int32)
        with pytest.raises(DeviceError, match="overlapping"):
            device.copy(a.view(4), a, 8)
        with pytest.raises(DeviceError, match="array of object"):
            device.upload(a, np.array([object()]))


# ---- launches ----------------------------------------------------------------------------------------------------------


def test_launch_takes_typed_arguments_only(device: Device) -> None:
    kernel = device.kernel("attention", "attn_decode_64")
    other = EmulatorDevice("fast", kernel_dir=KERNELS)
    i32, f32 = np.int32(1), np.float32(1)
    with device.alloc(4096, "b") as b, other.alloc(4096, "foreign") as foreign:
        good = [b, b, b, b, i32, i32, i32, f32, i32]
        wrong = {
            4: (1, "bare Python int"),
            5: (True, "bare Python bool"),
            7: (1e-5, "bare Python float"),
            6: (np.int64(1), "np.int64; the kernel declares np.int32"),
            8: (np.uint32(1), "np.uint32; the kernel declares np.int32"),
            0: (i32, "declares a pointer to const"),
            1: (np.zeros(4, np.float32), "is a ndarray"),
            2: (foreign, "another device"),
        }
        for index, (value, message) in wrong.items():
            args = [*good[:index], value, *good[index + 1 :]]
            with pytest.raises(LaunchError, match=rf"attn_decode_64: argument {index} .*{message}"):
                device.launch(kernel, 1, 128, args)
        with pytest.raises(LaunchError, match=r"argument 7 \('scale'\) is np.float64"):
            device.launch(kernel, 1, 128, [*good[:7], np.float64(1), i32])
        with pytest.raises(LaunchError, match=r"argument 4 \('T'\) is device memory"):
            device.launch(kernel, 1, 128, [*good[:4], b, *good[5:]])
        with pytest.raises(LaunchError, match="8 arguments for 9 parameters"):
            device.launch(kernel, 1, 128, good[:-1])
        with pytest.raises(LaunchError, match="256 threads in a block, __launch_bounds__ allows 128"):
            device.launch(kernel, 1, 256, good)
        closed = device.alloc(8, "closed")
        closed.close()
        with pytest.raises(BufferClosed):
            device.launch(kernel, 1, 128, [closed, *good[1:]])
    assert device.counters.launches == 0


def test_kernel_lookup_errors(device: Device) -> None:
    with pytest.raises(DeviceError, match="no kernel 'nothing'; it has attn_decode_128, attn_decode_64"):
        device.kernel("attention", "nothing")
    with pytest.raises(DeviceError, match="no kernel source"):
        device.kernel("nothing", "nothing")


@pytest.mark.parametrize("configuration", [(1, 2048, 0), ((1, 70000), 32, 0), (0, 32, 0), (1, 128, 50000)])
def test_impossible_configurations(device: Device, configuration: tuple) -> None:
    grid, block, shared = configuration
    with (
        device.alloc(512, "x") as x,
        pytest.raises(DeviceError, match=r"invalid launch configuration|sm_52 has 49152|ok: grid"),
    ):
        device.launch(device.kernel("planted_bugs", "ok"), grid, block, (x, x, np.int32(1)), shared=shared)


def test_parser_and_compiler_agree_on_signatures(emulator: EmulatorDevice) -> None:
    """The C++ compiler's view of every parameter equals the parser's, also where macros make the kernels."""
    for module in ("planted_bugs", "attention", "intrinsics", "signatures"):
        parsed = parse_kernels(KERNELS / f"{module}.cu", [KERNELS])
        for symbol, signature in parsed.items():
            assert emulator.kernel(module, symbol).handle.letters(symbol) == signature.letters
    signature = parse_kernels(KERNELS / "signatures.cu", [KERNELS])["typed_float_64"]
    assert signature.letters == "CPCfdbBhHiIqQBQ"
    assert [p.name for p in signature.parameters[:4]] == ["a", "b", "c", "f"]
    assert signature.max_threads == 64


def test_null_pointer_for_an_absent_operand(device: Device) -> None:
    kernel = device.kernel("signatures", "add_optional")
    with device.alloc(16, "x") as x:
        device.upload(x, np.ones(4, np.float32))
        device.launch(kernel, 1, 4, (x, None))
        np.testing.assert_array_equal(device.download(x, (4,), np.float32), np.ones(4))
        device.launch(kernel, 1, 4, (x, x))
        np.testing.assert_array_equal(device.download(x, (4,), np.float32), np.full(4, 2))


def test_view_limits_what_a_kernel_may_touch() -> None:
    device = EmulatorDevice("check", kernel_dir=KERNELS)
    kernel = device.kernel("planted_bugs", "ok")
    with device.alloc(1024, "all") as memory:
        device.upload(memory, np.zeros(256, np.float32))
        args = (memory.view(0, 512), memory.view(512, 508), np.int32(128))
        with pytest.raises(DeviceError, match=r"offset 508 of buffer 'y \(all\)'"):
            device.launch(kernel, 1, 128, args)


# ---- gemm, graphs, counters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gemm(device: Device, dtype: type, accumulate: bool) -> None:
    rng, (m, n, k) = np.random.default_rng(0), (3, 5, 7)
    a: npt.NDArray = rng.standard_normal((m, k + 2)).astype(dtype)
    b: npt.NDArray = rng.standard_normal((n, k)).astype(dtype)
    c = rng.standard_normal((m, n + 1)).astype(np.float32)
    with device.alloc(a.nbytes, "a") as da, device.alloc(b.nbytes, "b") as db, device.alloc(c.nbytes, "c") as dc:
        for buffer, array in ((da, a), (db, b), (dc, c)):
            device.upload(buffer, array)
        device.gemm(da, db, dc, m, n, k, dtype=dtype, accumulate=accumulate, lda=k + 2, ldc=n + 1)
        got = device.download(dc, c.shape, np.float32)
        want = a[:, :k].astype(np.float64) @ b.astype(np.float64).T + accumulate * c[:, :n]
        np.testing.assert_allclose(got[:, :n], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(got[:, n], c[:, n])
        with pytest.raises(DeviceError, match="leaves 'b'"):
            device.gemm(da, db, dc, m, n + 1, k, dtype=dtype)
        with pytest.raises(DeviceError, match="not int8"):
            device.gemm(da, db, dc, m, n, k, dtype=np.int8)


def test_graph_replays_what_was_enqueued(device: Device) -> None:
    kernel = device.kernel("signatures", "add_optional")
    stream = device.stream()
    with device.alloc(16, "x") as x, device.alloc(16, "y") as y:
        device.upload(x, np.ones(4, np.float32))
        with device.capture(stream) as graph:
            device.launch(kernel, 1, 4, (x, x), stream=stream)
            device.copy(y, x, 16, stream=stream)
            with pytest.raises(DeviceError, match="capture"):
                device.download(x, (4,), np.float32)
        np.testing.assert_array_equal(device.download(x, (4,), np.float32), np.ones(4))  # captured, not run
        before = device.counters.snapshot()
        for _ in range(3):
            device.replay(graph, stream)
        np.testing.assert_array_equal(device.download(y, (4,), np.float32), np.full(4, 8))
        assert device.counters - before == Counters(replays=3, synchronisations=1, d2h_copies=1, d2h_bytes=16)
        graph.close()


def test_counters(device: Device) -> None:
    event = device.event()
    with device.alloc(64, "a") as a, device.alloc(64, "b") as b:
        device.upload(a, np.ones(16, np.float32))
        device.copy(b, a, 32)
        device.gemm(a, a, b, 1, 1, 16)
        device.launch(device.kernel("signatures", "add_optional"), 1, 4, (b, None))
        device.record(event)
        device.wait(event)
        device.stream().synchronize()
        device.download(b, (2,), np.float64)
    assert device.counters == Counters(1, 1, 0, 2, 2, 2, 1, 64, 1, 16, 1, 32)
