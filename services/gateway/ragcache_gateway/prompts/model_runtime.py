"""A served model as the gateway has loaded it: its KV space and its prompts."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_core.errors import InvalidInput
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.reuse_mode import ServedModel
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """A model, and what builds its prompts.

    Args:
        number: Position of the model in ``GatewaySettings.models``.
    """

    number: int
    served: ServedModel
    prompts: PromptBuilder


def load_models(settings: GatewaySettings) -> list[ModelRuntime]:
    """Load every model. Raises InvalidInput for one that the gateway cannot serve."""
    return [_load(settings, number) for number in range(len(settings.models))]


def _load(settings: GatewaySettings, number: int) -> ModelRuntime:
    model = settings.models[number]
    engines = [engine for engine in settings.engines if engine.model == number]
    stores_kv = any(engine.records_port is not None for engine in engines)
    folder = load_model_folder(model.source, with_weights=stores_kv)
    prompts = PromptBuilder(
        load_tokenizer(folder.path),
        max_model_len=model.max_length,
        default_max_tokens=settings.default_max_tokens,
        cache_bytes=settings.token_cache_bytes // len(settings.models),
        layout=settings.layout,
    )
    try:
        prompts.frame(Conversation.asking("x", "x"))
    except InvalidInput as error:
        # The first question must not be the one to find this out.
        raise InvalidInput(
            "RAGCACHE_OTHER_MODELS" if number else "RAGCACHE_MODEL",
            f"has {model.name!r}, which cannot hold documents: {error.problem}",
            "name a model whose chat template takes a system message",
        ) from error
    space = folder.space(model.dtype, settings.store_key_file, model.max_length, model.num_ranks)
    served = ServedModel(model.name, model.max_length, space)
    return ModelRuntime(number, served, prompts)
