"""A long, rough use of `m40llm serve`: random requests, clients that leave, bad bodies, slow readers, SIGTERM under load, restart.

    python -m tests.soak [MODEL] [--seconds 600] [--lives 3] [--seed N]

The server lives several times; each life is phases of load with a look at it in the quiet between them, and ends by SIGTERM in
the middle of work. What must hold: everybody who stays gets an answer; every answered generation is in the log exactly once;
in the quiet every slot is idle, nothing waits, and ended generations are as many as log lines; resident memory stays within
5 % after a warm-up; greedy answers are those that the same requests get alone; SIGTERM ends with status 0 and no traceback.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click

from m40llm.cli.model_arg import resolve_model
from tests.server_process import ServerProcess

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def main():",
    "Dear Sir or Madam,",
    "1, 2, 3, 5, 8,",
    "Ö, ü, 日本",
)
SHARED = "You are a careful assistant. " * 20  # a beginning that several prompts have in common
GREEDY_TOKENS = 24
TIE = 0.05  # difference of two tokens' log-probabilities below which another kernel shape may turn their order round
MEMORY_TOLERANCE = 0.05
PATIENCE = 300.0  # seconds; on a busy machine everything takes long, and that is no fault
BAD_BODIES: tuple[tuple[str, bytes], ...] = (
    ("/generate", b"{"),
    ("/generate", b"\xff\xfe"),
    ("/generate", b"[]"),
    ("/generate", b'{"prompt": 5}'),
    ("/generate", b'{"prompt": "a", "max_tokens": 100000000}'),
    ("/generate", b'{"prompt": "a", "temperature": NaN}'),
    ("/generate", b'{"prompt": "", "prompt_format": "raw"}'),
    ("/v1/completions", b'{"prompt": [99999999]}'),
    ("/v1/completions", b'{"prompt": "a", "n": 0}'),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "surprise": 1}'),
    ("/v1/chat/completions", b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ("/nowhere", b"{}"),
)


@dataclass(frozen=True)
class Options:
    """How long, and how hard. `lives` servers share `seconds`; a life has `phases` stretches of load."""

    model: Path
    seconds: float = 600.0
    lives: int = 3
    phases: int = 8
    users: int = 8
    slots: int = 3
    context: int = 1024
    queue: int = 6
    seed: int = 0

    def server_options(self) -> tuple[str, ...]:
        sizes = {"slots": self.slots, "ctx-per-slot": self.context, "token-budget": 128, "max-queue": self.queue}
        sizes["cache-ram-mb"] = 16  # full after the warm-up, so that what grows later is a leak
        more = {"heartbeat-seconds": 1, "drain-seconds": 5, "idle-timeout": 20}
        return tuple(word for name, value in (sizes | more).items() for word in (f"--{name}", str(value)))


@dataclass(frozen=True)
class Alone:
    """The answer to a greedy request that had the server for itself: its pieces, and how far ahead of the next one each token was
    (log-probability; of several tokens in a piece the least)."""

    pieces: tuple[str, ...]
    margins: tuple[float, ...]

    def agrees(self, text: str) -> bool | None:
        """Whether `text` is the same answer; None: it leaves it at a near tie, where either token is right."""
        at = 0
        for piece, margin in zip(self.pieces, self.margins, strict=True):
            if text[at : at + len(piece)] != piece:
                return None if margin < TIE else False
            at += len(piece)
        return text[at:] == ""


@dataclass
class Outcome:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memory: list[list[float]] = field(default_factory=list)  # bytes in the quiet, one list a life


class Life:
    """One server from start to SIGTERM, and its users."""

    def __init__(self, options: Options, number: int, outcome: Outcome, alone: dict[str, Alone]) -> None:
        self._options = options
        self._outcome = outcome
        self._alone = alone
        self._rng = random.Random(f"{options.seed} {number}")
        self._answered: Counter[str] = Counter()  # ids of generations whose readers saw their end
        self._stopping = False
        self._until = 0.0
        self._server = ServerProcess(options.model, *options.server_options()).wait_until_ready()

    async def live(self, seconds: float) -> None:
        """Runs the whole life; problems go to the outcome."""
        try:
            self._fill_every_slot()
            for prompt in (*PROMPTS, *(SHARED + prompt for prompt in PROMPTS)):
                if prompt not in self._alone:
                    self._alone[prompt] = self._ask_alone(prompt)
            self._outcome.memory.append([])
            for _ in range(self._options.phases):
                await self._load(seconds / (self._options.phases + 1))
                self._look()
            await self._sigterm_under_load(seconds / (self._options.phases + 1))
        finally:
            self._server.stop()

    # -- the quiet ---------------------------------------------------------------------------------
    def _fill_every_slot(self) -> None:
        """Every page of the KV cache is touched once, and what was there goes to the cache in RAM: what comes later is a leak."""
        ids = [5] * (self._options.context - 8)
        for first in (10, 50):
            prompts = [[first + slot, *ids] for slot in range(self._options.slots)]
            reply = self._server.ask("POST", "/v1/completions", {"prompt": prompts, "max_tokens": 4}, seconds=PATIENCE)
            assert reply.status == 200, reply.body

    def _ask_alone(self, prompt: str) -> Alone:
        """As a stream: its pieces add up to the text, which the tokens' own texts do not where one is part of a character."""
        body = {"prompt": prompt, "max_tokens": GREEDY_TOKENS, "temperature": 0, "logprobs": 2, "stream": True}
        pieces, margins, least = [], [], math.inf
        for event in self._server.post("/v1/completions", body).events[:-1]:
            choice = event["choices"][0]
            found = choice["logprobs"] or {"token_logprobs": (), "top_logprobs": ()}
            for own, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
                least = min(least, own - min(top.values()))
            if choice["text"]:
                pieces.append(choice["text"])
                margins.append(least)
                least = math.inf
        return Alone(tuple(pieces), tuple(margins))

    def _look(self) -> None:
        """The server at rest: nothing runs, nothing waits, nothing is missing."""
        server = self._server
        server.wait_for(server.idle, PATIENCE)
        ended = self._total("m40llm_requests_total{")
        try:
            server.wait_for(lambda: len(server.requests) == self._total("m40llm_requests_total{"), 5)
        except AssertionError:
            self._problem(f"{ended:.0f} generations ended, {len(server.requests)} are in the log")
        if server.metric("m40llm_requests_active"):
            self._problem("a request is active in the quiet")
        if server.metric("m40llm_steps_failed_total"):
            self._problem("a step has failed")
        self._outcome.memory[-1].append(server.metric("process_resident_memory_bytes"))

    def _total(self, prefix: str) -> float:
        lines = self._server.get("/metrics").body.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(prefix))

    def _problem(self, text: str) -> None:
        self._outcome.problems.append(text)

    # -- the load ----------------------------------------------------------------------------------
    async def _load(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        await asyncio.gather(*(self._user() for _ in range(self._options.users)))

    async def _sigterm_under_load(self, seconds: float) -> None:
        load = asyncio.create_task(self._load(seconds + 1))
        await asyncio.sleep(seconds * self._rng.uniform(0.2, 1))
        self._stopping = True
        code = await asyncio.to_thread(self._server.stop, signal.SIGTERM, PATIENCE)
        self._until = 0
        await load
        if code != 0:
            self._problem(f"SIGTERM ended with status {code}")
        self._problem_lines()
        logged = Counter(entry["id"] for entry in self._server.requests)
        for identity, times in self._answered.items():
            if logged[identity] != times:
                self._problem(f"{identity}: answered {times} generations, {logged[identity]} in the log")
        self._outcome.counts["generations logged"] += sum(logged.values())

    def _problem_lines(self) -> None:
        for line in self._server.log:
            entry = json.loads(line)
            if "traceback" in entry or entry["level"] == "error":
                self._problem(f"in the log: {line[:2000]}")

    async def _user(self) -> None:
        kinds: dict[Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]], int] = {
            self._whole: 4,
            self._streamed: 6,
            self._sampled: 3,
            self._leaves_stream: 4,
            self._leaves_early: 3,
            self._slow: 1,
            self._bad: 2,
            self._looks: 1,
            self._crowd: 1,
        }
        async with aiohttp.ClientSession(self._server.url, timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session:
            while time.monotonic() < self._until:
                (kind,) = self._rng.choices(list(kinds), list(kinds.values()))
                try:
                    await kind(session)
                except (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError) as error:
                    if not self._stopping:
                        self._problem(f"{kind.__name__}: {type(error).__name__}: {error}")
                        return
                    await asyncio.sleep(0.05)
                self._outcome.counts[kind.__name__.strip("_")] += 1

    def _greedy(self) -> dict[str, Any]:
        prompt = self._rng.choice(PROMPTS)
        prompt = SHARED + prompt if self._rng.random() < 0.4 else prompt
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": GREEDY_TOKENS, "temperature": 0}
        return body | ({"priority": "background"} if self._rng.random() < 0.15 else {})

    def _compare(self, prompt: str, text: str) -> None:
        agrees = self._alone[prompt].agrees(text)
        self._outcome.counts["near ties" if agrees is None else "greedy answers as alone"] += agrees is not False
        if agrees is False:
            self._problem(f"{prompt[-40:]!r}: {text!r} instead of {''.join(self._alone[prompt].pieces)!r}")

    async def _served(self, reply: aiohttp.ClientResponse, *, bad: bool = False) -> bool:
        """Whether there is an answer to read; refusals that are in order are counted, others are problems."""
        if reply.status == 200 and not bad:
            return True
        self._outcome.counts[f"status {reply.status}"] += 1
        allowed = {429} | ({503} if self._stopping else set()) | ({400, 404, 413} if bad else set())
        if reply.status not in allowed:
            self._problem(f"status {reply.status}: {(await reply.text())[:300]}")
        elif "message" not in (await reply.json())["error"]:
            self._problem(f"status {reply.status} without OpenAI's error shape")
        if reply.status == 429 and "Retry-After" not in reply.headers:
            self._problem("429 without Retry-After")
        await asyncio.sleep(0.05)
        return False

    async def _whole(self, session: aiohttp.ClientSession) -> None:
        body = self._greedy()
        async with session.post("/generate", json=body | {"prompt_format": "raw"}) as reply:
            if await self._served(reply):
                answer = await reply.json()
                self._answered[answer["id"]] += 1
                self._compare(body["prompt"], answer["output"])

    async def _streamed(self, session: aiohttp.ClientSession) -> None:
        body = self._greedy()
        await self._read(session, body, pause=0.0)

    async def _slow(self, session: aiohttp.ClientSession) -> None:
        """Reads less quickly than the server writes."""
        await self._read(session, self._greedy() | {"logprobs": 20}, pause=self._rng.uniform(0.02, 0.2))

    async def _read(self, session: aiohttp.ClientSession, body: dict[str, Any], pause: float) -> None:
        async with session.post("/v1/completions", json=body | {"stream": True}, read_bufsize=1024) as reply:
            if not await self._served(reply):
                return
            text, identity, ended = "", "", False
            async for line in reply.content:
                if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                    ended = ended or line.startswith(b"data: [DONE]")
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    if not (self._stopping and event["error"]["code"] == "shutting_down"):
                        self._problem(f"an error in a stream: {event['error']}")
                    return
                identity = event["id"]
                text += event["choices"][0]["text"]
                if pause:
                    await asyncio.sleep(pause)
            if not ended:
                self._problem(f"{identity}: the stream has no end")
                return
            self._answered[identity] += 1
            self._compare(body["prompt"], text)

    async def _sampled(self, session: aiohttp.ClientSession) -> None:
        """What else a request may hold: several choices, log-probabilities, a grammar, a stop string."""
        more: dict[str, Any] = self._rng.choice(
            (
                {"n": 2},
                {"logprobs": True, "top_logprobs": 5},
                {"response_format": {"type": "json_object"}},
                {"stop": ["e"], "seed": 7},
            )
        )
        messages = [{"role": "user", "content": self._rng.choice(PROMPTS)}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": self._rng.randint(1, 40), "temperature": 0.9}
        body |= more
        async with session.post("/v1/chat/completions", json=body) as reply:
            if await self._served(reply):
                answer = await reply.json()
                self._answered[answer["id"]] += body.get("n", 1)

    async def _leaves_stream(self, session: aiohttp.ClientSession) -> None:
        """Goes away in the middle of an answer, sometimes in the middle of its prompt."""
        words = self._rng.choice((3, 200))
        prompt = " ".join(str(self._rng.randint(0, 9)) for _ in range(words))
        body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with session.post("/v1/completions", json=body) as reply:
            if await self._served(reply):
                for _ in range(self._rng.randint(0, 20)):
                    await reply.content.readline()
            reply.close()

    async def _leaves_early(self, session: aiohttp.ClientSession) -> None:
        """Goes away before there is an answer: in the queue, in the prefill, or with all of it still to come."""
        prompt = " ".join(str(self._rng.randint(0, 9)) for _ in range(300))
        body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True}
        request = asyncio.create_task(session.post("/generate", json=body | {"prompt_format": "raw"}).__aenter__())
        await asyncio.sleep(self._rng.uniform(0, 0.3))
        if request.done():
            await self._served(request.result())
            request.result().close()
        else:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    async def _bad(self, session: aiohttp.ClientSession) -> None:
        path, data = self._rng.choice(BAD_BODIES)
        async with session.post(path, data=data) as reply:
            await self._served(reply, bad=True)

    async def _looks(self, session: aiohttp.ClientSession) -> None:
        for path in ("/health", "/slots", "/metrics", "/props", "/v1/models"):
            async with session.get(path) as reply:
                if reply.status != 200 and not self._stopping:
                    self._problem(f"GET {path}: status {reply.status}")
                await reply.read()

    async def _crowd(self, session: aiohttp.ClientSession) -> None:
        """More at once than slots and queue hold."""
        await asyncio.gather(*(self._streamed(session) for _ in range(self._options.slots + self._options.queue + 2)))


def drift(memory: list[float]) -> float:
    """The largest relative distance of a value from the first one after the warm-up, which is the first third."""
    settled = memory[len(memory) // 3 :]
    return max(abs(value - settled[0]) / settled[0] for value in settled)


def run(options: Options, say: Callable[[str], None] = lambda text: None) -> Outcome:
    """All lives, one after the other. `outcome.problems` is empty if everything held."""
    outcome = Outcome()
    alone: dict[str, Alone] = {}
    for number in range(options.lives):
        asyncio.run(Life(options, number, outcome, alone).live(options.seconds / options.lives))
        memory = outcome.memory[-1]
        say(f"life {number + 1}: memory {', '.join(f'{m / 2**20:.0f}' for m in memory)} MiB, {dict(outcome.counts)}")
        if drift(memory) > MEMORY_TOLERANCE:
            outcome.problems.append(f"memory went from {memory[len(memory) // 3]:.0f} to {max(memory):.0f} bytes")
    return outcome


@click.command(context_settings={"show_default": True})
@click.argument("model", default="smollm2")
@click.option("--seconds", default=600.0, type=click.FloatRange(min=1), help="Of load, over all lives.")
@click.option(
    "--lives", default=3, type=click.IntRange(1), help="Starts of the server, each ended by SIGTERM under load."
)
@click.option("--seed", default=None, type=int, help="Of the random choices; default: the time.")
def main(model: str, seconds: float, lives: int, seed: int | None) -> None:
    """Soaks `m40llm serve MODEL`; status 1 if anything went wrong."""
    seed = int(time.time()) if seed is None else seed
    click.echo(f"seed {seed}")
    outcome = run(Options(resolve_model(model), seconds=seconds, lives=lives, seed=seed), click.echo)
    for problem in outcome.problems[:20]:
        click.echo(f"problem: {problem}", err=True)
    if outcome.problems:
        raise click.ClickException(f"{len(outcome.problems)} problems with seed {seed}")
    click.echo("nothing lost, no slot leaked, memory flat, greedy answers as alone")


if __name__ == "__main__":
    main()
