"""--device: chosen once and said once; the emulator prints the CPU's text; compile and doctor tell what there is."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from m40llm.cli.app import run
from m40llm.device import driver
from tests.cli_runner import Captured, failed
from tests.tiny_gguf import build_tiny_gguf


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a card, also where there is one."""
    monkeypatch.setattr(driver, "find_cards", functools.partial(driver.find_cards, "libm40llm-no-such-driver.so"))
    for name in ("M40LLM_DEVICE", "M40LLM_CTX", "M40LLM_KV_DTYPE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", head_dim=64))


@pytest.mark.parametrize("options", [("--device", "cuda"), ("--device", "cuda", "--require-sm52"), ("--require-sm52",)])
def test_cuda_without_a_driver_is_one_line_that_names_the_cpu(
    tiny: str, capsys: Captured, options: tuple[str, ...]
) -> None:
    error = failed(capsys, "generate", tiny, "x", *options)
    assert "no NVIDIA driver was found" in error
    assert "run on the CPU with --device cpu" in error


def test_auto_says_why_it_took_the_cpu(tiny: str, capsys: Captured) -> None:
    assert run(["generate", tiny, "Hello", "--greedy", "--max-tokens", "1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("device: ")]
    assert lines == ["device: the CPU, since no NVIDIA driver was found (libm40llm-no-such-driver.so)"]


def test_flags_for_a_card_are_said_to_have_no_effect_on_the_cpu(tiny: str, capsys: Captured) -> None:
    flags = (
        "--no-cublas",
        "--cache-experiment",
        "ldg",
        "--materialize-budget-mb",
        "9",
        "--decode-graph",
        "--decode-graph-diag-sync",
    )
    assert run(["generate", tiny, "Hello", "--greedy", "--max-tokens", "1", "--device", "cpu", *flags]) == 0
    line = next(s for s in capsys.readouterr().err.splitlines() if s.startswith("without effect on the CPU: "))
    assert set(line.split(": ")[1].split(", ")) == {flag for flag in flags if flag.startswith("--")}


def test_the_emulator_prints_the_cpus_text(tiny: str, capsys: Captured) -> None:
    texts = {}
    for device in ("cpu", "emulator"):
        assert (
            run(["generate", tiny, "Hello there", "--greedy", "--max-tokens", "5", "--device", device, "--json"]) == 0
        )
        result = json.loads(capsys.readouterr().out)
        assert result["device"] == device
        texts[device] = result["text"]
    assert texts["emulator"] == texts["cpu"]


def test_smollm2_in_the_emulator_prints_the_cpus_text(smollm2_path: Path, capsys: Captured) -> None:
    texts = []
    for device in ("cpu", "emulator"):
        prompt = ("The capital of France is", "--greedy", "--max-tokens", "4", "--raw", "--ctx", "64")
        assert run(["generate", str(smollm2_path), *prompt, "--device", device]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0].strip()) > 3


def test_what_the_kernels_cannot_run_is_one_line(tiny: str, tmp_path: Path, capsys: Captured) -> None:
    small = str(build_tiny_gguf(tmp_path / "small.gguf", head_dim=16))
    assert "heads of 64, 128, 256, not 16" in failed(capsys, "generate", small, "x", "--device", "emulator")
    error = failed(capsys, "generate", tiny, "x", "--device", "emulator", "--kv-dtype", "f32")
    assert "--kv-dtype f32" in error


@pytest.mark.parametrize("device", ["auto", "emulator"])
def test_doctor_checks_a_product_on_what_it_would_choose(device: str, capsys: Captured) -> None:
    assert run(["doctor", "--device", device, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["choice"]["kind"] == ("cpu" if device == "auto" else "emulator")
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found[f"Q8_0 product on {report['choice']['kind']}"]["status"] == "ok"
    assert found["driver and card"]["status"] == "missing"
    assert found["kernel compilation"]["status"] == "ok"


def test_doctor_of_a_device_that_is_not_there(capsys: Captured) -> None:
    assert run(["doctor", "--device", "cuda"]) == 2
    out = capsys.readouterr().out
    assert "failed   --device cuda: no NVIDIA driver was found" in out
    assert "would take" not in out


def test_compile_refuses_what_it_cannot_target(capsys: Captured) -> None:
    assert "sm_52" in failed(capsys, "compile", "--arch", "gtx970")
    assert "too old" in failed(capsys, "compile", "--arch", "sm_35")
    assert "--arch names no architecture" in failed(capsys, "compile", "--arch", ",")
