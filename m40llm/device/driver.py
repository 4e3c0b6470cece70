"""Which NVIDIA cards there are, asked of the driver itself through ctypes: quick, and needs no CuPy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from m40llm.device.errors import DeviceError, DeviceUnavailable

MINIMUM_CAPABILITY = (5, 0)
# CUDA's minor-version compatibility: any 12.x driver runs what 12.9 compiled.
MINIMUM_DRIVER = 12000
DRIVER_ADVICE = "install driver branch 525 to 580 (580 is the last that knows Maxwell, Pascal and Volta)"

# cuda.h, CUresult
_SUCCESS = 0
_ERRORS = {
    2: ("the driver is out of memory", "free memory on the card"),
    100: ("no NVIDIA card is visible to the driver", f"check nvidia-smi and CUDA_VISIBLE_DEVICES; {DRIVER_ADVICE}"),
    101: ("CUDA_VISIBLE_DEVICES names a card that does not exist", "check it against nvidia-smi"),
    802: ("the NVIDIA system is not ready", "start the fabric manager, or wait and try again"),
    803: ("the NVIDIA driver's library and kernel module differ", "reboot after the driver's update"),
    804: ("the CUDA compatibility package does not support this card", "remove the cuda-compat package"),
    999: ("the NVIDIA driver failed with an unknown error", "check dmesg; reload the driver"),
}
_ATTRIBUTE_MULTIPROCESSORS = 16
_ATTRIBUTE_MAJOR = 75
_ATTRIBUTE_MINOR = 76


@dataclass(frozen=True)
class Card:
    """A card as the driver describes it. `index` is CUDA's, within CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    pci_bus_id: str

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


def explain(status: int, what: str) -> DeviceUnavailable:
    """The exception for a CUresult other than success."""
    reason, remedy = _ERRORS.get(status, (f"the NVIDIA driver refused {what} (CUresult {status})", "check nvidia-smi"))
    return DeviceUnavailable(reason, remedy)


def check_driver_version(version: int) -> None:
    """`version` is 1000 × major + 10 × minor of the newest CUDA that the driver supports. Raises DeviceUnavailable."""
    if version < MINIMUM_DRIVER:
        raise DeviceUnavailable(
            f"the NVIDIA driver is too old: it supports CUDA {version // 1000}.{version % 1000 // 10}, 12.0 is needed",
            DRIVER_ADVICE,
        )


def find_cards(library: str = "libcuda.so.1") -> list[Card]:
    """Every visible card, in CUDA's order. Raises DeviceUnavailable that says what is missing."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        raise DeviceUnavailable(f"no NVIDIA driver was found ({library})", "install the driver") from None

    def call(function: str, *arguments: object) -> None:
        status = getattr(driver, function)(*arguments)
        if status != _SUCCESS:
            raise explain(status, function)

    call("cuInit", 0)
    version, count = ctypes.c_int(), ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    check_driver_version(version.value)
    call("cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise explain(100, "cuDeviceGetCount")
    cards = []
    for index in range(count.value):
        device, memory = ctypes.c_int(), ctypes.c_size_t()
        name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        attributes = {}
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        call("cuDeviceGetPCIBusId", bus, len(bus), device)
        for attribute in (_ATTRIBUTE_MULTIPROCESSORS, _ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR):
            value = ctypes.c_int()
            call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            attributes[attribute] = value.value
        capability = attributes[_ATTRIBUTE_MAJOR], attributes[_ATTRIBUTE_MINOR]
        multiprocessors = attributes[_ATTRIBUTE_MULTIPROCESSORS]
        cards.append(Card(index, name.value.decode(), capability, memory.value, multiprocessors, bus.value.decode()))
    return cards


def prefer(cards: Sequence[Card], require_sm52: bool = False) -> Card:
    """The card to use: a Tesla M40 if there is one, else the first in CUDA's order that is new enough.

    With `require_sm52` only compute capability 5.2 will do. Raises DeviceUnavailable that lists what there is.
    """
    if not cards:
        raise DeviceError("prefer() of no cards")
    listed = ", ".join(f"{card.name} ({card.arch})" for card in cards)
    if require_sm52:
        cards = [card for card in cards if card.arch == "sm_52"]
        if not cards:
            raise DeviceUnavailable(f"--require-sm52, but the cards are {listed}", "leave the flag out")
    usable = [card for card in cards if card.capability >= MINIMUM_CAPABILITY]
    if not usable:
        raise DeviceUnavailable(f"too old, the kernels need compute capability 5.0: {listed}", "use a newer card")
    return next((card for card in usable if card.name.startswith("Tesla M40")), usable[0])
