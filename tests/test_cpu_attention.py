"""CPU attention and RoPE against float64 NumPy: grouping, head sizes, storage, windows, mixed segments, threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from m40llm.config import RopeConfig
from m40llm.ops.cpu.attention_decode import NOT_RAW, attention_decode, decode_scratch
from m40llm.ops.cpu.attention_prefill import attention_prefill, prefill_scratch
from m40llm.ops.cpu.program import Program, Workers
from m40llm.ops.cpu.rope import rope_append, rope_frequencies, rope_tables
from tests import reference, tolerances

# (H, KH, HD, storage): groups 1, 3, 6 and 8; heads of 64, 128, 256 and of the tiny models' 16
SHAPES = [(2, 2, 256, "f16"), (9, 3, 64, "f16"), (6, 2, 64, "f32"), (12, 2, 128, "f16"), (16, 2, 16, "f16")]


@pytest.fixture(scope="module", params=[1, 2, 3])
def workers(request):
    with Workers(request.param) as w:
        yield w


@dataclass
class Case:
    """One layer's cache and the segments of a step: (rows, earlier positions) each."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    storage: str
    segments: Sequence[tuple[int, int]]
    window: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.lens = np.array([rows + before for rows, before in self.segments], np.int32)
        self.cu = np.concatenate(([0], np.cumsum([rows for rows, _ in self.segments]))).astype(np.int32)
        self.context, self.n_slots = int(self.lens.max()) + 5, len(self.lens) + 2
        self.slots = rng.permutation(self.n_slots)[: len(self.lens)].astype(np.int32)
        self.q = rng.standard_normal((self.cu[-1], self.n_heads, self.head_dim)).astype(np.float32)
        dtype = np.float16 if self.storage == "f16" else np.float32
        cache = (2, self.n_slots, self.context, self.n_kv_heads, self.head_dim)
        self.k, self.v = (
            np.full(cache, np.nan, dtype),
            np.full(cache, np.nan, dtype),
        )  # a read of what is not there shows
        for slot, n in zip(self.slots, self.lens, strict=True):
            for array in (self.k, self.v):
                array[1, slot, :n] = rng.standard_normal((n, self.n_kv_heads, self.head_dim))

    def expected(self) -> np.ndarray:
        return reference.attention(self.q, self.k[1], self.v[1], self.cu, self.lens, self.slots, self.window)

    def run(self, workers: Workers, replays: int = 1) -> np.ndarray:
        group, half = self.n_heads // self.n_kv_heads, self.storage == "f16"
        bits = np.uint16 if half else np.float32
        out = np.full_like(self.q, np.nan)
        stride = self.k[1].strides
        fields = {
            "q": self.q, "out": out, "k": self.k[1].view(bits), "v": self.v[1].view(bits), "slot_stride": stride[0],
            "pos_stride": stride[1], "cu_seqlens": self.cu, "kv_lens": self.lens, "slots": self.slots,
            "segments": len(self.slots), "kv_heads": self.n_kv_heads, "window": self.window, "scale": self.head_dim**-0.5,
        }  # fmt: skip
        self.fields, self.out = fields, out
        tiles = prefill_scratch(workers.threads, self.head_dim)
        parts = decode_scratch(workers.threads, self.n_heads, self.n_kv_heads, self.head_dim, self.context)
        program = Program()
        prefill = attention_prefill(group, self.head_dim, half)
        program.add(prefill, barrier=False, scratch=tiles, scratch_stride=tiles.shape[1], **NOT_RAW, **fields)
        decode = attention_decode(group, self.head_dim, half)
        program.add(decode, scratch=parts, scratch_stride=parts.shape[1], **NOT_RAW, **fields)
        for _ in range(replays):
            program.run(workers)
        return out


def check(case: Case, workers: Workers) -> np.ndarray:
    out = case.run(workers)
    assert np.abs(out - case.expected()).max() < tolerances.ATTENTION
    return out


MIXED = [(1, 0), (1, 16), (2, 0), (1, 127), (5, 3), (1, 128), (43, 90), (3, 200), (1, 399), (65, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_segments(shape, workers):
    check(Case(*shape, MIXED), workers)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sliding_window(shape, workers):
    check(Case(*shape, [(1, 10), (1, 499), (30, 60), (2, 200), (130, 0)], window=48), workers)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 127, 129, 257, 1000])
def test_one_long_sequence(length, workers):
    """The split of one row's keys over threads, and its merge."""
    check(Case(9, 3, 64, "f16", [(1, length - 1)]), workers)


@pytest.mark.parametrize("rows", [2, 16, 21, 22, 63, 64, 129, 300])
def test_one_prompt(rows, workers):
    check(Case(9, 3, 64, "f16", [(rows, 0)]), workers)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_change_no_bit(shape):
    outputs = []
    for threads in (1, 2, 3, 5):
        with Workers(threads) as workers:
            outputs.append(Case(*shape, MIXED).run(workers, replays=2))
    for other in outputs[1:]:
        assert np.array_equal(outputs[0], other)


def test_others_in_the_step_change_no_bit(workers):
    """A sequence alone gives the bits that it gives among others."""
    together = Case(9, 3, 64, "f16", MIXED)
    out = together.run(workers)
    for s, segment in enumerate(MIXED):
        alone = Case(9, 3, 64, "f16", [segment])
        rows = slice(together.cu[s], together.cu[s + 1])
        alone.q[:] = together.q[rows]
        for name in "kv":
            n = together.lens[s]
            getattr(alone, name)[1, alone.slots[0], :n] = getattr(together, name)[1, together.slots[s], :n]
        assert np.array_equal(alone.run(workers), out[rows])


def test_chunked_prefill_is_whole_prefill(workers):
    whole = Case(9, 3, 64, "f16", [(200, 30)])
    out = whole.run(workers)
    for start, end in ((0, 2), (2, 66), (66, 117), (117, 200)):
        part = Case(9, 3, 64, "f16", [(end - start, 30 + start)])
        part.q[:] = whole.q[start:end]
        for name in "kv":
            getattr(part, name)[1, part.slots[0], : 30 + end] = getattr(whole, name)[1, whole.slots[0], : 30 + end]
        assert np.array_equal(part.run(workers), out[start:end])


@pytest.mark.parametrize("rows", [1, 7])
def test_extreme_scores(rows, workers):
    """Scores of ±1e4 neither overflow nor leave NaN; one key takes all the weight."""
    case = Case(9, 3, 64, "f16", [(rows, 300)])
    case.q *= 1e3
    out = case.run(workers)
    assert np.isfinite(out).all()
    assert np.abs(out - case.expected()).max() < tolerances.ATTENTION_EXTREME


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("rope", ["llama", "neox", "partial pairs"])
@pytest.mark.parametrize("storage", ["f16", "f32"])
def test_decode_rotates_and_appends_as_rope_append_does(storage, rope, threads):
    """Bit for bit, with rows that threads share and rows that are too short for that; the cache included."""
    config = ROPES[rope]
    head_dim, half = max(config.dim, 32), storage == "f16"
    cos, sin = rope_tables(config, 500)
    for before in ([399, 70, 0], [3, 40]):
        results = []
        for interleaved in (None, config.interleaved):
            case = Case(6, 2, head_dim, storage, [(1, n) for n in before])
            rng = np.random.default_rng(2)
            new_k, new_v = (rng.standard_normal((len(before), 2, head_dim)).astype(np.float32) for _ in "kv")
            with Workers(threads) as workers:
                case.run(workers)  # for its fields
                fields, program = case.fields, Program()
                tables = {"cos": cos, "sin": sin, "pairs": config.dim // 2}
                if interleaved is None:
                    strides = {name: fields[name] for name in ("slot_stride", "pos_stride")}
                    program.add(
                        rope_append(config.interleaved, half), q=case.q, k=new_k, v=new_v, k_cache=fields["k"],
                        v_cache=fields["v"], pos=case.lens - 1, row_slot=case.slots, rows=len(before), heads=6, kv_heads=2,
                        head_dim=head_dim, **strides, **tables,
                    )  # fmt: skip
                raw = NOT_RAW if interleaved is None else {"new_k": new_k, "new_v": new_v, **tables}
                parts = decode_scratch(threads, 6, 2, head_dim, case.context)
                scratch = {"scratch": parts, "scratch_stride": parts.shape[1]}
                program.add(attention_decode(3, head_dim, half, interleaved), **scratch, **fields, **raw)
                program.run(workers)
            results.append((case.out, fields["k"][case.slots], fields["v"][case.slots]))
        for separate, fused in zip(*results, strict=True):
            assert np.array_equal(separate.view(np.uint8), fused.view(np.uint8))


PLAIN = RopeConfig(theta=10000.0, dim=64, interleaved=True)
ROPES = {
    "llama": PLAIN,
    "neox": RopeConfig(theta=1e6, dim=128, interleaved=False),
    "partial": RopeConfig(theta=10000.0, dim=20, interleaved=False),
    "partial pairs": RopeConfig(theta=10000.0, dim=20, interleaved=True),
    "linear": RopeConfig(theta=10000.0, dim=64, interleaved=True, scaling="linear", factor=4.0),
    "llama3": RopeConfig(
        theta=5e5,
        dim=128,
        interleaved=True,
        scaling="llama3",
        factor=8.0,
        original_context=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "factors": RopeConfig(
        theta=5e5, dim=64, interleaved=True, scaling="llama3", freq_factors=tuple(1 + i / 4 for i in range(32))
    ),
    "yarn": RopeConfig(theta=1e6, dim=128, interleaved=False, scaling="yarn", factor=4.0, original_context=32768),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies(name):
    rope = ROPES[name]
    frequencies, factor = rope_frequencies(rope)
    expected = [reference.rope_frequency(rope, i) for i in range(rope.dim // 2)]
    np.testing.assert_allclose(frequencies, expected, rtol=1e-12)
    assert factor == pytest.approx(0.1 * np.log(4.0) + 1 if name == "yarn" else 1.0)


def test_llama3_factors_and_formula_agree():
    """GGUF files carry Llama 3's scaling as divisors of the plain frequencies."""
    formula = ROPES["llama3"]
    plain, _ = rope_frequencies(RopeConfig(theta=formula.theta, dim=formula.dim, interleaved=True))
    scaled, _ = rope_frequencies(formula)
    by_factors = RopeConfig(
        theta=formula.theta, dim=formula.dim, interleaved=True, scaling="llama3", freq_factors=tuple(plain / scaled)
    )
    np.testing.assert_allclose(rope_frequencies(by_factors)[0], scaled, rtol=1e-12)
    assert scaled[0] == plain[0]  # short waves are kept,
    assert scaled[-1] == pytest.approx(plain[-1] / 8)  # long ones are stretched


def test_rope_tables_are_right_to_float32_far_out():
    cos, sin = rope_tables(PLAIN, 5000)
    assert cos.shape == sin.shape == (5000, 32)
    angle = 4999 * reference.rope_frequency(PLAIN, 3)
    assert cos[4999, 3] == np.float32(np.cos(angle))
    assert sin[4999, 3] == np.float32(np.sin(angle))


@pytest.mark.parametrize("storage", ["f16", "f32"])
@pytest.mark.parametrize("name", ["llama", "neox", "partial", "partial pairs", "yarn"])
def test_rope_append(name, storage, workers):
    rope, heads, kv_heads = ROPES[name], 6, 2
    head_dim = max(rope.dim, 32)
    rng = np.random.default_rng(1)
    rows, slots, context = 9, 4, 50
    q, k, v = (rng.standard_normal((rows, n, head_dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    pos = np.array([0, 1, 2, 49, 7, 8, 9, 10, 30], np.int32)
    row_slot = np.array([3, 3, 3, 0, 1, 1, 1, 1, 2], np.int32)
    half = storage == "f16"
    cache = np.zeros((2, slots, context, kv_heads, head_dim), np.float16 if half else np.float32)
    bits = cache.view(np.uint16 if half else np.float32)
    expected_q, expected_k = reference.rope(q, pos, rope), reference.rope(k, pos, rope)
    cos, sin = rope_tables(rope, context)
    program = Program()
    program.add(
        rope_append(rope.interleaved, half), q=q, k=k, v=v, cos=cos, sin=sin, pos=pos, row_slot=row_slot, k_cache=bits[0],
        v_cache=bits[1], slot_stride=cache.strides[1], pos_stride=cache.strides[2], rows=rows, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, pairs=rope.dim // 2,
    )  # fmt: skip
    program.run(workers)
    assert np.abs(q - expected_q).max() < tolerances.ROPE
    assert np.abs(k - expected_k).max() < tolerances.ROPE
    expected = np.zeros_like(cache)  # nothing but these positions is written; the rounding is NumPy's, to nearest even
    expected[0, row_slot, pos], expected[1, row_slot, pos] = k, v
    assert np.array_equal(cache, expected)
