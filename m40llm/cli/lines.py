"""Input of the commands that work on text, files and JSON lines; `-` is stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from m40llm.cli.errors import CliError


def read_text(path: str) -> str:
    """The whole of a UTF-8 file, or of stdin for `-`. Raises OSError, UnicodeDecodeError."""
    if path == "-":
        return sys.stdin.buffer.read().decode("utf-8")
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def read_objects(path: str, *required: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE:LINE", object) of each line of a JSON-lines file that is not blank.

    Raises CliError that names file and line for what is no object or lacks a `required` key.
    """
    # not splitlines(): U+2028 and its like may stand inside a JSON string
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{'stdin' if path == '-' else path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as err:
            raise CliError(f"{where}: not JSON ({err})") from err
        if not isinstance(value, dict) or any(key not in value for key in required):
            raise CliError(f"{where}: expected an object with {' and '.join(map(repr, required))}")
        yield where, value


def token_ids(value: Any, where: str) -> list[int]:
    """`value` as token ids. Raises CliError when it is not a list of integers of 0 or more."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise CliError(f"{where}: 'ids' must be a list of token ids")
    return value
