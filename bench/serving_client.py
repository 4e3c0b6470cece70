"""The two ends of a serving benchmark: `m40llm serve` as a process of its own, and clients that stream from it over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from serving_load import Call
from serving_stats import Record

START_SECONDS = 300.0  # the first start on a machine compiles kernels
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


class ServerFailed(RuntimeError):
    """The server did not start, or does not answer; the message says what it said."""


@contextmanager
def started_server(model: Path, options: Sequence[str]) -> Iterator[str]:
    """Runs `m40llm serve` on a free port; yields its address when it listens and stops it at the end.

    Raises:
        ServerFailed: it ended, or did not listen in time.
    """
    command = [
        sys.executable,
        "-c",
        "from m40llm.cli import main; main()",
        "serve",
        str(model),
        "--port",
        "0",
        *options,
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Any) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        log.seek(0)
        text = log.read()
        if found := re.search(r"listening on (http://[^ \"\n]+)", text):
            return found[1]
        if process.poll() is not None:
            raise ServerFailed(f"m40llm serve ended with status {process.returncode}:\n{text[-2000:]}")
        time.sleep(0.05)
    raise ServerFailed(f"m40llm serve did not listen within {START_SECONDS:.0f} s")


class Clients:
    """Clients of one server. Each request is a stream on `/v1/completions` with token ids as its prompt: lengths are exact."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    @classmethod
    def session(cls, api_key: str | None) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=NO_TIMEOUT, headers=headers, read_bufsize=1 << 20
        )

    async def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        """Raises ServerFailed if /health is not 200 in time."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                async with self._session.get(f"{self._url}/health") as reply:
                    if reply.status == 200:
                        return
                    said = await reply.text()
            except aiohttp.ClientError as error:
                said = str(error)
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self._url} is not ready: {said[:500]}")
            await asyncio.sleep(0.1)

    async def get(self, path: str) -> Any:
        """The JSON of a GET."""
        async with self._session.get(self._url + path) as reply:
            reply.raise_for_status()
            return await reply.json()

    async def metrics(self) -> dict[str, float]:
        """Samples of GET /metrics, by name with labels."""
        async with self._session.get(f"{self._url}/metrics") as reply:
            reply.raise_for_status()
            lines = [line for line in (await reply.text()).splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    async def stream(self, call: Call, due: float | None = None, record: Record | None = None) -> Record:
        """One request, greedy to its full length. `record` is filled while the stream runs."""
        body = {
            "prompt": call.prompt,
            "max_tokens": call.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        record = record or Record(0.0)
        record.due = time.perf_counter() if due is None else due
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as reply:
                record.status = reply.status
                if reply.status == 200:
                    await self._read(reply, record)
                else:
                    record.error = (await reply.text())[:500]
        except aiohttp.ClientError as error:
            record.error = f"{type(error).__name__}: {error}"
        return record

    async def _read(self, reply: aiohttp.ClientResponse, record: Record) -> None:
        """Only a search for bytes is done while tokens come: the client shares its processor with the server."""
        rest = b""
        last = b""
        async for data in reply.content.iter_any():
            now = time.perf_counter()
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if b'"finish_reason":null' in event:
                    record.arrivals.append(now)
                elif b'"usage":{' in event or b'"error"' in event:
                    last = event
        found = json.loads(last.removeprefix(b"data: ") or b"{}")
        if "usage" not in found:
            record.error = str(found.get("error", "the stream ended without its usage"))[:500]
            return
        usage = found["usage"]
        record.tokens = usage["completion_tokens"]
        record.prompt_tokens = usage["prompt_tokens"]
        record.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    async def closed_loop(
        self, calls: Iterator[Call], offsets: Sequence[float], seconds: float
    ) -> tuple[list[Record], float, float]:
        """One client per offset; each sends its next request when the last one has ended, until `seconds` are over.

        Returns records (what was under way at the end is waited for), and when the time began and ended.
        """
        records: list[Record] = []
        start = time.perf_counter()
        end = start + seconds

        async def client(offset: float) -> None:
            await asyncio.sleep(offset)
            while time.perf_counter() < end:
                records.append(await self.stream(next(calls)))

        await asyncio.gather(*(client(offset) for offset in offsets))
        return records, start, end

    async def open_loop(
        self, calls: Sequence[Call], arrivals: Sequence[float], seconds: float
    ) -> tuple[list[Record], float, float]:
        """Requests at given times, whether or not the earlier ones have ended."""
        start = time.perf_counter()

        async def request(call: Call, at: float) -> Record:
            await asyncio.sleep(start + at - time.perf_counter())
            return await self.stream(call, due=start + at)

        tasks = [asyncio.create_task(request(call, at)) for call, at in zip(calls, arrivals, strict=True)]
        return list(await asyncio.gather(*tasks)), start, start + seconds

    async def burst(self, calls: Sequence[Call]) -> tuple[list[Record], float]:
        """All at once; (records, when they were sent)."""
        began = time.perf_counter()
        return list(await asyncio.gather(*(self.stream(call) for call in calls))), began
