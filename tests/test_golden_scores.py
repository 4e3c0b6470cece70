"""Log-probabilities against FP32 transformers on the dequantised weights (recorded in tests/data)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from m40llm.config import RuntimeOptions, SamplingParams
from m40llm.engine import Engine
from m40llm.model import Model
from m40llm.scoring import score
from tests.conftest import DATA

# (KV type, bits of activations): mean and max. K and V in FP16 move the oracle's own log-probabilities by 0.001-0.002 on
# average and 0.013 at most; with KV in FP32 everything else has to be right to 0.002. The last row measures what 16-bit
# activations alone cost (0.0005 and 0.003).
BOUNDS = {("f16", None): (0.003, 0.03), ("f32", None): (0.0001, 0.002), ("f32", 16): (0.001, 0.005)}


def deviations(path: Path, golden: str, kv_dtype: str, bits: int | None) -> list[np.ndarray]:
    """|ours - oracle| of the eight best tokens at every position, an array for each prompt."""
    cases = json.loads((DATA / golden).read_text())
    out = []
    with Model.open(path, RuntimeOptions(kv_dtype=kv_dtype, activation_bits=bits), logit_rows=32) as model:  # type: ignore[arg-type]
        for case in cases:
            ids = case["prompt_ids"] + case["llama_cpp_greedy_ids"]
            oracle = case["f32_top8_on_llama_cpp_path"]
            ours = list(score(model.session, ids, len(case["prompt_ids"]), model.config.vocab_size))
            assert len(ours) == len(oracle)
            out.append(
                np.array(
                    [abs(dict(r.top)[i] - logprob) for r, best in zip(ours, oracle, strict=True) for i, logprob in best]
                )
            )
    return out


def check(path: Path, golden: str, kv_dtype: str, bits: int | None) -> None:
    mean, largest = BOUNDS[kv_dtype, bits]
    for d in deviations(path, golden, kv_dtype, bits):
        assert d.mean() <= mean
        assert d.max() <= largest


@pytest.mark.parametrize(("kv_dtype", "bits"), BOUNDS)
def test_smollm2(smollm2_path: Path, kv_dtype: str, bits: int | None) -> None:
    check(smollm2_path, "smollm2-135m-instruct-q4_1.json", kv_dtype, bits)


@pytest.mark.models
@pytest.mark.parametrize(("kv_dtype", "bits"), BOUNDS)
def test_qwen(qwen_path: Path, kv_dtype: str, bits: int | None) -> None:
    check(qwen_path, "qwen2.5-coder-1.5b-instruct-q4_k_m.json", kv_dtype, bits)


@pytest.mark.models
@pytest.mark.parametrize(
    ("question", "answer"), [("What is 2+2? Answer with one digit.", "4"), ("Please answer with the word OK.", "OK")]
)
def test_qwen_answers_what_cannot_be_missed(qwen_path: Path, question: str, answer: str) -> None:
    """A wrong RoPE pairing or a forgotten bias passes many tests, but not these."""
    with Engine.load(qwen_path, RuntimeOptions(ctx=256)) as engine:
        template = engine.model.chat_template
        assert template is not None
        prompt = template.render([{"role": "user", "content": question}])
        ids = engine.model.tokenizer.encode(prompt, bos=False)
        assert engine.submit(ids, SamplingParams(max_tokens=8, temperature=0)).result.text.strip() == answer
