"""`m40llm doctor`: what this machine can run on, checked piece by piece, and what would be chosen and why."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from m40llm.cli.errors import one_line
from m40llm.cli.options import json_flag

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from m40llm.device.choose import DeviceChoice

Status = Literal["ok", "missing", "failed"]


@dataclass(frozen=True)
class Finding:
    """One check. "missing" is a part that this machine does without, "failed" one that should work and does not."""

    name: str
    status: Status
    detail: str


@click.command(
    name="doctor",
    epilog="""\b
Examples:
  m40llm doctor
  m40llm doctor --device cuda
  m40llm doctor --json | jq '.findings[] | select(.status != "ok")'

Exit code 0 if the chosen device computes a known product right, 1 if it does not, 2 if the device cannot be had.""",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu", "emulator"]),
    default="auto",
    envvar="M40LLM_DEVICE",
    show_envvar=True,
    show_default=True,
    help="Which choice to examine.",
)
@click.option("--require-sm52", is_flag=True, help="As for generate: only compute capability 5.2 will do.")
@json_flag
def command(device: str, require_sm52: bool, as_json: bool) -> int:
    """Check driver, card, CuPy, NVRTC, cuBLAS, a kernel's compilation, and one product on the device."""
    from m40llm.device import DeviceUnavailable
    from m40llm.device.choose import choose_device

    findings = [Finding("m40llm", "ok", f"{_version('m40llm')}, Python {platform.python_version()}")]
    card, arch = _card()
    findings += [card, _attempt("CuPy", _cupy), *_nvrtc(), _cublas()]
    findings.append(_attempt("kernel compilation", lambda: _compile(arch or "sm_52")))
    findings.append(_attempt("emulator", _emulator))
    choice, code = None, 2
    try:
        choice = choose_device(device, require_sm52=require_sm52)
    except DeviceUnavailable as error:
        findings.append(Finding(f"--device {device}", "failed", str(error)))
    if choice is not None:
        product = _attempt(f"Q8_0 product on {choice.kind}", partial(_product, choice), failure="failed")
        findings.append(product)
        code = 0 if product.status == "ok" else 1
    if as_json:
        chosen = choice and {"kind": choice.kind, "reason": choice.reason}
        click.echo(json.dumps({"findings": [dataclasses.asdict(f) for f in findings], "choice": chosen}))
        return code
    for finding in findings:
        click.echo(f"{finding.status:<8} {finding.name}: {one_line(finding.detail)}")
    if choice is not None:
        click.echo(f"\n--device {device} would take {choice.reason}")
    return code


def _attempt(name: str, check: Callable[[], str], failure: Status = "missing") -> Finding:
    from m40llm.device import DeviceError, DeviceUnavailable

    try:
        return Finding(name, "ok", check())
    except DeviceUnavailable as error:
        return Finding(name, failure, str(error))
    except DeviceError as error:
        return Finding(name, "failed", str(error))


def _card() -> tuple[Finding, str | None]:
    """The driver's cards, and the architecture of the one that would be used."""
    from m40llm.device import DeviceUnavailable
    from m40llm.device.driver import find_cards, prefer

    try:
        cards = find_cards()
        best = prefer(cards)
    except DeviceUnavailable as error:
        return Finding("driver and card", "missing", str(error)), None
    listed = ", ".join(
        f"{c.name} ({c.arch}, {c.memory_bytes / 2**30:.1f} GiB, {c.multiprocessors} multiprocessors)" for c in cards
    )
    return Finding("driver and card", "ok", listed), best.arch


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"


def _cupy() -> str:
    from m40llm.device import DeviceUnavailable
    from m40llm.device.errors import install_extra

    if importlib.util.find_spec("cupy") is None:
        raise DeviceUnavailable("not installed", f"only a card needs it: {install_extra('cuda12')}")
    names = [name for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if _version(name) != "version unknown"]
    return ", ".join(f"{name} {_version(name)}" for name in names)


def _nvrtc() -> list[Finding]:
    from m40llm.device import nvrtc

    def describe(major: int) -> str:
        loaded = nvrtc.load(major)
        return f"{loaded.version[0]}.{loaded.version[1]}, sm_{min(loaded.archs)} to sm_{max(loaded.archs)}"

    return [_attempt(f"NVRTC {major}", partial(describe, major)) for major in nvrtc.MAJORS]


def _cublas() -> Finding:
    from m40llm.device.errors import install_extra

    packages = ("nvidia-cublas-cu12", "nvidia-cublas")
    found = [f"{name} {_version(name)}" for name in packages if _version(name) != "version unknown"]
    if found:
        return Finding("cuBLAS", "ok", ", ".join(found))
    return Finding(
        "cuBLAS", "missing", f"not installed; only the materialised backend needs it: {install_extra('cuda12')}"
    )


def _compile(arch: str) -> str:
    from m40llm.device.compile_all import compile_module

    started = time.perf_counter()
    kernels = compile_module("norm", arch)
    return f"{len(kernels)} kernels of norm.cu for {arch} in {time.perf_counter() - started:.2f} s"


def _emulator() -> str:
    from m40llm.device.emulator_build import architecture_flags, find_compiler

    architecture_flags()
    return find_compiler()[1].splitlines()[0]


def _product(choice: DeviceChoice) -> str:
    """Multiplies a known Q8_0 matrix by a known vector on the chosen device. Raises DeviceError if the result is wrong."""
    import numpy as np

    from m40llm.device import DeviceError
    from m40llm.gguf import TensorType, dequantize

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (96, 8, 34), dtype=np.uint8)  # 96 rows of 256 weights
    blocks[:, :, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    raw = blocks.reshape(96, -1)
    x = rng.standard_normal((1, 256)).astype(np.float32)
    weights = dequantize(raw, TensorType.Q8_0).astype(np.float64)
    got = _product_on_cpu(raw, x) if choice.kind == "cpu" else _product_on_device(choice, raw, x)
    error = float((np.abs(got - x @ weights.T) / (np.abs(x) @ np.abs(weights).T)).max())
    if not error < 1e-4:  # also refuses NaN
        raise DeviceError(
            f"wrong result: error {error:.1e} of the sum of |x w|; please report this with m40llm doctor --json"
        )
    return f"right, error {error:.1e} of the sum of |x w|"


def _product_on_cpu(raw: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    from m40llm.gguf import TensorType
    from m40llm.ops.cpu.isa import choose_isa
    from m40llm.ops.cpu.packing import pack_matrix
    from m40llm.ops.cpu.program import Program, Workers
    from m40llm.ops.cpu.project import Projection, record_project
    from m40llm.ops.cpu.quantise import QuantisedRows, record_quantise

    out = np.full((1, len(raw)), np.nan, np.float32)
    with Workers(1) as workers:
        matrix = pack_matrix(lambda a, b: raw[a:b], TensorType.Q8_0, len(raw), x.shape[1], workers)
        rows = QuantisedRows(1, x.shape[1], choose_isa("auto"))
        program = Program()
        record_quantise(program, x, rows)
        record_project(program, [Projection(matrix, out)], rows)
        program.run(workers)
    return out


def _product_on_device(choice: DeviceChoice, raw: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    from contextlib import ExitStack

    import numpy as np

    from m40llm.device.choose import open_device
    from m40llm.gguf import TensorType
    from m40llm.ops.cuda import pack, tensor
    from m40llm.ops.cuda.project import project

    with ExitStack() as stack:
        device = open_device(choice)
        stack.callback(device.close)
        matrix = pack.upload_matrix(device, raw, TensorType.Q8_0)
        stack.callback(matrix.close)
        buffer_x, device_x = tensor.empty(device, x.shape, np.float32, "x")
        stack.enter_context(buffer_x)
        buffer_y, device_y = tensor.empty(device, (1, len(raw)), np.float32, "y")
        stack.enter_context(buffer_y)
        tensor.upload(device, device_x, x)
        project(device, device_x, [matrix], [device_y])
        return tensor.download(device, device_y)
