"""Open GGUF models: one memory-mapped file, or all parts of a split one, as a single set of metadata and tensors."""

from __future__ import annotations

import mmap
import os
import re
import stat
from contextlib import ExitStack, suppress
from types import TracebackType

import numpy as np

from m40llm.gguf.dequant import dequantize
from m40llm.gguf.errors import GGUFError, UnsupportedTypeError, quote
from m40llm.gguf.metadata import Metadata
from m40llm.gguf.parse import Header, TensorInfo, parse_header
from m40llm.gguf.types import BLOCKS

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class _Part:
    """One mapped file. Owns its descriptor and its mapping."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = _open_regular(path)
        try:
            self.mapping = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            os.close(self.descriptor)
            raise GGUFError(path, f"cannot be mapped ({error})", "Copy the file to a local disk") from error

    def close(self) -> None:
        os.close(self.descriptor)
        with suppress(BufferError):  # views from data() still in use: the mapping goes when the last of them does
            self.mapping.close()


def _open_regular(path: str) -> int:
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise GGUFError(path, "this is a directory", "Give the path of the .gguf file in it")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise GGUFError(path, "this is not a regular file", "Give the path of a .gguf file on a disk")
        if status.st_size == 0:
            raise GGUFError(path, "the file is empty", "Download it again")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except GGUFError:
        raise
    except FileNotFoundError as error:
        raise GGUFError(path, "there is no such file", "Check the path") from error
    except PermissionError as error:
        raise GGUFError(path, "permission to read it is denied", "Change its permissions") from error
    except (OSError, ValueError) as error:
        raise GGUFError(path, f"cannot be opened ({error})", "Check the path") from error


class GGUFFile:
    """An open GGUF model. A context manager; arrays from `data` stay valid after `close`, everything else does not.

    Attributes:
        path: the file that was opened (of a split model: its first part).
        parts: paths of all files, one for an ordinary model.
        version: GGUF version, 2 or 3.
        alignment: of tensor offsets, in bytes.
        metadata: see `Metadata`; of a split model: that of its first part.
        tensors: name → `TensorInfo`, in file order.
    """

    def __init__(self, parts: list[_Part], headers: list[Header]) -> None:
        self._parts = parts
        self._closed = False
        self.path = parts[0].path
        self.parts = tuple(part.path for part in parts)
        self.version = headers[0].version
        self.alignment = headers[0].alignment
        self.metadata = Metadata(self.path, parts[0].mapping, headers[0].entries, headers[0].records)
        self.tensors: dict[str, TensorInfo] = {}
        for header in headers:
            for name, info in header.tensors.items():
                if name in self.tensors:
                    raise GGUFError(
                        parts[info.part].path, f"tensor {quote(name)} is in two parts", "Download the parts again"
                    )
                self.tensors[name] = info

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Open ``path``; for any part of a split model (``…-00001-of-0000N.gguf``), all of its parts.

        Raises GGUFError, in one line, for whatever is wrong with the file; the header's size bounds time and memory.
        """
        name = os.fspath(path)
        if isinstance(name, bytes):
            name = os.fsdecode(name)
        with ExitStack() as undo:
            first = _Part(name)
            undo.callback(first.close)
            header = parse_header(name, first.mapping)
            if _split_value(name, header, "split.count", 1) <= 1:
                opened = cls([first], [header])
            else:
                parts, headers = _open_split(name, header, undo)
                opened = cls(parts, headers)
                first.close()
            undo.pop_all()
        return opened

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({self.path!r}, v{self.version}, {len(self.metadata)} keys, {len(self.tensors)} tensors)"

    def close(self) -> None:
        """Release the files. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self.metadata.release()
        for part in self._parts:
            part.close()

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes as a read-only uint8 view of the mapping, (rows, bytes per row); 1 row for a vector.

        Raises GGUFError for an unknown name and UnsupportedTypeError for a type that m40llm cannot compute with.
        """
        info, row_bytes = self._layout(name)
        flat = np.frombuffer(self._part(info).mapping, dtype=np.uint8, count=info.nbytes, offset=info.offset)
        return flat.reshape(info.rows, row_bytes)

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` of the tensor's bytes, read into a fresh uint8 array, (stop - start, row bytes).

        Unlike `data` it leaves no mapped pages behind: the way to repack a model without holding it twice. ``stop``
        None is the end. Raises as `data` does, and IndexError for a range outside the tensor.
        """
        info, row_bytes = self._layout(name)
        stop = info.rows if stop is None else stop
        if not 0 <= start <= stop <= info.rows:
            raise IndexError(f"rows {start} to {stop} of tensor {name}, which has {info.rows}")
        part = self._part(info)
        out = np.empty((stop - start, row_bytes), dtype=np.uint8)
        view = out.reshape(-1).data
        position, done = info.offset + start * row_bytes, 0
        while done < len(view):  # one call reads 2 GiB at most
            count = os.preadv(part.descriptor, [view[done:]], position + done)
            if count == 0:
                raise GGUFError(part.path, "the file became shorter while it was open", "Load the model again")
            done += count
        return out

    def dequantize(self, name: str) -> np.ndarray:
        """The whole tensor as float32 in its own shape. Raises as `data` does."""
        info, _ = self._layout(name)
        return dequantize(self.data(name), info.type).reshape(info.shape)

    def tensor(self, name: str) -> TensorInfo:
        """The tensor's `TensorInfo`. Raises GGUFError that names the file if there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise GGUFError(
                self.path, f"tensor {quote(name)} is missing", "The model is incomplete; convert or download it again"
            ) from None

    def _part(self, info: TensorInfo) -> _Part:
        if self._closed:
            raise GGUFError(self.path, f"tensor {quote(info.name)} was asked for after close()", "Read it before")
        return self._parts[info.part]

    def _layout(self, name: str) -> tuple[TensorInfo, int]:
        info = self.tensor(name)
        block = BLOCKS.get(info.type)
        if block is None:
            raise UnsupportedTypeError(
                self._parts[info.part].path,
                f"tensor {quote(name)} has the type {info.type.name}, which m40llm does not support",
                "Use a file whose tensors are " + ", ".join(kind.name for kind in BLOCKS),
            )
        return info, block.row_bytes(info.columns)


def _split_value(path: str, header: Header, key: str, default: int) -> int:
    value = header.entries.get(key, (None, default))[1]
    if type(value) is not int or value < 0:
        raise GGUFError(path, f"metadata key '{key}' is not a count", "The file is malformed; split the model again")
    return value


def _open_split(path: str, header: Header, undo: ExitStack) -> tuple[list[_Part], list[Header]]:
    count = _split_value(path, header, "split.count", 1)
    match = _SPLIT_NAME.fullmatch(path)
    if match is None or int(match["count"]) != count:
        raise GGUFError(
            path,
            f"this is one of {count} parts of a split model, but its name does not say which",
            f"Name the parts NAME-00001-of-{count:05d}.gguf and so on",
        )
    paths = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    missing = [os.path.basename(other) for other in paths if not os.path.exists(other)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GGUFError(
            path, f"part {missing[0]}{more} of this split model is missing", "Put all parts into the same folder"
        )
    parts: list[_Part] = []
    headers: list[Header] = []
    for number, other in enumerate(paths):
        part = _Part(other)
        undo.callback(part.close)
        parsed = parse_header(other, part.mapping, number)
        claimed = _split_value(other, parsed, "split.no", 0), _split_value(other, parsed, "split.count", 1)
        if claimed != (number, count):
            raise GGUFError(
                other, f"its metadata do not say that it is part {number + 1} of {count}", "Download the parts again"
            )
        parts.append(part)
        headers.append(parsed)
    total = sum(len(h.tensors) for h in headers)
    expected = _split_value(paths[0], headers[0], "split.tensors.count", total)
    if total != expected:
        raise GGUFError(
            paths[0], f"its {count} parts hold {total} tensors instead of {expected}", "Download the parts again"
        )
    return parts, headers
