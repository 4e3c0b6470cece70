"""Log-probabilities of the model's own distribution, before bias, penalties and temperature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m40llm.sampling import candidates
from m40llm.sampling.errors import SamplingError


@dataclass(frozen=True)
class TokenLogprobs:
    """``logprob`` (natural) of the chosen token; ``top``: the most probable (id, logprob) pairs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: NDArray[np.float32], token_id: int, top: int) -> TokenLogprobs:
    """Log-softmax of ``logits`` (V,) f32 at ``token_id`` and at the ``top`` (0 to V) largest, ties by lower id.

    The sum over the vocabulary is float64; a term's own error is float32's, so that a result is good to about 1e-6.
    Raises SamplingError for logits that contain NaN or +inf or nothing but -inf.
    """
    best = float(logits[int(logits.argmax())])
    if not np.isfinite(best):
        raise SamplingError(f"log-probabilities need finite logits, the largest is {best}")
    log_total = best + float(np.log(np.exp(logits - np.float32(best)).sum(dtype=np.float64)))
    ids = candidates.largest(logits, top) if top > 0 else np.empty(0, np.intp)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return TokenLogprobs(
        token_id,
        float(logits[token_id]) - log_total,
        tuple((int(i), float(logits[i]) - log_total) for i in ids),
    )
