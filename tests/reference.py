"""The plain NumPy reference: every op, and the whole forward pass over dequantised weights. Float64 unless asked otherwise.

Written for reading, one sequence position or head at a time where that is clearer, and shares no code with the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from m40llm.config import ModelConfig, RopeConfig
from m40llm.gguf import GGUFFile

Array = np.ndarray


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    """x: (T, D). Weight after the division by the root mean square."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):  # 1 / (1 + inf) is the 0 that is meant
        return x / (1.0 + np.exp(-x))


def swiglu(gate: Array, up: Array) -> Array:
    return silu(gate) * up


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def log_softmax(x: Array) -> Array:
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def rope_frequency(rope: RopeConfig, pair: int) -> float:
    """Radians per position of one pair. The formulas of the papers, in terms of wavelengths, one `if` per scaling."""
    frequency = 1.0 / rope.theta ** (2 * pair / rope.dim)
    if rope.freq_factors is not None:
        return frequency / rope.freq_factors[pair] / (rope.factor if rope.scaling == "linear" else 1.0)
    if rope.scaling == "none":
        return frequency
    if rope.scaling == "linear":
        return frequency / rope.factor
    wavelength = 2 * math.pi / frequency
    if rope.scaling == "llama3":
        longest = rope.original_context / rope.low_freq_factor
        shortest = rope.original_context / rope.high_freq_factor
        if wavelength < shortest:
            return frequency
        if wavelength > longest:
            return frequency / rope.factor
        smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        return (1 - smooth) * frequency / rope.factor + smooth * frequency
    # YaRN: the pairs between those that turn beta_fast and beta_slow times in the original context are blended
    turns_at = [
        rope.dim / 2 * math.log(rope.original_context / (2 * math.pi * beta), rope.theta)
        for beta in (rope.beta_fast, rope.beta_slow)
    ]
    low, high = max(math.floor(turns_at[0]), 0), min(math.ceil(turns_at[1]), rope.dim - 1)
    if pair <= low:
        return frequency
    if pair >= high:
        return frequency / rope.factor
    blend = (pair - low) / (high - low)
    return frequency * (1 - blend) + frequency / rope.factor * blend


def rope(x: Array, pos: Sequence[int], config: RopeConfig) -> Array:
    """x: (T, heads, HD) → the same, the first `config.dim` elements of every head rotated."""
    out = np.array(x, np.float64)
    scale = config.attn_factor
    if config.scaling == "yarn":
        scale *= 0.1 * math.log(config.factor) + 1.0
    half = config.dim // 2
    for pair in range(half):
        i, j = (2 * pair, 2 * pair + 1) if config.interleaved else (pair, pair + half)
        angle = (np.asarray(pos, np.float64) * rope_frequency(config, pair))[:, None]
        a, b = np.array(x[..., i], np.float64), np.array(x[..., j], np.float64)
        out[..., i] = (a * np.cos(angle) - b * np.sin(angle)) * scale
        out[..., j] = (a * np.sin(angle) + b * np.cos(angle)) * scale
    return out


def attention(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Sequence[int],
    kv_lens: Sequence[int],
    slots: Sequence[int],
    window: int = 0,
) -> Array:
    """Causal grouped-query attention. q: (T, H, HD); k, v: (slots, positions, KH, HD); → (T, H, HD).

    The last row of segment s is position kv_lens[s] - 1. window: 0, or how many positions a query sees, its own included.
    """
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[2]
    for s, slot in enumerate(slots):
        for row in range(cu_seqlens[s], cu_seqlens[s + 1]):
            end = kv_lens[s] - (cu_seqlens[s + 1] - row) + 1
            start = max(0, end - window) if window else 0
            for h in range(q.shape[1]):
                keys = k[slot, start:end, h // group].astype(np.float64)
                values = v[slot, start:end, h // group].astype(np.float64)
                out[row, h] = softmax(keys @ q[row, h].astype(np.float64) / math.sqrt(q.shape[2])) @ values
    return out


def argmax(logits: Array) -> Array:
    """(R, V) → (R,): the lowest id among the largest; NaN never wins; 0 where all are NaN."""
    return np.where(np.isnan(logits), -np.inf, logits).argmax(axis=-1).astype(np.int32)


def forward(
    file: GGUFFile, config: ModelConfig, token_ids: Sequence[int], *, kv_dtype: str = "f16", dtype: type = np.float64
) -> Array:
    """Logits (T, V) after every token of one sequence, of a llama or qwen2 model. `dtype` is that of the matrix products."""

    def weight(name: str) -> Array:
        return file.dequantize(name).astype(dtype)

    def project(x: Array, name: str) -> Array:
        y = x.astype(dtype) @ weight(f"{name}.weight").T
        return y + weight(f"{name}.bias") if f"{name}.bias" in file.tensors else y

    def store(x: Array) -> Array:  # as the KV cache does
        return x.astype(np.float32).astype(np.float16 if kv_dtype == "f16" else np.float32)

    tokens, size, pos = len(token_ids), config.head_dim, range(len(token_ids))
    embedding = file.tensors["token_embd.weight"]
    x = file.dequantize(embedding.name)[np.asarray(token_ids)].astype(np.float64)  # (T, D)
    for i in range(config.n_layers):
        block = f"blk.{i}"
        h = rmsnorm(x, weight(f"{block}.attn_norm.weight"), config.rms_eps)
        q = rope(project(h, f"{block}.attn_q").reshape(tokens, config.n_heads, size), pos, config.rope)
        k = rope(project(h, f"{block}.attn_k").reshape(tokens, config.n_kv_heads, size), pos, config.rope)
        v = project(h, f"{block}.attn_v").reshape(tokens, config.n_kv_heads, size)
        mixed = attention(q, store(k)[None], store(v)[None], [0, tokens], [tokens], [0])
        x = x + project(mixed.reshape(tokens, -1), f"{block}.attn_output")
        h = rmsnorm(x, weight(f"{block}.ffn_norm.weight"), config.rms_eps)
        x = x + project(swiglu(project(h, f"{block}.ffn_gate"), project(h, f"{block}.ffn_up")), f"{block}.ffn_down")
    x = rmsnorm(x, weight("output_norm.weight"), config.rms_eps)
    return project(x, "token_embd" if config.tied_embeddings else "output")
