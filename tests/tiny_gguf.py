"""Build small, complete GGUF models for tests: random weights, llama.cpp's names, a byte-level tokenizer.

The ``gguf`` package writes the files, so the reader under test is not its own witness.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from m40llm.gguf import BLOCKS, TensorType, dequantize

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Each merge joins tokens that exist by then; as many are used as the vocabulary has room for.
MERGES = (
    "Ġ t", "h e", "i n", "e r", "Ġ a", "r e", "o n", "Ġt he", "a t", "Ġ s", "e n", "Ġ w", "o r", "Ġ c", "i t", "i s",
    "a n", "Ġ o", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p", "o u", "Ġa n", "a l", "a r", "Ġt o", "Ġ m", "Ġo f", "Ġ in",
    "Ġ d", "Ġ h", "Ġan d", "i c", "a s", "l e", "Ġt h", "i on", "o m", "l l", "en t", "Ġ n", "Ġ l", "s t", "Ġ re",
    "v e",
)  # fmt: skip
# Where a random block keeps its float16 scales (of d, and of dmin): the types that the gguf package cannot quantise to.
_SCALE_BYTES = {
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ4_NL: (0,),
    TensorType.IQ4_XS: (0,),
}
# dmin / d that centres uniformly random blocks near zero: mean scale · mean q / mean minimum
_CENTRE = {TensorType.Q2_K: 1.5, TensorType.Q4_K: 7.5, TensorType.Q5_K: 15.5}


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-in for each byte value, index = byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in kept]
    table = {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [table[b] for b in range(256)]


def random_blocks(rng: np.random.Generator, kind: TensorType, rows: int, columns: int, scale: float) -> np.ndarray:
    """Random quantised weights of standard deviation about ``scale``: (rows, row_bytes) uint8, any bits."""
    block = BLOCKS[kind]
    row_bytes = block.row_bytes(columns)
    offsets = _SCALE_BYTES.get(kind)
    if offsets is None:
        weights = (rng.standard_normal((rows, columns)) * scale).astype(np.float32)
        packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(int(kind)))
        return np.ascontiguousarray(packed).view(np.uint8).reshape(rows, row_bytes)
    data = rng.integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    blocks = data.reshape(-1, block.type_size)
    ratios = (1.0, _CENTRE.get(kind, 1.0))

    def set_scales(d: np.ndarray) -> None:
        for byte, ratio in zip(offsets, ratios, strict=False):
            blocks[:, byte : byte + 2] = (d * ratio).astype("<f2").view(np.uint8).reshape(-1, 2)

    set_scales(np.full(len(blocks), 2**-6))
    spread = float(dequantize(data, kind).std()) * 2**6
    set_scales(scale / spread * rng.uniform(0.7, 1.3, len(blocks)))  # blocks differ, as they do in real tensors
    return data


def build_tiny_gguf(
    path: str | os.PathLike[str],
    *,
    arch: str = "llama",
    n_layers: int = 2,
    d_model: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    d_ff: int = 128,
    vocab: int = 320,
    context: int = 512,
    types: Mapping[str, TensorType] | None = None,
    tied: bool = False,
    rope_base: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_factors: np.ndarray | None = None,
    sliding_window: int = 32,
    pre: str | None = None,
    chat_template: str | None = CHATML,
    metadata: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model of ``arch`` (llama, qwen2, qwen3, gemma3) to ``path`` and return the path.

    Args:
        types: tensor-name pattern (fnmatch) → type of the matrices that match, first match wins; the others, and all
            vectors, are F32. K-quants and IQ4 need a width that is a multiple of the block and get random blocks.
        tied: leave ``output.weight`` out.
        rope_scaling: ``<arch>.rope.scaling.<key>`` values, such as ``{"type": "yarn", "factor": 4.0,
            "original_context_length": 128}``.
        rope_factors: (head_dim / 2,) written as ``rope_freqs.weight``, the form that Llama 3's scaling takes in GGUF.
        metadata: further keys, or other values for these; None as a value removes the key.
    """
    rng = np.random.default_rng(seed)
    head = head_dim or d_model // n_heads
    writer = gguf.GGUFWriter(None, arch)
    tokens, merges, kinds = _vocabulary(vocab)
    keys: dict[str, Any] = {
        "general.name": f"tiny {arch}",
        f"{arch}.vocab_size": vocab,
        f"{arch}.block_count": n_layers,
        f"{arch}.context_length": context,
        f"{arch}.embedding_length": d_model,
        f"{arch}.feed_forward_length": d_ff,
        f"{arch}.attention.head_count": n_heads,
        f"{arch}.attention.head_count_kv": n_kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.key_length": head,
        f"{arch}.attention.value_length": head,
        f"{arch}.rope.dimension_count": head,
        f"{arch}.rope.freq_base": float(rope_base),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre or ("qwen2" if arch.startswith("qwen") else "gpt-2"),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index(SPECIALS[0]),
        "tokenizer.ggml.eos_token_id": tokens.index(SPECIALS[2]),
        "tokenizer.ggml.add_bos_token": False,
    }
    if arch == "gemma3":
        keys[f"{arch}.attention.sliding_window"] = sliding_window
    if chat_template is not None:
        keys["tokenizer.chat_template"] = chat_template
    keys |= {f"{arch}.rope.scaling.{key}": value for key, value in (rope_scaling or {}).items()}
    for key, value in (keys | dict(metadata or {})).items():
        if value is not None:
            _add_key(writer, key, value)

    for name, shape in _tensor_shapes(arch, n_layers, d_model, n_heads, n_kv_heads, head, d_ff, vocab, tied).items():
        kind = next((t for pattern, t in (types or {}).items() if fnmatch.fnmatch(name, pattern)), TensorType.F32)
        if len(shape) == 1:
            norm = name.endswith("norm.weight")
            writer.add_tensor(name, (norm + 0.1 * rng.standard_normal(shape)).astype(np.float32))
            continue
        scale = 1.0 if name == "token_embd.weight" else shape[1] ** -0.5
        data = random_blocks(rng, kind, *shape, scale)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(int(kind)))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, dtype=np.float32))

    writer.write_header_to_file(Path(path))
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _vocabulary(size: int) -> tuple[list[str], list[str], list[int]]:
    merges = list(MERGES[: max(0, size - 256 - len(SPECIALS))])
    tokens = byte_tokens() + [merge.replace(" ", "") for merge in merges]
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(SPECIALS)
    tokens += SPECIALS
    if size < len(tokens):
        raise ValueError(f"vocab must be at least {256 + len(SPECIALS)}: every byte and the control tokens")
    padding = [f"[PAD{index}]" for index in range(len(tokens), size)]
    return tokens + padding, merges, [int(k) for k in kinds] + [int(gguf.TokenType.UNUSED)] * len(padding)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensor_shapes(
    arch: str, layers: int, d: int, heads: int, kv_heads: int, head: int, ff: int, vocab: int, tied: bool
) -> dict[str, tuple[int, ...]]:
    """Tensor names as llama.cpp writes them, with NumPy shapes: matrices are (out, in)."""
    if arch not in ("llama", "qwen2", "qwen3", "gemma3"):
        raise ValueError(f"no recipe for architecture {arch}")
    q, kv = heads * head, kv_heads * head
    block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (d,)}
    for part, rows in (("q", q), ("k", kv), ("v", kv)):
        block[f"attn_{part}.weight"] = (rows, d)
        if arch == "qwen2":
            block[f"attn_{part}.bias"] = (rows,)
    if arch in ("qwen3", "gemma3"):
        block |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
    block["attn_output.weight"] = (d, q)
    if arch == "gemma3":
        block |= {"post_attention_norm.weight": (d,), "post_ffw_norm.weight": (d,)}
    block |= {
        "ffn_norm.weight": (d,),
        "ffn_gate.weight": (ff, d),
        "ffn_up.weight": (ff, d),
        "ffn_down.weight": (d, ff),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, d)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    shapes["output_norm.weight"] = (d,)
    if not tied:
        shapes["output.weight"] = (vocab, d)
    return shapes
