"""Load on a running `m40llm serve`, and llama.cpp decoding as many sequences beside it: latencies, tokens per second, ratios.

Closed loop: N clients, each with one request at a time. Open loop: requests arrive at random times, whether or not the earlier
ones have ended. `together`: N equal requests at once, in turns with llama.cpp's batch decode of the same prompts. A long prompt
beside running decodes: what its chunks do to their inter-token latency. See README.md beside this file.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import serving_interference
from compare_llama_cpp import SPIN_LIMIT_S, Prompts, Worker, Workload, commit, cpu_model
from rich.console import Console
from serving_client import Clients, ServerFailed, started_server
from serving_load import WORKLOADS, Call, calls_of, lengths_of, longest, poisson_arrivals, start_offsets
from serving_report import markdown, print_report
from serving_results import Results, Together
from serving_stats import summarize, together

from m40llm.cli.errors import CliError
from m40llm.cli.model_arg import model_argument, resolve_model
from m40llm.hub import HubError

LONG = "long-prompt"
TOGETHER = "together"
OPEN_LOOP = "mixed"  # the workload of the open loop


@dataclass(frozen=True)
class Plan:
    """What is measured. Lengths in tokens."""

    model: Path
    threads: int
    clients: tuple[int, ...]
    workloads: tuple[str, ...]
    seconds: float
    rounds: int
    prompt: int
    decode: int
    long_prompt: int
    long_decodes: int
    chunk: int
    open_loads: tuple[float, ...]
    seed: int

    @property
    def context(self) -> int:
        """Positions of a slot that every workload fits into, in whole blocks of 64."""
        sizes = [longest(tuple(name for name in self.workloads if name in WORKLOADS))]
        if TOGETHER in self.workloads:
            sizes.append(self.prompt + self.decode)
        if LONG in self.workloads:
            sizes.append(self.long_prompt + 64)
        return -(-(max(sizes) + 8) // 64) * 64

    @property
    def slots(self) -> int:
        return max(*self.clients, self.long_decodes + 1 if LONG in self.workloads else 1)

    def server_options(self) -> list[str]:
        values = {
            "threads": self.threads,
            "slots": self.slots,
            "ctx-per-slot": self.context,
            "token-budget": self.chunk,
        }
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]


async def run(
    plan: Plan, clients: Clients, llama: Worker | None, step: Callable[[str], None], results: Results
) -> None:
    """Measures all of `plan` into `results`; `step(text)` is told what comes next."""
    prompts = Prompts(plan.model)
    await clients.wait_until_ready()
    step("warm-up")
    for count in plan.clients:  # first touch of weights and KV, recorded steps of each width
        await clients.burst([Call(tuple(ids), 8) for ids in prompts.take(count, plan.prompt)])
    if TOGETHER in plan.workloads:
        await _measure_together(plan, clients, llama, prompts, results, step)
    cpu, wall = 0.0, 0.0
    for workload in (name for name in plan.workloads if name in WORKLOADS):
        for count in plan.clients:
            step(f"{workload}, {count} client{'s' * (count > 1)}")
            calls = calls_of(workload, plan.seed, prompts.take)
            before, began = time.process_time(), time.perf_counter()
            records, start, end = await clients.closed_loop(calls, start_offsets(workload, count), plan.seconds)
            cpu, wall = cpu + time.process_time() - before, wall + time.perf_counter() - began
            results.closed[workload, count] = summarize(records, start, end)
    results.client_cpu = cpu / wall if wall else 0.0
    if OPEN_LOOP in plan.workloads:
        await _measure_open_loop(plan, clients, prompts, results, step)
    if LONG in plan.workloads:
        step(f"{plan.long_prompt} tokens of prompt beside {plan.long_decodes} decodes")
        results.long = await serving_interference.measure(
            clients,
            prompts.take,
            decodes=plan.long_decodes,
            prompt=plan.long_prompt,
            chunk=plan.chunk,
            rounds=plan.rounds,
        )


async def _measure_together(
    plan: Plan, clients: Clients, llama: Worker | None, prompts: Prompts, results: Results, step: Callable[[str], None]
) -> None:
    if llama is not None:
        llama.ask(prompts.take(1, plan.prompt), 4)
    for round_, count in itertools.product(range(plan.rounds), plan.clients):
        both = results.together.setdefault(count, Together())
        batch = prompts.take(count, plan.prompt)

        async def ours(both: Together = both, batch: list[list[int]] = batch) -> None:
            records, began = await clients.burst([Call(tuple(ids), plan.decode) for ids in batch])
            if any(record.cached_tokens for record in records):
                raise ServerFailed("a prompt was partly reused from an earlier request: no other user, please")
            decode, whole = together(records, began)
            both.decode.append(decode)
            both.whole.append(whole)

        async def theirs(both: Together = both, batch: list[list[int]] = batch) -> None:
            if llama is None:
                return
            before = (await clients.metrics()).get("process_cpu_seconds_total", 0.0)
            answer = llama.ask(batch, plan.decode - 1)
            after = (await clients.metrics()).get("process_cpu_seconds_total", 0.0)
            results.server_idle_cpu_s = max(results.server_idle_cpu_s, after - before)
            results.llama_idle_cpu_s = max(results.llama_idle_cpu_s, answer["cpu_idle_s"])
            both.llama_decode.append(answer["decode_tok_s"])
            both.llama_whole.append(len(batch) * plan.decode / answer["total_s"])

        step(f"{count} together, round {round_ + 1}")
        for measure in (ours, theirs) if round_ % 2 == 0 else (theirs, ours):
            await measure()


async def _measure_open_loop(
    plan: Plan, clients: Clients, prompts: Prompts, results: Results, step: Callable[[str], None]
) -> None:
    """At fractions of the request rate that the closed loop of most clients has reached."""
    mean = statistics.fmean(each.output for each in itertools.islice(lengths_of(OPEN_LOOP, plan.seed), 1000))
    capacity = results.closed[OPEN_LOOP, max(plan.clients)].tok_s / mean
    for load in plan.open_loads:
        rate = load * capacity
        step(f"open loop, {rate:.2f} requests a second")
        arrivals = poisson_arrivals(rate, plan.seconds, plan.seed)
        calls = list(itertools.islice(calls_of(OPEN_LOOP, plan.seed, prompts.take), len(arrivals)))
        results.opened[load, rate] = summarize(*await clients.open_loop(calls, arrivals, plan.seconds))


@contextmanager
def llama_worker(plan: Plan, python: str | None) -> Iterator[Worker | None]:
    """llama.cpp's worker with the same threads and sequences, or None where it is not wanted."""
    if python is None or TOGETHER not in plan.workloads:
        yield None
        return
    work = Workload(plan.model, plan.threads, plan.prompt, plan.decode, plan.clients, plan.prompt)
    worker = Worker("llama_cpp", python, work)
    try:
        yield worker
    finally:
        worker.close()


def conditions(plan: Plan, load_average: float) -> dict[str, Any]:
    """What a number needs to be a result."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "cpu": cpu_model(),
        "threads": plan.threads,
        "model": plan.model.name,
        "peer": "none",
        "context": plan.context,
        "slots": plan.slots,
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "load_average": f"{load_average:.2f}",
        "command": shlex.join(["python", "bench/serve.py", *sys.argv[1:]]),
    }


@click.command(context_settings={"show_default": True})
@model_argument
@click.option(
    "--url", help="Measure the server at this address instead of starting one; give it MODEL and enough slots."
)
@click.option("--api-key", envvar="M40LLM_API_KEY", help="Key for --url.")
@click.option("--threads", default=2, type=click.IntRange(1), help="CPU threads of the server and of llama.cpp.")
@click.option("--clients", multiple=True, default=(1, 2, 4, 8, 16), type=click.IntRange(1, 256), help="Repeatable.")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    default=(TOGETHER, *WORKLOADS, LONG),
    type=click.Choice((TOGETHER, *WORKLOADS, LONG)),
    help="Repeatable.",
)
@click.option("--seconds", default=10.0, type=click.FloatRange(min=0.5), help="Of each closed or open loop.")
@click.option("--rounds", default=3, type=click.IntRange(1), help=f"Of '{TOGETHER}' and of '{LONG}'.")
@click.option("--prompt", default=32, type=click.IntRange(1), help=f"Prompt tokens of '{TOGETHER}'.")
@click.option("--decode", default=128, type=click.IntRange(8), help=f"Generated tokens of '{TOGETHER}'.")
@click.option("--long-prompt", default=4000, type=click.IntRange(16), help="Tokens of the long prompt.")
@click.option("--long-decodes", default=4, type=click.IntRange(1), help="Decodes that run beside it.")
@click.option("--chunk", default=512, type=click.IntRange(1), help="The server's --token-budget.")
@click.option(
    "--open-load", "open_loads", multiple=True, default=(0.5, 0.8), type=click.FloatRange(0.01), help="Repeatable."
)
@click.option("--seed", default=0, help="Of lengths and arrival times.")
@click.option("--server-option", multiple=True, help="One more word for `m40llm serve`; repeatable.")
@click.option("--llama-python", default=sys.executable, help="Python that has llama-cpp-python.")
@click.option("--llama/--no-llama", default=True, help="Measure llama.cpp too.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print rows for docs/perf_baselines.md to stdout.")
def main(model: str, **flags: Any) -> None:
    """Measures `m40llm serve MODEL` (a GGUF file, or an alias as for `m40llm generate`) under load over HTTP."""
    url, api_key, json_path = (flags.pop(name) for name in ("url", "api_key", "json_path"))
    as_markdown, more = flags.pop("as_markdown"), flags.pop("server_option")
    python, with_llama = flags.pop("llama_python"), flags.pop("llama")
    if not with_llama:
        python = None
    console = Console(stderr=as_markdown, width=None if sys.stdout.isatty() else 160)
    load_average = os.getloadavg()[0]
    if load_average > 0.5:
        console.print(f"[yellow]the machine is busy (load average {load_average:.1f}): expect noise[/]")
    if python is not None:
        _check_llama(python)
    try:
        path = resolve_model(model).resolve()
    except (HubError, CliError) as error:
        raise click.ClickException(str(error)) from error
    flags["clients"] = tuple(sorted(set(flags["clients"])))
    plan = Plan(model=path, **flags)
    started = time.perf_counter()
    progress = Console(stderr=True)  # no live display: a thread that redraws would take time from the server

    def step(text: str) -> None:
        progress.print(f"[dim]{time.perf_counter() - started:6.1f} s  {text}[/]", highlight=False)

    results = Results()

    async def measure(address: str, llama: Worker | None) -> None:
        async with Clients.session(api_key) as session:
            await run(plan, Clients(address.rstrip("/"), session), llama, step, results)

    known = conditions(plan, load_average)
    serving = nullcontext(url) if url else started_server(path, [*plan.server_options(), *more])
    try:
        with llama_worker(plan, python) as llama, serving as address:
            known["peer"] = llama.ready["version"] if llama else "none"
            asyncio.run(measure(address, llama))
    except (ServerFailed, ValueError, OSError) as error:
        print_report(console, results, known)  # what was measured before
        raise click.ClickException(str(error)) from error
    print_report(console, results, known)
    for name, idle in (("the server", results.server_idle_cpu_s), ("llama.cpp", results.llama_idle_cpu_s)):
        if idle > SPIN_LIMIT_S:
            console.print(f"[red]{name} used {idle:.2f} s of CPU while the other was measured[/]")
    if as_markdown:
        click.echo(markdown(results, known))
    if json_path:
        json_path.write_text(json.dumps(known | as_json(results), indent=1, default=_plain) + "\n")


def as_json(results: Results) -> dict[str, Any]:
    """All numbers of a run, in lists of objects."""
    return {
        "closed": [{"workload": w, "clients": n, **s.as_dict()} for (w, n), s in results.closed.items()],
        "open": [{"load": load, "rate": rate, **s.as_dict()} for (load, rate), s in results.opened.items()],
        "together": [{"clients": n, **vars(both)} for n, both in results.together.items()],
        "long_prompt": results.long and results.long.as_dict(),
        "server_idle_cpu_s": results.server_idle_cpu_s,
        "llama_idle_cpu_s": results.llama_idle_cpu_s,
        "client_cpu": results.client_cpu,
    }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else str(value)


def _check_llama(python: str) -> None:
    check = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, text=True, check=False)
    if check.returncode:
        reason = (check.stderr.strip().splitlines() or ["no message"])[-1]
        raise click.ClickException(
            f"{python} cannot import llama_cpp ({reason}): pip install '.[bench]' in m40llm's source folder, or give --no-llama"
        )


if __name__ == "__main__":
    main()
