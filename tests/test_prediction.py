"""Planning without a card: the recording device does what a real one is asked to, costs are current, the time model is as said."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from m40llm.cli.app import run
from m40llm.config import ModelConfig
from m40llm.device import DeviceError
from m40llm.device.emulator import EmulatorDevice
from m40llm.device.recording import RecordingDevice
from m40llm.device.roofline import CARDS, CLASSES, Cycles, Work, cycles_of, load_costs, stale_modules, time_on
from m40llm.gguf import GGUFFile, TensorType
from m40llm.ops.cuda import CudaOps
from m40llm.ops.cuda.dry_run import DryOps
from m40llm.ops.cuda.launch_cost import SegmentLength, launch_work
from m40llm.plan import Segment, StepLimits, StepPlan
from m40llm.prediction import predict, weights_of_file
from m40llm.session import DecodeSession
from m40llm.weights import load_weights
from tests.tiny_gguf import build_tiny_gguf

CONTEXT = 96
LIMITS = StepLimits(rows=40, segments=2, logit_rows=2)
STEPS = (
    [Segment(0, 0, [1, 2, 3] * 12, [35])],  # prefill by tiles
    [Segment(0, 36, [4], [0]), Segment(1, 0, [5, 6], [1])],  # mixed
    [Segment(0, 37, [4], [0])],
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Q4_K and Q6_K side by side, as Q4_K_M has them."""
    types = {"*attn_v*": TensorType.Q6_K, "*norm*": TensorType.F32, "*": TensorType.Q4_K}
    folder = tmp_path_factory.mktemp("models")
    sizes = {"d_model": 256, "d_ff": 512, "head_dim": 64, "context": 32768}
    return build_tiny_gguf(folder / "tiny.gguf", arch="qwen2", types=types, **sizes)  # type: ignore[arg-type]


def session(path: Path, ops: CudaOps) -> DecodeSession:
    with GGUFFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        weights = load_weights(file, config, ops, CONTEXT)
    return DecodeSession(config, weights, ops, slots=2, context=CONTEXT, kv_dtype="f16", limits=LIMITS)


class Watched(EmulatorDevice):
    """Remembers the launches that it runs."""

    def __init__(self) -> None:
        super().__init__("fast")
        self.seen: list[tuple[str, object, object]] = []

    def launch(self, kernel, grid, block, args, shared=0, stream=None) -> None:  # type: ignore[no-untyped-def]
        self.seen.append((kernel.symbol, grid, [a.item() for a in args if isinstance(a, np.generic)]))
        super().launch(kernel, grid, block, args, shared, stream)


def test_a_dry_run_launches_and_allocates_what_a_real_one_does(path: Path) -> None:
    real, dry = Watched(), RecordingDevice()
    with session(path, CudaOps(real)) as a, session(path, DryOps(dry)) as b:
        assert sum(nbytes for _, nbytes in dry.buffers()) == sum(m.nbytes for m, _ in real._live.values())
        for segments in STEPS:
            a.run(StepPlan.pack(segments))
            b.run(StepPlan.pack(segments))
        assert [s for s, *_ in real.seen] == [launch.symbol for launch in dry.launches]
        for (symbol, grid, scalars), recorded in zip(real.seen, dry.launches, strict=True):
            whole = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]  # type: ignore[misc]
            assert whole == recorded.grid, symbol
            assert scalars == [v.item() for v in recorded.arguments.values() if isinstance(v, np.generic)], symbol
    assert dry.buffers() == []


def test_every_launch_of_a_step_has_a_cost(path: Path) -> None:
    device, costs = RecordingDevice(), load_costs()
    with session(path, DryOps(device)) as dry:
        for segments in STEPS:
            device.launches.clear()
            dry.run(StepPlan.pack(segments))
            lengths = [SegmentLength(len(s.token_ids), s.start + len(s.token_ids)) for s in segments]
            for launch in device.launches:
                work = launch_work(launch, costs, lengths)
                heavy = launch.symbol.startswith(("project_", "gemm_", "attention_"))
                assert (work.busy > 0, work.nbytes > 0) == (heavy, heavy), launch.symbol
                assert work.launches == 1


def test_the_table_is_of_the_current_kernels() -> None:
    assert stale_modules() == [], "python bench/sm52_model.py --write renews the table (needs the extra `bench`)"


def test_a_changed_kernel_makes_the_table_stale(tmp_path: Path) -> None:
    from m40llm.device.roofline import source_digest
    from m40llm.device.sources import KERNEL_DIR

    for source in KERNEL_DIR.glob("*.cu*"):
        (tmp_path / source.name).write_text(source.read_text())
    header = tmp_path / "attention_decode.cuh"
    before = source_digest("attention_decode", tmp_path)
    header.write_text("// a remark\n" + header.read_text())
    assert source_digest("attention_decode", tmp_path) == before
    header.write_text(header.read_text() + "\n__device__ int one_more;\n")
    assert source_digest("attention_decode", tmp_path) != before
    assert source_digest("reduce", tmp_path) == source_digest("reduce")


def test_cycles_are_the_programming_guides() -> None:
    """Warp instructions per cycle of a 5.x multiprocessor: 4 of FP32, 2 of shifts, 1 of conversions, 4 schedulers in all."""
    assert cycles_of({"full": 400}).busiest == 100
    assert cycles_of({"half": 400}).busiest == 200
    assert cycles_of({"special": 400}).busiest == 400
    assert cycles_of({"full": 200, "half": 100, "control": 400}) == Cycles(issue=175, arithmetic=100)
    assert cycles_of({"shared128": 10}).shared == 40  # 512 bytes each at 128 a cycle
    assert cycles_of({"memory128": 10}).load == 80  # 16 requests of two threads each, two a cycle
    assert {c.issue for c in CLASSES.values()} == {0.25}


def test_the_time_model() -> None:
    """t = sqrt(issue² + (memory / 0.8)²) + launches × 3 µs."""
    card = CARDS["m40-24g"]
    cycles = Cycles(issue=24 * 1.114e9 * 3e-3)  # 3 ms on all 24 multiprocessors
    work = Work(cycles, cycles.busiest, 288e9 * 3.2e-3, 1)  # 4 ms at 0.8 of the bandwidth
    assert time_on(card, work).total == pytest.approx(5e-3 + 3e-6)
    assert time_on(card, Work(Cycles(), 0.0, 0.0, 100)).total == pytest.approx(3e-4)


def test_a_prediction_adds_up(path: Path) -> None:
    with GGUFFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        make = weights_of_file(file, config, CONTEXT)
        args = {"capacity": CONTEXT, "context": CONTEXT, "slots": 2, "prompt": 64, "token_budget": 40}
        m40, p40 = (predict(config, make, CARDS[name], **args) for name in ("m40-24g", "p40"))  # type: ignore[arg-type]
    assert m40.fits
    assert (
        m40.memory.kv == 2 * 2 * 2 * CONTEXT * 2 * 64 * 2
    )  # K and V, layers, slots, positions, heads, head size, bytes
    for speed in (m40.decode, m40.decode_together, m40.prefill):
        assert speed.low == pytest.approx(0.75 * speed.tokens_per_s)
        assert speed.high == pytest.approx(1.3 * speed.tokens_per_s)
        parts = speed.step
        assert parts.total == pytest.approx(math.hypot(parts.issue, parts.memory / 0.8) + parts.launches)
    assert m40.decode_together.tokens_per_s > m40.decode.tokens_per_s
    assert p40.decode.step.memory == pytest.approx(m40.decode.step.memory * 288 / 347)
    with pytest.raises(ValueError, match="within the 96 of a slot"):
        predict(config, make, CARDS["p40"], capacity=CONTEXT, context=CONTEXT + 1)


def test_an_unknown_kernel_is_named(path: Path) -> None:
    device = RecordingDevice()
    with session(path, DryOps(device)) as dry:
        dry.run(StepPlan.pack(STEPS[-1]))
        launch = next(r for r in device.launches if r.symbol.startswith("attention_"))
    with pytest.raises(DeviceError, match=f"no '{launch.symbol}'; bench/sm52_model.py --write"):
        launch_work(launch, {}, [SegmentLength(1, 38)])


def test_plan_prints_memory_and_speed_with_its_error(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(path), "--gpu", "m40-24g", "--ctx", "64", "--slots", "2"]) == 0
    out = capsys.readouterr().out
    assert "Tesla M40 24GB (288 GB/s)" in out
    assert "predicted, not measured: ratios are solid, absolute figures good to -25/+30 %" in out
    assert "2 sequences at 64" in out
    assert "prefill of 64" in out
    assert run(["plan", str(path), "--gpu", "p40", "--ctx", "64", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["memory"]["total"] == sum(result["memory"][k] for k in ("weights", "kv", "workspace"))
    assert result["error"]["low"] == -0.25
    assert result["decode"]["64"]["low"] < result["decode"]["64"]["tokens_per_s"] < result["decode"]["64"]["high"]


def test_plan_says_when_a_model_does_not_fit(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(path), "--gpu", "m40-12g", "--ctx", "32768", "--slots", "512"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"KV f16 +16,384\.0 MiB  \(512 × 32,768 tokens\)", out)
    assert "of 12,288: does not fit: shorten --ctx" in out
    assert run(["plan", str(path), "--gpu", "tesla-k80"]) == 2
    assert "m40-24g" in capsys.readouterr().err
