"""Buffers have one owner: whatever fails, and whenever, nothing stays on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from m40llm.config import ModelConfig
from m40llm.device import DeviceError, OutOfDeviceMemory
from m40llm.device.emulator import EmulatorDevice
from m40llm.gguf import GGUFFile, TensorType
from m40llm.ops.cuda import CudaOps
from m40llm.plan import Segment, StepLimits, StepPlan
from m40llm.session import DecodeSession
from m40llm.weights import load_weights
from tests.tiny_gguf import build_tiny_gguf

LIMITS = StepLimits(rows=8, segments=2, logit_rows=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return build_tiny_gguf(folder / "tiny.gguf", arch="qwen2", n_layers=1, head_dim=64, types={"*": TensorType.Q8_0})


def open_session(path: Path, device: EmulatorDevice) -> DecodeSession:
    """As `Model.open` does it: the backend is closed by whoever fails to build on it."""
    ops = CudaOps(device)
    with GGUFFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        try:
            weights = load_weights(file, config, ops, 32)
        except BaseException:
            ops.close()
            raise
        return DecodeSession(config, weights, ops, slots=2, context=32, kv_dtype="f16", limits=LIMITS)


def test_every_allocation_is_freed_at_close(path: Path) -> None:
    device = EmulatorDevice("fast")
    session = open_session(path, device)
    assert device.counters.allocations == len(device.live_buffers()) > 20
    session.close()
    assert device.live_buffers() == []
    assert device.counters.frees == device.counters.allocations
    session.close()  # a second time does nothing
    assert device.counters.frees == device.counters.allocations


def test_a_failure_at_any_allocation_leaves_nothing_behind(path: Path) -> None:
    device = EmulatorDevice("fast")
    open_session(path, device).close()
    for nth in range(1, device.counters.allocations + 1):
        failing = EmulatorDevice("fast")
        failing.fail_at_allocation = nth
        with pytest.raises(OutOfDeviceMemory):
            open_session(path, failing)
        assert failing.live_buffers() == []
        assert failing.counters.allocations == failing.counters.frees == nth - 1


def test_a_device_that_somebody_else_owns_stays_open(path: Path) -> None:
    device = EmulatorDevice("fast")
    foreign = device.alloc(16, "somebody else's")
    CudaOps(device, owns_device=False).close()
    with pytest.raises(DeviceError, match="somebody else's"):
        CudaOps(device).close()
    foreign.close()


def test_graphs_close_with_their_backend(path: Path) -> None:
    device = EmulatorDevice("check")
    ops = CudaOps(device, decode_graph=True)
    with GGUFFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        weights = load_weights(file, config, ops, 32)
    with DecodeSession(config, weights, ops, slots=2, context=32, kv_dtype="f16", limits=LIMITS) as session:
        for position in range(3):
            session.run(StepPlan.pack([Segment(0, position, [7], [0])]))
        (step,) = ops._graphs
        graph = step._graph
        assert graph is not None
        assert graph.work  # type: ignore[attr-defined]
    assert not graph.work  # type: ignore[attr-defined]
    assert device.live_buffers() == []
