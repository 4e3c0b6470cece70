"""The registry's real models through the reader; smollm2 is fetched on first use."""

import time

import gguf
import numpy as np
import pytest

from m40llm.cli.model_arg import resolve_model
from m40llm.gguf import GGUFFile, dequantize

ALIASES = [
    "smollm2",
    pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.models),
    pytest.param("gemma3-270m", marks=pytest.mark.models),
]
# alias → architecture, tensors, tokens, merges, one token of the vocabulary
FACTS = {
    "smollm2": ("llama", 272, 49152, 48900, (504, "The")),
    "qwen2.5-coder-1.5b": ("qwen2", 339, 151936, 151387, (151645, "<|im_end|>")),
    "gemma3-270m": ("gemma3", 236, 262144, 0, (106, "<end_of_turn>")),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_opens_fast_with_its_vocabulary(alias: str) -> None:
    path = resolve_model(alias)
    arch, tensors, tokens, merges, (token, text) = FACTS[alias]
    best = float("inf")
    for _ in range(3):  # the best of three: other tests share the processor
        start = time.perf_counter()
        with GGUFFile.open(path) as model:
            vocabulary = model.metadata.require("tokenizer.ggml.tokens", list)
            pairs = model.metadata.optional("tokenizer.ggml.merges", list, [])
        best = min(best, time.perf_counter() - start)
    assert model.metadata.require("general.architecture", str) == arch
    assert (len(model.tensors), len(vocabulary), len(pairs)) == (tensors, tokens, merges)
    assert vocabulary[token] == text
    assert best < 0.7


@pytest.mark.parametrize("alias", ALIASES)
def test_rows_of_every_type_equal_the_gguf_package(alias: str) -> None:
    with GGUFFile.open(resolve_model(alias)) as model:
        seen: dict[str, int] = {}
        for name, info in model.tensors.items():
            if seen.setdefault(info.type.name, 0) >= 3:
                continue
            seen[info.type.name] += 1
            rows = min(info.rows, 200)
            packed = model.read_rows(name, info.rows - rows, info.rows)
            np.testing.assert_array_equal(packed, model.data(name)[-rows:])
            expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(int(info.type)))
            np.testing.assert_array_equal(dequantize(packed, info.type).view(np.uint32), expected.view(np.uint32))
        assert len(seen) >= 2
