"""Asks NVML whether somebody else computes on a card: timings and free memory would not be ours alone."""

from __future__ import annotations

import ctypes
import os

_INSUFFICIENT_SIZE = 7
_MAX_PROCESSES = 64


class _ProcessInfo(ctypes.Structure):
    """nvml.h, nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def other_compute_processes(pci_bus_id: str, library: str = "libnvidia-ml.so.1") -> list[int] | None:
    """Process ids, but for our own, that compute on the card. None if NVML is missing or does not say."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        handle, count = ctypes.c_void_p(), ctypes.c_uint(_MAX_PROCESSES)
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(handle)):
            return None
        processes = (_ProcessInfo * _MAX_PROCESSES)()
        status = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes)
        if status not in (0, _INSUFFICIENT_SIZE):
            return None
        return [p.pid for p in processes[: min(count.value, _MAX_PROCESSES)] if p.pid != os.getpid()]
    except AttributeError:  # an NVML too old for a function
        return None
    finally:
        nvml.nvmlShutdown()
