"""One request's sampler: logits in, token id out."""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m40llm.config import SamplingParams
from m40llm.sampling import candidates
from m40llm.sampling.constraint import Constraint
from m40llm.sampling.errors import SamplingError


class Sampler:
    """Chooses the next token of one request; holds its penalty window and its random generator.

    The chain, in this order:

    0. the request's constraint, if it has one: what it does not allow is -inf;
    1. logit bias: added to the logit (-inf after it: the token is excluded);
    2. penalties over the last ``repeat_last_n`` tokens of prompt and output (0: off, -1: all of them). A token that
       occurs there c > 0 times: a logit > 0 is divided by ``repeat_penalty``, another multiplied by it, and then
       c * ``frequency_penalty`` + ``presence_penalty`` is subtracted;
    3. top-k (0: off), the k largest logits;
    4. top-p (1: off), the smallest set of most probable tokens whose probability, renormalised after top-k, reaches p;
       p = 0 keeps one token;
    5. min-p (0: off), tokens with at least p times the probability of the most probable one;
    6. temperature: logits are divided by it and one token is drawn; 0 takes the largest logit (of equals the lowest
       id) right after step 2.

    Source of order and definitions: llama.cpp, ``src/llama-sampling.cpp`` and the default chain of
    ``common/sampling.cpp`` (its samplers for which m40llm has no option are off by default there too). The repetition
    penalty is Keskar et al., "CTRL", 2019, section 4.1.

    A drawn token takes exactly one number from the request's own generator (PCG64), so that the text of a seed does not
    depend on other requests or on how a step was batched. The draw runs in order of token ids: two nearly equal logits
    that change places by another kernel's rounding do not change what is drawn.

    ``seed`` is the seed in use, also when ``params.seed`` is None and it came from the system's entropy.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        """``vocab_size`` is V of the logits. Raises SamplingError when the bias names a token outside of it."""
        self.params = params
        self.constraint = constraint
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        self._bias_ids, self._bias = _sum_bias(params.logit_bias, vocab_size)
        self._penalises = params.repeat_last_n != 0 and (
            params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self._window: deque[int] = deque()
        self._counts: Counter[int] = Counter()
        if self._penalises:
            recent = prompt_ids if params.repeat_last_n < 0 else prompt_ids[-params.repeat_last_n :]
            for token in recent:
                self._count(token)

    @property
    def needs_logits(self) -> bool:
        """False when the device's argmax of the raw logits is the answer: greedy, no bias, no penalty, no constraint."""
        return not self.params.greedy or self._penalises or len(self._bias_ids) > 0 or self._constrained

    @property
    def enough_candidates(self) -> int:
        """How many of the largest raw logits decide the next token, for `sample_candidates`; 0: all are needed.

        Top-k comes first where there is no constraint, bias or penalty, and nothing after it looks at the others.
        """
        top_k = self.params.top_k
        adjusts = self._penalises or len(self._bias_ids) > 0 or self._constrained
        return top_k if not adjusts and not self.params.greedy and 0 < top_k < self.vocab_size else 0

    @property
    def _constrained(self) -> bool:
        return self.constraint is not None and self.constraint.active

    def accept(self, token_id: int) -> None:
        """Records a token of the output, whoever chose it; call it once per token, after ``sample``.

        Raises SamplingError for a token that the constraint does not allow.
        """
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if self._penalises:
            self._count(token_id)

    def _count(self, token_id: int) -> None:
        self._window.append(token_id)
        self._counts[token_id] += 1
        if 0 < self.params.repeat_last_n < len(self._window):
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token's id for ``logits`` (V,) f32, which stay as they are.

        Raises SamplingError for another shape or dtype, for NaN or +inf, and when every token is excluded.
        """
        if logits.shape != (self.vocab_size,) or logits.dtype != np.float32:
            raise SamplingError(
                f"logits are {logits.dtype}{logits.shape}, the sampler was made for float32({self.vocab_size},)"
            )
        x = self._adjust(logits)
        best = int(x.argmax())  # NumPy's argmax stops at a NaN, so this one value tells of all of them
        if not np.isfinite(x[best]):
            raise SamplingError(_why_not_finite(x[best]))
        params = self.params
        if params.greedy:
            return best
        if 0 < params.top_k < len(x):
            ids = candidates.largest(x, params.top_k)
            return self._draw(x[ids], ids)
        return self._draw(x, None)

    def sample_candidates(self, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> int:
        """As `sample`, from the `enough_candidates` largest logits alone (k,) f32 and their ids (k,), in any order.

        Draws the same token as `sample` from the whole row. The largest logit must be finite.
        """
        order = np.argsort(ids)
        kept = order[logits[order] > -np.inf]
        return self._draw(logits[kept], ids[kept])

    def _draw(self, x: NDArray[np.float32], ids: NDArray[Any] | None) -> int:
        """The chain from top-p on. ``ids`` are the tokens of ``x``, ascending; None: ``x`` is the whole vocabulary."""
        params = self.params
        if params.top_p < 1:
            keep = candidates.nucleus(x, params.top_p)
            ids, x = keep if ids is None else ids[keep], x[keep]
        if params.min_p > 0:
            keep = candidates.near_maximum(x, params.min_p)
            ids, x = keep if ids is None else ids[keep], x[keep]
        chosen = candidates.draw(x, params.temperature, self._random.random())
        return chosen if ids is None else int(ids[chosen])

    def _adjust(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits after constraint, bias and penalties: a copy, or the input itself when none applies."""
        constrained = self._constrained
        if not self._counts and not len(self._bias_ids) and not constrained:
            return logits
        x = logits.copy()
        if constrained:
            assert self.constraint is not None
            self.constraint.restrict(x)
        if len(self._bias_ids):
            limit = np.finfo(np.float32).max  # a huge bias wins; it must not become the +inf that means a broken model
            with np.errstate(over="ignore"):
                x[self._bias_ids] = np.minimum(x[self._bias_ids] + self._bias, limit)
        if self._counts:
            params = self.params
            ids = np.fromiter(self._counts.keys(), np.intp, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            seen, penalty = x[ids], np.float32(params.repeat_penalty)
            with np.errstate(over="ignore"):
                seen = np.where(seen > 0, seen / penalty, seen * penalty)
            x[ids] = seen - counts * np.float32(params.frequency_penalty) - np.float32(params.presence_penalty)
        return x


def _sum_bias(logit_bias: Iterable[tuple[int, float]], vocab_size: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Distinct token ids and their biases; a token named twice gets the sum."""
    total: dict[int, float] = {}
    for token, bias in logit_bias:
        if not 0 <= token < vocab_size:
            raise SamplingError(f"logit_bias names token {token}, but the model's tokens are 0 to {vocab_size - 1}")
        total[token] = total.get(token, 0.0) + bias
    return np.array(list(total), np.intp), np.array(list(total.values()), np.float64)


def _why_not_finite(value: np.float32) -> str:
    if np.isneginf(value):
        return "no token is left to choose: logit_bias (or a constraint) excludes all of them; allow at least one"
    kind = "NaN" if np.isnan(value) else "+inf"
    return f"the model's logits contain {kind}: the file is damaged or an operation overflowed; try `m40llm score`"
