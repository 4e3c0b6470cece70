"""Tables of a serving benchmark: for the eye (rich) and for docs/perf_baselines.md (Markdown)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from serving_results import Results
    from serving_stats import Summary


def milliseconds(seconds: float | None) -> str:
    """A time as a cell: milliseconds, three digits or so; a dash where nothing was measured."""
    if seconds is None:
        return "–"
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Sequence[float]) -> str:
    """Median, and lowest to highest of more than one."""
    if not values:
        return "–"
    middle = f"{statistics.median(values):.1f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.1f}–{max(values):.1f})"


def print_report(console: Console, results: Results, known: dict[str, Any]) -> None:
    """All tables, then the figures that acceptance asks for."""
    title = f"{known['model']}, {known['threads']} threads, {known['cpu']}, commit {known['commit']}"
    if results.together:
        console.print(_together_table(results, title, known["peer"]))
    if results.closed or results.opened:
        console.print(_latency_table(results, title))
        console.print(f"the clients themselves kept {results.client_cpu:.2f} processors busy", style="dim")
    for line in verdicts(results):
        console.print(line, highlight=False)


def _together_table(results: Results, title: str, peer: str) -> Table:
    table = Table(
        title=f"{title}; m40llm over HTTP / {peer}",
        caption="tokens per second of all sequences together, median (lowest–highest)",
    )
    for heading in ("together", "decode", "peer's", "ratio", "with prefill", "peer's", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for count, both in results.together.items():
        table.add_row(
            str(count),
            spread(both.decode),
            spread(both.llama_decode),
            _ratio(both.ratio(both.decode, both.llama_decode)),
            spread(both.whole),
            spread(both.llama_whole),
            _ratio(both.ratio(both.whole, both.llama_whole)),
        )
    return table


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _latency_table(results: Results, title: str) -> Table:
    table = Table(
        title=title, caption="milliseconds; gap: inter-token latency; tokens per second of all clients together"
    )
    table.add_column("workload")
    for heading in ("clients", "requests", "TTFT p50", "p99", "gap p50", "p99", "max", "tok/s", "not served"):
        table.add_column(heading, justify="right")
    for name, clients, summary in _lines(results):
        times = (summary.ttft_p50, summary.ttft_p99, summary.gap_p50, summary.gap_p99, summary.gap_max)
        lost = f"{summary.refused} refused, {summary.failed} failed" if summary.refused + summary.failed else ""
        table.add_row(name, clients, str(summary.requests), *map(milliseconds, times), f"{summary.tok_s:.1f}", lost)
    return table


def _lines(results: Results) -> Iterator[tuple[str, str, Summary]]:
    for (workload, count), summary in results.closed.items():
        yield workload, str(count), summary
    for (load, rate), summary in results.opened.items():
        yield "mixed, open loop", f"{rate:.2f}/s ({load:.0%})", summary


def verdicts(results: Results) -> Iterator[str]:
    """One line per figure that acceptance asks for."""
    if (eight := results.together.get(8)) and eight.llama_decode:
        peer = statistics.median(eight.llama_decode)
        whole, decode = statistics.median(eight.whole) / peer, statistics.median(eight.decode) / peer
        yield (
            f"8 clients over HTTP against llama.cpp's batch decode of 8: {decode:.2f}× while all decode, {whole:.2f}× with our "
            f"prefill counted and theirs not (wanted: 2)"
        )
    if (long := results.long) is not None:
        mean = statistics.median(long.mean_chunk)
        yield (
            f"{long.prompt} tokens of prompt beside {long.decodes} decodes: inter-token p99 "
            f"{milliseconds(long.p99_alone)} ms alone, "
            f"{milliseconds(long.p99_beside)} ms beside it = {long.ratio:.2f} × a chunk of {long.chunk} alone at its end "
            f"({milliseconds(long.chunk_time)} ms; wanted: at most 1), {long.p99_beside / mean:.2f} × the mean chunk "
            f"({milliseconds(mean)} ms); TTFT {milliseconds(statistics.median(long.ttft))} ms"
        )


HEADINGS = (
    "date", "commit", "machine, threads", "model", "workload", "clients", "TTFT p50 / p99, ms", "inter-token p50 / p99, ms",
    "tok/s", "llama.cpp tok/s, ratio", "command; load average",
)  # fmt: skip


def markdown(results: Results, known: dict[str, Any]) -> str:
    """Rows under the header of docs/perf_baselines.md, section Serving."""
    head = [known["date"], known["commit"], f"{known['cpu']}, {known['threads']}", known["model"]]
    tail = f"`{known['command']}`; {known['load_average']}"
    lines: list[Sequence[str]] = [HEADINGS, ["---"] * len(HEADINGS)]
    for count, both in results.together.items():
        for kind, ours, theirs in (
            ("decode", both.decode, both.llama_decode),
            ("whole", both.whole, both.llama_whole),
        ):
            peer = f"{spread(theirs)} = **{_ratio(both.ratio(ours, theirs))}**" if theirs else "–"
            lines.append([*head, f"together, {kind}", str(count), "–", "–", spread(ours), peer, tail])
    for name, clients, s in _lines(results):
        ttft = f"{milliseconds(s.ttft_p50)} / {milliseconds(s.ttft_p99)}"
        gap = f"{milliseconds(s.gap_p50)} / {milliseconds(s.gap_p99)}"
        lines.append([*head, name, clients, ttft, gap, f"{s.tok_s:.1f}", "–", tail])
    if (long := results.long) is not None:
        ttft = milliseconds(statistics.median(long.ttft))
        gap = f"p99 {milliseconds(long.p99_alone)} → {milliseconds(long.p99_beside)}"
        note = f"{long.ratio:.2f} × a chunk's {milliseconds(long.chunk_time)} ms"
        lines.append(
            [*head, f"{long.prompt}-token prompt beside decodes", str(long.decodes), ttft, gap, "–", note, tail]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
