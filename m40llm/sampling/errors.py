"""The one exception of sampling."""

from __future__ import annotations


class SamplingError(ValueError):
    """A token could not be chosen; the message is one line that names the problem and the remedy."""
