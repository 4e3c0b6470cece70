"""Memory of the emulated device: guard pages around each allocation, poison inside, a canary behind."""

from __future__ import annotations

import ctypes
import mmap
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_ALIGNMENT = 256  # as cudaMalloc
_POISON = 0xFF  # NaN as float16, float32 and float64; -1 as an integer
_CANARY = 0xA5


class GuardedMemory:
    """`nbytes` bytes, 256-aligned, that end (up to that alignment) at an inaccessible page."""

    def __init__(self, nbytes: int):
        page = mmap.PAGESIZE
        rounded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        inner = -(-rounded // page) * page
        self._map_size = inner + 2 * page
        base = _LIBC.mmap(
            None, self._map_size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        if base == _MAP_FAILED:
            raise MemoryError(f"mmap of {self._map_size} bytes: {os.strerror(ctypes.get_errno())}")
        self._map: int = base
        _LIBC.mprotect(base, page, 0)
        _LIBC.mprotect(base + page + inner, page, 0)
        self.address = base + page + inner - rounded
        self._slack = rounded - nbytes
        self._end = self.address + nbytes
        ctypes.memset(self.address, _POISON, nbytes)
        ctypes.memset(self._end, _CANARY, self._slack)

    def overrun(self) -> int | None:
        """Distance in bytes behind the end of the first overwritten byte, or None."""
        slack = ctypes.string_at(self._end, self._slack)
        return (
            next((i for i, byte in enumerate(slack) if byte != _CANARY), None)
            if slack.strip(bytes([_CANARY]))
            else None
        )

    def free(self) -> None:
        _LIBC.munmap(self._map, self._map_size)
