"""Which device is chosen, and what a user reads when it cannot be had. No card needed."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from m40llm.device import DeviceError, DeviceUnavailable
from m40llm.device.choose import choose_device, open_device
from m40llm.device.cuda import check_runtime_version
from m40llm.device.driver import Card, check_driver_version, explain, find_cards, prefer
from m40llm.device.emulator import EmulatorDevice
from m40llm.device.nvml import other_compute_processes

try:
    ctypes.CDLL("libcuda.so.1")
    HAS_DRIVER = True
except OSError:
    HAS_DRIVER = False
without_driver = pytest.mark.skipif(HAS_DRIVER, reason="this machine has an NVIDIA driver; tests/-m gpu covers it")


def card(index: int, name: str, capability: tuple[int, int]) -> Card:
    return Card(index, name, capability, 24 << 30, 24, f"0000:0{index}:00.0")


M40, P40 = card(1, "Tesla M40 24GB", (5, 2)), card(2, "Tesla P40", (6, 1))
TITAN, K80 = card(0, "NVIDIA GeForce GTX TITAN X", (5, 2)), card(3, "Tesla K80", (3, 7))
H200 = card(4, "NVIDIA H200", (9, 0))


def test_an_m40_is_preferred() -> None:
    assert prefer([H200, P40, M40]) is M40
    assert prefer([TITAN, M40]) is M40
    assert prefer([H200, P40]) is H200
    assert prefer([K80, P40]) is P40
    assert prefer([P40, TITAN], require_sm52=True) is TITAN
    with pytest.raises(
        DeviceUnavailable, match=r"--require-sm52, but the cards are NVIDIA H200 \(sm_90\), Tesla P40 \(sm_61\)"
    ):
        prefer([H200, P40], require_sm52=True)
    with pytest.raises(DeviceUnavailable, match=r"too old, .* 5.0: Tesla K80 \(sm_37\)"):
        prefer([K80])


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (100, "no NVIDIA card is visible"),
        (803, "library and kernel module differ"),
        (12345, r"cuInit \(CUresult 12345\)"),
    ],
)
def test_driver_errors_are_explained_in_one_line(status: int, words: str) -> None:
    error = explain(status, "cuInit")
    with pytest.raises(DeviceUnavailable, match=words):
        raise error
    assert "\n" not in str(error)
    assert error.remedy


def test_old_drivers_and_new_runtimes_are_refused() -> None:
    check_driver_version(12000)
    with pytest.raises(
        DeviceUnavailable, match=r"driver is too old: it supports CUDA 11.8, 12.0 is needed; install driver"
    ):
        check_driver_version(11080)
    check_runtime_version(12090, "sm_52")
    check_runtime_version(13000, "sm_75")
    with pytest.raises(DeviceUnavailable, match=r"built for CUDA 13, which does not support sm_52; .*'\.\[cuda12\]'"):
        check_runtime_version(13000, "sm_52")


def test_missing_libraries() -> None:
    with pytest.raises(DeviceUnavailable, match=r"no NVIDIA driver was found \(libnothing.so\); install"):
        find_cards("libnothing.so")
    assert other_compute_processes("0000:01:00.0", "libnothing.so") is None


@without_driver
def test_cuda_without_a_driver_is_one_line_with_the_remedy() -> None:
    with pytest.raises(DeviceUnavailable) as caught:
        choose_device("cuda")
    assert "no NVIDIA driver was found" in str(caught.value)
    assert "--device cpu" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(DeviceUnavailable, match="no NVIDIA driver"):
        choose_device("auto", require_sm52=True)


@without_driver
def test_auto_without_a_driver_is_the_cpu_and_says_why() -> None:
    choice = choose_device("auto")
    assert choice.kind == "cpu"
    assert choice.reason == "the CPU, since no NVIDIA driver was found (libcuda.so.1)"


def test_explicit_choices() -> None:
    assert choose_device("cpu").kind == "cpu"
    choice = choose_device("emulator")
    assert choice.kind == "emulator"
    device = open_device(choice, emulator_mode="check")
    assert isinstance(device, EmulatorDevice)
    assert device.mode == "check"
    with pytest.raises(DeviceError, match="'cpu' opens no device"):
        open_device(choose_device("cpu"))
    with pytest.raises(DeviceError, match="--device gpu: choose one of auto, cuda, cpu, emulator"):
        choose_device("gpu")
    with pytest.raises(DeviceUnavailable, match="exclude each other"):
        choose_device("cpu", require_sm52=True)


def test_the_choice_imports_neither_cupy_nor_a_compiler() -> None:
    code = (
        "import sys; from m40llm.device.choose import choose_device; choose_device('cpu');"
        "print(sorted({'cupy', 'pcpp', 'numba', 'platformdirs'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
