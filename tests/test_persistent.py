"""The persistent worker in the emulator, where a launch runs to its end: a mailbox filled beforehand, with a stop."""

from __future__ import annotations

import numpy as np
import pytest

from m40llm.device.emulator import EmulatorDevice
from m40llm.device.errors import DeviceError, KernelFault
from m40llm.device.persistent import PersistentWorker
from tests.cuda_arrays import Arrays


@pytest.fixture(scope="module", params=["check", "kasan"])
def device(request: pytest.FixtureRequest) -> EmulatorDevice:
    return EmulatorDevice(request.param, timeout_ms=20_000)


@pytest.mark.parametrize("blocks", [1, 3, None])
def test_entries_are_worked_off_until_the_stop(device: EmulatorDevice, blocks: int | None) -> None:
    """More values than a grid has threads, a part of the area, an empty entry; the ring is as large as what is posted."""
    values = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    expected = values.astype(np.float64)
    jobs = [(0.5, 0, 2000, 1500), (-2.0, 10, 3999, 1), (1.0, 7, 7, 0), (3.0, 100, 3600, 77)]
    with Arrays(device) as arrays:
        area = arrays.put(values)
        with PersistentWorker(device, area.memory, capacity=len(jobs) + 1, blocks=blocks, concurrent=False) as worker:
            numbers = [worker.submit(*job) for job in jobs]
            assert numbers == [1, 2, 3, 4]
            worker.stop()
            assert worker.poll() == 0
            worker.start()
            assert worker.poll() == len(jobs) + 1
            worker.wait(numbers[-1], timeout_s=0)
        for scale, x, y, count in jobs:
            expected[y : y + count] += scale * expected[x : x + count]
        assert np.abs(arrays.get(area) - expected).max() < 1e-5


def test_entries_that_depend_on_each_other_race(device: EmulatorDevice) -> None:
    """What the documentation forbids, the emulator finds."""
    if device.mode != "check":
        return
    with Arrays(device) as arrays:
        area = arrays.zeros((1200,))
        with PersistentWorker(device, area.memory, blocks=3, concurrent=False) as worker:
            worker.submit(1.0, 0, 600, 600)
            worker.submit(1.0, 700, 100, 300)  # writes what another block reads for the first one
            worker.stop()
            with pytest.raises(KernelFault, match="race"):
                worker.start()


def test_wrong_use_is_refused(device: EmulatorDevice) -> None:
    with Arrays(device) as arrays:
        area = arrays.zeros((16,))
        with PersistentWorker(device, area.memory, capacity=2, concurrent=False) as worker:
            with pytest.raises(DeviceError, match="post the work and the stop before the start"):
                worker.start()
            for place in ((0, 10, 7), (-1, 0, 1), (0, 0, -1)):
                with pytest.raises(DeviceError, match="leave an area of 16"):
                    worker.submit(1.0, *place)
            worker.submit(1.0, 0, 8, 8)
            worker.stop()
            worker.stop()
            with pytest.raises(DeviceError, match="has been stopped"):
                worker.submit(1.0, 0, 8, 8)
            worker.start()
            with pytest.raises(DeviceError, match="started before"):
                worker.start()
        with PersistentWorker(device, area.memory, capacity=1, concurrent=False) as worker:
            worker.submit(1.0, 0, 8, 8)
            with pytest.raises(DeviceError, match="1 entries are in flight"):
                worker.submit(1.0, 0, 8, 8)
            with pytest.raises(DeviceError, match="not done within 0 s"):
                worker.wait(1, timeout_s=0)
    assert device.live_buffers() == []


@pytest.mark.gpu
def test_on_a_card_the_host_posts_while_the_kernel_runs() -> None:
    from m40llm.device.choose import choose_device, open_device

    card = open_device(choose_device("cuda"))
    with Arrays(card) as arrays:
        area = arrays.put(np.array([1.0] * 300 + [0.0] * 300, np.float32))
        with PersistentWorker(card, area.memory, capacity=4) as worker:
            worker.start()
            for _ in range(10):  # more than the ring holds: it comes round
                worker.wait(worker.submit(1.0, 0, 300, 300))
        assert arrays.get(area).tolist() == [1.0] * 300 + [10.0] * 300
