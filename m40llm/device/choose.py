"""Decides on which device to run, and says why. Quick, and imports CuPy for nobody who does not use it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from m40llm.device import driver
from m40llm.device.errors import DeviceError, DeviceUnavailable, install_extra

if TYPE_CHECKING:
    from m40llm.device.protocol import Device

DeviceKind = Literal["cuda", "cpu", "emulator"]
REQUESTS = ("auto", "cuda", "cpu", "emulator")


@dataclass(frozen=True)
class DeviceChoice:
    """`kind` is what to run on, `reason` one line for the log, `card` the card if `kind` is "cuda"."""

    kind: DeviceKind
    reason: str
    card: driver.Card | None = None


def choose_device(request: str, *, require_sm52: bool = False) -> DeviceChoice:
    """Resolves `--device`.

    "auto" takes a usable card, else the CPU, and says in `reason` why. "cuda" and "emulator" raise DeviceUnavailable,
    one line with the remedy, if they cannot be had; so does "auto" with `require_sm52`. DeviceError for an unknown
    request.
    """
    if request == "cpu":
        if require_sm52:
            raise DeviceUnavailable("--require-sm52 and --device cpu exclude each other", "leave one out")
        return DeviceChoice("cpu", "the CPU, as asked")
    if request == "emulator":
        from m40llm.device.emulator_build import architecture_flags, find_compiler

        find_compiler()
        architecture_flags()
        return DeviceChoice("emulator", "the emulator, as asked: checks kernels, is slow")
    if request not in ("auto", "cuda"):
        raise DeviceError(f"--device {request}: choose one of {', '.join(REQUESTS)}")
    try:
        card = usable_card(require_sm52)
    except DeviceUnavailable as error:
        if request == "auto" and not require_sm52:
            return DeviceChoice("cpu", f"the CPU, since {error.reason}")
        elsewhere = "run on the CPU with --device cpu" + (" and without --require-sm52" if require_sm52 else "")
        raise DeviceUnavailable(error.reason, f"{error.remedy}, or {elsewhere}") from None
    return DeviceChoice("cuda", f"{card.name} ({card.arch}, {card.memory_bytes / (1 << 30):.1f} GiB)", card)


def usable_card(require_sm52: bool = False) -> driver.Card:
    """The card that `cuda` means, with everything there that it takes to compile for it and launch on it.

    Raises DeviceUnavailable: no driver, driver too old, no card, card too old, NVRTC that cannot target it, no CuPy.
    """
    card = driver.prefer(driver.find_cards(), require_sm52)
    from m40llm.device import nvrtc  # not at the top: most machines have no card

    nvrtc.for_arch(card.arch)
    if importlib.util.find_spec("cupy") is None:
        raise DeviceUnavailable("CuPy is not installed", install_extra(nvrtc.extra_for(card.arch)))
    return card


def open_device(
    choice: DeviceChoice,
    *,
    emulator_mode: Literal["fast", "check", "kasan"] = "fast",
    cache_dir: Path | None = None,
    on_compile: Callable[[str], None] | None = None,
) -> Device:
    """The device of a choice. `cache_dir` holds compiled kernels (None: the user's cache); `on_compile` is called with a
    module's name before it is compiled, not when it is found there. DeviceError for "cpu", which needs no device;
    DeviceUnavailable as raised by the device itself."""
    if choice.kind == "emulator":
        from m40llm.device.emulator import EmulatorDevice

        return EmulatorDevice(emulator_mode, cache_dir=cache_dir, on_compile=on_compile)
    if choice.card is None:
        raise DeviceError(f"'{choice.kind}' opens no device")
    from m40llm.device.cuda import CudaDevice

    return CudaDevice(choice.card, cache_dir=cache_dir, on_compile=on_compile)
