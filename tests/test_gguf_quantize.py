"""Quantised copies: the gguf package's arithmetic, metadata byte for byte, and no half-written file."""

import os
import resource
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest

import tests.gguf_bytes as gb
from m40llm.gguf import BLOCKS, GGUFError, GGUFFile, TensorType, UnsupportedTypeError, ValueType
from m40llm.gguf.quantize import quantize_file
from tests.tiny_gguf import build_tiny_gguf

TARGETS = {"q8_0": (TensorType.Q8_0, 7), "q4_0": (TensorType.Q4_0, 2), "f16": (TensorType.F16, 1)}
MIXED = {
    "*attn_q*": TensorType.Q4_K,
    "*attn_k*": TensorType.BF16,
    "*ffn_up*": TensorType.Q8_0,
    "*ffn_gate*": TensorType.F16,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return build_tiny_gguf(tmp_path / "in.gguf", arch="qwen2", d_model=256, d_ff=320, n_heads=4, types=MIXED)


@pytest.mark.parametrize("kind", TARGETS)
def test_tensors_and_metadata(source: Path, tmp_path: Path, kind: Any) -> None:
    target, file_type = TARGETS[kind]
    reports: list[tuple[int, int]] = []
    out = quantize_file(source, tmp_path / "out.gguf", kind, lambda done, total: reports.append((done, total)))
    with GGUFFile.open(source) as before, GGUFFile.open(out) as after:
        assert list(after.tensors) == list(before.tensors)
        for name, info in before.tensors.items():
            weights = before.dequantize(name)
            if len(info.shape) == 1:
                assert after.tensors[name].type is TensorType.F32
                np.testing.assert_array_equal(after.dequantize(name), weights)
                continue
            assert after.tensors[name].type is target
            expected = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(int(target))).view(np.uint8)
            np.testing.assert_array_equal(after.data(name), expected, err_msg=name)
        assert after.metadata["general.file_type"] == file_type
        assert after.metadata["general.quantization_version"] == 2
        assert {*after.metadata} == {*before.metadata, "general.file_type", "general.quantization_version"}
        for key in before.metadata:
            assert after.metadata.record(key) == before.metadata.record(key)
        total = sum(info.nbytes for info in after.tensors.values())
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert reports[-1] == (total, total)
    # a second, independent reader agrees about every offset
    theirs = gguf.GGUFReader(out)
    assert int(theirs.tensors[0].tensor_type) == target
    assert os.listdir(tmp_path).count("out.gguf") == len([n for n in os.listdir(tmp_path) if n.startswith("out")]) == 1


def test_a_tensor_of_several_chunks(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((9000, 256)).astype(np.float32)  # 2.3 M weights: three chunks
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_tensor("w", weights)
    writer.write_header_to_file(tmp_path / "in.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    out = quantize_file(tmp_path / "in.gguf", tmp_path / "out.gguf", "q8_0")
    with GGUFFile.open(out) as model:
        expected = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
        np.testing.assert_array_equal(model.data("w"), expected)


def test_width_without_whole_blocks_becomes_f16(tmp_path: Path) -> None:
    raw = gb.build([], [gb.tensor("w", (5, 2), TensorType.F32, 0)], np.arange(10, dtype="<f4").tobytes())
    (tmp_path / "in.gguf").write_bytes(raw)
    with GGUFFile.open(quantize_file(tmp_path / "in.gguf", tmp_path / "out.gguf", "q4_0")) as model:
        assert model.tensors["w"].type is TensorType.F16
        np.testing.assert_array_equal(model.dequantize("w"), np.arange(10).reshape(2, 5))


def test_metadata_that_the_package_cannot_write_and_alignment_survive(tmp_path: Path) -> None:
    V = ValueType
    pairs = [
        gb.pair("general.alignment", V.UINT32, 128),
        gb.pair("general.file_type", V.UINT32, 0),
        gb.pair("split.count", V.UINT16, 1),
        gb.pair("a.none", V.ARRAY, (V.STRING, [])),
        gb.pair("tokenizer.ggml.tokens", V.ARRAY, (V.STRING, [b"\xff", "ok"])),
    ]
    tensors = [gb.tensor("a", (1,), TensorType.F32, 0), gb.tensor("b", (32, 1), TensorType.F32, 128)]
    data = np.zeros(64, "<f4")
    data[32:] = np.arange(32)
    (tmp_path / "in.gguf").write_bytes(gb.build(pairs, tensors, data.tobytes(), alignment=128))
    with GGUFFile.open(quantize_file(tmp_path / "in.gguf", tmp_path / "out.gguf", "f16")) as model:
        assert model.alignment == 128
        assert model.metadata["a.none"] == []
        assert model.metadata["tokenizer.ggml.tokens"][0] == "\udcff"
        assert model.metadata["general.file_type"] == 1
        assert "split.count" not in model.metadata
        np.testing.assert_array_equal(model.dequantize("b")[0], np.arange(32))


def files(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def test_unusable_destinations(source: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    linked = tmp_path / "link.gguf"
    linked.symlink_to(source)
    for destination, message in (
        (source, "the output is the input"),
        (linked, "the output is the input"),
        (tmp_path, "the output is a directory"),
        (tmp_path / "no" / "out.gguf", "folder does not exist"),
    ):
        with pytest.raises(GGUFError, match=message):
            quantize_file(source, destination, "f16")
    assert files(tmp_path) == before | {"link.gguf"}


def test_an_existing_file_is_replaced_whole(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    GGUFFile.open(quantize_file(source, out, "f16")).close()


def test_wrong_type_name(source: Path, tmp_path: Path) -> None:
    wrong: Any = "q9"
    with pytest.raises(ValueError, match="q8_0, q4_0, f16"):
        quantize_file(source, tmp_path / "out.gguf", wrong)


def test_unsupported_tensor_is_found_before_writing(tmp_path: Path) -> None:
    source = tmp_path / "in.gguf"
    source.write_bytes(gb.build([], [gb.tensor("w", (256,), TensorType.IQ1_S, 0)], bytes(64)))
    with pytest.raises(UnsupportedTypeError, match="'w' has the type IQ1_S"):
        quantize_file(source, tmp_path / "out.gguf", "q8_0")
    assert files(tmp_path) == {"in.gguf"}


@pytest.mark.parametrize("bad", [1e6, -7e4, np.inf, np.nan])
def test_weights_beyond_float16_are_an_error(tmp_path: Path, bad: float) -> None:
    source = tmp_path / "in.gguf"
    source.write_bytes(gb.build([], [gb.tensor("w", (2, 2), TensorType.F32, 0)], np.float32([0, 1, bad, 2]).tobytes()))
    with pytest.raises(GGUFError, match="'w' holds weights outside float16's range"):
        quantize_file(source, tmp_path / "out.gguf", "f16")
    assert files(tmp_path) == {"in.gguf"}


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_without_space_is_found_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(GGUFError, match=r"needs \d+ bytes but its disk has 1000 free"):
        quantize_file(source, tmp_path / "out.gguf", "f16")
    assert files(tmp_path) == {"in.gguf"}


def test_a_failing_write_or_an_interrupt_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(GGUFError, match="cannot be written"):
            quantize_file(source, tmp_path / "out.gguf", "f16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == {"in.gguf"}

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_file(source, tmp_path / "out.gguf", "f16", interrupt)
    assert files(tmp_path) == {"in.gguf"}


def test_split_source_becomes_one_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(None, "llama", split_max_tensors=1)
    for index in range(3):
        writer.add_tensor(f"t{index}", np.full((2, 32), index, np.float32))
    writer.write_header_to_file(tmp_path / "w.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first = tmp_path / "w-00001-of-00003.gguf"
    with pytest.raises(GGUFError, match="the output is the input"):
        quantize_file(first, tmp_path / "w-00002-of-00003.gguf", "q8_0")
    with GGUFFile.open(quantize_file(first, tmp_path / "one.gguf", "q8_0")) as model:
        assert len(model.parts) == 1
        assert [round(float(model.dequantize(f"t{i}")[1, 1]), 3) for i in range(3)] == [0, 1, 2]
        assert all(info.nbytes == 2 * BLOCKS[info.type].row_bytes(32) for info in model.tensors.values())
