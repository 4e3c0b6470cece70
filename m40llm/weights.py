"""GGUF tensors → the backend's weights. Names are the file's: `blk.3.attn_q.weight` is `weights.layers[3].attn_q`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from m40llm.config import ConfigError, ModelConfig
from m40llm.gguf import BLOCKS, GGUFFile
from m40llm.ops.protocol import Matrix, Ops, Tensor

LoadProgress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer block."""

    attn_norm: Tensor  # (D,)
    attn_q: Matrix  # (H*HD, D)
    attn_k: Matrix  # (KH*HD, D)
    attn_v: Matrix  # (KH*HD, D)
    attn_q_bias: Tensor | None  # (H*HD,)
    attn_k_bias: Tensor | None  # (KH*HD,)
    attn_v_bias: Tensor | None  # (KH*HD,)
    attn_output: Matrix  # (D, H*HD)
    ffn_norm: Tensor  # (D,)
    ffn_gate: Matrix  # (F, D)
    ffn_up: Matrix  # (F, D)
    ffn_down: Matrix  # (D, F)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model, and the RoPE table (the pairing is `ModelConfig.rope.interleaved`, decided in config.py)."""

    token_embd: Matrix  # (V, D), for row gathers
    layers: tuple[LayerWeights, ...]
    output_norm: Tensor  # (D,)
    output: Matrix  # (V, D), the token embedding again when tied
    rope: Tensor


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape (NumPy order) of every weight tensor that the model needs, by name."""
    d, f, v = config.d_model, config.d_ff, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (v, d), "output_norm.weight": (d,)}
    if not config.tied_embeddings:
        shapes["output.weight"] = (v, d)
    for i in range(config.n_layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (d,),
            f"blk.{i}.attn_q.weight": (config.q_width, d),
            f"blk.{i}.attn_k.weight": (config.kv_width, d),
            f"blk.{i}.attn_v.weight": (config.kv_width, d),
            f"blk.{i}.attn_output.weight": (d, config.q_width),
            f"blk.{i}.ffn_norm.weight": (d,),
            f"blk.{i}.ffn_gate.weight": (f, d),
            f"blk.{i}.ffn_up.weight": (f, d),
            f"blk.{i}.ffn_down.weight": (d, f),
        }
    return shapes


def _optional_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    widths = {"q": config.q_width, "k": config.kv_width, "v": config.kv_width}
    return {f"blk.{i}.attn_{part}.bias": (n,) for i in range(config.n_layers) for part, n in widths.items()}


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Compares the file's tensor table with what the model needs, before anything is allocated.

    Raises:
        ConfigError: a tensor is missing, has another shape, has a type that is not supported, or is not known at all.
    """
    required, optional = expected_shapes(config), _optional_shapes(config)
    for name in required:
        if name not in file.tensors:
            raise ConfigError(
                f"{file.path}: tensor '{name}' is missing; the file is incomplete or of another architecture"
            )
    for name, info in file.tensors.items():
        if name == "rope_freqs.weight":
            wanted: tuple[int, ...] | None = (config.rope.dim // 2,)
        else:
            wanted = required.get(name, optional.get(name))
        if wanted is None:
            raise ConfigError(
                f"{file.path}: tensor '{name}' has no place in a {config.arch} model; this variant is not supported"
            )
        if info.shape != wanted:
            raise ConfigError(f"{file.path}: tensor '{name}' has shape {info.shape}; expected {wanted}")
        if info.type not in BLOCKS:
            known = ", ".join(t.name for t in BLOCKS)
            raise ConfigError(
                f"{file.path}: tensor '{name}' has type {info.type.name}, which is not supported; known: {known}"
            )


def load_weights(
    file: GGUFFile, config: ModelConfig, ops: Ops, max_pos: int, progress: LoadProgress | None = None
) -> ModelWeights:
    """Loads and packs every tensor through `ops`.

    Raises:
        ConfigError: see `check_tensors`.
    """
    check_tensors(file, config)
    done, total = 0, sum(info.nbytes for info in file.tensors.values())

    def advance(name: str) -> None:
        nonlocal done
        done += file.tensors[name].nbytes
        if progress:
            progress(done, total)

    def matrix(name: str) -> Matrix:
        loaded = ops.load_matrix(file, name)
        advance(name)
        return loaded

    def vector(name: str) -> Tensor:
        loaded = ops.load_vector(file, name)
        advance(name)
        return loaded

    def bias(name: str) -> Tensor | None:
        return vector(name) if name in file.tensors else None

    def layer(i: int) -> LayerWeights:
        return LayerWeights(
            attn_norm=vector(f"blk.{i}.attn_norm.weight"),
            attn_q=matrix(f"blk.{i}.attn_q.weight"),
            attn_k=matrix(f"blk.{i}.attn_k.weight"),
            attn_v=matrix(f"blk.{i}.attn_v.weight"),
            attn_q_bias=bias(f"blk.{i}.attn_q.bias"),
            attn_k_bias=bias(f"blk.{i}.attn_k.bias"),
            attn_v_bias=bias(f"blk.{i}.attn_v.bias"),
            attn_output=matrix(f"blk.{i}.attn_output.weight"),
            ffn_norm=vector(f"blk.{i}.ffn_norm.weight"),
            ffn_gate=matrix(f"blk.{i}.ffn_gate.weight"),
            ffn_up=matrix(f"blk.{i}.ffn_up.weight"),
            ffn_down=matrix(f"blk.{i}.ffn_down.weight"),
        )

    return ModelWeights(
        token_embd=ops.load_embedding(file, "token_embd.weight"),
        layers=tuple(layer(i) for i in range(config.n_layers)),
        output_norm=vector("output_norm.weight"),
        output=matrix("token_embd.weight" if config.tied_embeddings else "output.weight"),
        rope=ops.load_rope(config, max_pos),
    )
