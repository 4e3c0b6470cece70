"""What the tests of the CUDA projections share: random matrices of every type, tensors on a device, the reference."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from m40llm.device import Device
from m40llm.gguf import BLOCKS, TensorType, dequantize
from m40llm.ops.cuda.pack import CudaMatrix, upload_matrix
from m40llm.ops.cuda.tensor import DeviceTensor, download, empty, upload
from tests.tiny_gguf import random_blocks

ALL_TYPES = tuple(BLOCKS)


class Bench:
    """A device with the buffers of one test, all closed at the end. `weights[name]` are matrices as float64."""

    def __init__(self, device: Device, seed: int = 0):
        self.device = device
        self.rng = np.random.default_rng(seed)
        self.stack = ExitStack()
        self.weights: dict[str, np.ndarray] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *unused: Any) -> None:
        self.stack.close()

    def raw(self, kind: TensorType, rows: int, columns: int) -> np.ndarray:
        return random_blocks(self.rng, kind, rows, columns, 0.05)

    def matrix(self, kind: TensorType, rows: int, columns: int, name: str = "w") -> CudaMatrix:
        raw = self.raw(kind, rows, columns)
        self.weights[name] = dequantize(raw, kind).astype(np.float64)
        matrix = upload_matrix(self.device, raw, kind, name)
        self.stack.callback(matrix.close)
        return matrix

    def tensor(self, values: np.ndarray, name: str = "x") -> DeviceTensor:
        tensor = self.empty(values.shape, values.dtype, name)
        upload(self.device, tensor, values)
        return tensor

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32, name: str = "y") -> DeviceTensor:
        """Uninitialised: the emulator fills it with NaN."""
        buffer, tensor = empty(self.device, shape, dtype, name)
        self.stack.callback(buffer.close)
        return tensor

    def activations(self, rows: int, columns: int) -> np.ndarray:
        """Normal, with the outliers that a residual stream has."""
        x = self.rng.standard_normal((rows, columns)) * np.exp(self.rng.standard_normal((rows, columns)))
        return x.astype(np.float32)

    def read(self, tensor: DeviceTensor) -> np.ndarray:
        return download(self.device, tensor)


def product_error(got: np.ndarray, x: np.ndarray, w: np.ndarray, plus: np.ndarray | float = 0.0) -> float:
    """Largest |got - (x @ w.T + plus)| in units of the sum of |x·w|: rounding of an FP32 sum is about 1e-7 on this scale."""
    exact = x.astype(np.float64) @ w.T + plus
    scale = np.abs(x).astype(np.float64) @ np.abs(w).T + np.abs(plus)
    return float((np.abs(got - exact) / scale).max())
