"""The routes' contracts over a real socket: shapes, limits, errors."""

from __future__ import annotations

import base64
import socket
from typing import Any

import pytest

from tests.server_process import CONTEXT, QUEUE, SLOTS, ServerProcess

FRANCE = {"prompt": "What is the capital of France?", "max_tokens": 16, "temperature": 0}
HELLO = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 6, "temperature": 0}


def test_generate_answers(server: ServerProcess) -> None:
    reply = server.post("/generate", FRANCE)
    assert reply.status == 200
    found = reply.json
    assert "Paris" in found["output"]
    assert found["finish_reason"] == "stop"
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert found["timings"]["predicted_n"] == usage["completion_tokens"] > 0
    assert reply.headers["access-control-allow-origin"] == "*"
    again = server.post("/generate", FRANCE).json
    assert again["output"] == found["output"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_generate_streams_the_same_text(server: ServerProcess) -> None:
    whole = server.post("/generate", FRANCE).json
    reply = server.post("/generate", {**FRANCE, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *pieces, last, done = reply.events
    assert done == "[DONE]"
    assert "".join(piece["output"] for piece in pieces) == whole["output"]
    assert (last["finish_reason"], last["usage"]["completion_tokens"]) == ("stop", whole["usage"]["completion_tokens"])


def test_raw_prompts_and_stop_strings(server: ServerProcess) -> None:
    raw = {"prompt": "One, two, three, four,", "prompt_format": "raw", "max_tokens": 12, "temperature": 0}
    text = server.post("/generate", raw).json["output"]
    assert text.startswith(" five")
    stopped = server.post("/generate", {**raw, "stop": ["six"]}).json
    assert stopped["output"] == text[: text.index("six")]
    assert (stopped["finish_reason"], stopped["stop"]) == ("stop", "six")


def test_a_seed_repeats_and_choices_differ(server: ServerProcess) -> None:
    body = {**HELLO, "temperature": 1.5, "seed": 7, "n": 2, "max_tokens": 12}
    first, second = (server.post("/v1/chat/completions", body).json for _ in range(2))
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert texts == [choice["message"]["content"] for choice in second["choices"]]
    assert texts[0] != texts[1]
    assert [choice["index"] for choice in first["choices"]] == [0, 1]


def test_llama_servers_names_are_understood(server: ServerProcess) -> None:
    body = {"prompt": "A", "n_predict": 3, "temperature": 0, "repeat_penalty": 1.1, "cache_prompt": True, "mirostat": 0}
    assert server.post("/v1/completions", body).json["usage"]["completion_tokens"] == 3
    refused = server.post("/v1/completions", {**body, "mirostat": 2})
    assert (refused.status, refused.json["error"]["param"]) == (400, "mirostat")


def test_completions_echo_and_several_prompts(server: ServerProcess) -> None:
    ids = server.post("/tokenize", {"content": "One two"}).json["tokens"]
    body = {"prompt": ["One two", "Red"], "max_tokens": 3, "temperature": 0, "echo": True}
    choices = server.post("/v1/completions", body).json["choices"]
    assert [c["text"].startswith(p) for c, p in zip(choices, body["prompt"], strict=True)] == [True, True]  # type: ignore[call-overload]
    from_ids = server.post("/v1/completions", {**body, "prompt": ids}).json["choices"]
    assert from_ids[0]["text"] == choices[0]["text"]


def test_logit_bias_forbids_and_forces(server: ServerProcess) -> None:
    (token, *_) = server.post("/tokenize", {"content": " zebra"}).json["tokens"]
    body = {"prompt": "A", "max_tokens": 2, "temperature": 0, "logit_bias": {str(token): 100}, "logprobs": 1}
    choice = server.post("/v1/completions", body).json["choices"][0]
    piece = server.post("/detokenize", {"tokens": [token]}).json["content"]
    assert choice["logprobs"]["tokens"] == [piece] * 2
    assert choice["logprobs"]["text_offset"] == [0, len(piece)]
    assert choice["logprobs"]["token_logprobs"][0] < choice["logprobs"]["top_logprobs"][0].popitem()[1]


def test_tokens_and_templates(server: ServerProcess) -> None:
    text = "Hello, wörld! <|im_end|>"
    ids = server.post("/tokenize", {"content": text}).json["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json["content"] == text
    plain = server.post("/tokenize", {"content": text, "parse_special": False}).json["tokens"]
    assert len(plain) > len(ids)
    pieces = server.post("/tokenize", {"content": "🦓", "with_pieces": True}).json["tokens"]
    assert b"".join(bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces) == (
        "🦓".encode()
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    prompt = server.post("/apply-template", {"messages": parts}).json["prompt"]
    assert prompt.endswith("<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n")


def test_what_the_server_says_of_itself(server: ServerProcess) -> None:
    (model,) = server.get("/v1/models").json["data"]
    assert (model["id"], model["meta"]["name"]) == ("smollm2", "Smollm2 135M 8k Lc100K Mix1 Ep2")
    assert server.get("/v1/models/smollm2").json == model
    assert server.get("/v1/models/Smollm2%20135M%208k%20Lc100K%20Mix1%20Ep2").json == model  # the file's general.name
    props = server.get("/props").json
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (SLOTS, CONTEXT)
    assert "im_start" in props["chat_template"]
    assert [slot["id"] for slot in server.get("/slots").json] == list(range(SLOTS))
    assert server.get("/v1/health").json == {"status": "ok"}
    text = server.get("/metrics").body.decode()
    for name in ("requests_active", "requests_waiting", "generated_tokens_total", "kv_bytes", "cache_hits_total"):
        assert f"\nm40llm_{name}" in text
    for name in ("time_to_first_token", "inter_token", "step"):
        assert f"m40llm_{name}_seconds_bucket" in text


def test_metrics_and_log_count_a_request(server: ServerProcess) -> None:
    before = {name: server.metric(f"m40llm_{name}_total") for name in ("prompt_tokens", "generated_tokens")}
    reply = server.post("/v1/chat/completions", {**HELLO, "max_tokens": 5, "ignore_eos": True}).json
    usage = reply["usage"]
    assert server.metric("m40llm_generated_tokens_total") - before["generated_tokens"] == 5
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert server.metric("m40llm_prompt_tokens_total") - before["prompt_tokens"] == computed
    server.wait_for(lambda: any(entry["id"] == reply["id"] for entry in server.requests))
    entry = next(entry for entry in server.requests if entry["id"] == reply["id"])
    assert (entry["generated_tokens"], entry["finish_reason"], entry["cancelled"]) == (5, "length", False)
    assert entry["slot"] in range(SLOTS)
    assert entry["decode_tok_s"] > 0


CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (GENERATE, b"{", "not valid JSON"),
        (GENERATE, b"[1]", "must be a JSON object"),
        (GENERATE, b'{"prompt": NaN}', "not valid JSON"),
        (GENERATE, b"\xff", "not valid JSON"),
        (GENERATE, b"[" * 100_000, "not valid JSON"),
        (GENERATE, {}, "'prompt' is missing"),
        (GENERATE, {"prompt": 5}, "prompt is 5; expected a string"),
        (GENERATE, {"prompt": "a", "max_token": 5}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
        (GENERATE, {"prompt": "a", "max_tokens": "5"}, 'max_tokens is "5"; expected an integer'),
        (GENERATE, {"prompt": "a", "max_tokens": True}, "max_tokens"),
        (GENERATE, {"prompt": "a", "max_tokens": -5}, "max_tokens is -5; expected at least 0"),
        (GENERATE, {"prompt": "a", "temperature": 1e9}, "temperature is 1000000000.0; expected 0..100"),
        (GENERATE, {"prompt": "a", "top_p": -0.1}, "top_p"),
        (GENERATE, {"prompt": "a", "seed": -2}, "seed"),
        (GENERATE, {"prompt": "a", "seed": 2**64}, "seed"),
        (GENERATE, {"prompt": "a", "stop": [""]}, "stop holds an empty string"),
        (GENERATE, {"prompt": "a", "stop": ["x"] * 33}, "at most 32 stop strings"),
        (GENERATE, {"prompt": "a", "priority": "urgent"}, "priority"),
        (GENERATE, {"prompt": "", "prompt_format": "raw"}, "the prompt is empty"),
        (GENERATE, {"prompt": "a b " * 1000}, "tokens.* context .*1024"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 1_000_000}]}, "at least 12[0-9]{3} tokens.*context"),
        (GENERATE, {"prompt": "a", "max_tokens": 1020}, r"max_tokens \(1020\) exceed the context of 1024"),
        (GENERATE, {"prompt": "a", "max_tokens": 3, "n_predict": 4}, "contradict each other"),
        (GENERATE, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (GENERATE, {"prompt": "a", "logit_bias": {"999999": 1}}, "token 999999"),
        (GENERATE, {"prompt": "a", "logit_bias": [[1, 2, 3]]}, "logit_bias"),
        (TEXT, {"prompt": []}, "the prompt is empty"),
        (TEXT, {"prompt": [999999]}, "outside the vocabulary"),
        (TEXT, {"prompt": [[1], ["a"]]}, "prompt"),
        (TEXT, {"prompt": ["a"] * 200, "n": 2}, "more than 256"),
        (TEXT, {"prompt": "a", "n": 20}, "20 sequences in one request are more"),
        (TEXT, {"prompt": "a", "n": 0}, "n is 0; expected at least 1"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "'suffix' is not supported"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of"),
        (TEXT, {"prompt": "a", "echo": True, "logprobs": 1}, "'echo' with 'logprobs'"),
        (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options needs stream"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "alien", "content": "a"}]}, r"messages\[0\].role must be one of"),
        (CHAT, {"messages": [{"role": ["user"], "content": "a"}]}, r"messages\[0\].role must be one of"),
        (CHAT, {"messages": [{"role": "user"}]}, r"messages\[0\].content is missing"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text only"),
        (CHAT, {**HELLO, "top_logprobs": 3}, "top_logprobs needs logprobs"),
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {**HELLO, "max_completion_tokens": 9}, "contradict each other"),
        (CHAT, {**HELLO, "chat_template_kwargs": {"messages": []}}, "may not set messages"),
        (CHAT, {**HELLO, "audio": {"voice": "x"}}, "'audio' is not supported"),
        ("/tokenize", {"content": "a", "what": 1}, "unknown field 'what'"),
        ("/detokenize", {"tokens": [10**9]}, "outside of the vocabulary"),
        ("/detokenize", {"tokens": [10**30]}, "token"),
        ("/apply-template", {"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_done_is_a_400_with_the_reason(server: ServerProcess, path: str, body: Any, words: str) -> None:
    steps = server.metric("m40llm_steps_total")
    reply = server.post(path, body)
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    import re

    assert re.search(words, error["message"]), error["message"]
    assert "\n" not in error["message"]
    assert server.metric("m40llm_steps_total") == steps  # nothing was computed


def test_wrong_paths_and_methods(server: ServerProcess) -> None:
    assert server.get("/nowhere").status == 404
    assert server.get("/v1/models/gpt-4").json["error"]["code"] == "model_not_found"
    refused = server.get("/generate")
    assert (refused.status, refused.headers["allow"]) == (405, "POST")
    assert refused.json["error"]["code"] == "method_not_allowed"
    assert server.ask("DELETE", "/health").status == 405


def test_a_body_over_the_limit_is_a_413(server: ServerProcess) -> None:
    reply = server.post("/generate", b" " * (9 << 20))
    assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")


def test_a_preflight_is_answered(server: ServerProcess) -> None:
    asked = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    reply = server.ask(
        "OPTIONS", "/generate", headers={**asked, "Access-Control-Request-Headers": "authorization,content-type"}
    )
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, "*")
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in reply.headers["access-control-allow-methods"]


def test_a_full_queue_is_a_429_that_says_when_to_come_back(server: ServerProcess) -> None:
    body = {"prompt": "a", "prompt_format": "raw", "max_tokens": 900, "ignore_eos": True}
    sockets = [server.raw("/generate", body) for _ in range(SLOTS + QUEUE)]
    opened: list[socket.socket] = []
    try:
        opened = [manager.__enter__() for manager in sockets]
        server.wait_for(lambda: server.metric("m40llm_requests_waiting") == QUEUE)
        assert server.metric("m40llm_requests_active") == SLOTS
        reply = server.post("/generate", body)
        assert (reply.status, reply.json["error"]["code"]) == (429, "queue_full")
        assert int(reply.headers["retry-after"]) >= 1
    finally:
        for sock in opened:
            sock.close()
    server.wait_for(server.idle)
    assert server.post("/generate", FRANCE).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n",
        base64.b64decode("FgMBAgABAAH8AwM="),  # a TLS hello to a plain port
    ],
)
def test_what_is_no_http_does_no_harm(server: ServerProcess, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(65536)
    assert answer == b"" or answer.split(b" ")[1:2] == [b"400"]
    assert server.get("/health").status == 200
