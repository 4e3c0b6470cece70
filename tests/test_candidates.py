"""Top-k on the device: the same tokens as from whole rows of logits, without copying them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from m40llm.cli.app import run
from m40llm.config import SamplingParams
from m40llm.device.emulator import EmulatorDevice
from m40llm.ops.cpu import CpuOps
from m40llm.ops.cuda import CudaOps
from m40llm.ops.cuda.reduce import most_candidates
from m40llm.plan import Segment, StepPlan
from m40llm.sampling import Sampler
from tests.test_cuda_ops import open_session
from tests.tiny_gguf import build_tiny_gguf

CHAINS = (
    {"top_k": 40},
    {"top_k": 1, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 64, "top_p": 0.5, "min_p": 0.0},
    {"top_k": 7, "top_p": 1.0, "min_p": 0.2, "temperature": 1.7},
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", head_dim=64)


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_candidates_draw_what_the_whole_row_draws(chain: dict) -> None:
    """Also with logits of few values, so that the k-th has equals, with excluded tokens, and in any order."""
    rng = np.random.default_rng(1)
    for seed in range(60):
        logits = rng.standard_normal(500).astype(np.float32) * 3
        if seed % 3 == 0:
            logits = np.round(logits)
        if seed % 5 == 0:
            logits[rng.permutation(500)[:490]] = -np.inf
        whole, few = (Sampler(SamplingParams(seed=seed, **chain), [], 500) for _ in range(2))
        count = few.enough_candidates
        assert count == chain["top_k"]
        best = np.lexsort((np.arange(500), -logits))[:count]
        best = rng.permutation(best).astype(np.int32)
        for _ in range(3):
            assert few.sample_candidates(best, logits[best]) == whole.sample(logits)


@pytest.mark.parametrize(
    ("options", "enough"),
    [
        ({}, 40),
        ({"top_k": 0}, 0),
        ({"top_k": 100}, 0),  # the whole vocabulary
        ({"temperature": 0}, 0),
        ({"logit_bias": ((3, 1.0),)}, 0),
        ({"presence_penalty": 0.5}, 0),
        ({"repeat_penalty": 1.1}, 0),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, 40),
    ],
)
def test_when_candidates_are_enough(options: dict, enough: int) -> None:
    assert Sampler(SamplingParams(**options), [], 100).enough_candidates == enough


def test_a_step_selects_them_on_the_device(tiny: Path) -> None:
    device = EmulatorDevice("check")
    plan = StepPlan.pack([Segment(0, 0, [5, 6, 7], [1, 2]), Segment(2, 0, [9], [0])])
    with open_session(tiny, CudaOps(device)) as session:
        result = session.run(plan)
        vocab = session.config.vocab_size
        before = device.counters.snapshot()
        few, more = result.candidates(1, 3), result.candidates(2, 20)
        again = result.candidates(0, 20)
        asked = device.counters - before
        assert (asked.launches, asked.d2h_copies, asked.d2h_bytes) == (2, 2, 3 * (3 + 20) * 8)
        assert (asked.allocations, asked.h2d_copies) == (0, 0)
        logits = result.logits
        for row, count, found in ((1, 3, few), (2, 20, more), (0, 20, again)):
            assert found is not None
            ids = np.lexsort((np.arange(vocab), -logits[row]))[:count]
            assert found[0].tolist() == ids.tolist()
            assert found[1].tolist() == logits[row][ids].tolist()
        assert result.candidates(0, most_candidates(vocab) + 1) is None
    with open_session(tiny, CpuOps()) as session:
        assert session.run(plan).candidates(0, 3) is None


def test_limits() -> None:
    assert [most_candidates(v) for v in (10, 4096, 151_936, 262_144, 600_000)] == [10, 64, 64, 64, 27]


def test_requests_take_candidates_and_the_same_text(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bias of zero changes nothing but the way: it needs whole rows."""
    arguments = ["generate", str(tiny), "Hello", "--seed", "3", "--max-tokens", "6", "--device", "emulator"]
    seen = {}
    for way, extra in (("candidates to host", ()), ("logits to host", ("--logit-bias", "5=0"))):
        assert run([*arguments, *extra, "--json", "--profile"]) == 0
        result = json.loads(capsys.readouterr().out)
        groups = result["profile"]["groups"]
        assert groups[way]["calls"] == 6
        assert len({"candidates to host", "logits to host"} & set(groups)) == 1
        seen[way] = result["token_ids"]
    assert seen["candidates to host"] == seen["logits to host"]
