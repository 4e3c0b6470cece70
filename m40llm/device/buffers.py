"""Device memory as values: a buffer owns an allocation, a pointer is a place in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from m40llm.device.errors import BufferClosed, DeviceError


class DeviceBuffer:
    """One allocation, owned by one object and freed by `close()` (idempotent) or by leaving its `with` block.

    Made by `Device.alloc`. `nbytes` is its size as asked for; the address is aligned to 256 bytes.
    """

    def __init__(self, device: object, address: int, nbytes: int, name: str, release: Callable[[], None]):
        self.device = device
        self.name = name
        self.nbytes = nbytes
        self._address = address
        self._release: Callable[[], None] | None = release

    @property
    def closed(self) -> bool:
        return self._release is None

    @property
    def ptr(self) -> int:
        """Address of the first byte. Raises BufferClosed after `close()`."""
        if self._release is None:
            raise BufferClosed(f"device buffer '{self.name}' was used after close()")
        return self._address

    def view(self, offset: int = 0, nbytes: int | None = None) -> DevicePointer:
        """A pointer to `nbytes` bytes from byte `offset` on (None: to the end). DeviceError if that leaves the buffer."""
        return DevicePointer(self, 0, self.nbytes).view(offset, nbytes)

    def close(self) -> None:
        """Frees the memory; a second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DeviceBuffer({self.name!r}, {self.nbytes} bytes{', closed' if self.closed else ''})"


@dataclass(frozen=True)
class DevicePointer:
    """`nbytes` bytes of `buffer` from byte `offset` on. What a kernel may touch through it is checked by the emulator."""

    buffer: DeviceBuffer
    offset: int
    nbytes: int

    @property
    def ptr(self) -> int:
        """Address of the first byte. Raises BufferClosed once the buffer is closed."""
        return self.buffer.ptr + self.offset

    @property
    def name(self) -> str:
        return self.buffer.name

    def view(self, offset: int = 0, nbytes: int | None = None) -> DevicePointer:
        """A part of this part. DeviceError if it does not lie inside."""
        size = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise DeviceError(
                f"view of {size} bytes at byte {offset} leaves '{self.name}', of which {self.nbytes} bytes are in reach"
            )
        return DevicePointer(self.buffer, self.offset + offset, size)

    def __add__(self, nbytes: int) -> DevicePointer:
        """The rest from `nbytes` further on, as pointer arithmetic on a `char*`."""
        return self.view(nbytes)


DeviceMemory = DeviceBuffer | DevicePointer


def as_pointer(memory: DeviceMemory) -> DevicePointer:
    """The whole of a buffer, or the pointer itself."""
    return memory.view() if isinstance(memory, DeviceBuffer) else memory
