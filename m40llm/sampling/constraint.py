"""What a request's next token may be: the protocol that the sampler asks, and a grammar's answer to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from m40llm.sampling.errors import SamplingError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Constraint(Protocol):
    """Restricts one request's tokens. One object serves one request and follows its output token by token."""

    @property
    def active(self) -> bool:
        """Whether the next token is restricted. False lets the device's own argmax stand."""

    @property
    def finished(self) -> bool:
        """Whether the output is complete and nothing may follow: the request ends without another step."""

    def restrict(self, logits: NDArray[np.float32]) -> None:
        """Sets the logits (V,) f32 of the tokens that may not come next to -inf, in place.

        Raises:
            SamplingError: the constraint went over one of its limits.
        """

    def accept(self, token_id: int) -> None:
        """Follows the output by one token; end-of-generation tokens are not part of it.

        Raises:
            SamplingError: the token was not allowed.
        """


class GrammarConstraint:
    """Follows a grammar (m40llm/sampling/grammar.py). When the text is complete, an end-of-generation token is allowed."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def active(self) -> bool:
        return True

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def restrict(self, logits: NDArray[np.float32]) -> None:
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)  # (ceil(V / 32) * 4,), bit 0 is token 0
        self._check()
        allowed = np.unpackbits(packed, count=len(logits), bitorder="little").view(np.bool_)
        np.copyto(logits, np.float32(-np.inf), where=~allowed)

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise SamplingError(f"the output's grammar cannot go on: {reason}; simplify the schema")
