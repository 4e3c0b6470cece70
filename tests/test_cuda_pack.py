"""Packing is lossless: what the kernels decode from the planes is what the file format defines, bit for bit."""

import numpy as np
import pytest

from m40llm.device.emulator import EmulatorDevice
from m40llm.gguf import BLOCKS, GGUFFile, TensorType, dequantize
from m40llm.ops.cuda.embed import dequantize as dequantize_on_device
from m40llm.ops.cuda.pack import FORMATS, load_matrix, pack, packed_bytes, upload_matrix
from tests.cuda_reference import ALL_TYPES, Bench
from tests.tiny_gguf import build_tiny_gguf


@pytest.fixture(scope="module")
def device():
    return EmulatorDevice("check")


def columns_of(kind: TensorType) -> tuple[int, ...]:
    """Less than a chunk of 32 units, exactly one, and one and a part; no multiple of 32 where a type has no blocks."""
    if BLOCKS[kind].block_size == 1:
        return (32, 100, 1024, 1030)
    return (32, 576, 1024, 1120) if BLOCKS[kind].block_size == 32 else (256, 1024, 1280)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda k: k.name)
def test_decoded_planes_equal_the_reference_bit_for_bit(device, kind):
    for rows, columns in zip((1, 5, 4, 7), columns_of(kind), strict=False):
        with Bench(device, rows) as bench:
            matrix = bench.matrix(kind, rows, columns)
            out = bench.empty((rows, columns))
            dequantize_on_device(device, matrix, out)
            got = bench.read(out)
            np.testing.assert_array_equal(got.view(np.uint32), bench.weights["w"].astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda k: k.name)
def test_any_bits_are_packed_without_loss(device, kind):
    rng = np.random.default_rng(3)
    with Bench(device) as bench:
        raw = bench.raw(kind, 4, 512)
        # every bit but those of the float16 scales, which could be infinite, and of floats
        if BLOCKS[kind].block_size > 1:
            noise = rng.integers(0, 256, raw.shape, dtype=np.uint8)
            blocks, random = raw.reshape(-1, BLOCKS[kind].type_size), noise.reshape(-1, BLOCKS[kind].type_size)
            halves = {
                TensorType.Q4_1: (0, 2), TensorType.Q5_1: (0, 2), TensorType.Q2_K: (80, 82), TensorType.Q3_K: (108,),
                TensorType.Q4_K: (0, 2), TensorType.Q5_K: (0, 2), TensorType.Q6_K: (208,),
            }.get(kind, (0,))  # fmt: skip
            for byte in halves:
                random[:, byte : byte + 2] = blocks[:, byte : byte + 2]
            raw = noise
        matrix = upload_matrix(device, raw, kind)
        bench.stack.callback(matrix.close)
        out = bench.empty((4, 512))
        dequantize_on_device(device, matrix, out)
        np.testing.assert_array_equal(bench.read(out).view(np.uint32), dequantize(raw, kind).view(np.uint32))


def test_float16_output_is_the_rounded_reference(device):
    with Bench(device) as bench:
        matrix = bench.matrix(TensorType.Q4_K, 6, 512)
        out = bench.empty((6, 512), np.float16)
        dequantize_on_device(device, matrix, out)
        np.testing.assert_array_equal(bench.read(out), bench.weights["w"].astype(np.float32).astype(np.float16))


def test_groups_have_the_announced_size_and_cost_what_the_file_does():
    rng = np.random.default_rng(0)
    for kind in ALL_TYPES:
        raw = rng.integers(0, 256, (8, BLOCKS[kind].row_bytes(2048)), dtype=np.uint8)
        packed = pack(raw, kind)
        assert packed.shape == (2, FORMATS[kind].group_bytes(2048))
        assert packed_bytes(kind, 7, 2048) == packed.nbytes
        if kind not in (TensorType.Q2_K, TensorType.Q3_K, TensorType.IQ4_NL, TensorType.IQ4_XS):
            # a scale of Q4_K and Q5_K takes a byte instead of six bits; nothing else grows
            assert packed.nbytes <= raw.nbytes * (1.028 if kind is TensorType.Q4_K else 1.023)


def test_a_tensor_of_a_file_is_loaded_in_slabs(device, tmp_path, monkeypatch):
    monkeypatch.setattr("m40llm.ops.cuda.pack._SLAB_BYTES", 1)  # four rows at a time
    path = build_tiny_gguf(tmp_path / "m.gguf", types={"*ffn_down*": TensorType.Q5_1})
    with GGUFFile.open(path) as file, Bench(device) as bench:
        name = "blk.1.ffn_down.weight"
        matrix = load_matrix(file, name, device)
        bench.stack.callback(matrix.close)
        assert (matrix.rows, matrix.columns) == file.tensor(name).shape
        out = bench.empty((matrix.rows, matrix.columns))
        dequantize_on_device(device, matrix, out)
        np.testing.assert_array_equal(bench.read(out), file.dequantize(name))


def test_a_failed_upload_leaves_no_buffer(monkeypatch):
    device = EmulatorDevice("fast")

    def broken(*unused):
        raise RuntimeError("cable pulled")

    monkeypatch.setattr(device, "upload", broken)
    with pytest.raises(RuntimeError, match="cable pulled"), Bench(device) as bench:
        bench.matrix(TensorType.F32, 4, 32)
    assert device.counters.allocations == device.counters.frees == 1
