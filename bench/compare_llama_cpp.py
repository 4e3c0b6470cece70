"""m40llm's CPU path and llama.cpp side by side: load, prefill, decode, several sequences together, peak memory.

Each engine runs in a process of its own; rounds alternate between them, so that a change of the machine's state meets both. Both
get the same token ids, threads and context, and decode greedily to a fixed length. See README.md beside this file.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from m40llm.cli.errors import CliError
from m40llm.cli.model_arg import model_argument, resolve_model
from m40llm.gguf import GGUFFile
from m40llm.hub import HubError
from m40llm.text import Tokenizer

HERE = Path(__file__).resolve().parent
SPIN_LIMIT_S = 0.02  # CPU seconds that an engine may use while it is the other one's turn


@dataclass(frozen=True)
class Workload:
    """What both engines are asked to do. Lengths in tokens."""

    model: Path
    threads: int
    prompt: int
    decode: int
    sequences: tuple[int, ...]
    batch_prompt: int

    @property
    def context(self) -> int:
        """Positions per sequence: prompt, output and a little room, in whole KV blocks."""
        return -(-(max(self.prompt, self.batch_prompt) + self.decode + 8) // 64) * 64

    @property
    def slots(self) -> int:
        return max((1, *self.sequences))


class Worker:
    """One engine in its own process."""

    def __init__(self, name: str, python: str, work: Workload) -> None:
        command = [python, str(HERE / f"{name}_worker.py"), str(work.model)]
        command += [str(n) for n in (work.threads, work.context, work.slots)]
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read()

    def ask(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "steps": steps}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"{self.name} {_how_it_ended(self._process.wait())}")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}; its message is above"
    if -status == signal.SIGILL:
        return "was built for another CPU (SIGILL); see bench/README.md for a build that runs on this one"
    return f"was killed by {signal.Signals(-status).name}"


@dataclass
class Samples:
    """What one engine did, one value a round."""

    version: str = ""
    description: str = ""
    compile_s: float = 0.0
    load_s: list[float] = field(default_factory=list)
    prefill_tok_s: list[float] = field(default_factory=list)
    decode_tok_s: list[float] = field(default_factory=list)
    together_tok_s: dict[int, list[float]] = field(default_factory=dict)
    together_total_s: dict[int, list[float]] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    idle_cpu_s: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)


_FIRST_TOKEN = 1000  # ordinary words in every vocabulary


class Prompts:
    """Token ids of real text, each prompt with another first token: a prefix cache finds nothing to reuse."""

    def __init__(self, model: Path) -> None:
        with GGUFFile.open(model) as file:
            self._ids = Tokenizer.from_gguf(file.metadata).encode((HERE.parent / "LICENSE").read_text())
        self._taken = 0

    def take(self, count: int, length: int) -> list[list[int]]:
        prompts = []
        for _ in range(count):
            self._taken += 1
            at = self._taken * 37 % len(self._ids)
            around = self._ids[at:] + self._ids[:at]
            text = around * (1 + length // len(around))
            prompts.append([_FIRST_TOKEN + self._taken, *text[: length - 1]])
        return prompts


ENGINES = ("m40llm", "llama_cpp")


def compare(work: Workload, rounds: int, pythons: dict[str, str], step: Callable[[str], None]) -> dict[str, Samples]:
    """Runs everything; `step(text)` is told what comes next."""
    samples = {name: Samples() for name in ENGINES}
    prompts = Prompts(work.model)
    for (
        name
    ) in ENGINES:  # the file into the page cache, kernels into the compile cache: neither is the engine's load time
        step(f"{name}: warm-up")
        started = time.perf_counter()
        worker = Worker(name, pythons[name], work)
        compiled = worker.ready.get("compiled", 0)
        compiled += sum(worker.ask(prompts.take(n, 8), 2).get("compiled", 0) for n in (1, *work.sequences))
        worker.close()
        samples[name].version = worker.ready["version"]
        samples[name].description = worker.ready["description"]
        samples[name].compile_s = time.perf_counter() - started if compiled else 0.0
    workers: dict[str, Worker] = {}
    for round_ in range(rounds):
        for name in ENGINES:
            step(f"{name}: load, round {round_ + 1}")
            if name in workers:
                workers[name].close()
            workers[name] = Worker(name, pythons[name], work)
            samples[name].load_s.append(workers[name].ready["load_s"])
        for name in ENGINES:
            workers[name].ask(prompts.take(1, work.prompt), 4)  # first touch of weights and buffers
        for count in (1, *work.sequences):
            batch = prompts.take(count, work.prompt if count == 1 else work.batch_prompt)
            for name in ENGINES if round_ % 2 == 0 else ENGINES[::-1]:
                step(f"{name}: {count} sequence{'s' * (count > 1)}, round {round_ + 1}")
                _record(samples[name], count, workers[name].ask(batch, work.decode))
    for worker in workers.values():
        worker.close()
    return samples


def _record(samples: Samples, count: int, answer: dict[str, Any]) -> None:
    if answer.get("compiled"):
        raise click.ClickException("kernels were compiled inside a measurement; run again, they are cached now")
    samples.peak_rss_bytes = max(samples.peak_rss_bytes, answer["peak_rss_bytes"])
    samples.idle_cpu_s = max(samples.idle_cpu_s, answer["cpu_idle_s"])
    if count == 1:
        samples.prefill_tok_s.append(answer["prefill_tok_s"])
        samples.decode_tok_s.append(answer["decode_tok_s"])
        samples.outputs.append(answer["output"])
    else:
        samples.together_tok_s.setdefault(count, []).append(answer["decode_tok_s"])
        samples.together_total_s.setdefault(count, []).append(answer["total_s"])


@dataclass(frozen=True)
class Metric:
    """One line of the result. `ratio` is ours over llama.cpp's medians, turned so that above 1 m40llm is better."""

    name: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    lower_is_better: bool = False

    @property
    def ratio(self) -> float:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        return theirs / ours if self.lower_is_better else ours / theirs


def metrics(samples: dict[str, Samples], work: Workload) -> list[Metric]:
    ours, theirs = (samples[name] for name in ENGINES)
    rows = [
        Metric(f"prefill {work.prompt}", "tok/s", ours.prefill_tok_s, theirs.prefill_tok_s),
        Metric(f"decode {work.decode}", "tok/s", ours.decode_tok_s, theirs.decode_tok_s),
    ]
    for n in work.sequences:
        rows.append(Metric(f"{n} together, decode", "tok/s", ours.together_tok_s[n], theirs.together_tok_s[n]))
    for n in work.sequences:
        rows.append(Metric(f"{n} together, all", "s", ours.together_total_s[n], theirs.together_total_s[n], True))
    peaks = ([ours.peak_rss_bytes / 2**20], [theirs.peak_rss_bytes / 2**20])
    return [
        *rows,
        Metric("load", "s", ours.load_s, theirs.load_s, True),
        Metric("peak memory", "MiB", *peaks, lower_is_better=True),
    ]


def _cell(values: Sequence[float]) -> str:
    digits = 1 if statistics.median(values) >= 10 else 2
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def table(rows: list[Metric], samples: dict[str, Samples], title: str) -> Table:
    out = Table(title=title, caption="median (lowest–highest); a ratio above 1 means that m40llm is better")
    out.add_column("")
    for name in ENGINES:
        out.add_column(samples[name].version, justify="right")
    out.add_column("ratio", justify="right")
    for row in rows:
        color = "green" if row.ratio >= 1 else "red"
        label = f"{row.name} [{row.unit}]".replace("[", r"\[")
        out.add_row(label, _cell(row.ours), _cell(row.theirs), f"[{color}]{row.ratio:.2f}×[/]")
    return out


def markdown(rows: list[Metric], conditions: dict[str, Any]) -> str:
    """Header, rule and one row for docs/perf_baselines.md: ours / llama.cpp (ratio) for every metric."""
    shown = ("date", "commit", "cpu", "threads", "model", "versions", "rounds", "load_average")
    heads = [*shown, *(f"{row.name} [{row.unit}]" for row in rows)]
    cells = [str(conditions[key]) for key in shown]
    cells += [f"{_cell(row.ours)} / {_cell(row.theirs)} = **{row.ratio:.2f}×**" for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), cells))


def conditions(work: Workload, samples: dict[str, Samples], rounds: int, load_average: float) -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "cpu": cpu_model(),
        "threads": work.threads,
        "model": work.model.name,
        "versions": ", ".join([*(samples[name].version for name in ENGINES), f"Python {platform.python_version()}"]),
        "rounds": rounds,
        "load_average": f"{load_average:.2f}",
    }


def commit() -> str:
    """The checked-out commit, with "-dirty" where files differ from it."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def cpu_model() -> str:
    """What the processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _agreement(samples: dict[str, Samples]) -> str:
    """How many leading tokens the two greedy outputs share, a plausibility check and not a measure of quality."""
    shared = []
    for ours, theirs in zip(*(samples[name].outputs for name in ENGINES), strict=True):
        pairs = zip(ours, theirs, strict=True)
        shared.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours)))
    total = len(samples["m40llm"].outputs[0])
    return f"equal greedy tokens before the first difference: {', '.join(map(str, shared))} of {total}"


@click.command(context_settings={"show_default": True})
@model_argument
@click.option("--threads", default=2, type=click.IntRange(1), help="CPU threads of both engines.")
@click.option("--prompt", default=512, type=click.IntRange(1), help="Prompt tokens, one sequence.")
@click.option("--decode", default=128, type=click.IntRange(8), help="Decoded tokens after the first.")
@click.option("--rounds", default=3, type=click.IntRange(1))
@click.option("--sequences", multiple=True, default=(4, 8), type=click.IntRange(2, 16), help="Repeatable.")
@click.option("--batch-prompt", default=128, type=click.IntRange(1), help="Prompt tokens of each of several sequences.")
@click.option("--llama-python", default=sys.executable, help="Python that has llama-cpp-python.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all samples here.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the row for docs/perf_baselines.md to stdout.")
def main(
    model: str,
    threads: int,
    prompt: int,
    decode: int,
    rounds: int,
    sequences: tuple[int, ...],
    batch_prompt: int,
    llama_python: str,
    json_path: Path | None,
    as_markdown: bool,
) -> None:
    """Measures MODEL (a GGUF file, or an alias as for `m40llm generate`) with m40llm and with llama.cpp, in turns."""
    console = Console(stderr=as_markdown)
    check = subprocess.run([llama_python, "-c", "import llama_cpp"], capture_output=True, text=True, check=False)
    if check.returncode:
        reason = (check.stderr.strip().splitlines() or ["no message"])[-1]
        raise click.ClickException(
            f"{llama_python} cannot import llama_cpp ({reason}): pip install '.[bench]' in m40llm's source folder"
        )
    load_average = os.getloadavg()[0]
    if load_average > 0.5:
        console.print(f"[yellow]the machine is busy (load average {load_average:.1f}): expect noise[/]")
    try:
        path = resolve_model(model)
    except (HubError, CliError) as error:
        raise click.ClickException(str(error)) from error
    work = Workload(path.resolve(), threads, prompt, decode, tuple(sorted(set(sequences))), batch_prompt)
    # No live display: a thread that redraws would take time from the engines.
    progress = Console(stderr=True)
    started = time.perf_counter()

    def step(text: str) -> None:
        progress.print(f"[dim]{time.perf_counter() - started:6.1f} s  {text}[/]", highlight=False)

    samples = compare(work, rounds, {"m40llm": sys.executable, "llama_cpp": llama_python}, step)
    rows = metrics(samples, work)
    known = conditions(work, samples, rounds, load_average)
    console.print(
        table(rows, samples, f"{known['model']}, {threads} threads, {known['cpu']}, commit {known['commit']}")
    )
    for name in ENGINES:
        console.print(f"{name}: {samples[name].description}", highlight=False, markup=False)
        if samples[name].compile_s:
            console.print(f"{name}: a first run that compiled kernels took {samples[name].compile_s:.1f} s")
        if samples[name].idle_cpu_s > SPIN_LIMIT_S:
            console.print(f"[red]{name} used {samples[name].idle_cpu_s:.2f} s of CPU while the other was measured[/]")
    console.print(_agreement(samples))
    if as_markdown:
        click.echo(markdown(rows, known))
    if json_path:
        record = known | {
            "prompt": prompt,
            "decode": decode,
            "batch_prompt": batch_prompt,
            "ratios": {row.name: row.ratio for row in rows},
            "samples": {name: vars(samples[name]) for name in ENGINES},
        }
        json_path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
