"""Checks that both devices make before they touch memory: ranges of copies, launch arguments, operands of `gemm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from m40llm.device.buffers import DeviceBuffer, DeviceMemory, DevicePointer, as_pointer
from m40llm.device.errors import DeviceError, LaunchError
from m40llm.device.protocol import Argument
from m40llm.device.signature import KernelSignature, check_count, check_scalar


def check_range(device: object, memory: DeviceMemory, offset: int, nbytes: int) -> DevicePointer:
    """`nbytes` bytes of `memory` from `offset` on. DeviceError if they leave it, or if it is another device's."""
    pointer = as_pointer(memory)
    if pointer.buffer.device is not device:
        raise DeviceError(f"buffer '{pointer.name}' belongs to another device")
    return pointer.view(offset, nbytes)


def contiguous_bytes(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, C-contiguous. DeviceError for Python objects, which have no bytes to copy."""
    if array.dtype.hasobject:
        raise DeviceError(f"cannot upload an array of {array.dtype}")
    return np.ascontiguousarray(array)


def check_arguments(
    device: object, signature: KernelSignature, args: Sequence[Argument]
) -> list[DevicePointer | np.generic | None]:
    """Launch arguments as pointers and typed scalars. LaunchError unless they fit the signature exactly."""
    check_count(signature, len(args))
    checked: list[DevicePointer | np.generic | None] = []
    for index, (argument, parameter) in enumerate(zip(args, signature.parameters, strict=True)):
        where = f"{signature.symbol}: argument {index} ('{parameter.name}')"
        if isinstance(argument, DeviceBuffer | DevicePointer):
            if not parameter.is_pointer:
                raise LaunchError(f"{where} is device memory; the kernel declares {parameter.description}")
            pointer = as_pointer(argument)
            if pointer.buffer.device is not device:
                raise LaunchError(f"{where}: buffer '{pointer.name}' belongs to another device")
            _ = pointer.ptr  # a closed buffer raises here, not on the card
            checked.append(pointer)
        elif argument is None and parameter.is_pointer:
            checked.append(None)
        else:
            check_scalar(signature, index, argument)
            checked.append(argument)
    return checked


def check_gemm(
    device: object,
    operands: tuple[DeviceMemory, DeviceMemory, DeviceMemory],
    sizes: tuple[int, int, int],
    pitches: tuple[int, int, int],
    dtype: np.dtype[Any],
) -> tuple[DevicePointer, DevicePointer, DevicePointer]:
    """A, B and C as pointers. DeviceError for a type that cuBLAS does not take or for operands that are too small."""
    if dtype not in (np.dtype(np.float32), np.dtype(np.float16)):
        raise DeviceError(f"gemm multiplies float32 or float16, not {dtype}")
    m, n, k = sizes
    if min(sizes) < 1 or pitches[0] < k or pitches[1] < k or pitches[2] < n:
        raise DeviceError(f"gemm: sizes m={m} n={n} k={k} with row pitches {pitches}")
    spans = zip((m, n, m), (k, k, n), pitches, (dtype.itemsize, dtype.itemsize, 4), strict=True)
    a, b, c = (
        check_range(device, operand, 0, ((rows - 1) * pitch + columns) * itemsize)
        for operand, (rows, columns, pitch, itemsize) in zip(operands, spans, strict=True)
    )
    return a, b, c
