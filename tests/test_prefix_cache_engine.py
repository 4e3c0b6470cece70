"""The cache under the engine, on real models: a cached answer is the fresh one, and what was computed once is not again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m40llm.config import ConfigError, RuntimeOptions, SamplingParams
from m40llm.engine import Engine, EngineClosed, Request, RequestError
from m40llm.generation import GenerationResult, PrefillEvent
from m40llm.kv.prefix_cache import CacheError, CacheIdentity
from tests.tiny_gguf import build_tiny_gguf

CONTEXT = 1024
PROMPT = [(i * 37 + i // 7) % 250 for i in range(500)]
OTHERS = [[(i * 11 + n) % 250 for i in range(300)] for n in range(4)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", context=CONTEXT)


@contextmanager
def engine_on(path: Path, *, ctx: int = CONTEXT, **options: Any) -> Iterator[Engine]:
    with Engine.load(path, RuntimeOptions(device="cpu", threads=1, ctx=ctx, **options)) as engine:
        yield engine


def greedy(max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def ask(engine: Engine, prompt: list[int], max_tokens: int = 24) -> GenerationResult:
    return engine.submit(prompt, greedy(max_tokens), stream=False).result


@pytest.fixture(scope="module")
def fresh(tiny: Path) -> GenerationResult:
    """What the model answers to `PROMPT` when nothing is cached."""
    with engine_on(tiny) as engine:
        return ask(engine, PROMPT)


@pytest.mark.parametrize("budget", [16, 100, 512])
def test_from_ram_after_the_slot_served_others(tiny: Path, fresh: GenerationResult, budget: int) -> None:
    with engine_on(tiny, cache_ram_mb=16, token_budget=budget) as engine:
        first = ask(engine, PROMPT)
        for other in OTHERS:
            ask(engine, other, 4)
        again = ask(engine, PROMPT)
    assert (first.cached_tokens, again.cached_tokens) == (0, len(PROMPT) - 1)
    assert first.token_ids == again.token_ids == fresh.token_ids


def test_from_disk_after_a_restart(tiny: Path, fresh: GenerationResult, tmp_path: Path) -> None:
    options = {"cache_disk_dir": tmp_path, "cache_ram_mb": 16}
    with engine_on(tiny, **options) as engine:
        ask(engine, PROMPT)
    with engine_on(tiny, **options) as engine:
        again = ask(engine, PROMPT)
        assert engine.cache is not None
        assert engine.cache.stats()["disk"]["loaded_tokens"] == len(PROMPT) - 1
    assert again.cached_tokens == len(PROMPT) - 1
    assert again.token_ids == fresh.token_ids


def test_a_damaged_file_costs_its_tokens_only(tiny: Path, fresh: GenerationResult, tmp_path: Path) -> None:
    with engine_on(tiny, cache_disk_dir=tmp_path) as engine:
        ask(engine, PROMPT)
    for path in tmp_path.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    with engine_on(tiny, cache_disk_dir=tmp_path) as engine:
        again = ask(engine, PROMPT)
    assert again.cached_tokens == 0
    assert again.token_ids == fresh.token_ids
    assert list(tmp_path.rglob("*.bad"))


def test_a_conversation_goes_on_from_its_own_answer(tiny: Path) -> None:
    with engine_on(tiny, cache_ram_mb=16) as engine:
        answer = ask(engine, PROMPT, 80)
        for other in OTHERS:
            ask(engine, other, 4)
        turn = [*PROMPT, *answer.token_ids, 9, 8, 7]
        second = ask(engine, turn)
    with engine_on(tiny) as engine:
        alone = ask(engine, turn)
    assert second.cached_tokens == len(PROMPT) + 79  # the last sampled token was never computed
    assert second.token_ids == alone.token_ids


def test_a_cancelled_prefill_is_kept(tiny: Path, fresh: GenerationResult) -> None:
    with engine_on(tiny, cache_ram_mb=16, token_budget=32) as engine:
        generation = engine.submit(PROMPT, greedy())
        assert next(iter(generation)) == PrefillEvent(32, len(PROMPT))
        generation.cancel()
        assert generation.result.finish_reason == "cancelled"
        for other in OTHERS:
            ask(engine, other, 4)
        again = ask(engine, PROMPT)
    assert again.cached_tokens >= 32
    assert again.token_ids == fresh.token_ids


def test_a_shared_prompt_is_computed_once_for_all_who_arrive_together(tiny: Path) -> None:
    prompts = [[*PROMPT, 10 + i, 20 + i] for i in range(4)]
    computed: list[int] = []
    with engine_on(tiny, slots=4, token_budget=128) as engine:
        run = engine.model.session.run
        engine.model.session.run = lambda plan: (computed.append(len(plan.token_ids)), run(plan))[1]  # type: ignore[method-assign]
        generations = engine.submit_all([Request(p, greedy(8)) for p in prompts], stream=False)
        together = [g.result for g in generations]
    with engine_on(tiny) as engine:
        alone = [ask(engine, p, 8) for p in prompts]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.cached_tokens for r in together] == [0, 500, 500, 500]
    assert sum(computed) == 500 + 4 * (2 + 7)


def test_random_traffic_gives_the_answers_of_a_fresh_engine(tiny: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    prompts = [PROMPT[: rng.integers(1, 500)] + rng.integers(0, 250, rng.integers(1, 90)).tolist() for _ in range(24)]
    with engine_on(tiny) as engine:
        alone = [ask(engine, p, 6).token_ids for p in prompts]
    with engine_on(tiny, slots=3, token_budget=64, cache_ram_mb=1, cache_disk_dir=tmp_path, cache_disk_mb=1) as engine:
        assert engine.cache is not None
        engine.cache._ram.budget = 200_000  # a dozen blocks: a MiB holds all of this
        engine.cache._disk.index.budget = 100_000  # type: ignore[union-attr]
        requests = [Request(p, greedy(6)) for p in prompts]
        together = [
            [g.result.token_ids for g in engine.submit_all(requests, stream=False, priority=priority)]
            for priority in ("interactive", "background")
        ]
        stats = engine.cache.stats()
        assert stats["ram"]["bytes"] <= 200_000
        assert stats["ram"]["evictions"] > 0
    assert together == [alone, alone]
    assert 0 < sum(p.stat().st_size for p in tmp_path.rglob("*.kv")) <= 100_000


def test_named_entries(tiny: Path) -> None:
    with engine_on(tiny, cache_ram_mb=2) as engine:
        assert engine.cache is not None
        warmed = engine.warm(PROMPT[:300], "system").result
        assert (warmed.cached_tokens, warmed.finish_reason) == (0, "length")
        for other in OTHERS:
            ask(engine, other, 4)
        [generation] = engine.submit_all(
            [Request(PROMPT, greedy(), cache_id="thread", prefix_cache_ids=("thread", "system"))], stream=False
        )
        assert generation.result.cached_tokens == 300
        entries = {e["cache_id"]: (e["tokens"], e["live"]) for e in engine.cache.stats()["entries"]}
        assert entries == {"system": (300, True), "thread": (len(PROMPT) + 23, True)}
        with pytest.raises(CacheError, match="live"):
            engine.warm(PROMPT[:200], "system")
        engine.cache.evict("thread")
        assert engine.cache.matched_tokens(PROMPT) >= 300


def test_an_answer_that_is_out_can_be_flushed_and_evicted_whole(tiny: Path, tmp_path: Path) -> None:
    computed = len(PROMPT) + 3
    blocks = -(-computed // 64)
    with engine_on(tiny, cache_ram_mb=16, cache_disk_dir=tmp_path, slots=2) as engine:
        cache, traffic = engine.cache, engine._kv._traffic
        assert cache is not None
        assert traffic is not None
        traffic._blocks_per_step = 0  # the steps in between are too few, whoever asks first
        requests = [Request([n, *PROMPT[1:]], greedy(4), cache_id=f"{n}") for n in range(2)]
        for generation in engine.submit_all(requests, stream=False):
            assert len(generation.result.token_ids) == 4
        engine.settle_cache()
        cache.flush()
        stats = cache.stats()
        assert stats["disk"]["pending"] == 0
        assert stats["disk"]["blocks"] == stats["ram"]["blocks"] == 2 * blocks
        assert [e["cached_tokens"] for e in stats["entries"]] == [computed] * 2
        assert [cache.evict("0"), cache.evict("1")] == [blocks] * 2


def test_settling_ends_with_the_engine(tiny: Path) -> None:
    engine = Engine.load(tiny, RuntimeOptions(device="cpu", threads=1, ctx=CONTEXT, cache_ram_mb=1))
    engine.settle_cache()
    engine.close()
    with pytest.raises(EngineClosed, match="shutting down"):
        engine.settle_cache()


def test_a_save_that_breaks_the_engine_leaves_nobody_waiting(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no such slot")

    with engine_on(tiny, cache_ram_mb=1) as engine:
        monkeypatch.setattr(engine._kv, "settle", broken)
        with engine._inbox._changed:  # both are taken at once
            waiting = [engine._inbox.saved() for _ in range(2)]
        for saved in waiting:
            with pytest.raises(EngineClosed, match="has failed: no such slot"):
                saved.result(timeout=10)


def test_names_need_a_cache(tiny: Path) -> None:
    with engine_on(tiny) as engine, pytest.raises(RequestError, match="--cache-ram-mb"):
        engine.warm(PROMPT, "a")


def test_a_folder_that_cannot_be_used_is_one_line(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--cache-disk-dir"), engine_on(tiny, cache_disk_dir=tmp_path / "file"):
        pass


def test_another_model_or_format_has_another_identity(tiny: Path, tmp_path: Path) -> None:
    def identity(path: Path, **options: Any) -> CacheIdentity:
        with engine_on(path, **options) as engine:
            return engine.model.cache_identity

    base = identity(tiny)
    assert identity(tiny, slots=2, token_budget=64) == base
    others = [
        identity(tiny, kv_dtype="f32"),
        identity(tiny, activation_bits=32),
        identity(build_tiny_gguf(tmp_path / "seed.gguf", context=CONTEXT, seed=1)),
        identity(build_tiny_gguf(tmp_path / "rope.gguf", context=CONTEXT, rope_base=20000.0)),
    ]
    assert len({i.root for i in (base, *others)}) == 5


def test_smollm2_from_ram_disk_and_a_neighbour(smollm2_path: Path, tmp_path: Path) -> None:
    with engine_on(smollm2_path) as engine:
        text = "The history of computing began long before electronic machines. " * 30
        prompt = engine.model.tokenizer.encode(text)
        questions = [[*prompt, *engine.model.tokenizer.encode(q)] for q in ("Why?", "When was that?")]
        alone = [ask(engine, q, 16).token_ids for q in questions]
    options = {"cache_ram_mb": 64, "cache_disk_dir": tmp_path}
    with engine_on(smollm2_path, slots=2, **options) as engine:
        both = [g.result for g in engine.submit_all([Request(q, greedy(16)) for q in questions], stream=False)]
        for _ in range(2):
            ask(engine, list(range(100, 130)), 2)
        from_ram = ask(engine, questions[0], 16)
    with engine_on(smollm2_path, **options) as engine:
        from_disk = ask(engine, questions[1], 16)
    assert [r.token_ids for r in both] == alone
    assert both[1].cached_tokens >= len(prompt) - 1
    assert from_ram.token_ids == alone[0]
    assert from_disk.token_ids == alone[1]
    assert from_disk.cached_tokens == len(questions[1]) - 1
