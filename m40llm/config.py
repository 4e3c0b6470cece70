"""What the model is, how it runs, how it samples: three kinds of frozen configuration, resolved once at the edge.

`ModelConfig` comes from the GGUF file alone; `RuntimeOptions` from command-line flags and `M40LLM_*` variables (read in
`cli/` and `server/` only); `SamplingParams` from each request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np

from m40llm.gguf import GGUFFile, TensorType

RopeScaling = Literal["none", "linear", "llama3", "yarn"]
KVDtype = Literal["f16", "f32"]
CacheExperiment = Literal["off", "ldg", "ldg_kv"]
ProjectionBackend = Literal["auto", "fast-fits", "large-model"]

# Which pairs RoPE rotates is a property of the architecture: llama's converters already permute Q and K for the
# interleaved form, every other family keeps the half-split (NeoX) one.
_INTERLEAVED_ROPE = {"llama": True, "qwen2": False}
ARCHITECTURES = tuple(_INTERLEAVED_ROPE)


class ConfigError(ValueError):
    """A model or an option that cannot be run; the message names the key or flag and the remedy."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., RoFormer, 2021) and its context extensions.

    `interleaved` pairs elements (2i, 2i+1), otherwise (i, i + dim/2). `freq_factors` (dim/2 values, from the tensor
    `rope_freqs.weight`) divide the pair frequencies: this is how GGUF files carry Llama 3's scaling.
    """

    theta: float
    dim: int
    interleaved: bool
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyper-parameters of a decoder-only transformer, named as in STYLE: L, D, H, KH, HD, F, V."""

    arch: str
    name: str
    n_layers: int  # L
    d_model: int  # D
    n_heads: int  # H
    n_kv_heads: int  # KH
    head_dim: int  # HD
    d_ff: int  # F
    vocab_size: int  # V
    context_length: int
    rms_eps: float
    rope: RopeConfig
    tied_embeddings: bool

    @property
    def q_width(self) -> int:
        """H * HD: columns of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """KH * HD: columns of the key and of the value projection."""
        return self.n_kv_heads * self.head_dim

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ModelConfig:
        """Reads and checks the hyper-parameters.

        Raises:
            ConfigError: unknown architecture, or values that contradict each other.
            GGUFError: a required key is missing or has the wrong type (the message names it).
        """
        meta = file.metadata
        arch = meta.require("general.architecture", str)
        if arch not in _INTERLEAVED_ROPE:
            raise ConfigError(f"architecture '{arch}' is not supported; known: {', '.join(ARCHITECTURES)}")
        d_model = meta.require(f"{arch}.embedding_length", int)
        n_heads = meta.require(f"{arch}.attention.head_count", int)
        n_kv_heads = meta.optional(f"{arch}.attention.head_count_kv", int, n_heads)
        for key, value in (("embedding_length", d_model), ("attention.head_count", n_heads)):
            if value <= 0:
                raise ConfigError(f"{arch}.{key} is {value}; it must be positive")
        head_dim = meta.optional(f"{arch}.attention.key_length", int, d_model // n_heads)
        if "token_embd.weight" not in file.tensors:
            raise ConfigError(f"{file.path}: tensor 'token_embd.weight' is missing; is this a complete language model?")
        config = cls(
            arch=arch,
            name=meta.optional("general.name", str, Path(file.path).stem),
            n_layers=meta.require(f"{arch}.block_count", int),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            d_ff=meta.require(f"{arch}.feed_forward_length", int),
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            context_length=meta.require(f"{arch}.context_length", int),
            rms_eps=meta.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
            rope=_rope_from_gguf(file, arch, head_dim),
            tied_embeddings="output.weight" not in file.tensors,
        )
        config._check()
        return config

    def _check(self) -> None:
        limits = {
            "block_count": (self.n_layers, 1, 1024),
            "attention.head_count_kv": (self.n_kv_heads, 1, self.n_heads),
            "attention.key_length": (self.head_dim, 16, 256),
            "feed_forward_length": (self.d_ff, 1, 1 << 20),
            "context_length": (self.context_length, 1, 1 << 27),
            "rope.dimension_count": (self.rope.dim, 2, self.head_dim),
        }
        for key, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise ConfigError(f"{self.arch}.{key} is {value}; expected {low}..{high}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly")
        if self.head_dim % 16:
            raise ConfigError(f"head size {self.head_dim} is not a multiple of 16")
        if self.rope.dim % 2:
            raise ConfigError(f"{self.arch}.rope.dimension_count is {self.rope.dim}; it must be even")
        if not 0 < self.rms_eps < 1:
            raise ConfigError(f"{self.arch}.attention.layer_norm_rms_epsilon is {self.rms_eps}; expected 0..1")


def _rope_from_gguf(file: GGUFFile, arch: str, head_dim: int) -> RopeConfig:
    meta = file.metadata
    prefix = f"{arch}.rope.scaling"
    scaling = meta.optional(f"{prefix}.type", str, "none")
    factor = meta.optional(f"{prefix}.factor", float, 1.0)
    if f"{arch}.rope.scale_linear" in meta and scaling == "none":  # the key's name before 2023-10
        scaling, factor = "linear", meta.require(f"{arch}.rope.scale_linear", float)
    freq_factors = None
    if "rope_freqs.weight" in file.tensors:
        freq_factors = _freq_factors(file)
        scaling = "llama3" if scaling == "none" else scaling
    if scaling not in ("none", "linear", "llama3", "yarn"):
        raise ConfigError(f"{prefix}.type '{scaling}' is not supported; known: none, linear, llama3, yarn")
    if not (math.isfinite(factor) and factor > 0):
        raise ConfigError(f"{prefix}.factor is {factor}; it must be positive")
    theta = meta.optional(f"{arch}.rope.freq_base", float, 10000.0)
    if not (math.isfinite(theta) and theta > 0):
        raise ConfigError(f"{arch}.rope.freq_base is {theta}; it must be positive")
    context = meta.require(f"{arch}.context_length", int)
    return RopeConfig(
        theta=theta,
        dim=meta.optional(f"{arch}.rope.dimension_count", int, head_dim),
        interleaved=_INTERLEAVED_ROPE[arch],
        scaling=cast(RopeScaling, scaling),  # one of the four: checked above
        factor=factor,
        original_context=meta.optional(f"{prefix}.original_context_length", int, context),
        attn_factor=meta.optional(f"{prefix}.attn_factor", float, 1.0),
        beta_fast=meta.optional(f"{prefix}.yarn_beta_fast", float, 32.0),
        beta_slow=meta.optional(f"{prefix}.yarn_beta_slow", float, 1.0),
        freq_factors=freq_factors,
    )


def _freq_factors(file: GGUFFile) -> tuple[float, ...]:
    if file.tensors["rope_freqs.weight"].type is not TensorType.F32:
        raise ConfigError(f"{file.path}: tensor 'rope_freqs.weight' must be F32")
    values = file.read_rows("rope_freqs.weight", 0, 1).view(np.float32).reshape(-1)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ConfigError(f"{file.path}: tensor 'rope_freqs.weight' holds values that are not positive")
    return tuple(float(v) for v in values)


DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How to run: device, sizes and storage types. Built once by the command line or the server.

    `ctx` is the number of positions of each slot (None: the model's own, at most `DEFAULT_CONTEXT`), `slots` how many
    sequences can be in flight, `token_budget` how many rows a step may hold, `threads` CPU threads (None: all cores).
    `activation_bits` is the precision of activations in the CPU's projections: 32 costs twice the work (None: 16 with
    FP16 KV, whose own rounding weighs more, and 32 with FP32 KV, the setting for exactness).
    `max_queue` requests may wait for a slot (None: any number); a stream whose reader stands still is cancelled after
    `idle_timeout_s` (None: never).
    `chat_template` replaces the file's: Jinja2 source, or the name of one of the file's templates.
    The prefix cache keeps KV of past prompts in `cache_ram_mb` of host memory (0: none) and, with `cache_disk_dir`, in
    `cache_disk_mb` of that folder, both in MiB.
    On a card: `require_sm52` takes nothing but compute capability 5.2, `decode_graph` replays decode steps as CUDA graphs,
    `cache_experiment` loads norms ("ldg") or K and V ("ldg_kv") through the read-only cache. `projection_backend`,
    `materialize_budget_mb` (MiB; None: what is free) and `cublas`: see ops/cuda/backend.py. `decode_graph_diag_sync` times
    every replay, at the price of a wait.
    `profile` measures every group of operations; `launch_log`, `sync_log`, `alloc_log` report each step to the logger
    "m40llm.steps".
    """

    device: Literal["auto", "cpu", "cuda", "emulator"] = "auto"
    threads: int | None = None
    cpu_isa: str = "auto"
    ctx: int | None = None
    slots: int = 1
    kv_dtype: KVDtype = "f16"
    activation_bits: Literal[16, 32] | None = None
    token_budget: int = 512
    max_queue: int | None = None
    idle_timeout_s: float | None = None
    chat_template: str | None = None
    cache_ram_mb: int = 0
    cache_disk_dir: Path | None = None
    cache_disk_mb: int = 4096
    require_sm52: bool = False
    decode_graph: bool = False
    cache_experiment: CacheExperiment = "off"
    projection_backend: ProjectionBackend = "auto"
    materialize_budget_mb: int | None = None
    cublas: bool = True
    decode_graph_diag_sync: bool = False
    profile: bool = False
    launch_log: bool = False
    sync_log: bool = False
    alloc_log: bool = False

    def __post_init__(self) -> None:
        for flag, value, low, high in (
            ("--threads", self.threads, 1, 256),
            ("--ctx", self.ctx, 1, 1 << 24),
            ("--slots", self.slots, 1, 1024),
            ("--token-budget", self.token_budget, 1, 1 << 16),
            ("--max-queue", self.max_queue, 0, 1 << 20),
            ("--idle-timeout", self.idle_timeout_s, 0.01, 1e9),
            ("--cache-ram-mb", self.cache_ram_mb, 0, 1 << 24),
            ("--cache-disk-mb", self.cache_disk_mb, 1, 1 << 30),
            ("--materialize-budget-mb", self.materialize_budget_mb, 0, 1 << 24),
        ):
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{flag} is {value}; expected {low}..{high}")
        if self.kv_dtype not in ("f16", "f32"):
            raise ConfigError(f"--kv-dtype is '{self.kv_dtype}'; expected f16 or f32")
        if self.activation_bits not in (None, 16, 32):
            raise ConfigError(f"--activation-bits is {self.activation_bits}; expected 16 or 32")
        if self.decode_graph_diag_sync and not self.decode_graph:
            raise ConfigError(
                "M40LLM_DECODE_GRAPH_DIAG_SYNC times graph replays, and there are none: add --decode-graph"
            )
        if self.token_budget < self.slots:
            raise ConfigError(
                f"--token-budget {self.token_budget} is below --slots {self.slots}: a decode step needs one row each"
            )

    @property
    def resolved_activation_bits(self) -> Literal[16, 32]:
        return self.activation_bits or (16 if self.kv_dtype == "f16" else 32)

    def context_for(self, model: ModelConfig) -> int:
        """Positions per slot for `model`.

        Raises:
            ConfigError: more positions are asked for than the model was trained on.
        """
        if self.ctx is None:
            return min(model.context_length, DEFAULT_CONTEXT)
        if self.ctx > model.context_length:
            raise ConfigError(
                f"a context of {self.ctx} tokens is over the model's context of {model.context_length}; "
                "lower --ctx (serve: --ctx-per-slot or --ctx-size)"
            )
        return self.ctx


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request picks its tokens. The defaults are llama.cpp's.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repeat_penalty` 1 and penalties of 0 switch that step
    off. `max_tokens` None runs to the end of the context. `logit_bias` is pairs of (token id, added logit).
    """

    max_tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; n: the chosen token's log-probability and the n best

    @property
    def greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature == 0

    def __post_init__(self) -> None:
        ranges: tuple[tuple[str, float | None, float, float], ...] = (
            ("max_tokens", self.max_tokens, 0, math.inf),
            ("temperature", self.temperature, 0, 100),
            ("top_k", self.top_k, 0, math.inf),
            ("top_p", self.top_p, 0, 1),
            ("min_p", self.min_p, 0, 1),
            ("repeat_penalty", self.repeat_penalty, 1e-6, 1e6),
            ("repeat_last_n", self.repeat_last_n, -1, math.inf),
            ("presence_penalty", self.presence_penalty, -100, 100),
            ("frequency_penalty", self.frequency_penalty, -100, 100),
            ("seed", self.seed, 0, 2**64 - 1),
            ("logprobs", self.logprobs, 0, 100),
        )
        for name, value, low, high in ranges:
            if value is not None and not (low <= value <= high):  # also refuses NaN
                bounds = f"at least {low}" if high == math.inf else f"{low}..{high}"
                raise ConfigError(f"{name} is {value}; expected {bounds}")
        if any(not text for text in self.stop):
            raise ConfigError("stop holds an empty string; remove it")
        if any(not math.isfinite(bias) or token < 0 for token, bias in self.logit_bias):
            raise ConfigError("logit_bias must map token ids (0 or more) to finite numbers")
