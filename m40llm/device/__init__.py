"""Devices: where kernels run, and what is counted about it."""

from m40llm.device.buffers import DeviceBuffer, DeviceMemory, DevicePointer
from m40llm.device.errors import (
    BufferClosed,
    DeviceError,
    DeviceUnavailable,
    KernelCompileError,
    KernelFault,
    LaunchError,
    OutOfDeviceMemory,
)
from m40llm.device.protocol import Counters, Device, Event, Graph, Kernel, Stream

__all__ = [
    "BufferClosed",
    "Counters",
    "Device",
    "DeviceBuffer",
    "DeviceError",
    "DeviceMemory",
    "DevicePointer",
    "DeviceUnavailable",
    "Event",
    "Graph",
    "Kernel",
    "KernelCompileError",
    "KernelFault",
    "LaunchError",
    "OutOfDeviceMemory",
    "Stream",
]
