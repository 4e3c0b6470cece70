"""Launchers of kernels/embed.cu and kernels/dequant.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from m40llm.device.protocol import Device
from m40llm.ops.cuda.pack import UNIT, CudaMatrix
from m40llm.ops.cuda.tensor import DeviceTensor

_UNITS_PER_BLOCK = 32
_DEQUANT_THREADS = 128


def embed(device: Device, table: CudaMatrix, token_ids: DeviceTensor, x: DeviceTensor, stream: Any = None) -> None:
    """x[t] = row token_ids[t] of `table` (V, D), dequantised exactly. token_ids (T,) int32, x (T, D) float32.

    Raises:
        ValueError: another shape or dtype. (An id outside the table stops the kernel.)
    """
    rows = len(token_ids)
    args = (
        table.buffer,
        token_ids.require("token_ids", (rows,), np.int32),
        x.require("x", (rows, table.columns)),
        np.int32(table.rows),
        np.int32(table.columns),
    )
    units = -(-table.columns // UNIT)
    kernel = device.kernel("embed", f"embed_{table.fmt.name}")
    device.launch(kernel, (rows, -(-units // _UNITS_PER_BLOCK)), _UNITS_PER_BLOCK, args, stream=stream)


def dequantize(device: Device, matrix: CudaMatrix, out: DeviceTensor, stream: Any = None) -> None:
    """out (N, K) = the whole matrix, exactly in float32, rounded once more in float16.

    Raises:
        ValueError: `out` has another shape, or a dtype other than these two.
    """
    half = out.dtype == np.float16
    memory = out.require("out", (matrix.rows, matrix.columns), np.float16 if half else np.float32)
    args = (
        matrix.buffer,
        None if half else memory,
        memory if half else None,
        np.int32(matrix.rows),
        np.int32(matrix.columns),
    )
    threads = matrix.rows * -(-matrix.columns // UNIT)
    kernel = device.kernel("dequant", f"dequant_{matrix.fmt.name}")
    device.launch(kernel, -(-threads // _DEQUANT_THREADS), _DEQUANT_THREADS, args, stream=stream)
