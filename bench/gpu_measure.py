"""What gpu_certify.py measures on a device, a card or the emulator: bandwidth, kernels, whole models, peers."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from m40llm.config import RuntimeOptions, SamplingParams
from m40llm.device.choose import DeviceChoice
from m40llm.device.protocol import Device
from m40llm.engine import Engine
from m40llm.gguf import TensorType
from m40llm.model import Model
from m40llm.ops.cuda import project, tensor
from m40llm.ops.cuda.pack import FORMATS, CudaMatrix, packed_bytes
from m40llm.scoring import score

HERE = Path(__file__).resolve().parent
KERNELS = HERE / "kernels"
ROOT = HERE.parent
THREADS = 256
SUBNORMAL = np.array([0x0F0000], np.uint32).view(np.float32)[0]  # 15 << 16: a 4-bit weight where it lies in its word
TYPES = ("F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure: bytes of a matrix (more than any L2), columns, rounds, tokens, test files (none: all)."""

    matrix_bytes: int
    columns: int
    rounds: int
    loops: int
    prompt: int
    decode: int
    golden_positions: int
    tests: tuple[str, ...]


CARD = Effort(192 << 20, 4096, 9, 4096, 512, 128, 10_000, ())
EMULATOR = Effort(64 << 10, 1024, 1, 8, 16, 2, 2, ("tests/test_cuda_embed.py",))


class Stopwatch:
    """Times work on a device by events: median of rounds after one round that does not count."""

    def __init__(self, device: Device, rounds: int):
        self._device = device
        self._rounds = rounds
        self._begin, self._end = device.event(), device.event()

    def seconds(self, work: Callable[[], None]) -> float:
        work()
        times = []
        for _ in range(self._rounds):
            self._device.record(self._begin)
            work()
            self._device.record(self._end)
            self._end.synchronize()
            times.append(max(self._end.elapsed_ms(self._begin), 1e-6) / 1e3)
        return statistics.median(times)


# ---- the card ------------------------------------------------------------------------------------------------------------


def microbenchmarks(device: Device, effort: Effort) -> dict[str, Any]:
    """Copy bandwidth, and the two rates that the predictions assume. `device` must have been opened with KERNELS."""
    watch = Stopwatch(device, effort.rounds)
    blocks = 16 * device.multiprocessors
    with ExitStack() as stack:
        size = effort.matrix_bytes
        a, b = (stack.enter_context(device.alloc(size, name)) for name in ("copy source", "copy target"))
        out = stack.enter_context(device.alloc(4 * blocks * THREADS, "sums"))
        device.fill(a, 0)

        def run(symbol: str, *args: Any) -> float:
            kernel = device.kernel("microbench", symbol)
            return watch.seconds(lambda: device.launch(kernel, blocks, THREADS, args))

        copy_s = run("copy_f32x4", a, b, np.int64(size // 16))
        loops = np.int32(effort.loops)
        fma = {
            name: run("fma_rate", out, np.float32(2.0**96), np.float32(w), loops)
            for name, w in (("normal", 1.5), ("subnormal", SUBNORMAL))
        }
        loads = {bits: run(f"load_rate_{bits}", a, out, loops) for bits in (32, 64, 128)}
    threads = blocks * THREADS
    return {
        "copy_gb_s": 2 * size / copy_s / 1e9,
        "fma_g_s": {name: 8 * effort.loops * threads / s / 1e9 for name, s in fma.items()},
        "subnormal_over_normal": fma["normal"] / fma["subnormal"],
        "load_gb_s": {str(bits): bits // 8 * effort.loops * threads / s / 1e9 for bits, s in loads.items()},
    }


def projection_bandwidth(device: Device, effort: Effort, copy_gb_s: float) -> list[dict[str, Any]]:
    """Bytes of weights per second of every type's projection, 1, 4 and 8 rows, and its share of the copy bandwidth."""
    watch, rng = Stopwatch(device, effort.rounds), np.random.default_rng(0)
    tile = rng.integers(0, 0x40, 1 << 20, dtype=np.uint8)  # every float16 among such bytes is finite
    results = []
    for name in TYPES:
        kind = TensorType[name]
        n = max(32, effort.matrix_bytes // (packed_bytes(kind, 4, effort.columns) // 4) // 32 * 32)
        nbytes = packed_bytes(kind, n, effort.columns)
        with ExitStack() as stack:
            buffer = stack.enter_context(device.alloc(nbytes, name))
            for at in range(0, nbytes, len(tile)):
                device.upload(buffer, tile[: min(len(tile), nbytes - at)], at)
            matrix = CudaMatrix(name, kind, FORMATS[kind], n, effort.columns, buffer)
            for rows in (1, 4, 8):
                x_buffer, x = tensor.empty(device, (rows, effort.columns), np.float32, "x")
                y_buffer, y = tensor.empty(device, (rows, n), np.float32, "y")
                with x_buffer, y_buffer:
                    tensor.upload(device, x, rng.standard_normal(x.shape).astype(np.float32))
                    seconds = watch.seconds(lambda m=matrix, x=x, y=y: project.project(device, x, [m], [y]))  # type: ignore[misc]
                rate = nbytes / seconds / 1e9
                results.append(
                    {"type": name, "rows": rows, "n": n, "k": effort.columns, "gb_s": rate, "of_copy": rate / copy_gb_s}
                )
    return results


def cublas_against_own(device: Device, effort: Effort, kind: TensorType = TensorType.Q8_0) -> dict[str, Any]:
    """Seconds of one prefill projection (prompt x K -> K): our kernel on packed weights, cuBLAS on materialised ones."""
    watch, rows, k = Stopwatch(device, effort.rounds), max(effort.prompt, project.GEMM_FROM_ROWS), effort.columns
    n = k if effort is CARD else 128
    with ExitStack() as stack:
        packed = stack.enter_context(device.alloc(packed_bytes(kind, n, k), "packed weights"))
        plain = stack.enter_context(device.alloc(4 * n * k, "materialised weights"))
        x_buffer, x = tensor.empty(device, (rows, k), np.float32, "x")
        y_buffer, y = tensor.empty(device, (rows, n), np.float32, "y")
        for buffer in (stack.enter_context(x_buffer), stack.enter_context(y_buffer), packed, plain):
            device.fill(buffer, 0)
        matrix = CudaMatrix("w", kind, FORMATS[kind], n, k, packed)
        own = watch.seconds(lambda: project.project(device, x, [matrix], [y]))
        cublas = watch.seconds(lambda: device.gemm(x.memory, plain, y.memory, rows, n, k))
    flops = 2 * rows * n * k
    return {"rows": rows, "n": n, "k": k, "own_gflop_s": flops / own / 1e9, "cublas_gflop_s": flops / cublas / 1e9}


# ---- whole models --------------------------------------------------------------------------------------------------------


def golden_deviation(path: Path, golden: Path, choice: DeviceChoice, effort: Effort) -> dict[str, float]:
    """|ours - oracle| of the log-probabilities of the eight best tokens, against FP32 transformers: mean and largest."""
    deviations: list[float] = []
    options = RuntimeOptions(device=choice.kind, ctx=512)
    with Model.open(path, options, logit_rows=32) as model:
        for case in json.loads(golden.read_text(encoding="utf-8")):
            start = len(case["prompt_ids"])
            ids = (case["prompt_ids"] + case["llama_cpp_greedy_ids"])[: start + effort.golden_positions]
            ours = score(model.session, ids, start, model.config.vocab_size)
            for result, best in zip(ours, case["f32_top8_on_llama_cpp_path"], strict=False):
                logprobs = dict(result.top)
                deviations += [abs(logprobs[i] - expected) for i, expected in best]
            if effort is EMULATOR:
                break
    return {"mean": statistics.fmean(deviations), "max": max(deviations), "values": len(deviations)}


@dataclass(frozen=True, slots=True)
class Variant:
    """How a model is run; the names of `RuntimeOptions`."""

    name: str
    projection_backend: Literal["fast-fits", "large-model"]
    cublas: bool
    decode_graph: bool


VARIANTS = (
    Variant("compact weights", "large-model", False, False),
    Variant("compact weights, graphs", "large-model", False, True),
    Variant("FP32 copies, cuBLAS", "fast-fits", True, False),
    Variant("FP32 copies, own GEMM", "fast-fits", False, False),
)


def model_speed(path: Path, choice: DeviceChoice, effort: Effort, variant: Variant) -> dict[str, Any]:
    """Prefill and decode tokens per second of one request, greedy, the end of the text ignored; median of rounds."""
    options = RuntimeOptions(
        device=choice.kind,
        ctx=effort.prompt + effort.decode + 8,
        projection_backend=variant.projection_backend,
        cublas=variant.cublas,
        decode_graph=variant.decode_graph,
    )
    prefill, decode = [], []
    with Engine.load(path, options, warm_up=True) as engine:
        sampling = SamplingParams(max_tokens=effort.decode, temperature=0.0, ignore_eos=True)
        for i in range(max(1, effort.rounds // 2)):
            prompt = [i + 1] + [7] * (effort.prompt - 1)  # nothing of it may come from a cache
            timings = engine.submit(prompt, sampling).result.timings
            prefill.append(timings.prefill_tok_s)
            decode.append(timings.decode_tok_s)
        description = engine.model.description
    return {
        "prefill_tok_s": statistics.median(prefill),
        "decode_tok_s": statistics.median(decode),
        "rounds": len(decode),
        "model": description,
    }


# ---- tests and peers -----------------------------------------------------------------------------------------------------


def run_grids(choice: DeviceChoice, effort: Effort) -> dict[str, int]:
    """The kernels' parity tests: all that are marked `gpu` on a card, some of the emulator's otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        marks = "gpu" if choice.kind == "cuda" else "not gpu"
        targets = effort.tests or ("tests",)
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}", *targets]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"pytest gave no report: {done.stdout[-500:]}{done.stderr[-500:]}")
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def llama_bench(binary: Path, path: Path, effort: Effort) -> dict[str, float]:
    """llama.cpp's own benchmark on the same file, all layers on the card: prefill and decode tokens per second."""
    command = [
        str(binary),
        "-m",
        str(path),
        "-ngl",
        "99",
        "-p",
        str(effort.prompt),
        "-n",
        str(effort.decode),
        "-o",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError(f"{binary.name} failed: {done.stderr.strip()[-300:]}")
    rows: Sequence[dict[str, Any]] = json.loads(done.stdout)
    prefill = next(row for row in rows if row["n_prompt"])
    decode = next(row for row in rows if row["n_gen"])
    return {"prefill_tok_s": float(prefill["avg_ts"]), "decode_tok_s": float(decode["avg_ts"])}
