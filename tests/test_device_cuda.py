"""The CuPy device. Without a card: what it says when CuPy is missing. With one (-m gpu): the protocol's tests run on it
(tests/test_device_protocol.py), and what only a card has is tested here."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from m40llm.device import DeviceUnavailable
from m40llm.device.choose import usable_card
from m40llm.device.cublas import find_library
from m40llm.device.cuda import CudaDevice, import_cupy
from m40llm.device.driver import Card

KERNELS = Path(__file__).parent / "kernels"


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here")
def test_missing_cupy_names_the_extra() -> None:
    with pytest.raises(DeviceUnavailable, match=r"CuPy cannot be imported .*; pip install '\.\[cuda12\]'"):
        import_cupy("sm_52")
    with pytest.raises(DeviceUnavailable, match=r"pip install '\.\[cuda13\]'"):
        CudaDevice(Card(0, "NVIDIA H200", (9, 0), 1 << 37, 132, "0000:01:00.0"))


@pytest.mark.skipif(importlib.util.find_spec("nvidia.cublas") is not None, reason="cuBLAS 12 is installed here")
def test_missing_cublas_names_the_extra_and_the_flag() -> None:
    with pytest.raises(
        DeviceUnavailable, match=r"cuBLAS 12 is not installed; pip install .*cuda12.*, or use --no-cublas"
    ):
        find_library(12)


@pytest.fixture
def card_device() -> Iterator[CudaDevice]:
    device = CudaDevice(usable_card(), kernel_dir=KERNELS)
    yield device
    device.close()


@pytest.mark.gpu
def test_streams_are_ordered_by_events(card_device: CudaDevice) -> None:
    device, first, second = card_device, card_device.stream(), card_device.stream(priority=-1)
    kernel = device.kernel("signatures", "add_optional")
    start, end = device.event(), device.event()
    with device.alloc(16, "x") as x:
        device.upload(x, np.ones(4, np.float32), stream=first)
        device.record(start, first)
        for _ in range(5):
            device.launch(kernel, 1, 4, (x, x), stream=first)
        device.record(end, first)
        device.wait(end, second)
        np.testing.assert_array_equal(device.download(x, (4,), np.float32, stream=second), np.full(4, 32))
        assert end.elapsed_ms(start) > 0


@pytest.mark.gpu
def test_a_gemm_can_be_captured(card_device: CudaDevice) -> None:
    device, stream = card_device, card_device.stream()
    with device.alloc(64, "a") as a, device.alloc(64, "c") as c:
        device.upload(a, np.ones((4, 4), np.float32), stream=stream)
        device.gemm(a, a, c, 4, 4, 4, stream=stream)  # cuBLAS is initialised outside of captures
        device.fill(c, 0, stream=stream)
        with device.capture(stream) as graph:
            device.gemm(a, a, c, 4, 4, 4, accumulate=True, stream=stream)
        for _ in range(3):
            device.replay(graph, stream)
        np.testing.assert_array_equal(device.download(c, (4, 4), np.float32, stream=stream), np.full((4, 4), 12))
        graph.close()


@pytest.mark.gpu
def test_a_second_thread_uses_the_same_card(card_device: CudaDevice) -> None:
    seen = []
    with card_device.alloc(16, "x") as x:
        card_device.upload(x, np.arange(4, dtype=np.float32))
        thread = threading.Thread(target=lambda: seen.append(card_device.download(x, (4,), np.float32)))
        thread.start()
        thread.join()
    np.testing.assert_array_equal(seen[0], np.arange(4))


@pytest.mark.gpu
def test_ieee_fma_keeps_subnormals_on_the_card(card_device: CudaDevice) -> None:
    """The unpacking of quantised weights rests on this; so does the emulator's model of it."""
    a, b = np.full(64, 2.0**60, np.float32), np.arange(64, dtype=np.uint32).view(np.float32)
    with ExitStack() as stack:
        buffers = [stack.enter_context(card_device.alloc(256, name)) for name in "abc"]
        y = stack.enter_context(card_device.alloc(1280, "y"))
        for buffer, array in zip(buffers, (a, b, np.zeros(64, np.float32)), strict=True):
            card_device.upload(buffer, array)
        card_device.launch(card_device.kernel("intrinsics", "fused"), 1, (32, 2), (*buffers, y))
        result = card_device.download(y, (5, 64), np.float32)
    np.testing.assert_array_equal(result[0], np.arange(64, dtype=np.float32) * np.float32(2.0**-89))
    assert not result[1].any()  # -ftz=true flushes the same weights in a plain multiplication
