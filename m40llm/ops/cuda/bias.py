"""Launcher of `bias_f32` in kernels/elementwise.cu: a bias where no projection kernel adds it."""

from __future__ import annotations

from typing import Any

import numpy as np

from m40llm.device.protocol import Device
from m40llm.ops.cuda.tensor import DeviceTensor

_THREADS = 256


def spread_bias(device: Device, y: DeviceTensor, bias: DeviceTensor, *, add: bool, stream: Any = None) -> None:
    """Every row of y (T, N) = bias (N,), or += bias with `add`; float32. At most 65,535 rows, CUDA's limit of a grid.

    Raises:
        ValueError: another shape or dtype.
    """
    rows, width = y.shape
    args = (y.require("y", (rows, width)), bias.require("the bias", (width,)), np.int32(width), np.int32(add))
    device.launch(
        device.kernel("elementwise", "bias_f32"), (-(-width // _THREADS), rows), _THREADS, args, stream=stream
    )
