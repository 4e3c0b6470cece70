"""generate, chat, tokenize, score and perplexity on a tiny random model: streams, JSON, interruption, wrong input."""

from __future__ import annotations

import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m40llm.cli.app import run
from m40llm.cli.lines import read_objects
from m40llm.cli.perplexity import perplexity
from m40llm.gguf import GGUFFile
from m40llm.text import Tokenizer
from tests.cli_runner import Captured, failed
from tests.tiny_gguf import build_tiny_gguf

COMMAND = [sys.executable, "-m", "m40llm"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture(scope="module")
def tokenizer(tiny: str) -> Tokenizer:
    with GGUFFile.open(tiny) as file:
        return Tokenizer.from_gguf(file.metadata)


def run_json(capsys: Captured, *argv: str) -> Any:
    assert run(argv) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def run_lines(capsys: Captured, *argv: str) -> list[Any]:
    assert run(argv) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow  # compiles for some 9 s
def test_a_first_run_says_that_compiling_made_it_slow(tiny: str, tmp_path: Path) -> None:
    command = [*COMMAND, "generate", tiny, "Hello", "--raw", "--greedy", "--max-tokens", "2", "--threads", "1"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    said = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr for _ in range(2)
    ]
    assert ["kernels were compiled" in text.splitlines()[-1] for text in said] == [True, False]


def test_generate_streams_text_and_json_tells_the_rest(tiny: str, tokenizer: Tokenizer, capsys: Captured) -> None:
    base = ("generate", tiny, "Hello there", "--greedy", "--max-tokens", "12")
    assert run(base) == 0
    out, err = capsys.readouterr()
    found = run_json(capsys, *base, "--json")
    assert out.removesuffix("\n") == found["text"].removesuffix("\n")
    assert "tok/s" in err.splitlines()[-1]
    assert set(found) >= {
        "text", "token_ids", "prompt_tokens", "generated_tokens", "finish_reason", "device", "kv_mode", "timings"
    }  # fmt: skip
    assert set(found["timings"]) == {"load_s", "prefill_s", "decode_s", "prefill_tok_s", "decode_tok_s"}
    assert found["generated_tokens"] == len(found["token_ids"]) <= 12
    assert found["text"] == tokenizer.decode(found["token_ids"])
    assert (found["device"], found["kv_mode"]) == ("cpu", "dense-f16")


def test_generate_prompt_formats(tiny: str, tokenizer: Tokenizer, capsys: Captured) -> None:
    base = ("generate", tiny, "Hi", "--greedy", "--max-tokens", "1", "--json")
    expected = {
        (): "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        (
            "--system",
            "Be.",
        ): "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ("--raw",): "Hi",
    }
    for flags, text in expected.items():
        assert run_json(capsys, *base, *flags)["prompt_tokens"] == len(tokenizer.encode(text))
    assert "--system needs the chat template" in failed(capsys, *base, "--raw", "--system", "Be.")


def test_generate_reads_stdin(tiny: str, capsys: Captured) -> None:
    flags = ["--greedy", "--max-tokens", "3", "--json"]
    given = run_json(capsys, "generate", tiny, "grüße\n", *flags)
    done = subprocess.run(
        [*COMMAND, "generate", tiny, "-", *flags], input="grüße\n".encode(), capture_output=True, timeout=120
    )
    assert json.loads(done.stdout)["token_ids"] == given["token_ids"]
    done = subprocess.run([*COMMAND, "generate", tiny, "-"], input=b"\xff\xfe", capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: the input is not UTF-8")


def test_seed_repeats_and_environment_sets_flags(tiny: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    base = ("generate", tiny, "Hi", "--max-tokens", "8", "--temperature", "5", "--seed", "7", "--json")
    assert run_json(capsys, *base)["token_ids"] == run_json(capsys, *base)["token_ids"]
    monkeypatch.setenv("M40LLM_KV_DTYPE", "f32")
    assert run_json(capsys, *base)["kv_mode"] == "dense-f32"


def test_prompts_that_do_not_fit(tiny: str, capsys: Captured) -> None:
    assert "--ctx" in failed(capsys, "generate", tiny, "a long prompt " * 20, "--ctx", "16")
    assert "--ctx" in failed(capsys, "generate", tiny, "hi", "--ctx", "32", "--max-tokens", "100")
    assert "over the model's context" in failed(capsys, "generate", tiny, "hi", "--ctx", "9999999")
    assert "empty" in failed(capsys, "generate", tiny, "", "--raw")


def test_ctrl_c_stops_generate(tmp_path: Path) -> None:
    model = str(build_tiny_gguf(tmp_path / "long.gguf", context=100_000))
    with GGUFFile.open(model) as file:
        ends = Tokenizer.from_gguf(file.metadata).eog_ids
    never_end = [flag for token in ends for flag in ("--logit-bias", f"{token}=-1000")]
    process = subprocess.Popen(
        [*COMMAND, "generate", model, "Hi", "--ctx", "50000", "--temperature", "50", *never_end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)  # the answer has begun, and 50,000 tokens take a while
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "interrupted"
    assert "Traceback" not in err.decode()


def test_chat_keeps_the_conversation(tiny: str, tokenizer: Tokenizer) -> None:
    """One turn fits the context, two do not: the second message fails unless the first is forgotten."""
    turn = len(tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"))
    done = subprocess.run(
        [*COMMAND, "chat", tiny, "--greedy", "--max-tokens", "4", "--ctx", str(turn + 8)],
        input=b"Hello\nHello\n/reset\nHello\n/exit\nnever read\n",
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.decode().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].endswith("(/reset starts over)")
    first, second, rest = done.stdout.decode("utf-8", "replace").split("\n")
    assert first == second != ""
    assert rest == ""


def test_chat_commands(tiny: str) -> None:
    done = subprocess.run(
        [*COMMAND, "chat", tiny],
        input=b"/help\n/system\n/system Be brief.\n/system\n/what\n",
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, b"")
    for line in (b"/reset", b"no system message", b"Be brief.", b"unknown command /what"):
        assert line in done.stderr


def test_chat_on_a_terminal_survives_ctrl_c(tiny: str) -> None:
    """A real pseudo-terminal: Ctrl-C at the prompt drops the line, Ctrl-D ends with exit code 0."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(COMMAND[0], [*COMMAND, "chat", tiny, "--greedy", "--max-tokens", "4"])

    def read_until(mark: bytes, silent: bytes = b"") -> bytes:
        """What is printed up to `mark`; `silent` is typed again whenever nothing comes for a while."""
        seen = b""
        deadline = time.monotonic() + 60
        while mark not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([fd], [], [], 5)[0]:
                seen += os.read(fd, 4096)
            else:
                os.write(fd, silent)
        return seen

    read_until(b"> ")
    # Nobody types so quickly as a program: a signal between the prompt and the wait for input is only noticed with the next
    # one (CPython, Modules/readline.c), so there is a pause, and another Ctrl-C where it was too short.
    time.sleep(0.2)
    os.write(fd, b"half a line\x03")
    read_until(b"> ", silent=b"\x03")
    os.write(fd, b"Hello\n")
    assert b"Traceback" not in read_until(b"\n> ")
    os.write(fd, b"\x04")
    try:
        while os.read(fd, 4096):
            pass
    except OSError:  # Linux: the other end of the terminal is closed
        pass
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_tokenize(tiny: str, tokenizer: Tokenizer, tmp_path: Path, capsys: Captured) -> None:
    text = "the <|im_end|> 🤖\u2028 end"
    assert run_json(capsys, "tokenize", tiny, "--text", text, "--json") == {"ids": tokenizer.encode(text, bos=False)}
    plain = tokenizer.encode(text, bos=False, special=False)
    assert run_json(capsys, "tokenize", tiny, "--text", text, "--no-special", "--json") == {"ids": plain}
    assert plain != tokenizer.encode(text, bos=False)
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n\n" + '{"text": ""}\n')
    assert run_lines(capsys, "tokenize", tiny, "--file", str(path), "--no-special", "--json") == [
        {"ids": plain},
        {"ids": []},
    ]
    assert run(["tokenize", tiny, "--text", "the"]) == 0
    assert "'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "in.jsonl:2: not JSON"),
        ("[1]", "in.jsonl:2: expected an object with 'ids' and 'start'"),
        ('{"ids": [1, 2]}', "in.jsonl:2: expected an object"),
        ('{"ids": [1, "2"], "start": 1}', "in.jsonl:2: 'ids' must be a list of token ids"),
        ('{"ids": [1, -2], "start": 1}', "in.jsonl:2: 'ids' must be a list of token ids"),
        ('{"ids": [1, 2], "start": "1"}', "in.jsonl:2: 'start' must be an integer"),
        ('{"ids": [1, 2], "start": 3}', "in.jsonl:2: start is 3"),
        ('{"ids": [1, 2], "start": 0}', "in.jsonl:2: start is 0"),
        ('{"ids": [1, 99999999], "start": 1}', "in.jsonl:2: token id 99999999 is outside"),
    ],
)
def test_score_names_the_line(tiny: str, tmp_path: Path, capsys: Captured, line: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"\n{line}\n")
    assert message in failed(capsys, "score", tiny, "--file", str(path))


def test_score_agrees_with_generate(tiny: str, tokenizer: Tokenizer, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "in.jsonl"
    prompt = tokenizer.encode("Hello there")
    made = run_json(capsys, "generate", tiny, "Hello there", "--raw", "--greedy", "--max-tokens", "5", "--json")
    ids = [*prompt, *made["token_ids"]]
    path.write_text(json.dumps({"ids": ids, "start": len(prompt)}) + "\n" + json.dumps({"ids": ids, "start": 1}))
    late, early = run_lines(capsys, "score", tiny, "--file", str(path), "--top", "3", "--kv-dtype", "f32")
    assert [best[0][0] for best in late["top"]] == made["token_ids"]  # greedy took the best each time
    assert late["logprobs"] == [best[0][1] for best in late["top"]]
    assert [len(best) for best in late["top"]] == [3] * len(made["token_ids"])
    np.testing.assert_allclose(early["logprobs"][len(prompt) - 1 :], late["logprobs"], rtol=0, atol=1e-4)


def test_perplexity_is_exp_of_the_mean(tiny: str, tokenizer: Tokenizer, tmp_path: Path, capsys: Captured) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox and the other one. " * 8)
    found = run_json(capsys, "perplexity", tiny, str(text), "--ctx", "32", "--json")
    ids = tokenizer.encode(text.read_text(), special=False)
    windows = [ids[i : i + 32] for i in range(0, len(ids) - 31, 32)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps({"ids": window, "start": 16}) for window in windows))
    scored = run_lines(capsys, "score", tiny, "--file", str(path), "--ctx", "32")
    logprobs = np.concatenate([line["logprobs"] for line in scored])
    assert (found["windows"], found["tokens"]) == (len(windows), logprobs.size)
    assert found["perplexity"] == pytest.approx(math.exp(-logprobs.mean()), rel=1e-6)
    assert found["error"] == pytest.approx(
        math.exp(-logprobs.mean()) * logprobs.std(ddof=1) / math.sqrt(logprobs.size), rel=1e-6
    )
    text.write_text("t")
    assert "too short" in failed(capsys, "perplexity", tiny, str(text))


def test_perplexity_of_a_fair_coin() -> None:
    assert perplexity([math.log(0.5)] * 10) == pytest.approx(
        {"perplexity": 2.0, "error": 0.0, "mean_nll": math.log(2), "tokens": 10}
    )


def test_lines_that_are_too_deep_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text("[" * 200_000)
    with pytest.raises(Exception, match=r"deep.jsonl:1: not JSON"):
        list(read_objects(str(path), "text"))
