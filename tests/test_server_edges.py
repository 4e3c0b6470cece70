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
