"""Hostile and damaged GGUF files: one clear GGUFError each, in bounded time and memory, and never anything else."""

import os
import random
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.gguf_bytes as gb
from m40llm.gguf import GGUFError, GGUFFile, TensorType, ValueType

V, T = ValueType, TensorType
HUGE = 2**63


def flag(value: int) -> bytes:
    return gb.pair("x", V.BOOL, bytes([value]))


def vector(name: str = "t", offset: int = 0, size: int = 8) -> bytes:
    return gb.tensor(name, (size,), T.F32, offset)


# what is wrong → (the file, what its one line must say)
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(100), r"not a GGUF file \(it starts with b'\\x89PNG'"),
    "text": (b"hi", r"not a GGUF file \(it starts with b'hi'"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "ggml": (b"tjgg" + bytes(100), "from before GGUF"),
    "magic alone": (b"GGUF", r"ends \(4 bytes\) inside the version number"),
    "version 1": (gb.build(version=1), "version 1 is not supported"),
    "version 4": (gb.build(version=4), "version 4 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^63 keys": (gb.build(counts=(0, HUGE)), f"claims {HUGE} metadata keys, more than the limit"),
    "2^63 tensors": (gb.build(counts=(HUGE, 0)), f"claims {HUGE} tensors, more than the limit"),
    "more keys than bytes": (gb.build(counts=(0, 1000)), "claims 1000 metadata keys, more than 32 bytes can hold"),
    "more tensors than bytes": (gb.build(counts=(1000, 0)), "claims 1000 tensors, more than 32 bytes can hold"),
    "huge key": (gb.build([struct.pack("<Q", HUGE) + bytes(16)]), "metadata key 1 of 1 claims .* bytes"),
    "empty key": (gb.build([gb.pair("", V.UINT8, 1)]), "metadata key 1 of 1 is empty"),
    "key not utf-8": (gb.build([gb.pair(b"\xff\xfe", V.UINT8, 1)]), "metadata key 1 of 1 is not valid UTF-8"),
    "key twice": (gb.build([gb.pair("x", V.UINT8, 1)] * 2), "key 'x' occurs twice"),
    "key with a newline": (gb.build([gb.pair("a\nb", V.UINT8, 1)] * 2), r"key 'a\\nb' occurs twice"),
    "unknown value type": (gb.build([gb.pair("x", 13, bytes(8))]), "'x' has the unknown value type 13"),
    "string not utf-8": (gb.build([gb.pair("x", V.STRING, b"\1\0\0\0\0\0\0\0\xc3")]), "'x' is not valid UTF-8"),
    "string of 2^63": (gb.build([gb.pair("x", V.STRING, struct.pack("<Q", HUGE))]), f"'x' claims {HUGE} bytes"),
    "string of 1000": (
        gb.build([gb.pair("x", V.STRING, struct.pack("<Q", 1000))]),
        "ends .* inside metadata value 'x'",
    ),
    "bool 2": (gb.build([flag(2)]), "'x' is a boolean with the value 2"),
    "array of 2^63": (gb.build([gb.pair("x", V.ARRAY, struct.pack("<IQ", V.INT32, HUGE))]), f"'x' .{HUGE} values"),
    "array of 2^63 strings": (
        gb.build([gb.pair("x", V.ARRAY, struct.pack("<IQ", V.STRING, HUGE))]),
        "limit of 16777216",
    ),
    "array of 99 strings": (gb.build([gb.pair("x", V.ARRAY, struct.pack("<IQ", V.STRING, 99))]), "'x' .99 strings"),
    "string in array of 2^63": (
        gb.build([gb.pair("x", V.ARRAY, struct.pack("<IQQQ", V.STRING, 2, HUGE + 5, 0))]),
        "ends .* inside metadata value 'x'",
    ),
    "string in array past the end": (
        gb.build([gb.pair("x", V.ARRAY, struct.pack("<IQQ", V.STRING, 1, 500))]),
        "ends .* inside metadata value 'x'",
    ),
    "array of unknown type": (gb.build([gb.pair("x", V.ARRAY, struct.pack("<IQ", 77, 1))]), "unknown value type 77"),
    "array of arrays": (
        gb.build([gb.pair("x", V.ARRAY, struct.pack("<IQ", V.ARRAY, 1) * 50)]),
        "'x' is an array of arrays",
    ),
    "alignment 0": (gb.build([gb.pair("general.alignment", V.UINT32, 0)]), "alignment' is not a power of two"),
    "alignment 24": (gb.build([gb.pair("general.alignment", V.UINT32, 24)]), "alignment' is not a power of two"),
    "alignment as text": (gb.build([gb.pair("general.alignment", V.STRING, "32")]), "alignment' is not a power of two"),
    "alignment true": (gb.build([gb.pair("general.alignment", V.BOOL, 1)]), "alignment' is not a power of two"),
    "tensor twice": (gb.build([], [vector(), vector(offset=32)], bytes(64)), "tensor 't' occurs twice"),
    "tensor name not utf-8": (gb.build([], [gb.tensor(b"\xff", (8,), 0, 0)], bytes(32)), "tensor 1 of 1 is not valid"),
    "no dimensions": (gb.build([], [gb.tensor("t", (), 0, 0)], bytes(64)), "'t' has 0 dimensions"),
    "5 dimensions": (gb.build([], [gb.tensor("t", (1,) * 5, 0, 0)], bytes(64)), "'t' has 5 dimensions"),
    "2^32 - 1 dimensions": (gb.build([], [gb.tensor("t", (1,), 0, 0, 2**32 - 1)], bytes(64)), "4294967295 dimensions"),
    "dimension 0": (gb.build([], [gb.tensor("t", (8, 0), 0, 0)], bytes(64)), "impossible shape"),
    "dimensions overflow 64 bits": (
        gb.build([], [gb.tensor("t", (2**32, 2**32), 0, 0)], bytes(64)),
        "impossible shape",
    ),
    "bytes overflow 64 bits": (gb.build([], [gb.tensor("t", (2**61, 2), 0, 0)], bytes(64)), "past the end of the file"),
    "broken block": (gb.build([], [gb.tensor("t", (33,), T.Q8_0, 0)], bytes(64)), "rows of 33 weights"),
    "misaligned": (gb.build([], [vector(offset=4)], bytes(64)), "offset 4, which is no multiple of the alignment 32"),
    "offset past the end": (gb.build([], [vector(offset=1 << 40)], bytes(64)), "'t' .* past the end of the file"),
    "offset of 2^63": (gb.build([], [vector(offset=HUGE)], bytes(64)), "past the end of the file"),
    "unknown type past the end": (gb.build([], [gb.tensor("t", (8,), 99, 64)], bytes(32)), "past the end of the file"),
    "data cut by a byte": (gb.build([], [vector()], bytes(31)), "past the end of the file"),
    "overlap": (gb.build([], [vector("a", size=16), vector("b", 32)], bytes(64)), "tensors 'a' and 'b' overlap"),
    "same place": (gb.build([], [vector("a"), vector("b")], bytes(64)), "tensors 'a' and 'b' overlap"),
    "split without a count": (gb.build([gb.pair("split.count", V.STRING, "2")]), "'split.count' is not a count"),
    "split of 2^60": (gb.build([gb.pair("split.count", V.UINT64, 2**60)]), "its name does not say which"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line(tmp_path: Path, name: str) -> None:
    raw, message = CASES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(GGUFError, match=message) as caught:
        GGUFFile.open(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert re.search(r"\. [A-Z][^.]* [^.]*", text), "the message ends without a remedy"


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, message in (
        (tmp_path, "is a directory"),
        (tmp_path / "absent.gguf", "there is no such file"),
        (pipe, "not a regular file"),
        (Path("/dev/null"), "not a regular file"),
        (tmp_path / ("x" * 300), "cannot be opened"),
        (Path("a\0b"), "cannot be opened"),
    ):
        with pytest.raises(GGUFError, match=message):
            GGUFFile.open(path)


def exercise(path: Path) -> bool:
    """Open, read everything; True if the file was accepted. Anything but a GGUFError escapes."""
    try:
        with GGUFFile.open(path) as model:
            for key in model.metadata:
                assert model.metadata[key] is not None
            for name in model.tensors:
                info = model.tensor(name)
                assert info.offset + info.nbytes <= path.stat().st_size
                try:
                    rows = model.data(name)
                except GGUFError:
                    continue
                assert rows.nbytes == info.nbytes
                np.testing.assert_array_equal(rows, model.read_rows(name))
    except GGUFError:
        return False
    return True


def test_truncated_anywhere(tmp_path: Path) -> None:
    raw = gb.small()
    path = tmp_path / "cut.gguf"
    end = len(raw) - 32  # the last tensor is of an unknown type and size
    for size in range(end):
        path.write_bytes(raw[:size])
        assert not exercise(path), f"accepted after {size} of {len(raw)} bytes"
    path.write_bytes(raw)
    assert exercise(path)


NUMBERS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def mutate(rng: random.Random, raw: bytearray) -> None:
    at = rng.randrange(len(raw))
    match rng.randrange(6):
        case 0:
            raw[at] ^= 1 << rng.randrange(8)
        case 1:
            raw[at] = rng.randrange(256)
        case 2:
            raw[at:at] = rng.randbytes(rng.randint(1, 16))
        case 3:
            del raw[at : at + rng.randint(1, 16)]
        case 4:
            raw[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        case _:
            raw[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)


def test_3000_mutated_headers(tmp_path: Path) -> None:
    rng = random.Random(20260101)
    seed = gb.small()
    path = tmp_path / "mutant.gguf"
    accepted, slowest = 0, 0.0
    tracemalloc.start()
    try:
        for _ in range(3000):
            raw = bytearray(seed)
            for _ in range(rng.randint(1, 4)):
                mutate(rng, raw)
            path.write_bytes(raw)
            start = time.process_time()
            accepted += exercise(path)
            slowest = max(slowest, time.process_time() - start)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 30 < accepted < 2000, "mutations are too harmless, or too harmful to reach the depths"
    assert slowest < 0.5
    assert peak < 4 << 20


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=400))
def test_any_bytes_after_the_magic(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "any.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + raw)
    exercise(path)


SCALARS: list[tuple[ValueType, st.SearchStrategy]] = [
    (V.UINT8, st.integers(0, 255)),
    (V.INT16, st.integers(-(2**15), 2**15 - 1)),
    (V.UINT64, st.integers(0, 2**64 - 1)),
    (V.INT64, st.integers(-(2**63), 2**63 - 1)),
    (V.FLOAT64, st.floats(allow_nan=False)),
    (V.BOOL, st.booleans()),
    (V.STRING, st.text(max_size=20)),
]
typed = st.one_of(*[st.tuples(st.just(kind), values) for kind, values in SCALARS])
arrays = st.one_of(*[st.tuples(st.just(kind), st.lists(values, max_size=9)) for kind, values in SCALARS])
keys = st.text(min_size=1, max_size=12)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scalars=st.dictionaries(keys, typed, max_size=5), lists=st.dictionaries(keys, arrays, max_size=5))
def test_what_is_written_is_read(tmp_path: Path, scalars: dict, lists: dict) -> None:
    lists = {f"list {key}": value for key, value in lists.items()}
    pairs = [gb.pair(key, kind, value) for key, (kind, value) in scalars.items()]
    pairs += [gb.pair(key, V.ARRAY, value) for key, value in lists.items()]
    path = tmp_path / "round.gguf"
    path.write_bytes(gb.build(pairs))
    reserved = ("general.alignment", "split.count")
    assert not any(key in reserved for key in scalars)
    with GGUFFile.open(path) as model:
        assert {key: model.metadata[key] for key in scalars} == {key: value for key, (_, value) in scalars.items()}
        for key, (kind, items) in lists.items():
            found = model.metadata[key]
            assert model.metadata.value_type(key) == (V.ARRAY, kind)
            assert (found if kind is V.STRING else found.tolist()) == items


def sparse(path: Path, head: bytes, size: int) -> None:
    path.write_bytes(head)
    os.truncate(path, size)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (lambda: gb.build([gb.pair("x", V.ARRAY, struct.pack("<IQ", V.STRING, 2**30))]), "more than the limit"),
        (lambda: gb.build([gb.pair("x", V.STRING, struct.pack("<Q", 2**32))]), "claims 4294967296 bytes"),
        (lambda: gb.build([gb.pair("x", V.ARRAY, struct.pack("<IQ", V.UINT8, 2**32))]), "limit for a header"),
        (lambda: gb.build(counts=(2**18 + 1, 0)), "more than the limit of 262144"),
        (lambda: gb.build(counts=(2**18, 0)), "'' has 0 dimensions"),
    ],
)
def test_a_huge_sparse_file_costs_no_memory(tmp_path: Path, head: Callable[[], bytes], message: str) -> None:
    path = tmp_path / "sparse.gguf"
    sparse(path, head(), 16 << 30)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(GGUFError, match=message):
            GGUFFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 1.0
