"""Exceptions of the hub."""

from __future__ import annotations


class HubError(Exception):
    """A model could not be fetched; the message is one line that names the problem and the remedy."""


class SpecError(HubError, ValueError):
    """No model has that name, or the name is malformed."""
