"""What stumbles into the server: broken encodings, bytes that are no HTTP, neighbours' routes and fields, odd values."""

from __future__ import annotations

import gzip
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from m40llm.gguf import GGUFFile
from m40llm.sampling import TokenLogprobs
from m40llm.server.replies import TextLogprobs
from m40llm.text import Tokenizer
from tests.server_process import ServerProcess
from tests.tiny_gguf import build_tiny_gguf

RAW: dict[str, Any] = {"prompt": "a", "prompt_format": "raw", "max_tokens": 1, "temperature": 0}


def said(server: ServerProcess, data: bytes) -> tuple[int, dict[str, Any]]:
    """(status, error) of the reply to bytes on a fresh connection, which the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(data)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


@pytest.mark.parametrize("path", ["/generate", "/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_encoded_as_it_says(server: ServerProcess, path: str, encoding: str) -> None:
    reply = server.post(path, {"prompt": "hi"}, **{"Content-Encoding": encoding})
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_body")
    assert f"the body is not {encoding}" in reply.json["error"]["message"]
    assert "drop the header" in reply.json["error"]["message"]
    assert not any("Traceback" in line for line in server.log)


def test_a_gzipped_body_is_read(server: ServerProcess) -> None:
    body = gzip.compress(json.dumps(RAW).encode())
    assert server.post("/generate", body, **{"Content-Encoding": "gzip"}).status == 200
    bomb = gzip.compress(b" " * (64 << 20))
    assert server.post("/generate", bomb, **{"Content-Encoding": "gzip"}).status == 413


HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (HEAD + b"Content-Length: -1\r\n\r\n", "no HTTP request"),
        (HEAD + b"Content-Length: 2\r\nContent-Encoding: zstd\r\n\r\n{}", "Content-Encoding"),
        (HEAD + b"X: " + b"y" * 10_000 + b"\r\n\r\n", "no HTTP request"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "body could not be read|no HTTP request"),
        (b"GARBAGE\r\n\r\n", "no HTTP request"),
    ],
)
def test_what_is_no_http_gets_an_error_in_openais_shape(server: ServerProcess, data: bytes, words: str) -> None:
    before = len(server.log)
    status, error = said(server, data)
    assert status == 400
    assert re.search(words, error["message"]), error
    assert "backports" not in error["message"]
    server.wait_for(lambda: len(server.log) > before)
    assert [json.loads(line)["event"] for line in server.log[before:]] == ["refused"]


def test_small_words_name_limit_and_methods(server: ServerProcess) -> None:
    error = server.post("/generate", b" " * (9 << 20)).json["error"]
    assert error["message"] == "the body is over the limit of 8 MiB; send less, or raise --max-body-mb"
    assert server.ask("DELETE", "/health").json["error"]["message"] == "this path takes GET, HEAD"


def test_timings_are_of_all_choices(server: ServerProcess) -> None:
    reply = server.post("/v1/completions", {"prompt": "One, two", "max_tokens": 4, "n": 2, "ignore_eos": True}).json
    timings, usage = reply["timings"], reply["usage"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 8
    assert timings["prompt_n"] + timings["cache_n"] == 2 * usage["prompt_tokens"]
    # each choice's first token belongs to the time of the prompt
    assert timings["predicted_per_second"] == pytest.approx(6 / timings["predicted_ms"] * 1000, rel=1e-2)


def test_pieces_of_characters_have_names_of_their_own(server: ServerProcess) -> None:
    body = {"prompt": "🦓🦓🦓", "max_tokens": 6, "temperature": 0, "logprobs": 20}
    logprobs = server.post("/v1/completions", body).json["choices"][0]["logprobs"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [20] * 6  # none took the place of another
    names = [name for top in logprobs["top_logprobs"] for name in top]
    assert not any("\ufffd" in name for name in names)
    assert any(name.startswith("bytes:\\x") for name in names)


def test_offsets_count_complete_characters(tmp_path: Path) -> None:
    with GGUFFile.open(build_tiny_gguf(tmp_path / "tiny.gguf")) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)  # a token a byte, but for some English
    ids = tokenizer.encode("é🦓a", bos=False)
    assert len(ids) == 7
    found = TextLogprobs(tokenizer, 10).of(TokenLogprobs(i, -1.0, ((i, -1.0),)) for i in ids)
    assert found["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]
    assert found["text_offset"] == [10, 10, 11, 11, 11, 11, 12]
    assert found["top_logprobs"][6] == {"a": -1.0}


CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (TEXT, {**RAW, "stop": ""}, "stop", "stop holds an empty string; remove it"),
        (TEXT, {**RAW, "stop": 5}, "stop", "stop is 5; expected a string or a list of strings"),
        (TEXT, {**RAW, "stop": ["a", 1]}, "stop", "stop[1] is 1; stop must be a string or a list of strings"),
        (
            TEXT,
            {"prompt": ["a", 1]},
            "prompt",
            "prompt[1] is 1; prompt must be a string, a list of strings, a list of integers or a list of lists of integers",
        ),
        (TEXT, {**RAW, "logit_bias": 3}, "logit_bias", 'logit_bias is 3; expected {"token id": bias} or [[token id, bias], …]'),
        (TEXT, {**RAW, "logit_bias": {"28": "x"}}, "logit_bias", "logit_bias: ('28', 'x') is no token id with a number"),
        (TEXT, {**RAW, "logit_bias": [[28, 10**400]]}, "logit_bias", "logit_bias of token 28 is too large"),
        (TEXT, {**RAW, "logit_bias": [28]}, "logit_bias", "logit_bias: each entry is [token id, bias]"),
        (TEXT, {**RAW, "stream": "yes"}, "stream", 'stream is "yes"; expected true or false'),
        (TEXT, {**RAW, "stream": True, "stream_options": []}, "stream_options", "stream_options is a list; expected an object"),
        (
            TEXT,
            {**RAW, "stream": True, "stream_options": {"include_usage": 1}},
            "stream_options",
            "stream_options.include_usage is 1; expected true or false",
        ),
        (TEXT, {**RAW, "stream_options": {"x": 1}}, "stream_options", "unknown field 'stream_options.x'"),
        (TEXT, {**RAW, "seed": -2}, "seed", "seed is -2; expected 0..18446744073709551615"),
        (TEXT, {**RAW, "priority": "x" * 99}, "priority", f'priority is "{"x" * 39}…; expected \'interactive\' or \'background\''),
        (TEXT, {**RAW, "prefix_cache_ids": ["a"] * 65}, "prefix_cache_ids", "prefix_cache_ids has 65 entries; 64 are the limit"),
        (CHAT, {**HI, "messages": []}, "messages", "messages is empty; give at least one"),
        (CHAT, {**HI, "messages": "hi"}, "messages", 'messages is "hi"; expected a list of objects'),
        (CHAT, {**HI, "tools": [1]}, "tools", "tools[0] is 1; tools must be a list of objects"),
        (CHAT, {**HI, "top_logprobs": 21, "logprobs": True}, "top_logprobs", "top_logprobs is 21; expected at most 20"),
        (CHAT, {**HI, "n": 10**4000}, "n", f"n is 1{'0' * 39}…; expected at most 64"),
        (CHAT, {**HI, "reasoning_format": "none"}, "reasoning_format", "'reasoning_format' is not supported; leave it out"),
        (TEXT, {**RAW, "cache_prompt": False}, "cache_prompt", "'cache_prompt' is not supported; leave it out"),
        (TEXT, {**RAW, "n_probs": 3}, "n_probs", "'n_probs' is not supported; leave it out"),
        (CHAT, {**HI, "think": True}, "think", "unknown field 'think'"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_and_what_it_takes(
    server: ServerProcess, path: str, body: Any, param: str, message: str
) -> None:
    if path == TEXT:
        body = {key: value for key, value in body.items() if key != "prompt_format"}
    reply = server.post(path, body)
    assert reply.status == 400, reply.body
    assert (reply.json["error"]["message"], reply.json["error"]["param"]) == (message, param)


@pytest.mark.parametrize("name", ["max_tokens", "n_predict", "max_completion_tokens"])
def test_minus_one_is_as_much_as_the_context_holds(server: ServerProcess, name: str) -> None:
    body = {"messages": HI["messages"], name: -1, "stop": ["e", "a", "o"]}
    assert server.post(CHAT, body).json["choices"][0]["finish_reason"] == "stop"
    assert server.post(CHAT, {**body, name: -2}).status == 400


def test_reasoning_format_is_taken_where_it_says_what_happens(server: ServerProcess) -> None:
    assert server.post(CHAT, {**HI, "reasoning_format": "auto", "n_probs": 0}).status == 200


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/completion", "use /v1/completions"),
        ("/infill", "use /v1/completions"),
        ("/api/chat", "use /v1/chat/completions"),
        ("/api/blobs/sha256:1", "under /v1"),
        ("/v1/responses", "use /v1/chat/completions"),
        ("/v1/messages/count_tokens", "use /v1/chat/completions"),
        ("/v1/embeddings", "generates text only"),
        ("/slots/0?action=save", "/v1/cache/warm"),
        ("/v1/audio/speech", "text only"),
    ],
)
def test_neighbours_routes_are_refused_with_what_to_use(server: ServerProcess, path: str, instead: str) -> None:
    reply = server.post(path, {"prompt": "a"})
    assert (reply.status, reply.json["error"]["code"]) == (404, "unsupported_route")
    assert f"{path.partition('?')[0]} is not supported; " in reply.json["error"]["message"]
    assert instead in reply.json["error"]["message"]
