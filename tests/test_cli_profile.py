"""--profile and the step logs: they change no token, and their sums are the device's own counters."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path

import pytest

from m40llm.cli.app import run
from m40llm.config import RuntimeOptions
from m40llm.device.emulator import EmulatorDevice
from m40llm.device.protocol import Counters
from m40llm.model import Model
from m40llm.ops.cuda import CudaOps
from m40llm.ops.cuda.counted import CountedOps
from m40llm.ops.profile import StepLogs
from m40llm.plan import Segment, StepPlan
from tests.test_cuda_ops import open_session
from tests.tiny_gguf import build_tiny_gguf

Captured = pytest.CaptureFixture[str]
LAYERS = 2
IN_STEP = {"embed": 1, "norm": 2 * LAYERS, "qkv": LAYERS, "rope + append": LAYERS, "attention": LAYERS}
IN_STEP |= {"attn_output": LAYERS, "gate + up": LAYERS, "ffn_down": LAYERS, "logits + argmax": 1, "plan": 1, "ids": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", head_dim=64, n_layers=LAYERS)


def one_token(position: int) -> StepPlan:
    return StepPlan.pack([Segment(0, position, [7], [0])])


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_the_text_stays_and_the_table_follows(tiny: Path, capsys: Captured, device: str) -> None:
    arguments = ["generate", str(tiny), "Hello", "--greedy", "--max-tokens", "3", "--device", device, "--ctx", "64"]
    assert run(arguments) == 0
    plain = capsys.readouterr()
    assert "profile" not in plain.err
    assert run([*arguments, "--profile"]) == 0
    profiled = capsys.readouterr()
    assert profiled.out == plain.out
    table = profiled.err[profiled.err.index("profile: 3 steps") :].splitlines()
    assert table[1].split()[:2] == ["group", "calls"]
    assert table[-1].split()[0] == "all"
    assert len({len(line) for line in table[1:]}) == 1
    shares = [float(cell) for line in table[2:-1] for cell in re.findall(r"([\d.]+)%", line)]
    assert sum(shares) == pytest.approx(100, abs=1.0)
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_json_has_the_profile_when_asked(tiny: Path, capsys: Captured, device: str) -> None:
    arguments = ["generate", str(tiny), "Hello", "--greedy", "--max-tokens", "3", "--device", device, "--json"]
    assert run(arguments) == 0
    assert "profile" not in json.loads(capsys.readouterr().out)
    assert run([*arguments, "--profile"]) == 0
    profile = json.loads(capsys.readouterr().out)["profile"]
    assert profile["steps"] == 3
    groups = profile["groups"]
    if device == "cpu":
        assert all(group["calls"] > 0 and group["seconds"] >= 0 for group in groups.values())
        assert any("project" in name for name in groups)
        return
    assert profile["timed_by"] == "host clock (emulator)"
    assert {name: group["calls"] / 3 for name, group in groups.items()} == IN_STEP
    assert all((groups[name]["seconds"] is None) == (name in ("plan", "ids")) for name in groups)
    assert (groups["ids"]["synchronisations"], groups["plan"]["h2d_copies"]) == (3, 3)


def test_the_groups_add_up_to_the_devices_counters(tiny: Path) -> None:
    device = EmulatorDevice("fast")
    ops = CountedOps(device, timed=True, emulated=True, logs=StepLogs())
    with open_session(tiny, ops) as session:
        before = device.counters.snapshot()
        session.run(StepPlan.pack([Segment(0, 0, [1, 2, 3], [])]))  # wants no logits: nothing waits
        assert ops.profile.groups["norm"].seconds is None
        result = session.run(one_token(3))
        assert (ops.profile.groups["norm"].seconds or 0) > 0
        assert result.logits.shape[0] == 1
        asked = device.counters - before
    total = sum((group.counters for group in ops.profile.groups.values()), Counters())
    assert total == asked
    assert ops.profile.steps == 2


def test_times_are_added_once(tiny: Path) -> None:
    """A group's seconds lie within the steps, however many there are."""
    ops = CountedOps(EmulatorDevice("fast"), timed=True, emulated=True, logs=StepLogs())
    with open_session(tiny, ops) as session:
        began = time.perf_counter()
        for position in range(8):
            session.run(one_token(position))
        wall = time.perf_counter() - began
    assert 0 < sum(group.seconds or 0.0 for group in ops.profile.groups.values()) <= wall


def test_a_graph_is_one_group(tiny: Path) -> None:
    device = EmulatorDevice("fast")
    ops = CountedOps(device, timed=True, emulated=True, logs=StepLogs(), decode_graph=True)
    with open_session(tiny, ops) as session, open_session(tiny, CudaOps(EmulatorDevice("fast"))) as plain:
        for position in range(3):
            assert session.run(one_token(position)).ids.tolist() == plain.run(one_token(position)).ids.tolist()
    graph = ops.profile.groups["decode graph"]
    assert (graph.calls, graph.counters.replays) == (3, 2)
    assert set(ops.profile.groups) == {"plan", "decode graph", "ids"}


def test_each_log_has_its_line_a_step(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = RuntimeOptions(device="emulator", ctx=32, launch_log=True, sync_log=True, alloc_log=True)
    with caplog.at_level(logging.INFO, "m40llm.steps"), Model.open(tiny, options) as model:
        assert model.profile is None
        model.session.run(one_token(0))
    lines = [record.getMessage() for record in caplog.records]
    step = [line for line in lines if line.startswith("step 1 (1 row): ")]
    assert len(step) == 3
    counted = re.search(r"launches (\d+), gemms 0, replays 0 \(embed 1, norm 4, .*logits \+ argmax 3\)$", step[0])
    assert counted
    assert 0 < int(counted[1]) <= 1 + 8 * LAYERS + 3
    assert "synchronisations 1, h2d_copies 1," in step[1]
    assert step[1].endswith("(ids 1)")
    assert step[2].endswith("allocations 0, frees 0")
    assert any(re.search(r"^loading: allocations [1-9]", line) for line in lines)


def test_the_environment_turns_logs_on(tiny: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("m40llm.steps")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setenv("M40LLM_SYNC_LOG", "1")
    arguments = ["generate", str(tiny), "Hello", "--greedy", "--max-tokens", "2", "--ctx", "64"]
    assert run([*arguments, "--device", "emulator"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(lines) == 2
    assert all("synchronisations 1" in line for line in lines)
    assert run([*arguments, "--device", "cpu"]) == 0
    assert "without effect on the CPU: --sync-log" in capsys.readouterr().err
