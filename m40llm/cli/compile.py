"""`m40llm compile`: all CUDA kernels ahead of time, and what they take on a card."""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import click

from m40llm.cli.options import json_flag


@click.command(
    name="compile",
    epilog="""\b
Examples:
  m40llm compile --arch sm_52
  m40llm compile --arch sm_52,sm_61,sm_75,sm_90
  m40llm compile --arch sm_52 --json | jq '.kernels[] | select(.spill_bytes > 0)'

Needs no card and no driver, only NVRTC, from m40llm's source folder: pip install '.[cuda12]' (sm_50 to sm_120) or '.[cuda13]'
(from sm_75).
Results are cached; a run on a card finds them there.""",
)
@click.option("--arch", "archs", default="sm_52", show_default=True, help="Architectures, comma-separated.")
@click.option("--cuda", "major", type=click.Choice(["12", "13"]), help="Which NVRTC (default: the newest that can).")
@json_flag
def command(archs: str, major: str | None, as_json: bool) -> None:
    """Compile every kernel; print registers, spills, shared memory and occupancy."""
    from m40llm.cli.progress import StageBar
    from m40llm.device import DeviceError
    from m40llm.device.compile_all import compile_all
    from m40llm.device.nvrtc import parse_arch

    names = [name.strip() for name in archs.split(",") if name.strip()]
    if not names:
        raise click.UsageError("--arch names no architecture; write for example sm_52", click.get_current_context())
    try:
        for name in names:
            parse_arch(name)
    except DeviceError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
    started = time.perf_counter()
    with StageBar("compiling") as bar:
        kernels = compile_all(names, cuda_major=int(major) if major else None, progress=bar.update)
    if as_json:
        click.echo(json.dumps({"kernels": [dataclasses.asdict(k) for k in kernels]}))
        return
    width = max(len(k.name) for k in kernels)
    click.echo(
        f"{'kernel':<{width}} {'arch':<6} {'regs':>4} {'spill':>5} {'shared':>6} {'block':>5} {'occupancy':>9}  limit"
    )
    for k in kernels:
        click.echo(
            f"{k.name:<{width}} {k.arch:<6} {k.registers:>4} {k.spill_bytes:>5} {k.shared_bytes:>6} {k.threads:>5} "
            f"{k.occupancy:>8.0%}   {k.limited_by}"
        )
    spilling = sum(k.spill_bytes > 0 for k in kernels)
    seconds = time.perf_counter() - started
    print(f"{len(kernels)} kernels in {seconds:.1f} s, {spilling} of them spill registers", file=sys.stderr)
