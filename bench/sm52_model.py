"""The kernels' machine code for sm_52 against the card's throughput: who waits for instructions, and predicted tokens per second.

    python bench/sm52_model.py                 # issue over memory time of every kernel, speed of well-known models
    python bench/sm52_model.py --check         # fails where a target of docs/perf_baselines.md is missed
    python bench/sm52_model.py --write         # renews m40llm/device/data/sm52_costs.json after a kernel has changed

What a warp executes, once and per step, is counted in the machine code (sm52_costs.py); sm52_targets.py says what follows from it.
Nothing here was measured on a card; m40llm/device/roofline.py has the time model and its error. Without --write the package's table
is read, and no disassembler is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click
from nvdisasm import find_nvdisasm
from shapes import SHAPES
from sm52_costs import make_table
from sm52_targets import TARGET_MODEL, ProjectionRow, missed_targets, predicted, projection_rows

from m40llm.device import nvrtc
from m40llm.device.roofline import (
    COSTS_FILE,
    ERROR_NOTE,
    KernelCost,
    load_costs,
    source_digest,
    stale_modules,
    to_json,
)
from m40llm.device.sources import kernel_modules

# llama.cpp's kernels, walked in the same way on the same chips (K = 4096, one row): issue over memory time
LLAMA_CPP = {
    ("m40-24g", "Q8_0"): 0.92,
    ("m40-24g", "Q4_0"): 1.48,
    ("m40-24g", "Q4_K"): 1.89,
    ("m40-24g", "Q6_K"): 1.89,
    ("p40", "Q8_0"): 0.49,
    ("p40", "Q4_0"): 0.75,
    ("p40", "Q4_K"): 1.03,
    ("p40", "Q6_K"): 0.96,
}
# llama.cpp or Ollama, decode in tokens per second: measured and published, or from the same model
LLAMA_CPP_DECODE = {
    ("m40-24g", "qwen2.5-3b-q8_0"): "40.8 (measured, Ollama)",
    ("m40-24g", "llama2-7b-q4_0"): "35 (modelled)",
    ("m40-24g", "llama3-8b-q8_0"): "22 (modelled)",
    ("p40", "llama2-7b-q4_0"): "56.8 (measured)",
}


def print_kernels(costs: Mapping[str, KernelCost], rows: list[ProjectionRow]) -> None:
    click.echo(
        "Projections: instructions per weight, multiprocessor cycles per byte of weights, busiest unit, and its time over the"
    )
    click.echo(
        "memory time (of the schedulers alone in parentheses); llama.cpp's kernels at K = 4096 beside, issue over memory.\n"
    )
    click.echo(
        f"{'kernel':<32} {'K':>6} {'regs':>4} {'occ.':>5} {'instr/w':>8} {'cyc/B':>7} {'busiest':<10} "
        f"{'M40':>13} {'P40':>13} {'llama.cpp':>12}"
    )
    for row in rows:
        cost = costs[row.name]
        peer = ""
        if row.rows == 1 and row.columns == 4096 and ("p40", row.kind.name) in LLAMA_CPP:
            peer = f"{LLAMA_CPP['m40-24g', row.kind.name]:.0%} / {LLAMA_CPP['p40', row.kind.name]:.0%}"
        m40, p40 = (f"{row.share(c):.0%} ({row.issue_share(c):.0%})" for c in ("m40-24g", "p40"))
        click.echo(
            f"{row.name:<32} {row.columns:>6} {cost.registers:>4} {cost.occupancy:>5.0%} {row.instructions:>8.2f} "
            f"{row.cycles.busiest / row.nbytes:>7.4f} {row.unit:<10} {m40:>13} {p40:>13} {peer:>12}"
        )
    click.echo("\nTiled projections and attention: cycles of a warp per step, by unit.\n")
    click.echo(
        f"{'kernel':<26} {'regs':>4} {'occ.':>5} {'step':<20} {'issue':>8} {'arithm.':>8} {'special':>8} {'shared':>8} {'load':>8}"
    )
    for name, cost in costs.items():
        if name.startswith("project_"):
            continue
        c = cost.warp(1) + cost.warp(0) * -1
        click.echo(
            f"{name:<26} {cost.registers:>4} {cost.occupancy:>5.0%} {cost.step:<20} {c.issue:>8.1f} {c.arithmetic:>8.1f} "
            f"{c.special:>8.1f} {c.shared:>8.1f} {c.load:>8.1f}"
        )


def print_speeds(names: tuple[str, ...], context: int, costs: Mapping[str, KernelCost]) -> None:
    click.echo(f"\nTokens per second at context {context}, prefill of 512 tokens. {ERROR_NOTE}.\n")
    click.echo(
        f"{'model':<22} {'card':<8} {'weights':>9} {'decode':>22} {'4 together':>22} {'prefill':>24}  llama.cpp decode"
    )
    for name in names:
        for card in ("m40-24g", "p40"):
            p = predicted(SHAPES[name], card, context, 4, costs)
            cells = [
                f"{s.tokens_per_s:.1f} ({s.low:.0f}-{s.high:.0f})" for s in (p.decode, p.decode_together, p.prefill)
            ]
            click.echo(
                f"{name:<22} {card:<8} {p.memory.weights / 2**30:>5.2f} GiB {cells[0]:>22} {cells[1]:>22} {cells[2]:>24}  "
                f"{LLAMA_CPP_DECODE.get((card, name), '')}"
            )


@click.command()
@click.option("--write", is_flag=True, help="Walk the kernels and renew the table of the package.")
@click.option("--check", is_flag=True, help="Exit with 1 where a target is missed.")
@click.option("--nvdisasm", type=click.Path(exists=True, path_type=Path), help="Default: the one of the triton wheel.")
@click.option("--context", type=click.IntRange(512, 1 << 17), default=512, show_default=True)
@click.option(
    "--columns", "columns", multiple=True, type=click.IntRange(256), default=(2048, 4096, 11008), show_default=True
)
def main(write: bool, check: bool, nvdisasm: Path | None, context: int, columns: tuple[int, ...]) -> None:
    """Instructions against bytes of every kernel, and predicted tokens per second."""
    if write:
        # before anything is compiled: a source that changes meanwhile leaves a table that is stale, not one that is wrong
        digests = {module: source_digest(module) for module in kernel_modules()}
        try:
            costs = make_table(nvdisasm or find_nvdisasm())
        except FileNotFoundError as error:
            raise click.ClickException(str(error)) from None
        sources = {cost.module: digests[cost.module] for cost in costs.values()}
        version = ".".join(map(str, nvrtc.for_arch("sm_52").version))
        note = {"made by": "bench/sm52_model.py --write", "compiler": f"NVRTC {version}", "counts": "warp instructions"}
        COSTS_FILE.write_text(to_json(sources, costs, note), encoding="utf-8")
        load_costs.cache_clear()
    elif stale := stale_modules():
        print(f"the table is older than {', '.join(stale)}: --write renews it", file=sys.stderr)
    costs = load_costs()
    rows = list(projection_rows(costs, columns))
    print_kernels(costs, rows)
    print_speeds(tuple(name for name in SHAPES if not name.startswith("tiny")), context, costs)
    missed = missed_targets(rows, predicted(SHAPES[TARGET_MODEL], "m40-24g", 512, 1, costs))
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    if check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
