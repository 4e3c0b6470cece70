"""Projection backends: the same products with cuBLAS on and off, what is materialised within which budget, and why."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from m40llm.cli.app import run
from m40llm.config import ConfigError, ModelConfig, RuntimeOptions
from m40llm.device.emulator import EmulatorDevice
from m40llm.device.errors import DeviceUnavailable
from m40llm.gguf import BLOCKS, GGUFFile, TensorType, dequantize
from m40llm.kv import KVLayout
from m40llm.model import Model
from m40llm.ops.cpu import CpuOps
from m40llm.ops.cuda import CudaOps, MemoryPlan, ProjectionPlan, memory_plan, plan_projections
from m40llm.ops.cuda.backend import RESERVE_BYTES, Projections
from m40llm.ops.cuda.bias import spread_bias
from m40llm.ops.cuda.pack import load_matrix
from m40llm.plan import Segment, StepLimits, StepPlan
from m40llm.session import DecodeSession
from m40llm.weights import load_weights
from tests.cuda_reference import ALL_TYPES, Bench, product_error
from tests.test_cuda_ops import ROWS, SLOTS, generate, open_session
from tests.test_cuda_project import TOLERANCE, silu
from tests.tiny_gguf import build_tiny_gguf

MIB = 1 << 20
LIMITS = StepLimits(rows=ROWS, segments=SLOTS, logit_rows=SLOTS)
ON_OFF = pytest.mark.parametrize("cublas", [True, False], ids=["cublas", "no-cublas"])


@pytest.fixture(scope="module")
def device() -> EmulatorDevice:
    return EmulatorDevice("fast")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, GQA 4:2, biases: Q8_0 in the first, F32 in the second."""
    types = {"blk.0.*": TensorType.Q8_0, "token_embd.weight": TensorType.Q8_0}
    folder = tmp_path_factory.mktemp("models")
    return build_tiny_gguf(folder / "tiny.gguf", arch="qwen2", head_dim=64, types=types, seed=3)


@pytest.fixture
def file(path: Path) -> Iterator[GGUFFile]:
    with GGUFFile.open(path) as opened:
        yield opened


def decide(
    file: GGUFFile, free: int | None = None, *, emulated: bool = False, limits: StepLimits = LIMITS, **options: object
) -> tuple[ProjectionPlan, MemoryPlan]:
    config = ModelConfig.from_gguf(file)
    layout = KVLayout.for_model(config, SLOTS, 96, "f16")
    memory = memory_plan(file, config, layout, limits)
    device = EmulatorDevice("fast", memory_bytes=free)
    plan = plan_projections(
        file,
        config,
        RuntimeOptions(**options),
        limits,
        memory,
        device,
        emulated=emulated,  # type: ignore[arg-type]
    )
    assert device.live_buffers() == []
    return plan, plan.added_to(memory)


def layer_matrices(file: GGUFFile) -> set[str]:
    return {name for name, info in file.tensors.items() if name.startswith("blk.") and len(info.shape) == 2}


# -- products --------------------------------------------------------------------------------------------------


# Without cuBLAS every type becomes F32 on the host, by a function with its own tests: a few are enough.
OFF_TYPES = (TensorType.F32, TensorType.Q8_0, TensorType.Q4_K)


@pytest.mark.parametrize(
    ("kind", "cublas"), [*((k, True) for k in ALL_TYPES), *((k, False) for k in OFF_TYPES)], ids=str
)
def test_products_of_materialised_weights(
    device: EmulatorDevice, tmp_path: Path, kind: TensorType, cublas: bool
) -> None:
    """Each type, as stored in a file, at row counts on both sides of the border: 1e-6 of the sum of |x·w| in float64."""
    width = max(64, BLOCKS[kind].block_size)
    made = build_tiny_gguf(tmp_path / "one.gguf", head_dim=64, d_model=width, types={"blk.0.attn_q.weight": kind})
    name = "blk.0.attn_q.weight"
    with Bench(device) as bench, ExitStack() as keep, GGUFFile.open(made) as file:
        matrix = load_matrix(file, name, device)
        keep.callback(matrix.close)
        weights = dequantize(file.read_rows(name), kind).astype(np.float64)
        plan = ProjectionPlan("fast-fits", "", cublas, frozenset([name]))
        projections = Projections(device, plan, keep)
        projections.load(file, matrix)
        for rows in (1, 32, 33, 40):
            x, bias, before = (
                bench.activations(*shape) for shape in ((rows, width), (1, matrix.rows), (rows, matrix.rows))
            )
            for with_bias, add in ((True, True),) if rows < 33 else ((False, False), (True, False), (False, True)):
                out = bench.tensor(before)
                counted = device.counters.snapshot()
                given = [bench.tensor(bias[0])] if with_bias else None
                projections.project(bench.tensor(x), [matrix], [out], given, add=add)
                assert (device.counters - counted).gemms == (cublas and rows >= 33)
                plus = with_bias * bias + add * before
                assert product_error(bench.read(out), x, weights, plus) < TOLERANCE


@ON_OFF
@pytest.mark.parametrize("rows", [3, 33, 40])
def test_gate_up_swiglu(device: EmulatorDevice, file: GGUFFile, cublas: bool, rows: int) -> None:
    config = ModelConfig.from_gguf(file)
    names = ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"]
    plan = ProjectionPlan("fast-fits", "", cublas, frozenset(names), 0, 1)
    with Bench(device, rows) as bench, ExitStack() as keep:
        projections = Projections(device, plan, keep)
        projections.new_workspace(config, LIMITS)
        matrices = [load_matrix(file, name, device) for name in names]
        for matrix in matrices:
            keep.callback(matrix.close)
            projections.load(file, matrix)
        gate, up = (dequantize(file.read_rows(n), file.tensor(n).type).astype(np.float64) for n in names)
        x = bench.activations(rows, config.d_model)
        out = bench.empty((rows, config.d_ff))
        before = device.counters.snapshot()
        projections.gate_up_swiglu(bench.tensor(x), *matrices, out)
        assert (device.counters - before).gemms == (2 if cublas and rows >= 33 else 0)
        exact = x.astype(np.float64)
        scale = (np.abs(exact) @ np.abs(gate).T) * (np.abs(exact) @ np.abs(up).T)
        error = np.abs(bench.read(out) - silu(exact @ gate.T) * (exact @ up.T))
        assert error.max() < 1e-5 * scale.min()


def test_a_bias_is_spread_over_rows() -> None:
    with Bench(EmulatorDevice("check")) as bench:
        for rows, width in ((1, 1), (3, 255), (2, 257)):
            y, bias = bench.activations(rows, width), bench.activations(1, width)[0]
            out = bench.tensor(y)
            spread_bias(bench.device, out, bench.tensor(bias), add=True)
            assert np.array_equal(bench.read(out), y + bias)
            spread_bias(bench.device, out, bench.tensor(bias), add=False)
            assert np.array_equal(bench.read(out), np.broadcast_to(bias, y.shape))
        with pytest.raises(ValueError, match="the bias"):
            spread_bias(bench.device, bench.empty((2, 4)), bench.empty((5,)), add=False)


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[int, list[int]]:
    with open_session(path, CpuOps()) as session:
        return generate(session, range(SLOTS), 3, ROWS)


@pytest.mark.parametrize("graphs", [False, True])
@ON_OFF
def test_a_model_gives_the_cpus_tokens(
    path: Path, file: GGUFFile, expected: dict[int, list[int]], cublas: bool, graphs: bool
) -> None:
    plan, memory = decide(file, projection_backend="fast-fits", cublas=cublas)
    device = EmulatorDevice("fast")
    with open_session(path, CudaOps(device, decode_graph=graphs, projections=plan)) as session:
        free, total = device.memory_info()
        assert memory.total <= total - free <= memory.total + 1 * MIB  # small scratch is not planned
        assert generate(session, range(SLOTS), 3, ROWS) == expected
    # the one step of 33 rows and more: seven matrices a layer
    assert device.counters.gemms == (7 * session.config.n_layers if cublas else 0)
    assert device.live_buffers() == []


def test_a_captured_step_multiplies_by_cublas_too(path: Path, file: GGUFFile) -> None:
    """33 sequences decode together: enough rows, and a shape that graphs replay."""
    config, limits = ModelConfig.from_gguf(file), StepLimits(33, 33, 33)
    plan = decide(file, projection_backend="fast-fits", limits=limits)[0]
    ids: dict[bool, list[list[int]]] = {True: [], False: []}
    for graphs in ids:
        device = EmulatorDevice("fast")
        ops = CudaOps(device, decode_graph=graphs, projections=plan)
        weights = load_weights(file, config, ops, 8)
        with DecodeSession(config, weights, ops, slots=33, context=8, kv_dtype="f16", limits=limits) as session:
            for position in range(3):
                segments = [Segment(slot, position, [slot + 7 * position], [0]) for slot in range(33)]
                ids[graphs].append(session.run(StepPlan.pack(segments)).ids.tolist())
        # a graph's are counted twice: in the eager first step, and when they are captured
        assert device.counters.gemms == 7 * config.n_layers * (2 if graphs else 3)
        assert device.counters.replays == (2 if graphs else 0)
    assert ids[True] == ids[False]


# -- decisions -------------------------------------------------------------------------------------------------


def test_auto_takes_what_fits_and_says_the_sum(file: GGUFFile) -> None:
    plan, memory = decide(file)
    assert (plan.backend, plan.materialised) == ("fast-fits", layer_matrices(file))
    assert "fast-fits (auto), since weights" in plan.reason
    enough = memory.total + RESERVE_BYTES
    assert decide(file, enough)[0].backend == "fast-fits"
    plan, _ = decide(file, enough - 1)
    assert (plan.backend, plan.nbytes, plan.scratch) == ("large-model", 0, 0)
    assert "do not fit into" in plan.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cublas": False}, "cuBLAS is off"),
        ({"emulated": True}, "the emulator"),
        ({"materialize_budget_mb": 0}, "over --materialize-budget-mb 0"),
        ({"limits": StepLimits(32, SLOTS, SLOTS)}, "no step has more than 32 rows"),
        ({"projection_backend": "large-model"}, "as asked"),
    ],
)
def test_auto_stays_compact_for_a_reason(file: GGUFFile, options: dict, reason: str) -> None:
    plan, _ = decide(file, **options)
    assert (plan.backend, plan.materialised) == ("large-model", frozenset())
    assert reason in plan.reason


def test_a_missing_cublas_is_a_reason_for_auto_and_an_error_for_fast_fits(
    file: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise DeviceUnavailable("cuBLAS 12 is not installed", "use --no-cublas")

    monkeypatch.setattr(EmulatorDevice, "gemm", missing)
    assert "large-model (auto), since cuBLAS 12 is not installed" in decide(file)[0].reason
    with pytest.raises(DeviceUnavailable, match="--no-cublas"):
        decide(file, projection_backend="fast-fits")
    assert decide(file, projection_backend="fast-fits", cublas=False)[0].backend == "fast-fits"


def test_over_budget_tensors_stay_compact_in_one_line(file: GGUFFile, caplog: pytest.LogCaptureFixture) -> None:
    """The memory that is free is a budget too; gate and up are kept together or not at all."""
    _, with_all = decide(file, projection_backend="fast-fits")
    for short in (1, with_all.materialised // 2, with_all.materialised):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            plan, memory = decide(file, with_all.total + RESERVE_BYTES - short, projection_backend="fast-fits")
        assert memory.total <= with_all.total - short
        assert plan.nbytes <= with_all.materialised - short
        left = layer_matrices(file) - plan.materialised
        assert left
        assert [f"{len(left)} matrices stay compact" in r.getMessage() for r in caplog.records] == [True]
        for layer in (0, 1):
            pair = {f"blk.{layer}.ffn_{part}.weight" for part in ("gate", "up")}
            assert len(pair & plan.materialised) in (0, 2)
    plan, _ = decide(file, projection_backend="fast-fits", materialize_budget_mb=0)
    assert (plan.materialised, plan.scratch) == (frozenset(), 0)
    assert "over --materialize-budget-mb" in plan.reason


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="--materialize-budget-mb is -1"):
        RuntimeOptions(materialize_budget_mb=-1)
    with pytest.raises(ConfigError, match="add --decode-graph"):
        RuntimeOptions(decode_graph_diag_sync=True)


# -- through the command line ----------------------------------------------------------------------------------


def test_the_command_line_and_the_environment_choose(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", str(path), "x " * 40, "--greedy", "--max-tokens", "3", "--device", "emulator", "--json"]
    texts = set()
    for environment, line in (
        ({}, "projections: large-model (auto), since the emulator"),
        ({"M40LLM_PROJECTION_BACKEND": "fast-fits"}, "14 of 14 matrices in FP32 (1 MiB) for cuBLAS"),
        ({"M40LLM_PROJECTION_BACKEND": "fast-fits", "M40LLM_ENABLE_CUBLAS": "0"}, "for our own GEMM"),
        (
            {"M40LLM_PROJECTION_BACKEND": "fast-fits", "M40LLM_FAST_FITS_BUDGET_MB": "0"},
            "over --materialize-budget-mb",
        ),
    ):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert run(arguments) == 0
        captured = capsys.readouterr()
        texts.add(json.loads(captured.out)["text"])
        assert line in captured.err
    assert len(texts) == 1


def test_replays_are_timed_when_asked(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = RuntimeOptions(device="emulator", decode_graph=True, decode_graph_diag_sync=True, ctx=32)
    with Model.open(path, options) as model, caplog.at_level(logging.INFO, "m40llm.steps"):
        for position in range(3):
            model.session.run(StepPlan.pack([Segment(0, position, [7], [0])]))
    timed = [r.getMessage() for r in caplog.records if "replayed in" in r.getMessage()]
    assert len(timed) == 2  # the first of the three runs eagerly


def test_the_first_use_of_a_kernel_is_announced(path: Path, tmp_path: Path) -> None:
    names: list[str] = []
    for _ in range(2):
        device = EmulatorDevice("fast", cache_dir=tmp_path, on_compile=names.append)
        device.kernel("elementwise", "add_f32")
    assert names == ["elementwise"]
    options = replace(RuntimeOptions(), device="emulator", ctx=32)
    with Model.open(path, options, on_compile=names.append) as model:
        assert model.notes[0].startswith("projections: ")
