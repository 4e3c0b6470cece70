"""Cosines and sines of rotary position embedding, with the context extensions that models carry: one table for all backends."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from m40llm.config import RopeConfig


def rope_frequencies(rope: RopeConfig) -> tuple[NDArray[np.float64], float]:
    """Radians per position of each pair, (dim/2,), and the factor of cosine and sine (1 except for YaRN).

    Sources: RoFormer (Su et al., 2021); linear: position interpolation (Chen et al., 2023); llama3: the reference code's
    `apply_scaling` (meta-llama/llama-models), which GGUF files carry as divisors, `rope_freqs.weight`; YaRN (Peng et al., 2023)
    with the rounding of ggml's `rope_yarn` and Hugging Face's `_compute_yarn_parameters`.
    """
    pairs = np.arange(rope.dim // 2)
    plain = rope.theta ** (-2.0 * pairs / rope.dim)
    if rope.freq_factors is not None:
        plain = plain / np.asarray(rope.freq_factors, np.float64)
    if rope.scaling == "linear":
        return plain / rope.factor, rope.attn_factor
    if rope.scaling == "llama3" and rope.freq_factors is None:
        turns = rope.original_context * plain / (2 * math.pi)  # in the original context
        span = rope.high_freq_factor - rope.low_freq_factor
        kept = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
        return plain * (kept + (1 - kept) / rope.factor), rope.attn_factor
    if rope.scaling == "yarn":

        def pair_with(turns: float) -> float:
            return rope.dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low = max(0.0, math.floor(pair_with(rope.beta_fast)))
        high = min(rope.dim - 1.0, math.ceil(pair_with(rope.beta_slow)))
        kept = 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
        return plain * (kept + (1 - kept) / rope.factor), rope.attn_factor * (1.0 + 0.1 * math.log(rope.factor))
    return plain, rope.attn_factor


def rope_tables(rope: RopeConfig, max_pos: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine of every position: two (max_pos, dim/2) float32 arrays, computed in float64."""
    frequencies, factor = rope_frequencies(rope)
    cos = np.empty((max_pos, len(frequencies)), np.float32)
    sin = np.empty_like(cos)
    for start in range(0, max_pos, 1024):  # float64 temporaries stay small
        angles = np.outer(np.arange(start, min(start + 1024, max_pos)), frequencies)
        cos[start : start + 1024] = np.cos(angles) * factor
        sin[start : start + 1024] = np.sin(angles) * factor
    return cos, sin
