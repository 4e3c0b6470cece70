"""Clients that leave, clients that do not read, signals, keys: over raw sockets, against real processes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from m40llm.cli.app import run
from tests.server_process import SERVE, START_SECONDS, Reply, ServerProcess, serving
from tests.tiny_gguf import build_tiny_gguf

ENDLESS = {"prompt": "Once", "prompt_format": "raw", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def long_prompt(words: int, salt: str) -> str:
    return f"{salt} " + " ".join(f"word{i}" for i in range(words))


# -- clients that go away --------------------------------------------------------------------------


def last_request(server: ServerProcess, before: int) -> dict[str, Any]:
    server.wait_for(lambda: len(server.requests) > before)
    return server.requests[-1]


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_during_decode_stops_it_and_frees_the_slot(server: ServerProcess, stream: bool) -> None:
    server.wait_for(server.idle)
    before, made = len(server.requests), server.metric("m40llm_generated_tokens_total")
    with server.raw("/generate", {**ENDLESS, "stream": stream}):
        server.wait_for(lambda: server.metric("m40llm_generated_tokens_total") > made + 3)
        at_leaving = server.metric("m40llm_generated_tokens_total")
    server.wait_for(server.idle)
    entry = last_request(server, before)
    assert (entry["finish_reason"], entry["cancelled"]) == ("cancelled", "client")
    total = server.metric("m40llm_generated_tokens_total")
    assert total - at_leaving <= 3  # the step under way, and what was made between the scrape and the close
    time.sleep(0.1)
    assert server.metric("m40llm_generated_tokens_total") == total
    assert entry["generated_tokens"] == total - made


def test_leaving_during_prefill_stops_it_and_keeps_what_was_read(server: ServerProcess) -> None:
    server.wait_for(server.idle)
    before = len(server.requests)
    body = {"prompt": long_prompt(280, "prefill"), "prompt_format": "raw", "max_tokens": 1, "temperature": 0}
    tokens = len(server.post("/tokenize", {"content": body["prompt"]}).json["tokens"])
    assert tokens > 800
    with server.raw("/generate", body):
        server.wait_for(lambda: any(0 < slot["n_past"] < tokens for slot in busy(server)))
    server.wait_for(server.idle)
    entry = last_request(server, before)
    assert (entry["cancelled"], entry["generated_tokens"]) == ("client", 0)
    kept = max(slot["n_past"] for slot in server.get("/slots").json)
    assert 0 < kept < tokens
    again = server.post("/generate", body).json
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def busy(server: ServerProcess) -> list[dict[str, Any]]:
    return [slot for slot in server.get("/slots").json if slot["state"] == "prefill"]


def test_leaving_the_queue_costs_nothing(server: ServerProcess) -> None:
    server.wait_for(server.idle)
    with server.raw("/generate", ENDLESS), server.raw("/generate", ENDLESS):
        server.wait_for(lambda: server.slot_states() == ["decode", "decode"])
        before = len(server.requests)
        with server.raw("/generate", {**ENDLESS, "prompt": "Never"}):
            server.wait_for(lambda: server.metric("m40llm_requests_waiting") == 1)
        server.wait_for(lambda: server.metric("m40llm_requests_waiting") == 0)
        entry = last_request(server, before)
        assert (entry["slot"], entry["generated_tokens"], entry["cancelled"]) == (-1, 0, "client")
        assert server.slot_states() == ["decode", "decode"]
    server.wait_for(server.idle)


def test_a_waiting_stream_carries_heartbeats(server: ServerProcess) -> None:
    server.wait_for(server.idle)
    with (
        server.raw("/generate", ENDLESS),
        server.raw("/generate", ENDLESS),
        server.raw("/generate", {**ENDLESS, "stream": True}) as waiting,
    ):
        received = b""
        while received.count(b": keep-alive\n\n") < 2:
            received += waiting.recv(4096)
        assert b"data:" not in received
    server.wait_for(server.idle)


def test_background_requests_yield(server: ServerProcess) -> None:
    server.wait_for(server.idle)
    background = {**ENDLESS, "priority": "background"}
    with server.raw("/generate", background), server.raw("/generate", background):
        server.wait_for(lambda: server.slot_states() == ["decode", "decode"])
        before = server.metric("m40llm_preemptions_total")
        assert server.post("/generate", {**ENDLESS, "max_tokens": 3}).json["usage"]["completion_tokens"] == 3
        assert server.metric("m40llm_preemptions_total") == before + 1
    server.wait_for(server.idle)


# -- a second server: keys, limits, deadlines ------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", context=8192)


@pytest.fixture(scope="module")
def guarded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("first-key\nzweiter-schlüssel\n", encoding="utf-8")
    template = keys.with_name("template.jinja")
    template.write_text("{% for m in messages %}({{ m.role }}: {{ m.content }}){% endfor %}")
    sizes = ("-np", "2", "-c", "16384", "-ctk", "f32", "-ctv", "f32")
    options = (*sizes, "--api-key-file", str(keys), "--api-key", "third", "-a", "small,tiny")
    # On a busy machine it takes seconds until the engine is so far ahead of a reader that it pauses: no less than that here.
    limits = ("--idle-timeout", "6", "--max-body-mb", "0.1", "--cors-origin", "https://here.example")
    more = ("--chat-template-file", str(template), "--no-warmup", "--jinja", "--metrics")
    with serving(tiny, *options, *limits, *more) as process:
        yield process


def with_key(process: ServerProcess, path: str, body: Any, key: str = "first-key") -> Reply:
    return process.ask("POST", path, body, {"Authorization": f"Bearer {key}"})


def test_keys(guarded: ServerProcess) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}, {"X-Api-Key": ""}):
        for path in ("/v1/models", "/metrics", "/slots", "/props", "/nowhere"):
            reply = guarded.ask("GET", path, headers=headers)
            assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
            assert reply.headers["www-authenticate"] == "Bearer"
    schluessel = "zweiter-schlüssel".encode().decode("latin-1")
    for headers in (
        {"Authorization": "Bearer first-key"},
        {"Authorization": f"bearer {schluessel}"},
        {"X-Api-Key": "third"},
    ):
        assert guarded.ask("GET", "/v1/models", headers=headers).status == 200
    assert guarded.get("/health").status == 200
    preflight = {"Origin": "https://here.example", "Access-Control-Request-Method": "POST"}
    reply = guarded.ask("OPTIONS", "/v1/chat/completions", headers=preflight)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, "https://here.example")


def test_aliases_and_sizes_by_llama_servers_flags(guarded: ServerProcess) -> None:
    reply = guarded.ask("GET", "/v1/models", headers={"X-Api-Key": "third"}).json["data"][0]
    assert (reply["id"], reply["meta"]["n_ctx"]) == ("small", 8192)
    assert "KV f32" in guarded.ask("GET", "/props", headers={"X-Api-Key": "third"}).json["description"]
    assert guarded.ask("GET", "/v1/models/tiny", headers={"X-Api-Key": "third"}).status == 200
    assert with_key(guarded, "/generate", {"prompt": "x" * 200_000}).status == 413
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert with_key(guarded, "/apply-template", {"messages": messages}).json == {"prompt": "(system: a)(user: b)"}


# -- clients that do not read ----------------------------------------------------------------------

LOUD = {  # some kilobytes a token
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 900,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
}


@contextmanager
def unread(process: ServerProcess, max_tokens: int) -> Iterator[socket.socket]:
    """A stream that nobody reads yet, through a small window, until its sequence is paused."""
    body = {**LOUD, "max_tokens": max_tokens}
    with process.raw("/v1/chat/completions", body, receive_buffer=4096, headers={"X-Api-Key": "third"}) as sock:
        process.wait_for(lambda: "paused" in slot_states(process))
        yield sock


def slot_states(process: ServerProcess) -> list[str]:
    return [slot["state"] for slot in process.ask("GET", "/slots", headers={"X-Api-Key": "third"}).json]


def test_a_slow_reader_holds_up_itself_only(guarded: ServerProcess) -> None:
    with unread(guarded, 1500) as slow:
        reply = with_key(guarded, "/generate", {**ENDLESS, "max_tokens": 20})
        assert reply.json["usage"]["completion_tokens"] == 20
        assert "paused" in slot_states(guarded)
        received = bytearray()
        while data := slow.recv(1 << 20):
            received += data
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert received.count(b'"finish_reason":"length"') == 1
    guarded.wait_for(lambda: guarded.requests[-1]["generated_tokens"] == 1500)


def test_an_unread_stream_is_given_up(guarded: ServerProcess) -> None:
    with unread(guarded, 8000):
        guarded.wait_for(lambda: any(entry["cancelled"] == "idle" for entry in guarded.requests))
        guarded.wait_for(lambda: any("stood still" in line for line in guarded.log))
    assert slot_states(guarded) == ["idle", "idle"]


# -- start and stop --------------------------------------------------------------------------------


def test_sigterm_lets_a_request_end_and_takes_no_other(tiny: Path) -> None:
    process = ServerProcess(tiny, "--slots", "1", "--ctx-per-slot", "4096").wait_until_ready()
    with ThreadPoolExecutor() as pool, process.raw("/generate", {"prompt": "late"}) as late:
        late.recv(1)  # answered: the connection, closed by now, proves that requests were taken
        running = pool.submit(process.post, "/generate", {**ENDLESS, "max_tokens": 600})
        process.wait_for(lambda: "decode" in process.slot_states())
        idle = socket.create_connection(("127.0.0.1", process.port))
        process.process.send_signal(signal.SIGTERM)
        process.wait_for(lambda: any('"stopping"' in line for line in process.log))
        with idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 503 " in idle.recv(4096).splitlines()[0]
        reply = running.result(30)
        assert (reply.status, reply.json["usage"]["completion_tokens"]) == (200, 600)
    assert process.stop() == 0


def test_sigterm_cuts_what_takes_too_long(tiny: Path) -> None:
    process = ServerProcess(tiny, "--slots", "2", "--ctx-per-slot", "8192", "--drain-seconds", "0.2").wait_until_ready()
    body = {**ENDLESS, "max_tokens": 8000}
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(process.post, "/generate", body)
        stream = pool.submit(process.post, "/generate", {**body, "stream": True})
        process.wait_for(lambda: process.slot_states() == ["decode", "decode"])
        began = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - began < 10
        assert (whole.result(5).status, whole.result(5).json["error"]["code"]) == (503, "shutting_down")
        *_, error, done = stream.result(5).events
        assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
    assert {entry["cancelled"] for entry in process.requests} == {"shutdown"}
    assert not any("Traceback" in line for line in process.log)


def test_every_option_has_a_variable(tiny: Path) -> None:
    variables = {
        "M40LLM_MODEL": str(tiny),
        "M40LLM_SLOTS": "3",
        "M40LLM_CTX_PER_SLOT": "100",
        "M40LLM_ALIAS": "from-env",
        "M40LLM_API_KEY": "k1 k2",
        "M40LLM_MAX_QUEUE": "0",
    }
    with serving("", env=variables) as process:
        headers = {"X-Api-Key": "k2"}
        found = process.ask("GET", "/props", headers=headers).json
        assert (found["total_slots"], found["default_generation_settings"]["n_ctx"]) == (3, 100)
        assert found["model_alias"] == "from-env"
        body = {"prompt": "a", "n": 4, "max_tokens": 1}
        assert process.ask("POST", "/v1/completions", body, headers).status == 400  # no queue: 3 at once and no more


def test_while_loading_health_says_so_and_sigterm_works(tiny: Path) -> None:
    process = ServerProcess(tiny)
    first = process.get("/health")
    if first.status == 503:  # a fast machine may have loaded the model by now
        assert first.json == {"status": "loading model"}
        assert process.post("/generate", {"prompt": "a"}).status in (200, 503)
    assert process.stop() == 0


def test_sigterm_ends_a_first_start_that_compiles(tiny: Path, tmp_path: Path) -> None:
    process = ServerProcess(tiny, env={"XDG_CACHE_HOME": str(tmp_path)})

    def compiled() -> list[str]:  # for steps: what loading needs comes first
        return [path.name for path in tmp_path.rglob("*.nbc") if path.name.split(".")[0] not in ("program", "packing")]

    process.wait_for(compiled, START_SECONDS)
    assert any("compiling kernels" in line for line in process.log)
    process.process.send_signal(signal.SIGTERM)
    assert process.stop() == 0
    assert len(compiled()) < 5  # what was under way; a step needs more
    assert '"stopped"' in process.log[-1]
    assert not any('"ready"' in line or "Traceback" in line for line in process.log)


def test_the_server_ends_with_its_parent(tiny: Path) -> None:
    command = [*SERVE, str(tiny), "--device", "cpu", "--port", "0", "--exit-with-parent"]
    script = f"import subprocess, time; p = subprocess.Popen({command!r}); print(p.pid, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stderr is not None
    parent.stdout.readline()
    while "listening" not in parent.stderr.readline():
        pass
    parent.kill()
    parent.wait()
    rest: list[str] = []
    reader = threading.Thread(target=lambda: rest.append(parent.stderr.read()))  # type: ignore[union-attr]
    reader.start()
    reader.join(20)  # the pipe ends when the server, its last writer, has
    assert rest
    assert "the parent process has ended" in rest[0]
    assert "stopped" in rest[0]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("{tiny}", "--slots", "0"), 2, "--slots is 0"),
        (("{tiny}", "--port", "70000"), 2, "--port is 70000"),
        (("{tiny}", "-c", "100", "--ctx-per-slot", "50"), 2, "contradict each other"),
        (("{tiny}", "--chat-template", "a", "--chat-template-file", "b"), 2, "give one"),
        (("{tiny}", "-ctk", "q8_0"), 2, "'q8_0' is not one of 'f16', 'f32'"),
        (("{tiny}", "-ctk", "f16", "-ctv", "f32"), 2, "K and V have one type here"),
        (("{tiny}", "--api-key", ""), 2, "--api-key is empty"),
        (("{tiny}", "--api-key-file", "/dev/null"), 2, "holds no key"),
        (("{tiny}", "-m", "other.gguf"), 2, "two models"),
        (("{tiny}", "--drain-seconds", "nan"), 2, "--drain-seconds is nan"),
        ((), 2, "name a model"),
        (("/nowhere.gguf",), 2, "no such file"),
    ],
)
def test_wrong_usage_is_one_line(
    tiny: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    assert run(["serve", *(a.format(tiny=tiny) for a in arguments)]) == code
    assert_one_error(capsys.readouterr().err, words)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--port", "{taken}", "is taken; choose another with --port"),
        ("--host", "nosuch.invalid", "--host nosuch.invalid is not known"),
        ("--host", "192.0.2.1", "--host 192.0.2.1 is not an address of this machine"),
        (
            "--ctx-per-slot",
            "99999",
            "a context of 99999 tokens is over the model's context of 8192; lower --ctx (serve: --ctx-per-slot",
        ),
    ],
)
def test_what_cannot_be_served_is_one_line(tiny: Path, option: str, value: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        value = value.format(taken=taken.getsockname()[1])
        command = [*SERVE, str(tiny), "--device", "cpu", "--port", "0", option, value]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert_one_error(done.stderr, words)
    assert (" listening " in done.stderr) == (
        option == "--ctx-per-slot"
    )  # the address is tried before anything is read
    assert "Traceback" not in done.stderr


def assert_one_error(text: str, words: str) -> None:
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0]
