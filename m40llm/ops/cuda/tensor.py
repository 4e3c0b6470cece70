"""DeviceTensor: a shape and a dtype on device memory. It owns nothing; whoever allocated the buffer closes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from m40llm.device.buffers import DeviceBuffer, DeviceMemory, DevicePointer, as_pointer
from m40llm.device.protocol import Device


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A contiguous, row-major tensor at the start of `memory`, which reaches to its end and no further."""

    memory: DevicePointer
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def at(cls, memory: DeviceMemory, shape: tuple[int, ...], dtype: DTypeLike, offset: int = 0) -> DeviceTensor:
        """A tensor `offset` bytes into `memory`.

        Raises:
            DeviceError: it does not fit.
        """
        kind = np.dtype(dtype)
        return cls(as_pointer(memory).view(offset, math.prod(shape) * kind.itemsize), tuple(shape), kind)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> DeviceTensor:
        """Rows start:stop of the first axis, without a copy. Raises IndexError for a step or rows outside the tensor."""
        start, stop, step = rows.start or 0, self.shape[0] if rows.stop is None else rows.stop, rows.step
        if step not in (None, 1) or not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(
                f"rows {start}:{stop}{'' if step is None else f':{step}'} of a tensor of shape {self.shape}"
            )
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return DeviceTensor.at(self.memory, (stop - start, *self.shape[1:]), self.dtype, start * row_bytes)

    def reshape(self, *shape: int) -> DeviceTensor:
        """The same elements in another shape. Raises ValueError if the number of elements differs."""
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"a tensor of shape {self.shape} cannot become {shape}")
        return DeviceTensor(self.memory, shape, self.dtype)

    def require(self, what: str, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> DevicePointer:
        """The memory, for a launch. Raises ValueError, naming `what`, unless shape and dtype are these."""
        if self.shape != shape or self.dtype != np.dtype(dtype):
            raise ValueError(f"{what} is {self.dtype} {self.shape}; the kernel needs {np.dtype(dtype)} {shape}")
        return self.memory


def empty(device: Device, shape: tuple[int, ...], dtype: DTypeLike, name: str) -> tuple[DeviceBuffer, DeviceTensor]:
    """A new buffer, for the caller to close, and the uninitialised tensor that fills it."""
    buffer = device.alloc(max(1, math.prod(shape) * np.dtype(dtype).itemsize), name)
    return buffer, DeviceTensor.at(buffer, shape, dtype)


def upload(device: Device, tensor: DeviceTensor, values: NDArray[Any]) -> None:
    """Enqueues a copy of `values` into the tensor. Raises ValueError for another shape or dtype."""
    tensor.require("the destination", values.shape, values.dtype)
    device.upload(tensor.memory, values)


def download(device: Device, tensor: DeviceTensor) -> NDArray[Any]:
    """Waits for the device and returns the tensor as a new array."""
    return device.download(tensor.memory, tensor.shape, tensor.dtype)
