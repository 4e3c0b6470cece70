"""Building for the emulator: cache keys, processes that build at once, translation, and errors that say what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from m40llm.device import DeviceError, DeviceUnavailable, KernelCompileError, emulator_build
from m40llm.device.emulator import EmulatorDevice
from m40llm.device.emulator_build import build, translate
from m40llm.device.sources import headers

KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulator")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in ("signatures.cu", "signatures.cuh"):
        shutil.copy(KERNELS / name, tmp_path / name)
    return tmp_path


def test_a_changed_header_or_mode_is_another_module(sources: Path, cache: Path) -> None:
    first = build("signatures", "fast", cache, sources)
    assert build("signatures", "fast", cache, sources) == first
    assert build("signatures", "kasan", cache, sources).library != first.library
    header = sources / "signatures.cuh"
    header.write_text(header.read_text().replace("typed_##T", "renamed_##T"))
    second = build("signatures", "fast", cache, sources)
    assert second.library != first.library
    assert "renamed_float_64" in second.kernels


@pytest.mark.parametrize(("own", "others"), [("a", "z"), ("z", "a")])
def test_of_two_headers_with_one_name_the_first_folders_counts(tmp_path: Path, own: str, others: str) -> None:
    for folder, names in ((own, "mn"), (others, "no")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"{name}.cuh").touch()
    found = [str(path.relative_to(tmp_path)) for path in headers([tmp_path / own, tmp_path / others])]
    assert found == [f"{own}/m.cuh", f"{own}/n.cuh", f"{others}/o.cuh"]


def test_processes_that_build_at_once_share_one_result(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    code = (
        "import sys; from pathlib import Path; from m40llm.device.emulator_build import build;"
        "print(build('signatures', 'fast', Path(sys.argv[1]), Path(sys.argv[2])).library)"
    )
    command = [sys.executable, "-c", code, str(cache), str(sources)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = {process.communicate()[0] for process in running}
    assert len(results) == 1
    assert all(process.returncode == 0 for process in running)
    assert len(list(cache.glob("signatures-*.so"))) == 1
    assert not list(cache.glob("build-*"))


def test_two_devices_may_load_one_module() -> None:
    devices = [EmulatorDevice("check", kernel_dir=KERNELS) for _ in range(2)]
    for device in devices:
        with device.alloc(512, "x") as x, device.alloc(512, "y") as y:
            device.upload(x, np.arange(128, dtype=np.float32))
            device.launch(device.kernel("planted_bugs", "ok_syncwarp"), 1, 128, (x, y, np.int32(128)))
            assert (device.download(y, (128,), np.float32) == 130).all()


def test_compile_error_carries_the_compilers_words(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken(float* y) { y[0] = nonsense; }\n')
    with pytest.raises(KernelCompileError, match=r"g\+\+ cannot compile broken.cu:\n(.|\n)*broken.cu:1.*nonsense"):
        build("broken", "fast", cache, tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("__device__ int f() { return 1; }", 'no `extern "C" __global__` kernel'),
        ('#include "absent.cuh"\nextern "C" __global__ void k(int* p) {}', "header absent.cuh not found"),
        ('struct S { int a; };\nextern "C" __global__ void k(S s) {}', "'S s' has a type that no launch can pass"),
        ('extern "C" __global__ void k(int* p) { extern __shared__ int a[4]; }', r"write dynamic shared memory as"),
    ],
)
def test_sources_that_cannot_be_taken(text: str, words: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "odd.cu").write_text(text)
    with pytest.raises(DeviceError, match=words):
        build("odd", "fast", cache, tmp_path)


@pytest.mark.parametrize(
    "declaration",
    [
        "extern __shared__ float s[];",
        "extern __shared__ __align__(16) float s[];",
        "extern __align__( 16 ) __shared__ float s [ ];",
    ],
)
def test_dynamic_shared_memory_becomes_a_pointer(declaration: str) -> None:
    text = translate(f"\n{declaration} // tail", Path("/k/x.cu"))
    assert text == '#line 1 "/k/x.cu"\n\nfloat* const s = (float*)emu_dynamic_shared(); // tail\n'


def test_missing_compiler_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    emulator_build.find_compiler.cache_clear()
    try:
        with pytest.raises(DeviceUnavailable, match=r"needs g\+\+ and objdump; install them .* or use --device cpu"):
            emulator_build.find_compiler()
    finally:
        emulator_build.find_compiler.cache_clear()
