"""What can go wrong between the program and a device: one exception class for each remedy."""

from __future__ import annotations


class DeviceError(RuntimeError):
    """Base of everything that a device raises."""


class DeviceUnavailable(DeviceError):
    """The requested device cannot be used here.

    `reason` says what is missing in one clause, `remedy` what to do about it.
    """

    def __init__(self, reason: str, remedy: str):
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


def install_extra(extra: str) -> str:
    """The remedy that installs an extra. The package is on no index: a name alone would ask for somebody else's."""
    return f"pip install '.[{extra}]' in m40llm's source folder"


class OutOfDeviceMemory(DeviceError):
    """An allocation did not fit. `wanted` and `free` are bytes."""

    def __init__(self, name: str, wanted: int, free: int, total: int):
        mib = 1 << 20
        super().__init__(
            f"out of device memory: buffer '{name}' wants {wanted / mib:.1f} MiB, {free / mib:.1f} of {total / mib:.1f} "
            "MiB are free; shorten the context (--ctx), run fewer sequences (--max-seqs) or materialise less "
            "(--materialize-budget-mb)"
        )
        self.name = name
        self.wanted = wanted
        self.free = free
        self.total = total


class BufferClosed(DeviceError):
    """A buffer, or a pointer into it, was used after `close()`."""


class LaunchError(DeviceError, TypeError):
    """A launch whose arguments do not fit the kernel: count, type, or an untyped Python number."""


class KernelCompileError(DeviceError):
    """A kernel source does not compile. The message ends with the compiler's own log."""

    def __init__(self, source: str, compiler: str, log: str):
        super().__init__(f"{compiler} cannot compile {source}:\n{log.rstrip()}")
        self.source = source
        self.log = log


class KernelFault(DeviceError):
    """A kernel broke a rule while it ran (emulator only; a card reports next to nothing).

    `block` and `thread` are (x, y, z) indices, `source` is "file:line" or None, `what` describes the fault.
    """

    def __init__(
        self,
        kernel: str,
        block: tuple[int, int, int],
        thread: tuple[int, int, int],
        source: str | None,
        what: str,
    ):
        where = f" [{source}]" if source else ""
        super().__init__(f"{kernel}: block {block} thread {thread}: {what}{where}")
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.source = source
        self.what = what
