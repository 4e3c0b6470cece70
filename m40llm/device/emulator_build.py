"""Compiles a `.cu` with g++ into a shared library that the emulator can run.

The source is taken as it is, but for two things: `extern __shared__` arrays, which C++ cannot express, become pointers;
and everything is put into an unnamed namespace, because g++ ignores the section of static variables in templates with
external linkage, and the runtime must find every shared variable.

The result is cached. Its key covers the sources, all headers, the options and the compiler, and several processes may
build at once: a lock file keeps them from doing the same work, a rename makes the result appear whole.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from m40llm.device.errors import DeviceError, DeviceUnavailable, KernelCompileError
from m40llm.device.signature import KernelSignature, Parameter, parse_kernels
from m40llm.device.sources import HOST_DIR, KERNEL_DIR, digest, headers, include_dirs, kernel_source

Mode = Literal["fast", "check", "kasan", "traffic"]

_COMMON_FLAGS = (
    "-std=c++17",
    "-g1",  # line tables: faults name their source line
    "-gdwarf-4",  # binutils 2.40 takes the wrong file of a version 5 table when #line renames it
    "-fPIC",
    "-fno-gnu-unique",  # else dlopen would merge variables of different modules
    "-fno-threadsafe-statics",
    "-fno-strict-aliasing",  # kernels reinterpret memory, as nvcc allows
    "-fstack-clash-protection",  # a large frame must touch the guard page, not jump over it
    "-fno-math-errno",
    "-ffp-contract=fast",  # nvcc fuses multiply-add too
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused",
    "-Wno-attributes",
)
# Hidden: each module has a runtime of its own, none may resolve to another module's.
_RUNTIME_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-Wall", "-Wextra")
_MODE_FLAGS: dict[str, tuple[str, ...]] = {
    "fast": ("-O2",),
    "check": (
        "-O1",
        "-fsanitize=thread",
        "--param=tsan-instrument-func-entry-exit=0",
        # alignment: g++ splits a float4 load into parts, each of them aligned
        "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero,signed-integer-overflow",
    ),
    "kasan": ("-O1", "-fsanitize=kernel-address", "--param=asan-globals=1", "-fsanitize-sections=emu_shared"),
    # Vector loads and stores stay whole: no pass that splits or looks through the copy of a structure.
    "traffic": (
        "-O1",
        "-fsanitize=thread",
        "--param=tsan-instrument-func-entry-exit=0",
        "-fno-tree-sra",
        "-fno-tree-fre",
    ),
}
MODES: tuple[str, ...] = tuple(_MODE_FLAGS)

_DYNAMIC_SHARED = re.compile(
    r"\bextern\s+(?:__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?|__align__\s*\(\s*\d+\s*\)\s*__shared__\s+)"
    r"(?P<type>[\w: ]+?)\s+(?P<name>\w+)\s*\[\s*\]\s*;"
)
_SYMBOL = re.compile(
    r"^(?P<address>[0-9a-f]+) .{6}O (?P<section>\S+)\s+(?P<size>[0-9a-f]+)\s+(?:\.\w+ )?(?P<name>\S+)$"
)


@dataclass(frozen=True)
class SharedVariable:
    """A static `__shared__` variable of a module: `offset` from the module's base and `size` in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class EmulatorModule:
    """A built module: the library's path, its kernels by symbol, its shared variables."""

    library: Path
    kernels: dict[str, KernelSignature]
    shared: tuple[SharedVariable, ...]


def build(
    module: str,
    mode: Mode,
    cache_dir: Path,
    kernel_dir: Path = KERNEL_DIR,
    arch: int = 520,
    on_compile: Callable[[str], None] | None = None,
) -> EmulatorModule:
    """Builds `<kernel_dir>/<module>.cu`, or finds it in `cache_dir`; `on_compile` is called with its name before the former.

    Raises DeviceUnavailable without g++ (or on a processor that the emulator does not know), KernelCompileError with
    the compiler's log, DeviceError for a source that the emulator cannot take.
    """
    source = kernel_source(module, kernel_dir)
    compiler, version = find_compiler()
    options = (*_COMMON_FLAGS, *architecture_flags(), *_MODE_FLAGS[mode], f"-D__CUDA_ARCH__={arch}")
    device_headers = headers(include_dirs(kernel_dir))
    host_files = sorted(path for path in HOST_DIR.rglob("*") if path.is_file())
    key = digest(
        version,
        *options,
        str(source),
        source,
        Path(__file__),
        *(str(h) for h in device_headers),
        *device_headers,
        *host_files,
    )
    library, manifest = cache_dir / f"{module}-{mode}-{key}.so", cache_dir / f"{module}-{mode}-{key}.json"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f"{key}.lock"):
        if not (library.exists() and manifest.exists()):
            if on_compile:
                on_compile(module)
            kernels = parse_kernels(source, include_dirs(kernel_dir), arch)
            runtime = _build_runtime(compiler, version, cache_dir)
            with tempfile.TemporaryDirectory(dir=cache_dir, prefix="build-") as folder:
                built = _compile(compiler, options, source, device_headers, list(kernels), runtime, Path(folder))
                text = json.dumps({"kernels": _to_json(kernels), "shared": _shared_symbols(built)})
                temporary = Path(folder) / "manifest.json"
                temporary.write_text(text, encoding="utf-8")
                os.replace(built, library)
                os.replace(temporary, manifest)
    loaded = json.loads(manifest.read_text(encoding="utf-8"))
    return EmulatorModule(
        library, _from_json(loaded["kernels"]), tuple(SharedVariable(*entry) for entry in loaded["shared"])
    )


@functools.cache
def find_compiler() -> tuple[str, str]:
    """(path, version text) of g++. Raises DeviceUnavailable if there is none."""
    path = shutil.which("g++")
    if path is None or shutil.which("objdump") is None:
        raise DeviceUnavailable(
            "the emulator needs g++ and objdump", "install them (Debian: apt install g++) or use --device cpu"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, f"{version}\n{platform.machine()}"


@functools.cache
def architecture_flags() -> tuple[str, ...]:
    """Flags for this processor. Raises DeviceUnavailable where context_switch.h or FP16 conversion is missing."""
    machine = platform.machine()
    if machine == "aarch64":
        return ("-march=armv8-a",)
    if machine != "x86_64":
        raise DeviceUnavailable(f"the emulator is written for x86-64 and aarch64, not {machine}", "use --device cpu")
    features = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    if not {"avx2", "fma", "f16c"} <= set(features):
        raise DeviceUnavailable("the emulator needs a processor with AVX2, FMA and F16C", "use --device cpu")
    return ("-march=x86-64-v3",)


def translate(text: str, path: Path) -> str:
    """The source for g++: dynamic shared memory as a pointer, lines and file names as in the original."""
    translated = _DYNAMIC_SHARED.sub(
        lambda m: f"{m['type']}* const {m['name']} = ({m['type']}*)emu_dynamic_shared();", text
    )
    if re.search(r"\bextern\s+(?:__align__\s*\([^)]*\)\s*)?__shared__", translated):
        raise DeviceError(f"{path.name}: write dynamic shared memory as `extern __shared__ T name[];`")
    return f'#line 1 "{path}"\n{translated}\n'


def _compile(
    compiler: str,
    options: Sequence[str],
    source: Path,
    device_headers: Sequence[Path],
    kernels: Sequence[str],
    runtime: Path,
    folder: Path,
) -> Path:
    """Compiles and links in `folder`; returns the library."""
    for header in device_headers:
        (folder / header.name).write_text(translate(header.read_text(encoding="utf-8"), header), encoding="utf-8")
    entries = "".join(f"EMU_KERNEL({name})\n" for name in kernels)
    unit = folder / "module.cpp"
    unit.write_text(
        f"namespace {{\n{translate(source.read_text(encoding='utf-8'), source)}}}\n{entries}", encoding="utf-8"
    )
    compiled, library = folder / "module.o", folder / "module.so"
    includes = ("-I", str(folder), "-I", str(HOST_DIR / "include"), "-include", str(HOST_DIR / "device_api.h"))
    _run(source, [compiler, *options, *includes, "-c", str(unit), "-o", str(compiled)])
    _run(source, [compiler, "-shared", "-Wl,-Bsymbolic", str(compiled), str(runtime), "-lrt", "-o", str(library)])
    return library


def _build_runtime(compiler: str, version: str, cache_dir: Path) -> Path:
    """The runtime's object file, shared by all modules and modes."""
    unit = HOST_DIR / "runtime.cpp"
    options = (*_RUNTIME_FLAGS, *architecture_flags())
    key = digest(version, *options, *sorted(HOST_DIR.glob("*.h")), unit)
    result = cache_dir / f"runtime-{key}.o"
    with _locked(cache_dir / f"runtime-{key}.lock"):
        if not result.exists():
            with tempfile.TemporaryDirectory(dir=cache_dir, prefix="build-") as folder:
                built = Path(folder) / "runtime.o"
                _run(unit, [compiler, *options, "-c", str(unit), "-o", str(built)])
                os.replace(built, result)
    return result


def _run(source: Path, command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KernelCompileError(source.name, "g++", done.stderr)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _shared_symbols(library: Path) -> list[tuple[str, int, int]]:
    """(name, offset, size) of the static shared variables.

    In templates g++ drops the section: there, a mutable static local of the unnamed namespace is one (device code has no
    other kind).
    """
    table = subprocess.run(["objdump", "-t", str(library)], capture_output=True, text=True, check=True).stdout
    found = []
    for line in table.splitlines():
        match = _SYMBOL.match(line)
        if match is None or int(match["size"], 16) == 0:
            continue
        local_static = match["name"].startswith("_ZZN12_GLOBAL__N_1") and match["section"] in (".data", ".bss")
        if match["section"] == "emu_shared" or local_static:
            found.append((_plain_name(match["name"]), int(match["address"], 16), int(match["size"], 16)))
    return found


def _plain_name(mangled: str) -> str:
    """`s` of `_ZZN12_GLOBAL__N_14sumEvE1s`: Itanium ABI, <length><name> behind the function's encoding."""
    match = re.search(r"E(\d+)([A-Za-z_]\w*)$", mangled)
    return match[2][: int(match[1])] if match else mangled


def _to_json(kernels: dict[str, KernelSignature]) -> dict[str, object]:
    return {k.symbol: [[[p.name, p.letter] for p in k.parameters], k.max_threads] for k in kernels.values()}


def _from_json(entries: dict[str, list]) -> dict[str, KernelSignature]:
    return {
        symbol: KernelSignature(symbol, tuple(Parameter(*p) for p in parameters), max_threads)
        for symbol, (parameters, max_threads) in entries.items()
    }
