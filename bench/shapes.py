"""Shapes of well-known models, for benches that need sizes and types but no weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from m40llm.config import ModelConfig, RopeConfig
from m40llm.gguf import TensorType

F32, F16, Q8_0, Q4_0, Q4_1 = TensorType.F32, TensorType.F16, TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_1
Q4_K, Q6_K = TensorType.Q4_K, TensorType.Q6_K


@dataclass(frozen=True, slots=True)
class LayerKind:
    """`count` layers whose matrices have these types: `most`, but V and the down projection."""

    count: int
    most: TensorType
    value: TensorType
    down: TensorType


def alike(count: int, kind: TensorType) -> tuple[LayerKind, ...]:
    return (LayerKind(count, kind, kind, kind),)


def q4_k_m(count: int) -> tuple[LayerKind, ...]:
    """The mixture of llama.cpp's Q4_K_M: half of the layers have V and down in Q6_K."""
    more = sum(i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2 for i in range(count))
    return (LayerKind(more, Q4_K, Q6_K, Q6_K), LayerKind(count - more, Q4_K, Q4_K, Q4_K))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes as in STYLE (D, H, KH, HD, F, V); `head` is the type of the output projection, `embedding` of the table."""

    name: str
    arch: str
    d: int
    h: int
    kh: int
    hd: int
    f: int
    v: int
    layers: tuple[LayerKind, ...]
    embedding: TensorType
    head: TensorType
    tied: bool = True

    @property
    def layer_count(self) -> int:
        return sum(kind.count for kind in self.layers)

    @property
    def biased(self) -> bool:
        return self.arch == "qwen2"

    def layer_matrices(self, kind: LayerKind) -> Iterator[tuple[str, TensorType, int, int]]:
        """(name without `blk.N.` and `.weight`, type, N, K) of every matrix of such a layer."""
        q, kv = self.h * self.hd, self.kh * self.hd
        yield "attn_q", kind.most, q, self.d
        yield "attn_k", kind.most, kv, self.d
        yield "attn_v", kind.value, kv, self.d
        yield "attn_output", kind.most, self.d, q
        yield "ffn_gate", kind.most, self.f, self.d
        yield "ffn_up", kind.most, self.f, self.d
        yield "ffn_down", kind.down, self.d, self.f

    def config(self, layers: int, context: int) -> ModelConfig:
        """The configuration of such a model with `layers` layers."""
        rope = RopeConfig(theta=1e4, dim=self.hd, interleaved=self.arch == "llama")
        return ModelConfig(
            arch=self.arch,
            name=self.name,
            n_layers=layers,
            d_model=self.d,
            n_heads=self.h,
            n_kv_heads=self.kh,
            head_dim=self.hd,
            d_ff=self.f,
            vocab_size=self.v,
            context_length=context,
            rms_eps=1e-5,
            rope=rope,
            tied_embeddings=self.tied,
        )


_QWEN_3B = ("qwen2", 2048, 16, 2, 128, 11008, 151936)
_LLAMA_7B = ("llama", 4096, 32, 32, 128, 11008, 32000)
_LLAMA_8B = ("llama", 4096, 32, 8, 128, 14336, 128256)

SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("tiny-q4_1", "llama", 1024, 8, 2, 64, 2048, 2048, alike(8, Q4_1), Q8_0, Q8_0),
        ModelShape("tiny-q4_k_m", "qwen2", 1024, 8, 1, 128, 2048, 2048, q4_k_m(8), Q6_K, Q6_K),
        ModelShape("smollm2-135m-q4_1", "llama", 576, 9, 3, 64, 1536, 49152, alike(30, Q4_1), Q8_0, Q8_0),
        ModelShape("qwen2.5-1.5b-q4_k_m", "qwen2", 1536, 12, 2, 128, 8960, 151936, q4_k_m(28), Q6_K, Q6_K),
        ModelShape("qwen2.5-3b-q8_0", *_QWEN_3B, alike(36, Q8_0), Q8_0, Q8_0),
        ModelShape("qwen2.5-3b-q4_0", *_QWEN_3B, alike(36, Q4_0), Q6_K, Q6_K),
        ModelShape("qwen2.5-3b-q4_k_m", *_QWEN_3B, q4_k_m(36), Q6_K, Q6_K),
        ModelShape("qwen2.5-3b-f16", *_QWEN_3B, alike(36, F16), F16, F16),
        ModelShape("llama2-7b-q4_0", *_LLAMA_7B, alike(32, Q4_0), Q4_0, Q6_K, tied=False),
        ModelShape("llama3-8b-q8_0", *_LLAMA_8B, alike(32, Q8_0), Q8_0, Q8_0, tied=False),
    )
}
