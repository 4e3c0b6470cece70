"""Arrays on a device for the kernel tests: inputs are copied in, outputs start as NaN (or -1), everything is closed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from m40llm.device import Device
from m40llm.device.choose import choose_device, open_device
from m40llm.device.emulator import EmulatorDevice
from m40llm.ops.cuda import tensor
from m40llm.ops.cuda.tensor import DeviceTensor

# Every grid runs in the emulator, and on a card where there is one (pytest -m gpu).
DEVICES = ["check", pytest.param("cuda", marks=pytest.mark.gpu)]


def kernel_device(kind: str) -> Device:
    """The emulator in its "check" mode, or the card that "cuda" means."""
    return EmulatorDevice("check") if kind == "check" else open_device(choose_device(kind))


class Arrays:
    """Owns the buffers of one test; a context manager."""

    def __init__(self, device: Device):
        self.device = device
        self._open = ExitStack()

    def put(self, values: NDArray[Any], name: str = "input") -> DeviceTensor:
        """A copy of `values` in a buffer of exactly its size: one element too far is a fault in the emulator."""
        buffer, result = tensor.empty(self.device, values.shape, values.dtype, name)
        self._open.enter_context(buffer)
        tensor.upload(self.device, result, np.ascontiguousarray(values))
        return result

    def poisoned(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32, name: str = "output") -> DeviceTensor:
        """NaN for floats, all bits set for integers: a place that no thread writes shows."""
        kind = np.dtype(dtype)
        values = np.full(shape, np.nan, kind) if kind.kind == "f" else ~np.zeros(shape, kind)
        return self.put(values, name)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32, name: str = "scratch") -> DeviceTensor:
        return self.put(np.zeros(shape, dtype), name)

    def get(self, values: DeviceTensor) -> NDArray[Any]:
        return tensor.download(self.device, values)

    def __enter__(self) -> Arrays:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
