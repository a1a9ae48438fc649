"""Names of OpenTelemetry's conventions for generative AI and of OpenInference, each in one version.

The conventions are in development, so a name may change in a later version. This module alone
follows them. Spans have both kinds of names, because trace viewers read one kind or the other.

Source: semantic conventions of OpenTelemetry for generative AI; those of OpenInference.
"""

from __future__ import annotations

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""Version of the conventions of OpenTelemetry. OTLP exports of metrics carry it."""

OPENINFERENCE_VERSION: Final = "0.1.42"
"""Version of the package openinference-semantic-conventions that has the names below."""

SERVER_TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
SERVER_REQUEST_DURATION: Final = "gen_ai.server.request.duration"
SERVER_TIME_PER_OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"
CLIENT_TOKEN_USAGE: Final = "gen_ai.client.token.usage"

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
TOKEN_TYPE: Final = "gen_ai.token.type"
REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STREAM: Final = "gen_ai.request.stream"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
DATA_SOURCE_ID: Final = "gen_ai.data_source.id"
RETRIEVAL_DOCUMENTS: Final = "gen_ai.retrieval.documents"
RETRIEVAL_QUERY: Final = "gen_ai.retrieval.query.text"
EMBEDDING_DIMENSION: Final = "gen_ai.embeddings.dimension.count"

OPERATION_CHAT: Final = "chat"
OPERATION_COMPLETION: Final = "text_completion"
OPERATION_RETRIEVAL: Final = "retrieval"
OPERATION_EMBEDDINGS: Final = "embeddings"
PROVIDER: Final = "ragcache"
INPUT_TOKENS: Final = "input"
OUTPUT_TOKENS: Final = "output"

FIRST_TOKEN_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0),
)
"""Those of the conventions, and three more for the longest timeout of a first token."""
REQUEST_BUCKETS_S: Final = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12),
    *(10.24, 20.48, 40.96, 81.92),
)
OUTPUT_TOKEN_BUCKETS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
USAGE_BUCKETS_TOKENS: Final = tuple(float(4**power) for power in range(14))

SPAN_KIND: Final = "openinference.span.kind"
KIND_CHAIN: Final = "CHAIN"
KIND_LLM: Final = "LLM"
KIND_RETRIEVER: Final = "RETRIEVER"
KIND_EMBEDDING: Final = "EMBEDDING"
KIND_RERANKER: Final = "RERANKER"

INPUT_VALUE: Final = "input.value"
OUTPUT_VALUE: Final = "output.value"
INPUT_TYPE: Final = "input.mime_type"
LLM_MODEL: Final = "llm.model_name"
LLM_PARAMETERS: Final = "llm.invocation_parameters"
LLM_FINISH_REASON: Final = "llm.finish_reason"
LLM_PROMPT_TOKENS: Final = "llm.token_count.prompt"
LLM_COMPLETION_TOKENS: Final = "llm.token_count.completion"
LLM_TOTAL_TOKENS: Final = "llm.token_count.total"
LLM_CACHED_TOKENS: Final = "llm.token_count.prompt_details.cache_read"
EMBEDDING_MODEL: Final = "embedding.model_name"
RERANKER_MODEL: Final = "reranker.model_name"
RERANKER_QUERY: Final = "reranker.query"
RERANKED_DOCUMENTS: Final = "reranker.output_documents"
"""Prefix of the attributes of each document: its index from 0, and a name of a document."""
RETRIEVED_DOCUMENTS: Final = "retrieval.documents"
"""As RERANKED_DOCUMENTS."""
DOCUMENT_ID: Final = "document.id"
DOCUMENT_SCORE: Final = "document.score"
DOCUMENT_CONTENT: Final = "document.content"
