"""Attributes of spans by the conventions for generative AI and by OpenInference, as pure functions.

They contain no text of questions, answers or documents, except ``with_texts``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ragcache_wire.telemetry import semantic_conventions as names

MAX_DOCUMENTS: Final = 32
"""Most documents in the attributes of one span. A span has at most 128 attributes by default."""

Attributes = dict[str, str | int | float | bool | tuple[str, ...]]

_PARAMETERS: Final = (
    *("frequency_penalty", "logprobs", "max_completion_tokens", "max_tokens", "min_p"),
    *("min_tokens", "n", "presence_penalty", "priority", "repetition_penalty", "seed"),
    *("stream", "temperature", "top_k", "top_logprobs", "top_p"),
)
"""Fields of a request that may be exported. Other fields may have text."""
_COUNTS: Final = {
    "max_tokens": names.REQUEST_MAX_TOKENS,
    "max_completion_tokens": names.REQUEST_MAX_TOKENS,
    "seed": names.REQUEST_SEED,
}
_NUMBERS: Final = {
    "frequency_penalty": names.REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": names.REQUEST_PRESENCE_PENALTY,
    "temperature": names.REQUEST_TEMPERATURE,
    "top_p": names.REQUEST_TOP_P,
}
_MAX_INT: Final = (1 << 63) - 1


def model_call(body: Mapping[str, Any], *, is_chat: bool) -> Attributes:
    """Return the attributes of a request to a model.

    Args:
        body: Body of the request, in the format of OpenAI. Its values may be a client's own.
    """
    found: Attributes = {
        names.SPAN_KIND: names.KIND_LLM,
        names.OPERATION_NAME: names.OPERATION_CHAT if is_chat else names.OPERATION_COMPLETION,
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_STREAM: body.get("stream") is True,
    }
    if isinstance(model := body.get("model"), str):
        found[names.REQUEST_MODEL] = found[names.LLM_MODEL] = model
    parameters = {
        name: body[name] for name in _PARAMETERS if isinstance(body.get(name), int | float)
    }
    found[names.LLM_PARAMETERS] = json.dumps(parameters)
    for name, value in parameters.items():
        if isinstance(value, bool):
            continue
        if name in _NUMBERS and abs(value) <= _MAX_INT:
            found[_NUMBERS[name]] = float(value)
        elif name in _COUNTS and isinstance(value, int) and abs(value) <= _MAX_INT:
            found[_COUNTS[name]] = value
    choices = parameters.get("n", 1)
    if isinstance(choices, int) and 1 < choices <= _MAX_INT:
        found[names.REQUEST_CHOICE_COUNT] = choices
    return found


def model_usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None
) -> Attributes:
    """Return what a model has read and written.

    Args:
        cached_tokens: Prompt tokens that it did not compute. None: unknown.
    """
    found: Attributes = {
        names.USAGE_INPUT_TOKENS: prompt_tokens,
        names.USAGE_OUTPUT_TOKENS: completion_tokens,
        names.LLM_PROMPT_TOKENS: prompt_tokens,
        names.LLM_COMPLETION_TOKENS: completion_tokens,
        names.LLM_TOTAL_TOKENS: prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        found[names.USAGE_CACHE_READ_TOKENS] = cached_tokens
        found[names.LLM_CACHED_TOKENS] = cached_tokens
    return found


def finish_reasons(reasons: Sequence[str]) -> Attributes:
    """Return why a model stopped, for each choice."""
    if not reasons:
        return {}
    return {names.RESPONSE_FINISH_REASONS: tuple(reasons), names.LLM_FINISH_REASON: reasons[0]}


def retrieval(collection: str) -> Attributes:
    """Return the attributes of a search."""
    return {
        names.SPAN_KIND: names.KIND_RETRIEVER,
        names.OPERATION_NAME: names.OPERATION_RETRIEVAL,
        names.PROVIDER_NAME: names.PROVIDER,
        names.DATA_SOURCE_ID: collection,
    }


def retrieved(scores: Sequence[tuple[str, float]]) -> Attributes:
    """Return the first ``MAX_DOCUMENTS`` results of a search.

    Args:
        scores: Id and score of each one, best first.
    """
    first = [{"id": name, "score": score} for name, score in scores[:MAX_DOCUMENTS]]
    found = _documents(names.RETRIEVED_DOCUMENTS, scores)
    return {**found, names.RETRIEVAL_DOCUMENTS: json.dumps(first)}


def embedding(model: str) -> Attributes:
    """Return the attributes of an embedding of texts."""
    return {
        names.SPAN_KIND: names.KIND_EMBEDDING,
        names.OPERATION_NAME: names.OPERATION_EMBEDDINGS,
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_MODEL: model,
        names.EMBEDDING_MODEL: model,
    }


def reranking(model: str) -> Attributes:
    """Return the attributes of a reranking."""
    return {names.SPAN_KIND: names.KIND_RERANKER, names.RERANKER_MODEL: model}


def reranked(scores: Sequence[tuple[str, float]]) -> Attributes:
    """Return the first ``MAX_DOCUMENTS`` results of a reranking.

    Args:
        scores: Id and score of each one, best first.
    """
    return _documents(names.RERANKED_DOCUMENTS, scores)


def with_texts(prefix: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the texts of the first ``MAX_DOCUMENTS`` documents.

    Args:
        prefix: ``RETRIEVED_DOCUMENTS`` or ``RERANKED_DOCUMENTS``.
    """
    return {
        f"{prefix}.{index}.{names.DOCUMENT_CONTENT}": text
        for index, text in enumerate(texts[:MAX_DOCUMENTS])
    }


def _documents(prefix: str, scores: Sequence[tuple[str, float]]) -> Attributes:
    found: Attributes = {}
    for index, (name, score) in enumerate(scores[:MAX_DOCUMENTS]):
        found[f"{prefix}.{index}.{names.DOCUMENT_ID}"] = name
        found[f"{prefix}.{index}.{names.DOCUMENT_SCORE}"] = score
    return found
