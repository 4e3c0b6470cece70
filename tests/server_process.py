"""`m40llm serve` as a process of its own, spoken to over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SERVE = [sys.executable, "-c", "from m40llm.cli import main; main()", "serve"]
START_SECONDS = 120.0  # the first start on a machine compiles kernels
SLOTS, CONTEXT, BUDGET, QUEUE = 2, 1024, 64, 4


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events; comments are skipped, the [DONE] at the end stays."""
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class ServerProcess:
    """A running server; without a `model` the environment names it. Its log (JSON lines) is collected, `requests` are its
    lines of ended requests."""

    def __init__(self, model: Path | str, *options: str, env: dict[str, str] | None = None) -> None:
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [
                *SERVE,
                *([str(model)] if model else []),
                "--device",
                "cpu",
                "--port",
                "0",
                "--log-format",
                "json",
                *options,
            ],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.port = 0
        self.wait_for(self._find_port, START_SECONDS)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))

    def _find_port(self) -> bool:
        assert self.process.poll() is None, "\n".join(self.log)
        found = [m for line in self.log if (m := re.search(r"listening on http://[^ \"]*:(\d+)", line))]
        self.port = int(found[0][1]) if found else 0
        return bool(found)

    def wait_until_ready(self) -> ServerProcess:
        self.wait_for(self._healthy, START_SECONDS)
        return self

    def _healthy(self) -> bool:
        try:
            return self.get("/health").status == 200
        except ConnectionError:
            raise AssertionError("the server has ended:\n" + "\n".join(self.log[-20:])) from None

    def wait_for(self, condition: Callable[[], Any], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "this did not happen in time:\n" + "\n".join(self.log[-20:])
            time.sleep(0.005)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [entry for line in list(self.log) if (entry := json.loads(line))["event"] == "request"]

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, seconds: float = 60
    ) -> Reply:
        """One request on a connection of its own; `body` is JSON unless it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.ask("POST", path, body, headers)

    def metric(self, name: str, *default: float) -> float:
        text = self.get("/metrics").body.decode()
        found = (line.split()[-1] for line in text.splitlines() if line.startswith((name + " ", name + "{")))
        return float(next(found, *default))

    def slot_states(self) -> list[str]:
        return [slot["state"] for slot in self.get("/slots").json]

    def idle(self) -> bool:
        return set(self.slot_states()) == {"idle"} and self.metric("m40llm_requests_waiting") == 0

    @contextmanager
    def raw(
        self, path: str, body: Any, *, receive_buffer: int | None = None, headers: dict[str, str] | None = None
    ) -> Iterator[socket.socket]:
        """A socket on which a POST has been sent; leaving the block closes it, whatever is still to come."""
        data = json.dumps(body).encode()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.settimeout(30)
            sock.connect(("127.0.0.1", self.port))
            fields = {"Host": "test", "Connection": "close", "Content-Length": str(len(data)), **(headers or {})}
            head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            sock.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
            yield sock

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Sends the signal; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join(5)
        return code


@contextmanager
def serving(model: Path | str, *options: str, **more: Any) -> Iterator[ServerProcess]:
    """A ready server, stopped at the end."""
    process = ServerProcess(model, *options, **more)
    try:
        yield process.wait_until_ready()
    finally:
        process.stop()


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[ServerProcess]:
    """SmolLM2 behind HTTP, small in everything, so that limits are quickly reached."""
    sizes = ("--slots", str(SLOTS), "--ctx-per-slot", str(CONTEXT), "--token-budget", str(BUDGET))
    with serving(smollm2_path, *sizes, "--max-queue", str(QUEUE), "--heartbeat-seconds", "0.3") as process:
        yield process
