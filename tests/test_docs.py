"""What a reader of the documentation relies on and a machine can check: tables are whole, routes are all there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from m40llm.config import RuntimeOptions
from m40llm.server.app import build_app
from m40llm.server.settings import ServerOptions

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("llm-context/*.md"), *ROOT.glob("bench/*.md")])
_CELL_END = re.compile(r"(?<!\\)\|")


def tables(text: str) -> Iterator[list[str]]:
    """Runs of lines that begin with a bar, outside of code."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for is_row, lines in groupby(prose.splitlines(), lambda line: line.startswith("|")):
        if is_row:
            yield list(lines)


def broken(table: list[str]) -> str | None:
    if len(table) < 2 or not re.fullmatch(r"\|(\s*:?-+:?\s*\|)+\s*", table[1]):
        return f"no head above {table[0]!r}"
    widths = [len(_CELL_END.findall(line)) for line in table]
    odd = [line for line, width in zip(table, widths, strict=True) if width != widths[0]]
    return f"another number of cells: {odd[0]!r}" if odd else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    assert [problem for table in tables(page.read_text(encoding="utf-8")) if (problem := broken(table))] == []


def test_a_table_that_a_blank_line_splits_is_found() -> None:
    halves = list(tables("| a | b |\n| - | - |\n| 1 | 2 |\n\n| 3 | 4 |\n"))
    assert [bool(broken(table)) for table in halves] == [False, True]
    assert broken(["| a | b |", "| - | - |", "| 1 |"])


def test_every_route_is_described() -> None:
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    app = build_app(ServerOptions(Path("model.gguf"), RuntimeOptions()))
    served = {
        (route.method, re.sub(r"\{\w+(:[^}]*)?\}", "{id}", route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None and route.method not in ("*", "HEAD", "OPTIONS")
    }
    assert len(served) > 15
    missing = {
        f"{method} {path}" for method, path in served if f"`{method} {path}`" not in page and f"`{path}`" not in page
    }
    assert missing - {"GET /favicon.ico", "GET /static/{id}"} == set()  # what the page at / loads
