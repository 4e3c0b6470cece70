"""Compiles kernels to cubins with NVRTC, through ctypes on the pip packages: needs no card, no driver and no CuPy.

NVRTC 12.9 (extra `cuda12`) targets compute capability 5.0 to 12.x, NVRTC 13 (extra `cuda13`) starts at 7.5. Cubins are
cached; the key covers the source, every header, the options, the architecture and NVRTC's version.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from m40llm.device.errors import DeviceError, DeviceUnavailable, KernelCompileError, install_extra
from m40llm.device.signature import KernelSignature, Parameter, parse_kernels
from m40llm.device.sources import digest, headers, include_dirs

# Folders of the pip packages below `nvidia/`, by major version: libraries, headers, the extra that installs them.
_PACKAGES = {
    12: ("cuda_nvrtc/lib/libnvrtc.so.12", "cuda_runtime/include", "cuda12"),
    13: ("cu13/lib/libnvrtc.so.13", "cu13/include", "cuda13"),
}
MAJORS = tuple(_PACKAGES)

# -ftz: subnormal floats cost nothing on sm_52 either way, but the emulator and CuPy's own kernels flush, and so do we.
# Default execution space: a generic lambda cannot carry `__device__`, and no source here has host code.
BASE_OPTIONS = ("--std=c++17", "--ftz=true", "--device-as-default-execution-space", "-DNDEBUG", "--ptxas-options=-v")

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_NUMBERS = {
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
    "spill_store_bytes": re.compile(r"(\d+) bytes spill stores"),
    "spill_load_bytes": re.compile(r"(\d+) bytes spill loads"),
    "registers": re.compile(r"Used (\d+) registers"),
    "shared_bytes": re.compile(r"(\d+) bytes smem"),
}
_CONSTANT = re.compile(r"(\d+) bytes cmem\[\d+\]")


@dataclass(frozen=True)
class KernelResources:
    """What ptxas allotted to one kernel. Bytes are per thread for stack and spills, per block for (static) shared memory."""

    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    constant_bytes: int
    stack_bytes: int


@dataclass(frozen=True)
class Compiled:
    """A compiled module: the cubin and its file in the cache, NVRTC's log, resources and signatures by kernel."""

    cubin: bytes
    path: Path
    log: str
    kernels: tuple[KernelResources, ...]
    signatures: dict[str, KernelSignature]


def default_cache_dir() -> Path:
    """Where cubins are kept unless the caller says otherwise."""
    return platformdirs.user_cache_path("m40llm") / "cubins"


def parse_log(log: str) -> tuple[KernelResources, ...]:
    """Resources of every kernel in the log of `--ptxas-options=-v`, in its order."""
    _, *parts = _ENTRY.split(log)  # kernel name, its section, kernel name, …
    found = []
    for name, section in zip(parts[::2], parts[1::2], strict=True):
        numbers = {key: int(m[1]) if (m := pattern.search(section)) else 0 for key, pattern in _NUMBERS.items()}
        constant = sum(int(size) for size in _CONSTANT.findall(section))
        found.append(KernelResources(name=name, constant_bytes=constant, **numbers))
    return tuple(found)


class Nvrtc:
    """One NVRTC library. `version` is (major, minor), `archs` the real architectures that it targets: 50, 52, …"""

    def __init__(self, library: Path, cuda_include: Path):
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.cuda_include = cuda_include
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        archs = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(archs))
        self.version = (major.value, minor.value)
        self.archs = tuple(archs)

    def _check(self, status: int) -> None:
        if status:
            raise DeviceError(f"NVRTC: {self._library.nvrtcGetErrorString(status).decode()}")

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        """The program's `what` (CUBIN or ProgramLog)."""
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, text))
        return text.raw

    def compile_source(self, source: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
        """(cubin, log). Raises KernelCompileError with the log. `options` must name a real architecture (sm_…)."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        )
        try:
            encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), encoded)
            log = self._text(program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
            if status:
                raise KernelCompileError(name, f"NVRTC {self.version[0]}.{self.version[1]}", log)
            return self._text(program, "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def load(major: int) -> Nvrtc:
    """NVRTC of a major CUDA version. Raises DeviceUnavailable if its pip packages are not installed."""
    library, include, extra = _PACKAGES[major]
    spec = importlib.util.find_spec("nvidia")
    for root in map(Path, spec.submodule_search_locations or () if spec else ()):
        if (root / library).exists():
            if not (root / include / "cuda_fp16.h").exists():
                raise DeviceUnavailable("CUDA's header cuda_fp16.h is missing", install_extra(extra))
            return Nvrtc(root / library, root / include)
    raise DeviceUnavailable(f"NVRTC {major} is not installed", install_extra(extra))


def for_arch(arch: str) -> Nvrtc:
    """The newest installed NVRTC that targets `arch` ("sm_52"). Raises DeviceUnavailable that names the extra to install."""
    number = parse_arch(arch)
    installed = []
    for major in reversed(MAJORS):
        try:
            nvrtc = load(major)
        except DeviceUnavailable:
            continue
        if number in nvrtc.archs:
            return nvrtc
        installed.append(nvrtc)
    extra = extra_for(arch)
    if not installed:
        raise DeviceUnavailable("NVRTC is not installed", install_extra(extra))
    versions = ", ".join(f"{n.version[0]}.{n.version[1]} (sm_{min(n.archs)} and newer)" for n in installed)
    if number < 50:
        raise DeviceUnavailable(f"{arch} is too old: the kernels need compute capability 5.0", "use --device cpu")
    raise DeviceUnavailable(f"the installed NVRTC {versions} cannot compile for {arch}", install_extra(extra))


def extra_for(arch: str) -> str:
    """The extra of this package that supports `arch`; both do from 7.5 on, where the newer one is named."""
    return "cuda12" if parse_arch(arch) < 75 else "cuda13"


def parse_arch(arch: str) -> int:
    """52 of "sm_52". DeviceError for anything else."""
    match = re.fullmatch(r"sm_(\d{2,3})", arch)
    if match is None:
        raise DeviceError(f"'{arch}' is not an architecture; write sm_52")
    return int(match[1])


def options_for(arch: str, include: Sequence[Path], extra: Sequence[str] = ()) -> tuple[str, ...]:
    """NVRTC's command line for a module."""
    return (f"--gpu-architecture={arch}", *BASE_OPTIONS, *(f"-I{path}" for path in include), *extra)


def cache_key(nvrtc: Nvrtc, source: Path, options: Sequence[str], device_headers: Sequence[Path]) -> str:
    """Digest of everything that decides the cubin."""
    cuda_headers = sorted(nvrtc.cuda_include.glob("cuda_fp16.*"))
    return digest(
        repr(nvrtc.version), *options, source, *(h.name for h in device_headers), *device_headers, *cuda_headers
    )


def compile(
    source: Path,
    arch: str,
    *,
    nvrtc: Nvrtc | None = None,
    extra_options: Sequence[str] = (),
    cache_dir: Path | None = None,
    on_compile: Callable[[str], None] | None = None,
) -> Compiled:
    """Compiles a `.cu` for `arch`, or finds it in the cache; `on_compile` is called with its name before the former.

    Raises KernelCompileError with NVRTC's log, DeviceUnavailable if no installed NVRTC targets `arch`.
    """
    compiler = nvrtc or for_arch(arch)
    folder = cache_dir or default_cache_dir()
    search = include_dirs(source.parent)
    options = options_for(arch, [*search, compiler.cuda_include], extra_options)
    key = cache_key(compiler, source, options, headers(search))
    path = folder / f"{source.stem}-{arch}-{key}.cubin"
    manifest = path.with_suffix(".json")
    if path.exists() and manifest.exists():
        return _load_cached(path, manifest)
    if on_compile:
        on_compile(source.stem)
    cubin, log = compiler.compile_source(source.read_text(encoding="utf-8"), source.name, options)
    signatures = parse_kernels(source, search, parse_arch(arch) * 10)
    compiled = Compiled(cubin, path, log, parse_log(log), signatures)
    folder.mkdir(parents=True, exist_ok=True)
    _write_whole(path, cubin)
    _write_whole(manifest, json.dumps(_to_json(compiled)).encode())
    return compiled


def _write_whole(path: Path, data: bytes) -> None:
    """Writes beside and renames: another process sees all of the file or none of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def _to_json(compiled: Compiled) -> dict[str, object]:
    return {
        "log": compiled.log,
        "kernels": [dataclasses.asdict(kernel) for kernel in compiled.kernels],
        "signatures": [dataclasses.asdict(signature) for signature in compiled.signatures.values()],
    }


def _load_cached(path: Path, manifest: Path) -> Compiled:
    entry = json.loads(manifest.read_text(encoding="utf-8"))
    kernels = tuple(KernelResources(**kernel) for kernel in entry["kernels"])
    signatures = {
        s["symbol"]: KernelSignature(s["symbol"], tuple(Parameter(**p) for p in s["parameters"]), s["max_threads"])
        for s in entry["signatures"]
    }
    return Compiled(path.read_bytes(), path, entry["log"], kernels, signatures)
