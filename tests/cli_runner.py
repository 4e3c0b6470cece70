"""The command line run in this process, for tests of what it prints."""

from __future__ import annotations

import pytest

from m40llm.cli.app import run

Captured = pytest.CaptureFixture[str]


def failed(capsys: Captured, *argv: str, code: int = 2) -> str:
    """Runs a command that must fail with `code`, nothing on stdout and one line of error, the last on stderr; returns it.

    Lines before it are what was said of the model and the device while they were opened.
    """
    assert run(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    *before, error = err.splitlines()
    assert error.startswith("error: ")
    assert not any(line.startswith("error: ") for line in before)
    assert code == 1 or "internal error" not in error
    return error
