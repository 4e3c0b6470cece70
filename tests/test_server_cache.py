"""The prefix cache over HTTP: named entries, what is refused, and a restart that finds everything again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server_process import ServerProcess, serving

SYSTEM = [{"role": "system", "content": "You answer in one short sentence. " * 40}]
SIZES = ("--slots", "1", "--ctx-per-slot", "1024", "--cache-ram-mb", "32")


def chat(server: ServerProcess, question: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [*SYSTEM, {"role": "user", "content": question}], "max_tokens": 8, "temperature": 0}
    reply = server.post("/v1/chat/completions", {**body, **fields})
    assert reply.status == 200, reply.body
    return reply.json


def cached(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def caching(smollm2_path: Path, folder: Path) -> Iterator[ServerProcess]:
    with serving(smollm2_path, *SIZES, "--cache-disk-dir", str(folder), "--cache-disk-mb", "64") as process:
        yield process


def test_named_entries_over_http(caching: ServerProcess) -> None:
    warmed = caching.post("/v1/cache/warm", {"cache_id": "system", "messages": SYSTEM})
    assert warmed.status == 200, warmed.body
    tokens = warmed.json["tokens"]
    assert warmed.json == {"cache_id": "system", "tokens": tokens, "cached_tokens": 0}
    caching.post("/generate", {"prompt": "something else", "prompt_format": "raw", "max_tokens": 2})  # takes the slot
    reply = chat(caching, "Why?", prefix_cache_ids=["thread", "system"], cache_id="thread")
    assert cached(reply) >= tokens
    stats = caching.get("/v1/cache/stats").json
    assert {e["cache_id"] for e in stats["entries"]} == {"system", "thread"}
    assert stats["ram"]["loaded_tokens"] >= tokens
    # the end of the answer may still be on its way there
    assert caching.metric('m40llm_kv_bytes{tier="ram"}') >= stats["ram"]["bytes"] > 0
    shrink = caching.post("/v1/cache/warm", {"cache_id": "system", "prompt": "something else"})
    assert (shrink.status, shrink.json["error"]["code"]) == (409, "cache_conflict")
    assert caching.ask("DELETE", "/v1/cache/thread").json["evicted_blocks"] >= 1
    gone = caching.ask("DELETE", "/v1/cache/thread")
    assert (gone.status, gone.json["error"]["code"]) == (404, "cache_id_not_found")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/cache/warm", {"cache_id": "a"}, 400),
        ("/v1/cache/warm", {"cache_id": "a", "prompt": "x", "messages": SYSTEM}, 400),
        ("/v1/cache/warm", {"cache_id": "", "prompt": "x"}, 400),
        ("/v1/cache/warm", {"cache_id": "a", "prompt": []}, 400),
        ("/v1/cache/warm", {"cache_id": "a", "prompt": [-1]}, 400),
        ("/v1/cache/warm", {"cache_id": "a", "prompt": [10**12]}, 400),
        ("/generate", {"prompt": "x", "cache_id": "a\nb"}, 400),
        ("/v1/completions", {"prompt": ["x", "y"], "cache_id": "a"}, 400),
    ],
)
def test_bad_requests_are_told_why(caching: ServerProcess, path: str, body: dict[str, Any], status: int) -> None:
    reply = caching.post(path, body)
    assert reply.status == status
    assert reply.json["error"]["message"]


def test_a_restart_finds_the_disk_tier(caching: ServerProcess, smollm2_path: Path, folder: Path) -> None:
    first = chat(caching, "What is a slot?")
    assert caching.post("/admin/flush", {}).status == 200
    assert caching.get("/v1/cache/stats").json["disk"]["pending"] == 0
    assert caching.stop() == 0
    with serving(smollm2_path, *SIZES, "--cache-disk-dir", str(folder)) as again:
        second = chat(again, "What is a slot?")
    assert cached(second) == second["usage"]["prompt_tokens"] - 1
    assert second["choices"][0]["message"] == first["choices"][0]["message"]


def test_without_a_cache_the_routes_say_so(smollm2_path: Path) -> None:
    with serving(smollm2_path, "--slots", "1", "--ctx-per-slot", "256", "--cache-ram-mb", "0") as server:
        for reply in (server.get("/v1/cache/stats"), server.post("/admin/flush", {})):
            assert (reply.status, reply.json["error"]["code"]) == (404, "cache_disabled")
        assert server.post("/generate", {"prompt": "x", "cache_id": "a", "max_tokens": 1}).status == 400
