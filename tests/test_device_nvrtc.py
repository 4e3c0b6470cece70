"""NVRTC for real, without a card: cubins for every architecture, ptxas' numbers, cache keys, errors, occupancy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from m40llm.device import DeviceError, DeviceUnavailable, KernelCompileError, nvrtc
from m40llm.device.occupancy import occupancy
from m40llm.device.sources import headers

KERNELS = Path(__file__).parent / "kernels"


def test_versions_and_architectures() -> None:
    twelve, thirteen = nvrtc.load(12), nvrtc.load(13)
    assert twelve.version == (12, 9)
    assert {52, 61, 70, 90} <= set(twelve.archs)
    assert thirteen.version[0] == 13
    assert min(thirteen.archs) == 75


def test_each_card_gets_the_newest_nvrtc_that_knows_it() -> None:
    assert nvrtc.for_arch("sm_52").version[0] == 12
    assert nvrtc.for_arch("sm_70").version[0] == 12
    assert nvrtc.for_arch("sm_75").version[0] == 13
    assert [nvrtc.extra_for(arch) for arch in ("sm_52", "sm_70", "sm_75", "sm_90")] == ["cuda12"] * 2 + ["cuda13"] * 2
    with pytest.raises(DeviceUnavailable, match=r"sm_35 is too old: the kernels need compute capability 5.0"):
        nvrtc.for_arch("sm_35")
    with pytest.raises(DeviceUnavailable, match=r"installed NVRTC 13.* cannot compile for sm_999; pip install"):
        nvrtc.for_arch("sm_999")
    with pytest.raises(DeviceError, match="'52' is not an architecture; write sm_52"):
        nvrtc.for_arch("52")


@pytest.mark.parametrize(("arch", "major"), [("sm_52", 12), ("sm_90", 13)])
def test_compile_reports_resources_and_signatures(arch: str, major: int, tmp_path: Path) -> None:
    compiled = nvrtc.compile(KERNELS / "attention.cu", arch, nvrtc=nvrtc.load(major), cache_dir=tmp_path)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.path.read_bytes() == compiled.cubin
    assert {k.name for k in compiled.kernels} == {"attn_decode_64", "attn_decode_128"}
    for kernel in compiled.kernels:
        assert 16 <= kernel.registers <= 64
        assert kernel.shared_bytes == 16  # __shared__ float red[4]
        assert kernel.spill_store_bytes == kernel.spill_load_bytes == kernel.stack_bytes == 0
    assert compiled.signatures["attn_decode_64"].letters == "CCCPiiifi"
    again = nvrtc.compile(KERNELS / "attention.cu", arch, nvrtc=nvrtc.load(major), cache_dir=tmp_path)
    assert again == compiled
    assert len(list(tmp_path.iterdir())) == 2  # cubin and manifest, no temporary files left


def test_spills_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "spill.cu"
    source.write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) spill(const float* x, float* y) {\n'
        "  float v[64];\n#pragma unroll\n  for (int i = 0; i < 64; i++) v[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n#pragma unroll\n  for (int i = 0; i < 64; i++) y[i * 1024 + threadIdx.x] = v[63 - i];\n}\n"
    )
    (kernel,) = nvrtc.compile(source, "sm_52", cache_dir=tmp_path).kernels
    assert kernel.registers == 32
    assert kernel.spill_store_bytes > 0
    assert kernel.spill_load_bytes > 0


def test_compile_error_carries_the_log(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void broken(float* y) { y[0] = nonsense; }\n')
    with pytest.raises(KernelCompileError, match=r"NVRTC 12.9 cannot compile broken.cu:\n.*\n?.*nonsense") as caught:
        nvrtc.compile(source, "sm_52", cache_dir=tmp_path)
    assert 'identifier "nonsense" is undefined' in caught.value.log
    assert not list(tmp_path.glob("*.cubin"))


def test_options_are_the_same_everywhere() -> None:
    options = nvrtc.options_for("sm_52", [Path("/k")], ["-DX=1"])
    assert options == ("--gpu-architecture=sm_52", *nvrtc.BASE_OPTIONS, "-I/k", "-DX=1")
    # What the emulator models, and what the resource table needs.
    assert {"--std=c++17", "--ftz=true", "--ptxas-options=-v"} <= set(nvrtc.BASE_OPTIONS)


def test_cache_key_covers_source_headers_options_and_version(tmp_path: Path) -> None:
    for name in ("signatures.cu", "signatures.cuh"):
        shutil.copy(KERNELS / name, tmp_path / name)
    source, header, twelve = tmp_path / "signatures.cu", tmp_path / "signatures.cuh", nvrtc.load(12)
    options = nvrtc.options_for("sm_52", [tmp_path])

    def key(compiler: nvrtc.Nvrtc = twelve, with_options: tuple[str, ...] = options) -> str:
        return nvrtc.cache_key(compiler, source, with_options, headers([tmp_path]))

    first = key()
    assert key() == first
    others = [
        key(nvrtc.load(13)),
        key(with_options=(*options, "-DX")),
        key(with_options=nvrtc.options_for("sm_61", [tmp_path])),
    ]
    header.write_text(header.read_text() + "// changed\n")
    others.append(key())
    source.write_text(source.read_text() + "// changed\n")
    others.append(key())
    assert len({first, *others}) == 6


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "arch", "blocks", "limit"),
    [
        # the CUDA Occupancy Calculator's answers
        (32, 0, 128, "sm_52", 16, "threads"),
        (40, 8192, 256, "sm_52", 6, "registers"),
        (32, 48 * 1024, 256, "sm_52", 2, "shared memory"),
        (16, 0, 32, "sm_52", 32, "blocks"),
        (255, 0, 256, "sm_52", 1, "registers"),
        (64, 0, 1024, "sm_61", 1, "registers"),
        (32, 0, 1024, "sm_75", 1, "threads"),
        (32, 0, 256, "sm_86", 6, "threads"),
        (32, 99 * 1024, 256, "sm_86", 1, "shared memory"),
        (128, 0, 128, "sm_90", 4, "registers"),
    ],
)
def test_occupancy(registers: int, shared: int, threads: int, arch: str, blocks: int, limit: str) -> None:
    result = occupancy(registers, shared, threads, arch)
    assert (result.blocks, result.limited_by) == (blocks, limit)
    assert result.warps == blocks * -(-threads // 32)


@pytest.mark.parametrize("impossible", [(32, 49153, 128, "sm_52"), (256, 0, 128, "sm_52"), (32, 0, 1025, "sm_52")])
def test_occupancy_refuses_what_cannot_run(impossible: tuple[int, int, int, str]) -> None:
    with pytest.raises(DeviceError, match="cannot run on sm_52"):
        occupancy(*impossible)
    with pytest.raises(DeviceError, match="no occupancy limits for sm_20"):
        occupancy(32, 0, 32, "sm_20")
