"""Constrained output: whatever the logits say, the finished text parses and satisfies its schema."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from m40llm.config import RuntimeOptions, SamplingParams
from m40llm.engine import Engine, Request, RequestError
from m40llm.gguf import GGUFFile
from m40llm.sampling import GrammarCompiler, GrammarError, Sampler, SamplingError, ThinkingConstraint
from m40llm.text import Tokenizer
from tests.text_vocabularies import CONTROL, USER_DEFINED, bpe_metadata

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", 'b"lue']}, "minItems": 1, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "lat": {"type": "integer", "minimum": -90, "maximum": 90},
            },
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[Any] = [
    PERSON,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"enum": ["yes", "no", 3, None]},
    {"type": "string", "format": "date"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    merges = ["t r", "tr u", "tru e", '" :', "1 2"]
    extra = {"<|end|>": CONTROL, "<|mark|>": CONTROL, "<think>": USER_DEFINED, "</think>": USER_DEFINED}
    metadata = bpe_metadata(merges, extra)
    metadata["tokenizer.ggml.eos_token_id"] = metadata["tokenizer.ggml.tokens"].index("<|end|>")
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 3)  # three rows of padding


def babble(tokenizer: Tokenizer, sampler: Sampler, seed: int, limit: int = 400) -> tuple[str, list[int], bool]:
    """What a model with random logits says: text, ids, whether it came to an end."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    while len(ids) < limit:
        token = sampler.sample(random.normal(size=sampler.vocab_size).astype(np.float32) * 4)
        if token in tokenizer.eog_ids:
            return tokenizer.decode(ids), ids, True
        sampler.accept(token)
        ids.append(token)
        if sampler.constraint is not None and sampler.constraint.finished:
            return tokenizer.decode(ids), ids, True
    return tokenizer.decode(ids), ids, False


@pytest.mark.parametrize("schema", SCHEMAS, ids=["person", "array", "enum", "date"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_random_logits_satisfy_the_schema(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: Any, temperature: float
) -> None:
    grammar = compiler.compile_json(schema)
    ended = 0
    for seed in range(12):
        params = SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0, seed=seed)
        sampler = Sampler(params, [], tokenizer.vocab_size + 3, grammar.start())
        text, ids, end = babble(tokenizer, sampler, seed)
        assert max(ids) < tokenizer.vocab_size
        if end:
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
            ended += 1
    assert ended >= 8


def test_json_object_is_an_object(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    sampler = Sampler(SamplingParams(temperature=0), [], tokenizer.vocab_size + 3, compiler.compile_json().start())
    logits = np.zeros(tokenizer.vocab_size + 3, np.float32)
    assert tokenizer.decode([sampler.sample(logits)]) == "{"
    assert not logits.any(), "the model's logits must stay as they are"
    assert sampler.needs_logits


def test_two_requests_of_one_grammar_do_not_disturb_each_other(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile('start: "ab" | "cd"')
    first, second = grammar.start(), grammar.start()
    a, c = tokenizer.encode("a", bos=False)[0], tokenizer.encode("c", bos=False)[0]
    first.accept(a)
    logits = np.zeros(tokenizer.vocab_size + 3, np.float32)
    second.restrict(logits)
    assert set(np.flatnonzero(np.isfinite(logits))) == {a, c}


def test_a_control_token_is_never_text(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    mark = tokenizer.encode("<|mark|>", bos=False)
    assert len(mark) == 1
    constraint = compiler.compile('start: "<|mark|>"').start()
    logits = np.zeros(tokenizer.vocab_size + 3, np.float32)
    constraint.restrict(logits)
    assert np.isneginf(logits[mark[0]])
    assert np.isfinite(logits[tokenizer.encode("<", bos=False)[0]])
    by_id = compiler.compile(f"start: <[{mark[0]}]>").start()
    logits[:] = 0
    by_id.restrict(logits)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == mark


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "object", "properties": 3},
        {"$ref": "#/$defs/missing"},
        {"type": "string", "pattern": "("},
        {"type": "integer", "minimum": 5, "maximum": 4},
        False,
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "object", "unevaluatedProperties": False},
        {"$ref": "https://example.com/schema.json"},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    ],
)
def test_a_schema_that_cannot_be_is_refused_in_one_line(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(GrammarError) as error:
        compiler.compile_json(schema)
    assert str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
    ],
    ids=["pattern", "length", "items", "properties"],
)
def test_a_hostile_schema_costs_little(tokenizer: Tokenizer, compiler: GrammarCompiler, schema: Any) -> None:
    started = time.perf_counter()
    try:
        constraint = compiler.compile_json(schema).start()
        constraint.restrict(np.zeros(tokenizer.vocab_size + 3, np.float32))
    except (GrammarError, SamplingError):
        pass
    assert time.perf_counter() - started < 10


def test_a_token_that_is_not_allowed_is_an_error(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint = compiler.compile_json().start()
    with pytest.raises(SamplingError):
        constraint.accept(tokenizer.encode("x", bos=False)[0])


class TestThinking:
    def test_the_budget_forces_the_closing_marker(self, tokenizer: Tokenizer) -> None:
        constraint = ThinkingConstraint(tokenizer, "<think>", "</think>", inside=True, budget=3)
        sampler = Sampler(SamplingParams(temperature=0), [], tokenizer.vocab_size, constraint)
        _, ids, _ = babble(tokenizer, sampler, 0, limit=7)
        at = ids.index(tokenizer.encode("</think>", bos=False)[0])
        assert at == 4  # three tokens and the line break before the marker
        assert not constraint.active

    def test_a_budget_that_is_kept_changes_nothing(self, tokenizer: Tokenizer) -> None:
        constraint = ThinkingConstraint(tokenizer, "<think>", "</think>", inside=False, budget=5)
        for token in tokenizer.encode("<think>hm</think>hello, world, for ever", bos=False):
            assert not constraint.active
            constraint.accept(token)
        assert not constraint.active

    def test_without_reasoning_the_budget_does_not_count(self, tokenizer: Tokenizer) -> None:
        constraint = ThinkingConstraint(tokenizer, "<think>", "</think>", inside=False, budget=0)
        for token in tokenizer.encode("<thin air", bos=False):
            constraint.accept(token)
        assert not constraint.active

    @pytest.mark.parametrize("inside", [True, False])
    @pytest.mark.parametrize("seed", range(6))
    def test_the_grammar_starts_behind_the_marker(self, tokenizer: Tokenizer, inside: bool, seed: int) -> None:
        compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
        then = compiler.compile_json({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}).start()
        constraint = ThinkingConstraint(tokenizer, "<think>", "</think>", inside=inside, budget=5, then=then)
        sampler = Sampler(SamplingParams(temperature=0), [], tokenizer.vocab_size, constraint)
        text, _, end = babble(tokenizer, sampler, seed)
        assert end
        _, marker, answer = text.rpartition("</think>")
        assert bool(marker) or not inside
        assert isinstance(json.loads(answer), list)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    with Engine.load(smollm2_path, RuntimeOptions(device="cpu", ctx=512, slots=2)) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("schema", SCHEMAS, ids=["person", "array", "enum", "date"])
def test_smollm2_satisfies_the_schema(smollm2: Engine, schema: Any, temperature: float) -> None:
    compiler = GrammarCompiler(smollm2.model.tokenizer, smollm2.model.config.vocab_size)
    grammar = compiler.compile_json(schema)
    ids = smollm2.model.tokenizer.encode("<|im_start|>user\nInvent something.<|im_end|>\n<|im_start|>assistant\n")
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=7)
    # A neighbour without a constraint shares every step.
    with_neighbour = [Request(ids, params, grammar.start()), Request(ids, SamplingParams(max_tokens=40, temperature=0))]
    constrained, free = smollm2.submit_all(with_neighbour)
    result = constrained.result
    assert result.finish_reason == "stop"
    jsonschema.validate(json.loads(result.text), schema, format_checker=jsonschema.FormatChecker())
    assert not free.result.text.startswith(("{", "["))


def test_cut_off_in_the_middle_is_length(smollm2: Engine) -> None:
    compiler = GrammarCompiler(smollm2.model.tokenizer, smollm2.model.config.vocab_size)
    request = Request([1, 2], SamplingParams(max_tokens=3, temperature=0), compiler.compile_json(PERSON).start())
    result = smollm2.submit_all([request])[0].result
    assert (result.finish_reason, result.generated_tokens) == ("length", 3)


def test_ignore_eos_is_refused(smollm2: Engine) -> None:
    compiler = GrammarCompiler(smollm2.model.tokenizer, smollm2.model.config.vocab_size)
    request = Request([1], SamplingParams(max_tokens=3, ignore_eos=True), compiler.compile_json().start())
    with pytest.raises(RequestError, match="ignore_eos"):
        smollm2.submit_all([request])


@pytest.mark.models
def test_a_mask_of_a_large_vocabulary_takes_less_than_a_millisecond(qwen_path: Path) -> None:
    with GGUFFile.open(qwen_path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    constraint = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile_json(PERSON).start()
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    text = '{"name": "Ada", "age": 36, "tags": ["red"], "home": null}'
    seconds = []
    for token in tokenizer.encode(text, bos=False):
        started = time.perf_counter()
        constraint.restrict(logits)
        seconds.append(time.perf_counter() - started)
        assert np.isfinite(logits[token])
        logits[:] = 0
        constraint.accept(token)
    assert constraint.finished
    assert float(np.median(seconds)) < 1e-3


# Keywords that are rarely used: each is either honoured or refused, never passed over.
KEYWORDS: list[Any] = [
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "null"}},
    {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "null"}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer", "minimum": 0, "maximum": 9}}},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    {"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "required": ["x"], "additionalProperties": {"type": "boolean"}},
    {"type": "array", "contains": {"type": "null"}, "items": {"type": ["null", "boolean"]}, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25},
    {"not": {"type": "string"}},
    {"if": {"type": "null"}, "then": False},
    {"oneOf": [{"type": "integer", "minimum": 1, "maximum": 5}, {"type": "integer", "minimum": 3, "maximum": 9}]},
    {"oneOf": [{"const": 1}, {"const": "1"}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "no-such-format", "maxLength": 5},
    {"type": "string", "pattern": "b+"},
    {"type": "string", "minLength": 1, "maxLength": 3, "contentEncoding": "base64"},
    {"const": {"a": [1, 2.5, None], "b": "é\n"}},
    {"type": "object", "x-guidance": {"lenient": True}, "unevaluatedProperties": False},
]


@pytest.mark.parametrize("schema", KEYWORDS, ids=range(len(KEYWORDS)))
def test_a_rare_keyword_is_honoured_or_refused(tokenizer: Tokenizer, schema: Any) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    try:
        grammar = compiler.compile_json(schema)
    except GrammarError:
        return
    ended = 0
    for seed in range(30):
        sampler = Sampler(SamplingParams(temperature=0), [], tokenizer.vocab_size, grammar.start())
        text, _, end = babble(tokenizer, sampler, seed)
        if end:
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
            ended += 1
    assert ended
