"""Certifies m40llm on the card in this machine, in one command and under eight minutes.

    pip install -e '.[test,cuda12]'      # or cuda13, from compute capability 7.5 on
    python bench/gpu_certify.py          # writes gpu_certify.json and prints a row for docs/perf_baselines.md

What it does: the kernels' parity grids on the card; log-probabilities of a real model against FP32 transformers; copy
bandwidth and the two rates that the predictions assume; every projection kernel's share of the copy bandwidth; our prefill
kernel against cuBLAS; prefill and decode speed with compact weights and with FP32 copies, with and without CUDA graphs and
cuBLAS, and what was predicted for it; llama.cpp's own benchmark, where `llama-bench` is installed. Exit code 1: a grid failed
or a log-probability is off. `--device emulator` runs all of it on the CPU, for a look at the script.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from gpu_measure import (
    CARD,
    EMULATOR,
    KERNELS,
    ROOT,
    VARIANTS,
    cublas_against_own,
    golden_deviation,
    llama_bench,
    microbenchmarks,
    model_speed,
    projection_bandwidth,
    run_grids,
)

from m40llm.cli.model_arg import resolve_model
from m40llm.config import ModelConfig, RuntimeOptions
from m40llm.device.choose import DeviceChoice, choose_device
from m40llm.device.errors import DeviceError
from m40llm.device.protocol import Device
from m40llm.device.roofline import CARDS, ERROR_NOTE
from m40llm.device.sources import KERNEL_DIR
from m40llm.gguf import GGUFFile
from m40llm.prediction import predict, weights_of_file

GOLDEN_MODEL, GOLDEN = "smollm2", ROOT / "tests/data/smollm2-135m-instruct-q4_1.json"
GOLDEN_BOUNDS = {"mean": 0.003, "max": 0.03}
PREDICTED = {"M40": "m40-24g", "P40": "p40"}  # part of the driver's name for the card


def open_device(choice: DeviceChoice, kernel_dir: Path = KERNEL_DIR) -> Device:
    """Like `m40llm.device.choose.open_device`, but with the kernels of another folder."""
    if choice.card is None:
        from m40llm.device.emulator import EmulatorDevice

        return EmulatorDevice("fast", kernel_dir=kernel_dir)
    from m40llm.device.cuda import CudaDevice

    return CudaDevice(choice.card, kernel_dir=kernel_dir)


def environment(choice: DeviceChoice) -> dict[str, Any]:
    """Commit, versions, driver, card."""
    packages = ("m40llm", "numpy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": found,
        "driver": driver or "none",
        "device": choice.card.name if choice.card else "emulator",
        "arch": choice.card.arch if choice.card else "sm_52",
    }


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def predicted(path: Path, device_name: str, context: int) -> dict[str, Any] | None:
    """Of the time model, for the cards that it knows."""
    card = next((CARDS[key] for part, key in PREDICTED.items() if part in device_name), None)
    if card is None:
        return None
    with GGUFFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        make = weights_of_file(file, config, context)
        result = predict(config, make, card, capacity=context, context=context, prompt=min(512, context))
    return {"decode": asdict(result.decode), "prefill": asdict(result.prefill), "note": ERROR_NOTE}


class Stages:
    """Runs the stages one after the other; what one of them raises is recorded, and the others go on."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            result = work()
        except (DeviceError, RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
            self.failed.append(name)
            result = {"error": f"{type(error).__name__}: {error}"}
        self.results[name] = result
        print(f"{name:<20} {time.perf_counter() - started:>6.1f} s  {_short(result)}", file=sys.stderr)
        return result


def _short(result: Any) -> str:
    text = json.dumps(result, default=str)
    return text if len(text) <= 150 else text[:147] + "…"


def markdown_row(report: dict[str, Any]) -> str:
    """For the table of kernels in docs/perf_baselines.md."""
    env, results = report["environment"], report["results"]
    speeds = [results[v.name] for v in VARIANTS]
    best = {
        what: max((s[what] for s in speeds if what in s), default=0.0) for what in ("decode_tok_s", "prefill_tok_s")
    }
    projections = results["projections"]
    one_row = [r["of_copy"] for r in projections if r["rows"] == 1] if isinstance(projections, list) else []
    share = f"{min(one_row):.0%}-{max(one_row):.0%}" if one_row else "-"
    peer = results.get("llama.cpp", {})
    cells = (
        env["date"],
        env["commit"],
        f"{env['device']}, driver {env['driver']}, Python {env['python']}",
        f"{report['model']}: decode of {report['effort']['decode']}, prefill of {report['effort']['prompt']} tokens",
        f"{_number(best, 'decode_tok_s')} and {_number(best, 'prefill_tok_s')} tok/s",
        f"projections of one row: {share} of the copy bandwidth ({_number(results['microbenchmarks'], 'copy_gb_s')} GB/s)",
        f"llama-bench: {_number(peer, 'decode_tok_s')} and {_number(peer, 'prefill_tok_s')} tok/s",
    )
    return f"| {' | '.join(cells)} |"


def _number(values: Any, name: str) -> str:
    return f"{values[name]:.1f}" if isinstance(values, dict) and name in values else "-"


@click.command()
@click.option("--device", type=click.Choice(["cuda", "emulator"]), default="cuda", show_default=True)
@click.option("--model", default=GOLDEN_MODEL, show_default=True, help="Whose speed to measure: a file or an alias.")
@click.option("--require-sm52", is_flag=True, help="Refuse every card but one of compute capability 5.2.")
@click.option("--grids/--no-grids", default=True, help="Run the parity tests.")
@click.option(
    "--llama-bench", "peer", type=click.Path(path_type=Path), help="llama.cpp's benchmark (default: from PATH)."
)
@click.option("--json", "target", type=click.Path(path_type=Path), default=Path("gpu_certify.json"), show_default=True)
def main(device: str, model: str, require_sm52: bool, grids: bool, peer: Path | None, target: Path) -> None:
    """Parity, accuracy and speed of m40llm on this machine's card."""
    started = time.perf_counter()
    try:
        choice = choose_device(device, require_sm52=require_sm52)
    except DeviceError as error:
        print(f"error: {error}; to look at this script without a card: --device emulator", file=sys.stderr)
        sys.exit(2)
    effort = CARD if choice.kind == "cuda" else EMULATOR
    path, golden_path = resolve_model(model), resolve_model(GOLDEN_MODEL)
    stages = Stages()
    print(f"device: {choice.reason}", file=sys.stderr)
    ours = open_device(choice, KERNELS)
    micro = stages.run("microbenchmarks", lambda: microbenchmarks(ours, effort))
    ours.close()
    kernels = open_device(choice)
    copy = micro.get("copy_gb_s", float("inf"))
    stages.run("projections", lambda: projection_bandwidth(kernels, effort, copy))
    stages.run("cuBLAS", lambda: cublas_against_own(kernels, effort))
    kernels.close()
    golden = stages.run("golden scores", lambda: golden_deviation(golden_path, GOLDEN, choice, effort))
    for variant in VARIANTS:
        stages.run(variant.name, lambda v=variant: model_speed(path, choice, effort, v))  # type: ignore[misc]
    context = RuntimeOptions(ctx=effort.prompt + effort.decode).ctx or effort.prompt
    stages.run("predicted", lambda: predicted(path, choice.card.name if choice.card else "emulated M40", context))
    binary = peer or (Path(found) if (found := shutil.which("llama-bench")) else None)
    if binary is not None:
        stages.run("llama.cpp", lambda: llama_bench(binary, path, effort))
    tests = stages.run("grids", lambda: run_grids(choice, effort)) if grids else {}

    wrong = [f"{name} stopped" for name in stages.failed]
    wrong += [
        f"log-probabilities: {k} {golden[k]:.4f} over {v}" for k, v in GOLDEN_BOUNDS.items() if golden.get(k, 0) > v
    ]
    if tests.get("failures", 0) + tests.get("errors", 0) or tests.get("tests") == 0:
        wrong.append(f"parity grids: {tests}")
    report = {
        "environment": environment(choice),
        "model": path.name,
        "effort": asdict(effort),
        "results": stages.results,
        "wrong": wrong,
        "seconds": round(time.perf_counter() - started, 1),
    }
    target.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"{target}: {report['seconds']} s, {'; '.join(wrong) or 'everything as it should be'}", file=sys.stderr)
    click.echo(markdown_row(report))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
