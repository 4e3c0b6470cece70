"""Options of the server itself: addresses, limits, keys. Built once by the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from m40llm.config import ConfigError, RuntimeOptions

LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How `m40llm serve` runs. `runtime.slots` counts only if `slots` is given, else the rule of `slots.default_slots`.

    `names` are shown as the model's id, the first one, and accepted, as is the file's `general.name`; without them the id is the
    file's name without its ending.
    Seconds unless the name says otherwise.
    """

    model_path: Path
    runtime: RuntimeOptions
    slots: int | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origin: str = "*"  # "" sends no CORS headers
    max_queue: int = 64
    max_body_bytes: int = 8 << 20
    idle_timeout: float = 60.0
    heartbeat: float = 10.0
    drain: float = 30.0
    warm_up: bool = True
    exit_with_parent: bool = False
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        for flag, value, low, high in (
            ("--port", self.port, 0, 65535),
            ("--slots", self.slots, 1, 1024),
            ("--max-queue", self.max_queue, 0, 1 << 20),
            ("--max-body-mb", self.max_body_bytes / (1 << 20), 0.001, 1 << 12),
            ("--idle-timeout", self.idle_timeout, 0.1, 1e6),
            ("--heartbeat-seconds", self.heartbeat, 0.1, 1e6),
            ("--drain-seconds", self.drain, 0, 1e6),
        ):
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{flag} is {value:g}; expected {low:g}..{high:g}")
        if any(not key or not key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key is empty or holds control characters; give each key on a line of its own")
