"""Log-probabilities of given tokens under the model: for evaluation, not for generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from m40llm.config import ConfigError
from m40llm.plan import Segment, StepPlan
from m40llm.sampling import TokenLogprobs, token_logprobs
from m40llm.session import DecodeSession


def score(session: DecodeSession, ids: Sequence[int], start: int, top: int) -> Iterator[TokenLogprobs]:
    """Log-probability of `ids[p]` given `ids[:p]`, and the `top` best tokens there, for every p from `start` on.

    Runs in chunks of the session's step limits, in slot 0. Natural logarithm.

    Raises:
        ConfigError: `start` is not in 1..len(ids), or the ids do not fit the context.
    """
    if not 1 <= start <= len(ids):
        raise ConfigError(f"start is {start}; expected 1..{len(ids)} (the first token has nothing before it)")
    if len(ids) - 1 > session.kv_layout.context:
        raise ConfigError(f"{len(ids)} tokens do not fit the context of {session.kv_layout.context}; raise --ctx")
    limits = session.limits
    done, end = 0, len(ids) - 1  # the last token is only predicted, never fed
    while done < end:
        # rows before `start - 1` need no logits and may use the whole step; the others are bounded by the logits buffer
        n = min(limits.rows, end - done)
        first_wanted = max(start - 1 - done, 0)
        n = min(n, first_wanted + limits.logit_rows)
        want = range(first_wanted, n)
        result = session.run(StepPlan.pack([Segment(0, done, ids[done : done + n], want)]))
        for row, local in enumerate(want):
            yield token_logprobs(result.logits[row], ids[done + local + 1], top)
        done += n
