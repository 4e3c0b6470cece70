"""The device functions that kernels use, against NumPy: collectives, integer and half intrinsics, subnormal rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from m40llm.device.emulator import EmulatorDevice
from m40llm.device.emulator_build import Mode

KERNELS = Path(__file__).parent / "kernels"
ORDERS = ("forward", "reverse", "random")
LANE, WARP = np.arange(64) & 31, np.arange(64) & 32


def run(
    device: EmulatorDevice,
    symbol: str,
    inputs: list[npt.NDArray],
    out_shape: tuple[int, ...],
    out_dtype: type,
    *scalars: np.generic,
) -> npt.NDArray:
    """Launches `symbol` on one block of (32, 2) threads with the inputs, an output and scalars."""
    buffers = [device.alloc(max(a.nbytes, 1), f"in{i}") for i, a in enumerate(inputs)]
    for buffer, array in zip(buffers, inputs, strict=True):
        device.upload(buffer, array)
    out = device.alloc(int(np.prod(out_shape)) * np.dtype(out_dtype).itemsize, "out")
    device.launch(device.kernel("intrinsics", symbol), 1, (32, 2), (*buffers, out, *scalars), shared=256)
    result = device.download(out, out_shape, out_dtype)
    for buffer in (*buffers, out):
        buffer.close()
    return result


@pytest.fixture(scope="module", params=["fast", "check"])
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


@pytest.mark.parametrize("order", ORDERS)
def test_collectives(mode: Mode, order: str) -> None:
    x = np.random.default_rng(1).integers(0, 500, 64).astype(np.int32)
    device = EmulatorDevice(mode, kernel_dir=KERNELS, order=order, seed=3)
    y = run(device, "collectives", [x], (12, 64), np.int32, np.int32(x[40]))
    warp_of = x.reshape(2, 32)
    ballot = np.array([sum(int(v & 1) << i for i, v in enumerate(w)) for w in warp_of], np.uint32).view(np.int32)
    expected = [
        x[WARP + np.where(LANE + 3 < 32, LANE + 3, LANE)],
        x[WARP + np.where(LANE >= 5, LANE - 5, LANE)],
        x[WARP + 7],
        x[WARP + (LANE ^ 4)],
        ballot[WARP // 32],
        np.array([(w == x[40]).any() for w in warp_of])[WARP // 32],
        np.ones(64),
        np.full(64, (x & 1).sum()),
        np.full(64, x.sum()),
        np.full(64, x.max()),
        x[WARP + np.where(LANE < 16, 3, 19)],
        x[::-1],
    ]
    for row, (got, want) in enumerate(zip(y, expected, strict=True)):
        np.testing.assert_array_equal(got, want, err_msg=f"row {row}")


def test_integers(mode: Mode) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(2))
    a[:3] = 0, 1, 0x80000000
    y = run(EmulatorDevice(mode, kernel_dir=KERNELS), "integers", [a, b], (6, 64), np.uint32)
    byte = np.stack([a, b], 1).view(np.uint8).reshape(64, 8).astype(np.uint32)
    sign = np.where(byte & 128, 255, 0).astype(np.uint32)
    popc = np.array([int(v).bit_count() for v in a])
    clz = np.array([32 - int(v).bit_length() for v in a])
    ffs = np.array([(int(v) & -int(v)).bit_length() for v in a])
    tripled = np.rint(a.view(np.int32).astype(np.float32) * np.float32(3)).astype(np.float64)
    saturated = np.clip(tripled, -(2.0**31), 2.0**31 - 1).astype(np.int32)
    reverse = np.array([int(f"{int(v):032b}"[::-1], 2) for v in b], np.uint32)
    wide = (b.astype(np.uint64) << np.uint64(32)) | a
    expected = [
        byte[:, 2] | byte[:, 0] << 8 | byte[:, 3] << 16 | byte[:, 7] << 24,
        sign[:, 2] | sign[:, 0] << 8 | byte[:, 1] << 16 | sign[:, 4] << 24,
        popc + 100 * clz + 10000 * ffs,
        (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32),
        (wide >> np.uint64(9)).astype(np.uint32),
        saturated.view(np.uint32) ^ reverse,
    ]
    for row, (got, want) in enumerate(zip(y, expected, strict=True)):
        np.testing.assert_array_equal(got, want, err_msg=f"row {row}")


def fused_inputs() -> tuple[npt.NDArray, npt.NDArray, npt.NDArray]:
    """a: scaled activations; b: weights as subnormal bit patterns (n x 2^-149); c: accumulators of every kind."""
    rng = np.random.default_rng(3)
    a = (rng.standard_normal(64) * 2.0**60).astype(np.float32)
    n = rng.integers(0, 256, 64)
    b = (n << rng.integers(0, 15, 64)).astype(np.uint32).view(np.float32)
    c = (rng.standard_normal(64) * 2.0**-70).astype(np.float32)
    c[:16] = 0
    c[16:20] = np.float32(1e-40)
    a[20:28], b[20:28] = b[20:28].copy(), a[20:28].copy()  # the subnormal in either place
    a[28:36], b[28:36], c[28:36] = 1.5, 2.5, rng.standard_normal(8)  # ordinary numbers
    a[36:40], b[36:40], c[36:40] = 1e-30, 1e-10, 0  # a subnormal result
    return a, b, c


def test_ieee_fma_keeps_subnormals_and_plain_arithmetic_flushes_them(mode: Mode) -> None:
    a, b, c = fused_inputs()
    y = run(EmulatorDevice(mode, kernel_dir=KERNELS), "fused", [a, b, c], (5, 64), np.float32)
    wide = [v.astype(np.longdouble) for v in (a, b, c)]
    exact = (wide[0] * wide[1] + wide[2]).astype(np.float32)  # 48-bit product; 64-bit sum, rounded once more
    np.testing.assert_array_max_ulp(y[0], exact, maxulp=1)
    assert (y[0][36:40] > 0).all()

    def flush(v: npt.NDArray) -> npt.NDArray:
        return np.where(np.abs(v) < np.finfo(np.float32).tiny, np.float32(0), v)

    fa, fb, fc = map(flush, (a, b, c))
    product = flush(fa * fb)
    np.testing.assert_array_equal(y[1], product)
    np.testing.assert_array_equal(y[2], flush((fa.astype(np.float64) * fb + fc).astype(np.float32)))
    np.testing.assert_array_equal(y[3], flush(product + fc))
    np.testing.assert_array_equal(y[4], y[2])
    assert (
        y[1][:16] == 0
    ).all()  # a kernel that multiplies bit patterns without the IEEE form gets zeros, as on the card


def test_loads(mode: Mode) -> None:
    rng = np.random.default_rng(4)
    h = rng.standard_normal(128).astype(np.float16)
    h[:4] = np.float16(6e-8), np.float16(-1e-5), np.float16(65504), np.float16(0)  # half subnormals are float normals
    packed = rng.integers(0, 2**32, (64, 4), dtype=np.uint32)
    quads = rng.integers(-100, 100, (64, 4)).astype(np.float32)
    d = rng.standard_normal(64)
    out = run(EmulatorDevice(mode, kernel_dir=KERNELS), "loads", [h, packed, quads, d], (5, 64), np.float32)
    pairs = h.astype(np.float32).reshape(64, 2)
    np.testing.assert_array_equal(out[0], pairs[:, 0] + 2 * pairs[:, 1])
    np.testing.assert_array_equal(out[1], (np.bitwise_xor.reduce(packed, 1) & 0xFFFFFF).astype(np.float32))
    np.testing.assert_array_equal(out[2], np.ones(64))
    np.testing.assert_array_equal(out[3], quads @ np.array([1, 2, 4, 8], np.float32))
    np.testing.assert_array_equal(out[4], (d * 0.1).astype(np.float32))
