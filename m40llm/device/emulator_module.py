"""A built kernel module, loaded: ctypes structures of the runtime, launches, and faults as exceptions."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from m40llm.device.buffers import DevicePointer
from m40llm.device.emulator_build import EmulatorModule
from m40llm.device.emulator_traffic import Traffic
from m40llm.device.errors import DeviceError, KernelFault
from m40llm.device.signature import POINTER
from m40llm.device.sources import HOST_DIR

ORDERS = ("forward", "reverse", "random")  # kernels/host/runtime.h, Order

# Stacks and signal handlers belong to the process: one launch at a time, one set of stacks for all modules.
_launching = threading.Lock()
_stacks: int | None = None


class _Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_size_t),
        ("end", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("races", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("ranges", ctypes.POINTER(_Range)),
        ("range_count", ctypes.c_uint64),
        ("traffic", ctypes.c_void_p),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("switches", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("fault_pc", ctypes.c_uint64),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("source", ctypes.c_char * 256),
        ("what", ctypes.c_char * 768),
    )


@dataclass(frozen=True)
class LaunchStatistics:
    """What one launch did: fiber switches, collective calls, completed barriers; `accesses` in check and kasan mode."""

    switches: int
    collectives: int
    barriers: int
    accesses: int


@dataclass(frozen=True)
class LaunchOptions:
    """How threads and blocks are ordered (ORDERS), whether races are sought, and the time limit (0: none)."""

    order: str = "forward"
    seed: int = 0
    races: bool = False
    timeout_ms: int = 0


class LoadedModule:
    """A module in this process. Kernels are looked up by symbol."""

    def __init__(self, module: EmulatorModule):
        global _stacks
        self._module = module
        self._library = ctypes.CDLL(str(module.library), mode=ctypes.RTLD_LOCAL)
        self._library.emu_module_base.restype = ctypes.c_void_p
        self._library.emu_create_stacks.restype = ctypes.c_void_p
        self._base: int = self._library.emu_module_base()
        with _launching:
            if _stacks is None:
                _stacks = self._library.emu_create_stacks()
                if _stacks is None:
                    raise DeviceError("the emulator cannot map the stacks of its threads")
            self._library.emu_use_stacks(ctypes.c_void_p(_stacks))
            # dlopen gives the same library again to a second device: its variables are registered once.
            if not self._library.emu_shared_count():
                for variable in module.shared:
                    address = ctypes.c_void_p(self._base + variable.offset)
                    self._library.emu_add_shared(address, ctypes.c_uint64(variable.size), variable.name.encode())
        self.kernels = module.kernels

    def letters(self, symbol: str) -> str:
        """Parameter types as the C++ compiler sees them: one letter each (signature.SCALAR_TYPES)."""
        function = getattr(self._library, f"emu_letters__{symbol}")
        function.restype = ctypes.c_char_p
        return function().decode()

    def launch(
        self,
        symbol: str,
        dimensions: tuple[int, int, int, int, int, int],
        shared_bytes: int,
        arguments: Sequence[DevicePointer | np.generic | None],
        options: LaunchOptions,
        traffic: Traffic | None = None,
    ) -> LaunchStatistics:
        """Runs a kernel; `dimensions` is grid x, y, z, block x, y, z. Its traffic is added to `traffic`. Raises KernelFault.

        Argument types must have been checked against the signature.
        """
        parameters = self.kernels[symbol].parameters
        values = [_c_value(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        reachable = [(a, p) for a, p in zip(arguments, parameters, strict=True) if isinstance(a, DevicePointer)]
        ranges = (_Range * max(len(reachable), 1))()
        for entry, (pointer, parameter) in zip(ranges, reachable, strict=False):
            entry.begin, entry.end = pointer.ptr, pointer.ptr + pointer.nbytes
            entry.name = f"{parameter.name} ({pointer.name})".encode()
            entry.writable = parameter.letter == POINTER
        c_options = _Options(
            ORDERS.index(options.order), options.seed, options.races, options.timeout_ms, ranges, len(reachable)
        )
        counting = None
        if traffic is not None:
            counting = traffic.begin(
                self._library, [pointer.name for pointer, _ in reachable], dimensions, shared_bytes
            )
            c_options.traffic = ctypes.addressof(counting.structure)
        report = _Report()
        invoke = ctypes.cast(getattr(self._library, f"emu_invoke__{symbol}"), ctypes.c_void_p)
        c_dimensions = (ctypes.c_uint32 * 6)(*dimensions)
        with _launching:
            failed = self._library.emu_launch(
                invoke,
                c_dimensions,
                ctypes.c_uint32(shared_bytes),
                addresses,
                ctypes.byref(c_options),
                ctypes.byref(report),
            )
        if failed:
            raise self._fault(symbol, report)
        if traffic is not None and counting is not None:
            traffic.add(symbol, counting, self._source_line)
        return LaunchStatistics(report.switches, report.collectives, report.barriers, report.accesses)

    def _fault(self, symbol: str, report: _Report) -> KernelFault:
        source = report.source.decode()
        if source:
            source = source.rsplit("/", 1)[-1]
        elif report.fault_pc:
            source = self._source_line(report.fault_pc) or ""
        block = (report.block[0], report.block[1], report.block[2])
        thread = (report.thread[0], report.thread[1], report.thread[2])
        return KernelFault(symbol, block, thread, source or None, report.what.decode(errors="replace"))

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - modules live as long as their device
    def _source_line(self, pc: int) -> str | None:
        """ "file:line" of the instruction before `pc`: the innermost inlined frame that is not the emulator's own."""
        command = ["addr2line", "-i", "-e", str(self._module.library), hex(pc - 1 - self._base)]
        output = subprocess.run(command, capture_output=True, text=True).stdout
        for line in output.splitlines():
            path, _, number = line.split(" ")[0].rpartition(":")
            if number.isdigit() and Path(path).parent not in (HOST_DIR, HOST_DIR / "include"):
                return f"{Path(path).name}:{number}"
        return None


def _c_value(argument: DevicePointer | np.generic | None) -> ctypes.Array | ctypes.c_void_p:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, DevicePointer):
        return ctypes.c_void_p(argument.ptr)
    return (ctypes.c_char * argument.nbytes).from_buffer_copy(argument.tobytes())
