"""The house rules that a machine can check: imports go one way, the environment is read at the edge, files stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "m40llm"

# Floors from the ground up: a module imports from its own floor and from those before it. The first entry that a module's
# name equals or lies under is its floor.
FLOORS = (
    "m40llm.gguf",
    "m40llm.config",
    "m40llm.text",
    "m40llm.sampling",
    "m40llm.plan",
    "m40llm.device",
    "m40llm.kv.layout",  # sizes only, which the ops' contract speaks of
    "m40llm.kv",
    "m40llm.ops.protocol",
    "m40llm.ops",
    "m40llm.weights",
    "m40llm.forward",
    "m40llm.session",
    "m40llm.prediction",
    "m40llm.scoring",
    "m40llm.scheduler",
    "m40llm.model",
    "m40llm.generation",
    "m40llm.request",
    "m40llm.engine_inbox",
    "m40llm.engine_cache",
    "m40llm.engine_stats",
    "m40llm.engine",
    "m40llm.server",
    "m40llm.hub",
    "m40llm.cli",
    "m40llm.__main__",
)
HUB_SEES_ONLY = ("m40llm.gguf", "m40llm.config", "m40llm.hub")
EDGE = ("m40llm.cli", "m40llm.server")
MAX_LINES = 450


def is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def floor(name: str) -> int:
    for index, package in enumerate(FLOORS):
        if is_under(name, package):
            return index
    raise LookupError(f"{name} stands on no floor: add it to FLOORS")


def imports(tree: ast.AST, importer: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """(name of every m40llm module that is imported anywhere in the file, line)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = importer.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*above, *([node.module] if node.module else [])])
            # `from m40llm.kv import layout` imports a module, `from m40llm.kv import KVLayout` does not
            names = [f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if is_under(name, "m40llm"))


def violations(name: str, source: str, *, is_package: bool) -> list[str]:
    own = floor(name)
    found = []
    for imported, line in imports(ast.parse(source), name, is_package):
        if imported == "m40llm":
            continue
        if floor(imported) > own:
            found.append(f"{name}:{line} imports {imported}, a floor above")
        if is_under(name, "m40llm.hub") and not any(is_under(imported, p) for p in HUB_SEES_ONLY):
            found.append(f"{name}:{line} imports {imported}: the hub knows files only")
    return found


def environment_reads(source: str) -> list[int]:
    """Lines that name os.environ or os.getenv in any spelling."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb", "putenv"):
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in ("environ", "environb", "getenv")]
    return lines


@pytest.mark.parametrize("name", [name for name in MODULES if name != "m40llm"])
def test_imports_go_down(name: str) -> None:
    path = MODULES[name]
    assert violations(name, path.read_text(), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize("name", MODULES)
def test_only_the_edge_reads_the_environment(name: str) -> None:
    if not any(is_under(name, package) for package in EDGE):
        assert environment_reads(MODULES[name].read_text()) == []


@pytest.mark.parametrize("name", MODULES)
def test_files_are_short_and_have_a_subject(name: str) -> None:
    assert not name.rpartition(".")[2].startswith("util"), "split by stage, not into utils"
    assert len(MODULES[name].read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("source", "is_package"),
    [
        ("from m40llm.engine import Engine", False),
        ("import m40llm.cli", False),
        ("def f():\n    from m40llm import engine", False),
        ("from ..engine import Engine", False),
        ("from .. import engine", False),
        ("from ..cli import app", True),
    ],
)
def test_the_check_sees_every_spelling(source: str, is_package: bool) -> None:
    importer = "m40llm.kv" if is_package else "m40llm.kv.layout"
    assert len(violations(importer, source, is_package=is_package)) == 1


def test_the_check_lets_good_imports_pass() -> None:
    assert violations("m40llm.engine", "from m40llm.kv import KVLayout\nimport numpy", is_package=False) == []
    assert violations("m40llm.kv", "from .layout import KVLayout", is_package=True) == []


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "import os as o\no.getenv('A')", "from os import environ"]
)
def test_the_check_sees_environment_reads(source: str) -> None:
    assert environment_reads(source) != []
