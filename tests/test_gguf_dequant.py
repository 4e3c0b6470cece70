"""Dequantisation against the gguf package, bit for bit."""

import gguf
import numpy as np
import pytest

from m40llm.gguf import BLOCKS, TensorType, dequantize
from m40llm.gguf.types import FOREIGN_BLOCKS


def reference(data: np.ndarray, kind: TensorType) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(kind)))


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    # which of two NaN payloads survives a multiplication is the processor's affair
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def random_bytes(kind: TensorType, rows: int, blocks: int) -> np.ndarray:
    rng = np.random.default_rng(int(kind))
    return rng.integers(0, 256, (rows, blocks * BLOCKS[kind].type_size), dtype=np.uint8)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_random_bytes_equal_the_gguf_package(kind: TensorType, rows: int) -> None:
    data = random_bytes(kind, rows, 12)
    assert_same_bits(dequantize(data, kind), reference(data, kind))


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_every_byte_value_in_every_position(kind: TensorType) -> None:
    size = BLOCKS[kind].type_size
    data = np.add.outer(np.arange(256), 37 * np.arange(size)).astype(np.uint8)
    assert_same_bits(dequantize(data, kind), reference(data, kind))


def test_chunks_of_a_large_tensor_join_without_a_seam() -> None:
    data = random_bytes(TensorType.Q4_K, 700, 8)  # 1.4 M weights: many chunks
    assert_same_bits(dequantize(data, TensorType.Q4_K), reference(data, TensorType.Q4_K))


def test_rows_longer_than_a_chunk_and_strided_input() -> None:
    data = random_bytes(TensorType.Q8_0, 6, 20000)
    assert_same_bits(dequantize(data[::2], TensorType.Q8_0), reference(data[::2].copy(), TensorType.Q8_0))


def test_out_is_filled_and_returned() -> None:
    data = random_bytes(TensorType.Q6_K, 5, 3)
    out = np.full((5, 768), 7, dtype=np.float32)
    assert dequantize(data, TensorType.Q6_K, out=out) is out
    assert_same_bits(out, reference(data, TensorType.Q6_K))


def test_empty_inputs() -> None:
    assert dequantize(np.empty((0, 144), np.uint8), TensorType.Q4_K).shape == (0, 256)
    assert dequantize(np.empty((3, 0), np.uint8), TensorType.Q4_K).shape == (3, 0)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (np.zeros((1, 143), np.uint8), TensorType.Q4_K),
        (np.zeros(144, np.uint8), TensorType.Q4_K),
        (np.zeros((1, 144), np.int8), TensorType.Q4_K),
        (np.zeros((1, 66), np.uint8), TensorType.IQ2_XXS),
    ],
)
def test_wrong_arrays_and_types_are_refused(data: np.ndarray, kind: TensorType) -> None:
    with pytest.raises(ValueError, match=kind.name):
        dequantize(data, kind)


def test_wrong_out_is_refused() -> None:
    with pytest.raises(ValueError, match="out must be"):
        dequantize(np.zeros((2, 34), np.uint8), TensorType.Q8_0, out=np.empty((2, 33), np.float32))


def test_block_sizes_equal_the_gguf_package() -> None:
    ours = {int(kind): tuple(block) for kind, block in (BLOCKS | FOREIGN_BLOCKS).items()}
    theirs = {int(kind): tuple(size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    theirs[TensorType.Q8_1] = (
        32,
        36,
    )  # the package has the float32 scales of before 2024; such tensors are never stored
    assert {kind: size for kind, size in theirs.items() if kind in ours} == ours
    assert {kind.name: int(kind) for kind in gguf.GGMLQuantizationType}.items() <= {
        kind.name: int(kind) for kind in TensorType
    }.items()
