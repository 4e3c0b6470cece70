"""End to end on small models built in memory: the session against the plain NumPy forward pass, and against itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from m40llm.config import ModelConfig, RuntimeOptions
from m40llm.gguf import GGUFFile, TensorType
from m40llm.model import Model
from m40llm.plan import Segment, StepPlan
from tests import reference
from tests.tiny_gguf import build_tiny_gguf

MODELS = {
    "llama, FP16 weights, plain RoPE": {"types": {"*": TensorType.F16}},
    "qwen2, biases, halves, tied": {"arch": "qwen2", "types": {"*": TensorType.F16}, "tied": True},
    "llama, floats among integers": {"types": {"*attn_v*": TensorType.F16, "*": TensorType.Q8_0}},
    "llama, mixed types, GQA 4:1": {
        "d_model": 256,
        "n_heads": 4,
        "n_kv_heads": 1,
        "d_ff": 512,
        "types": {"*attn_v*": TensorType.Q6_K, "*ffn_up*": TensorType.Q5_0, "*": TensorType.Q4_K},
    },
    "llama, linear scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen2, YaRN": {
        "arch": "qwen2",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_context_length": 128},
    },
    "llama, llama3 factors": {"rope_factors": np.linspace(1, 8, 8, dtype=np.float32)},
}
PROMPT = [int(i) for i in np.random.default_rng(7).integers(0, 300, 45)]


@contextmanager
def opened(path: Path, **options: object) -> Iterator[Model]:
    chosen = {"threads": 2, "slots": 3, "ctx": 128, "kv_dtype": "f32"} | options
    with Model.open(path, RuntimeOptions(**chosen), logit_rows=64) as model:  # type: ignore[arg-type]
        yield model


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model") / "tiny.gguf"
    build_tiny_gguf(target, seed=3, **MODELS[request.param])
    return target


def logits_of(model: Model, *steps: list[Segment]) -> np.ndarray:
    """Logits of all wanted rows of a sequence of steps, in order."""
    return np.concatenate([model.session.run(StepPlan.pack(segments)).logits.copy() for segments in steps])


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_logits_equal_the_plain_forward_pass(path: Path, kv_dtype: str) -> None:
    with GGUFFile.open(path) as file:
        expected = reference.forward(file, ModelConfig.from_gguf(file), PROMPT, kv_dtype=kv_dtype)
    with opened(path, kv_dtype=kv_dtype) as model:
        ours = logits_of(model, [Segment(0, 0, PROMPT, range(len(PROMPT)))])
    # FP32 throughout with exact KV; otherwise 16-bit activations, and FP16 roundings that may fall on the other side
    np.testing.assert_allclose(ours, expected, atol={"f32": 2e-5, "f16": 4e-3}[kv_dtype] * np.abs(expected).max())


def test_chunked_equals_whole_and_packed_equals_alone(path: Path) -> None:
    a, b = PROMPT[:30], PROMPT[15:]
    with opened(path) as model:
        whole = logits_of(model, [Segment(0, 0, a, (len(a) - 1,))])
        alone = logits_of(model, [Segment(1, 0, b, (len(b) - 1,))])
        chunked = logits_of(
            model,
            [Segment(2, 0, a[:7])],
            [Segment(2, 7, a[7:8]), Segment(0, 0, b[:16])],
            [Segment(0, 16, b[16:], (len(b) - 17,)), Segment(2, 8, a[8:], (len(a) - 9,))],
        )
    scale = np.abs(whole).max()
    np.testing.assert_allclose(chunked, np.concatenate([alone, whole]), atol=2e-4 * scale)
    np.testing.assert_array_equal(chunked.argmax(1), np.concatenate([alone, whole]).argmax(1))


def test_a_step_reports_the_argmax_of_its_logits(path: Path) -> None:
    with opened(path) as model:
        result = model.session.run(StepPlan.pack([Segment(0, 0, PROMPT, range(len(PROMPT)))]))
        np.testing.assert_array_equal(result.ids, result.logits.argmax(1))


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(0, 127, [1, 2]), "outside the context"),
        (Segment(3, 0, [1]), "slot"),
        (Segment(0, 0, [320]), "vocabulary"),
        (Segment(0, 0, [-1]), "vocabulary"),
        (Segment(0, 0, [1] * 513), "limits"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path, segment: Segment, message: str) -> None:
    build_tiny_gguf(tmp_path / "tiny.gguf")
    with opened(tmp_path / "tiny.gguf") as model, pytest.raises(ValueError, match=message):
        model.session.run(StepPlan.pack([segment]))
