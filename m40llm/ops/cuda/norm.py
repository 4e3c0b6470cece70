"""Launchers of kernels/norm.cu (or norm_ldg.cu) and kernels/elementwise.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from m40llm.device.protocol import Device
from m40llm.ops.cuda.staged import Staged, batch_of
from m40llm.ops.cuda.tensor import DeviceTensor

_NORM_THREADS = 256
_ELEMENTWISE_THREADS = 256
_ELEMENTWISE_VALUES = 4  # of a thread


def rmsnorm(
    device: Device,
    x: DeviceTensor,
    weight: DeviceTensor,
    eps: float,
    out: DeviceTensor | Staged,
    *,
    rows: DeviceTensor | None = None,
    ldg: bool = False,
    stream: Any = None,
) -> None:
    """out (T, D) = x / sqrt(mean(x^2) + eps) * weight, float32; row t comes from x[rows[t]] if `rows` (T,) int32 is given.

    `ldg` takes the variant that loads through the read-only cache.

    Raises:
        ValueError: another shape or dtype.
    """
    count, width = out.shape
    source = x.require("x", (count if rows is None else len(x), width))
    args = (
        source,
        None if rows is None else rows.require("rows", (count,), np.int32),
        weight.require("the norm's weight", (width,)),
        out.require("out", (count, width)),
        np.int32(width),
        np.float32(eps),
    )
    if isinstance(out, Staged):
        staged = (*args, np.int32(batch_of(count)), *(np.int32(number) for number in out.types))
        device.launch(device.kernel(_module(ldg), "rmsnorm_staged_f32"), count, _NORM_THREADS, staged, stream=stream)
        return
    device.launch(device.kernel(_module(ldg), "rmsnorm_f32"), count, _NORM_THREADS, args, stream=stream)


def rmsnorm_add(
    device: Device,
    x: DeviceTensor,
    delta: DeviceTensor,
    weight: DeviceTensor,
    eps: float,
    out: DeviceTensor,
    *,
    ldg: bool = False,
    stream: Any = None,
) -> None:
    """x (T, D) += delta (T, D), then out (T, D) = rmsnorm of the sum; float32.

    Raises:
        ValueError: another shape or dtype.
    """
    count, width = x.shape
    args = (
        x.require("x", (count, width)),
        delta.require("delta", (count, width)),
        weight.require("the norm's weight", (width,)),
        out.require("out", (count, width)),
        np.int32(width),
        np.float32(eps),
    )
    device.launch(device.kernel(_module(ldg), "rmsnorm_add_f32"), count, _NORM_THREADS, args, stream=stream)


def swiglu(device: Device, gate: DeviceTensor, up: DeviceTensor, out: DeviceTensor, stream: Any = None) -> None:
    """out = silu(gate) * up, float32, all of one shape; `out` may be one of the inputs. ValueError for other shapes."""
    _elementwise(device, "swiglu_f32", (gate, up, out), stream)


def geglu(device: Device, gate: DeviceTensor, up: DeviceTensor, out: DeviceTensor, stream: Any = None) -> None:
    """out = gelu(gate) * up with the tanh form of gelu, otherwise as `swiglu`."""
    _elementwise(device, "geglu_f32", (gate, up, out), stream)


def add(device: Device, x: DeviceTensor, y: DeviceTensor, stream: Any = None) -> None:
    """x += y, float32, of one shape. ValueError for other shapes."""
    _elementwise(device, "add_f32", (x, y), stream)


def _module(ldg: bool) -> str:
    return "norm_ldg" if ldg else "norm"


def _elementwise(device: Device, symbol: str, tensors: tuple[DeviceTensor, ...], stream: Any) -> None:
    shape = tensors[0].shape
    pointers = [t.require(f"operand {i} of {symbol}", shape) for i, t in enumerate(tensors)]
    count = int(np.prod(shape))
    blocks = -(-count // (_ELEMENTWISE_THREADS * _ELEMENTWISE_VALUES))
    kernel = device.kernel("elementwise", symbol)
    device.launch(kernel, blocks, _ELEMENTWISE_THREADS, (*pointers, np.int64(count)), stream=stream)
