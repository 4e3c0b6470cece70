"""Memory for weights and small KV caches in large mappings that the system may back with 2 MB pages.

A model is hundreds of matrices, most of them too small for large pages on their own; read as a stream, 4 KB pages cost a
tenth of the memory's speed and more (page walks, and prefetching that stops at every page).
"""

import contextlib
import mmap
from typing import Any

import numpy as np

__all__ = ["Arena"]

ALIGNMENT = 64
LARGE_PAGE = 2 << 20


class Arena:
    """Hands out parts of large anonymous mappings, all zeros. A mapping is returned to the system when its last array is gone.

    Pages that are never written take no memory, so a chunk's unused end costs address space only. `used` is what was handed
    out so far, in bytes.
    """

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self.used = 0
        self._rest = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray:
        """A C-contiguous array whose address is a multiple of 64, in the order of the calls. Raises MemoryError."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        taken = -(-size // ALIGNMENT) * ALIGNMENT
        if taken > len(self._rest):
            self._rest = self._map(max(taken, self._chunk_bytes))
        array, self._rest = self._rest[:size], self._rest[taken:]
        self.used += taken
        return array.view(dtype).reshape(shape)

    @staticmethod
    def _map(size: int) -> np.ndarray:
        try:
            mapping = mmap.mmap(-1, size + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for {size / 1e6:.0f} MB of weights: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; elsewhere the pages stay small
            with contextlib.suppress(OSError):  # a kernel without large pages: nothing is lost but speed
                mapping.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(mapping, np.uint8)
        start = -raw.ctypes.data % LARGE_PAGE
        return raw[start : start + size]
