"""Write a copy of a model with its matrices in another type, in bounded memory.

The ``gguf`` package does the arithmetic. The container is written here: metadata are copied byte for byte, which the
package's writer cannot do (it refuses empty arrays and strings that are not UTF-8).
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, LlamaFileType
from gguf.quants import quantize as quantize_rows

from m40llm.gguf.dequant import dequantize
from m40llm.gguf.errors import GGUFError, UnsupportedTypeError, quote
from m40llm.gguf.parse import MAGIC, TensorInfo
from m40llm.gguf.reader import GGUFFile
from m40llm.gguf.types import BLOCKS, TensorType, ValueType

QuantizeType = Literal["q8_0", "q4_0", "f16"]

_TARGETS = {
    "q8_0": (TensorType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (TensorType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "f16": (TensorType.F16, LlamaFileType.MOSTLY_F16),
}
_CHUNK_WEIGHTS = 1 << 20  # 4 MB of float32, and a few times that inside the package
_FLOAT16_MAX = 65504.0
_OWN_KEYS = ("general.file_type", "general.quantization_version", "split.no", "split.count", "split.tensors.count")


class _Output(NamedTuple):
    source: TensorInfo
    type: TensorType
    nbytes: int


def quantize_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    type: QuantizeType,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write ``src`` to ``dst`` with its matrices as ``type``; ``dst`` appears whole or not at all. Returns ``dst``.

    Vectors become F32; a matrix whose width is no multiple of the type's block becomes F16. Already quantised matrices
    are dequantised first, so their error adds up. A split model becomes one file.

    Args:
        progress: called with (bytes written, bytes in all) of tensor data after each chunk.

    Raises:
        GGUFError: bad source, unsupported tensor type, unusable destination, full disk.
        ValueError: unknown ``type``.
    """
    if type not in _TARGETS:
        raise ValueError(f"type must be one of {', '.join(get_args(QuantizeType))}, not {type!r}")
    kind, file_type = _TARGETS[type]
    destination = Path(dst)
    with GGUFFile.open(src) as model:
        _check_destination(destination, model.parts)
        outputs = [_plan(model, info, kind) for info in model.tensors.values()]
        header = _header(model, outputs, file_type)
        total = len(header) + sum(_padded(output.nbytes, model.alignment) for output in outputs)
        free = shutil.disk_usage(destination.parent).free
        if free < total:
            raise GGUFError(
                dst, f"needs {total} bytes but its disk has {free} free", "Free some space or write elsewhere"
            )
        partial = destination.with_name(f"{destination.name}.{os.getpid()}.part")
        try:
            with open(partial, "wb") as stream:
                stream.write(header)
                _write_tensors(stream, model, outputs, progress)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, destination)
        except OSError as error:
            remedy = "Free some space" if error.errno == errno.ENOSPC else "Check the folder and its permissions"
            raise GGUFError(dst, f"cannot be written ({error.strerror or error})", remedy) from error
        finally:
            with suppress(FileNotFoundError):
                partial.unlink()
    return destination


def _check_destination(destination: Path, sources: tuple[str, ...]) -> None:
    if destination.is_dir():
        raise GGUFError(destination, "the output is a directory", "Give a file name in it")
    if destination.exists() and not destination.is_file():  # the final rename would replace a device node or a pipe
        raise GGUFError(destination, "the output is not a regular file", "Give another file name")
    if not destination.parent.is_dir():
        raise GGUFError(destination, "the output's folder does not exist", "Create it first")
    if destination.exists() and any(os.path.samefile(destination, source) for source in sources):
        raise GGUFError(destination, "the output is the input", "Give another file name")


def _plan(model: GGUFFile, info: TensorInfo, kind: TensorType) -> _Output:
    if info.type not in BLOCKS:
        raise UnsupportedTypeError(
            model.parts[info.part],
            f"tensor {quote(info.name)} has the type {info.type.name}, which m40llm cannot convert",
            "Quantise from an F16, BF16, F32 or Q8_0 file of the model",
        )
    if len(info.shape) == 1:
        kind = TensorType.F32
    elif info.columns % BLOCKS[kind].block_size:
        kind = TensorType.F16
    return _Output(info, kind, info.rows * BLOCKS[kind].row_bytes(info.columns))


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _header(model: GGUFFile, outputs: list[_Output], file_type: LlamaFileType) -> bytes:
    """Everything before the tensor data, padded to the alignment (GGUF specification, version 3)."""
    records = [model.metadata.record(key) for key in model.metadata if key not in _OWN_KEYS]
    for key, value in (("general.file_type", file_type), ("general.quantization_version", GGML_QUANT_VERSION)):
        records.append(_string(key) + struct.pack("<II", ValueType.UINT32, value))
    header = bytearray(MAGIC + struct.pack("<IQQ", 3, len(outputs), len(records)))
    header += b"".join(records)
    offset = 0
    for output in outputs:
        shape = output.source.shape
        header += _string(output.source.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += struct.pack("<IQ", output.type, offset)
        offset += _padded(output.nbytes, model.alignment)
    header += bytes(-len(header) % model.alignment)
    return bytes(header)


def _write_tensors(
    stream: BinaryIO, model: GGUFFile, outputs: list[_Output], progress: Callable[[int, int], None] | None
) -> None:
    done, total = 0, sum(output.nbytes for output in outputs)
    for output in outputs:
        info = output.source
        step = max(1, _CHUNK_WEIGHTS // info.columns)
        for start in range(0, info.rows, step):
            packed = model.read_rows(info.name, start, min(start + step, info.rows))
            if info.type is not output.type:
                packed = _convert(model, output, packed)
            stream.write(packed.data)
            done += packed.nbytes
            if progress is not None:
                progress(done, total)
        stream.write(bytes(-output.nbytes % model.alignment))


def _convert(model: GGUFFile, output: _Output, packed: np.ndarray) -> np.ndarray:
    weights = dequantize(packed, output.source.type)
    if output.type is TensorType.F16 and not np.abs(weights).max() <= _FLOAT16_MAX:  # also true of a NaN
        raise GGUFError(
            model.parts[output.source.part],
            f"tensor {quote(output.source.name)} holds weights outside float16's range",
            "Use another file of the model",
        )
    return np.ascontiguousarray(quantize_rows(weights, GGMLQuantizationType(int(output.type))))
