"""CudaOps under the session and the forward pass, in the emulator: tokens, logits, and what a step asks of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from m40llm.config import ConfigError, ModelConfig
from m40llm.device.emulator import EmulatorDevice
from m40llm.gguf import GGUFFile, TensorType
from m40llm.ops.cpu import CpuOps
from m40llm.ops.cuda import CudaOps, OverBudget, check_model, memory_plan
from m40llm.ops.protocol import Ops
from m40llm.plan import Segment, StepLimits, StepPlan
from m40llm.session import DecodeSession
from m40llm.weights import load_weights
from tests import reference
from tests.cuda_arrays import DEVICES, kernel_device
from tests.tiny_gguf import build_tiny_gguf

SLOTS, CONTEXT, ROWS = 3, 96, 40
# Prompts of the three slots: longer than a tile of keys, of one token, and in between
PROMPTS = ([*range(5, 43)], [300], [*range(100, 111)])
# CONTRIBUTING's bound for logits with FP16 keys and values, mean and maximum
MEAN, MAXIMUM = 0.003, 0.03

Open = Callable[[Ops], DecodeSession]


@pytest.fixture(scope="module", params=DEVICES)
def kind(request: pytest.FixtureRequest) -> str:
    """What `kernel_device` opens; each test opens its own, since a backend closes its device."""
    return request.param


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with GQA 4:2: llama (pairs of neighbours) and qwen2 (halves, biases); Q8_0 and F32 matrices."""
    types = {"blk.0.*": TensorType.Q8_0, "token_embd.weight": TensorType.Q8_0}
    return build_tiny_gguf(
        tmp_path_factory.mktemp("models") / "tiny.gguf",
        arch=request.param,
        head_dim=64,
        types=types,
        seed=3,
    )


def open_session(path: Path, ops: Ops) -> DecodeSession:
    with GGUFFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        weights = load_weights(file, config, ops, CONTEXT)
    limits = StepLimits(rows=ROWS, segments=SLOTS, logit_rows=SLOTS)
    return DecodeSession(config, weights, ops, slots=SLOTS, context=CONTEXT, kv_dtype="f16", limits=limits)


def generate(session: DecodeSession, slots: Sequence[int], count: int, chunk: int) -> dict[int, list[int]]:
    """Greedy tokens of the slots' prompts, all in flight at once, `chunk` prompt tokens a step (in turns within ROWS)."""
    tokens = {slot: list(PROMPTS[slot]) for slot in slots}
    done = dict.fromkeys(slots, 0)
    while any(len(tokens[s]) < len(PROMPTS[s]) + count for s in slots):
        segments, room = [], ROWS
        for slot in slots:
            waiting = tokens[slot][done[slot] :][: min(chunk, room)]
            if not waiting or len(tokens[slot]) >= len(PROMPTS[slot]) + count:
                continue
            room -= len(waiting)
            last = done[slot] + len(waiting) == len(tokens[slot])
            segments.append(Segment(slot, done[slot], waiting, [len(waiting) - 1] if last else []))
            done[slot] += len(waiting)
        result = session.run(StepPlan.pack(segments))
        for segment, token in zip([s for s in segments if s.want], result.ids.tolist(), strict=True):
            tokens[segment.slot].append(token)
    return {slot: tokens[slot][len(PROMPTS[slot]) :] for slot in slots}


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[int, list[int]]:
    with open_session(path, CpuOps()) as session:
        return generate(session, range(SLOTS), 4, ROWS)


@pytest.mark.parametrize("chunk", [ROWS, 7, 1])
@pytest.mark.parametrize("graphs", [False, True])
def test_packed_requests_give_the_cpus_tokens(
    kind: str, path: Path, expected: dict[int, list[int]], chunk: int, graphs: bool
) -> None:
    if graphs and chunk == 7:
        return  # prompts in chunks do not concern the graphs, which are of decode steps
    device = kernel_device(kind)
    with open_session(path, CudaOps(device, decode_graph=graphs)) as session:
        assert generate(session, range(SLOTS), 4, chunk) == expected
    assert (device.counters.replays > 0) == graphs


def test_a_request_alone_gives_the_same_tokens(kind: str, path: Path, expected: dict[int, list[int]]) -> None:
    with open_session(path, CudaOps(kernel_device(kind))) as session:
        for slot in range(SLOTS):
            assert generate(session, [slot], 4, ROWS)[slot] == expected[slot]


def test_logits_are_the_references(kind: str, path: Path) -> None:
    with GGUFFile.open(path) as file:
        oracle = reference.forward(file, ModelConfig.from_gguf(file), PROMPTS[0])
    device = kernel_device(kind)
    with open_session(path, CudaOps(device)) as session:
        session.run(StepPlan.pack([Segment(1, 0, PROMPTS[0][:20], [])]))
        plan = [Segment(1, 20, PROMPTS[0][20:], [5, 17]), Segment(0, 0, PROMPTS[1], [0])]
        result = session.run(StepPlan.pack(plan))
        before = device.counters.snapshot()
        logits, _ = result.logits, result.logits
        assert (device.counters - before).d2h_copies == 1  # fetched when asked for, once
    difference = np.abs(logits[:2] - oracle[[25, 37]])
    assert difference.mean() < MEAN
    assert difference.max() < MAXIMUM
    assert result.ids[:2].tolist() == oracle[[25, 37]].argmax(axis=1).tolist()


@pytest.mark.parametrize("experiment", ["ldg", "ldg_kv"])
def test_the_cache_experiments_change_no_token(
    kind: str, path: Path, expected: dict[int, list[int]], experiment: str
) -> None:
    ops = CudaOps(kernel_device(kind), cache_experiment=experiment)  # type: ignore[arg-type]
    assert experiment in ops.description
    with open_session(path, ops) as session:
        assert generate(session, [1], 4, ROWS)[1] == expected[1]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_allocates_nothing_and_waits_once(kind: str, path: Path, graphs: bool) -> None:
    device = kernel_device(kind)
    with open_session(path, CudaOps(device, decode_graph=graphs)) as session:
        for position in range(3):  # eager, captured, replayed
            before = device.counters.snapshot()
            session.run(StepPlan.pack([Segment(0, position, [7], [0]), Segment(2, position, [9], [0])]))
            step = device.counters - before
            assert (step.allocations, step.frees, step.synchronisations) == (0, 0, 1)
            assert (step.h2d_copies, step.d2h_copies, step.d2d_copies) == (1, 1, 0)
        if graphs:
            assert (step.launches, step.replays) == (0, 1)
        else:
            layers = session.config.n_layers
            # embedding; norm, q-k-v, RoPE, attention, output, norm, gate-up, down; norm, head, argmax
            assert step.launches <= 1 + 8 * layers + 3
        before = device.counters.snapshot()
        session.run(StepPlan.pack([Segment(1, 0, [1, 2, 3], [])]))
        assert (device.counters - before).synchronisations == 0  # a chunk of a prompt has no result to wait for


def test_a_layer_is_eight_launches_with_mixed_types(kind: str, tmp_path: Path) -> None:
    """As in a Q4_K_M file, with activations staged: the CPU's tokens for one row, for up to four, and for more."""
    types = {"blk.*.attn_v.weight": TensorType.Q6_K, "blk.*.ffn_down.weight": TensorType.Q6_K}
    types |= {"blk.*": TensorType.Q4_K, "output.weight": TensorType.Q6_K}
    mixed = build_tiny_gguf(tmp_path / "mixed.gguf", arch="qwen2", d_model=256, d_ff=256, types=types, seed=5)
    with open_session(mixed, CpuOps(activation_bits=32)) as session:
        expected = generate(session, range(SLOTS), 4, ROWS)
    device = kernel_device(kind)
    with open_session(mixed, CudaOps(device)) as session:
        assert generate(session, range(SLOTS), 4, ROWS) == expected
        assert generate(session, [0], 4, ROWS)[0] == expected[0]
        for slots in ([0], [0, 1, 2]):
            before = device.counters.launches
            session.run(StepPlan.pack([Segment(slot, 50, [7], [0]) for slot in slots]))
            # embedding; norm, q-k-v, RoPE, attention, output, norm, gate-up, down; norm, head, argmax
            assert device.counters.launches - before == 1 + 8 * session.config.n_layers + 3


def test_what_the_kernels_cannot_run_is_refused_before_loading(path: Path) -> None:
    with GGUFFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
    check_model(config, "f16")
    with pytest.raises(ConfigError, match="--kv-dtype f32"):
        check_model(config, "f32")


def test_a_head_size_without_a_kernel_is_refused(tmp_path: Path) -> None:
    with GGUFFile.open(build_tiny_gguf(tmp_path / "small.gguf", head_dim=16)) as file:
        config = ModelConfig.from_gguf(file)
    with pytest.raises(ConfigError, match="heads of 64, 128, 256, not 16; use --device cpu"):
        check_model(config, "f16")


def test_memory_is_planned_before_it_is_taken(path: Path) -> None:
    """The plan covers what is allocated, but for small scratch, and names the flags when it does not fit."""
    device = EmulatorDevice("fast")
    with open_session(path, CudaOps(device)) as session, GGUFFile.open(path) as file:
        limits = StepLimits(rows=ROWS, segments=SLOTS, logit_rows=SLOTS)
        plan = memory_plan(file, session.config, session.kv_layout, limits)
        free, total = device.memory_info()
        taken = total - free
        scratch = 4 * 65 * 4 * 96 * 2  # partial results of attention
        assert plan.total <= taken <= plan.total + scratch + 4096
    plan.check(plan.total)
    with pytest.raises(OverBudget, match="--ctx"):
        plan.check(plan.total - 1)
