"""OpenAI's chat completions in the REST API, with the ragcache extension."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from ragcache_core.errors import InvalidInput
from ragcache_core.quality.report import Verdict
from ragcache_gateway.documents.search_schema import SearchOptions
from ragcache_gateway.documents.text_type import Text
from ragcache_gateway.engines.completion import Usage

MAX_MESSAGES = 1024
MAX_STOPS = 4
_INT64 = 2**63

_SAMPLING_FIELDS = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop",
)  # fmt: skip

IGNORED_FIELDS = frozenset(
    {
        # The gateway decides which KV is reused and shared, never a client.
        "cache_salt", "ec_transfer_params", "kv_transfer_params", "priority", "prompt_cache_key",
        "prompt_cache_retention", "prompt_embeds", "prompt_token_ids", "request_id", "session_id",
        "vllm_xargs",
        # Fields for OpenAI's own platform.
        "metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "user",
    }
)  # fmt: skip
"""Fields that the gateway accepts and ignores."""

REFUSED_FIELDS: dict[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's fields that would change the answer and that the gateway does not support, with the
values that have no effect. Null has no effect in any field."""


class TextPart(BaseModel):
    """A part of a message's content; only text is supported."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: Text


def _tag(value: object) -> str | None:
    if isinstance(value, str):
        return "~text"
    return "~list" if isinstance(value, list) else None


Content = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[list[TextPart], Field(min_length=1), Tag("~list")],
    Discriminator(_tag),
]

_Stop = Annotated[Text, Field(min_length=1)]
Stop = Annotated[
    Annotated[_Stop, Tag("~text")]
    | Annotated[list[_Stop], Field(max_length=MAX_STOPS), Tag("~list")],
    Discriminator(_tag),
]


class ChatMessage(BaseModel):
    """One turn of the conversation.

    System (or developer) messages come first and replace the built-in system prompt. The last
    message is the user's question.
    """

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = Field(default=None, description="Accepted and ignored.")

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # An answer that a client sends back as history has empty fields (refusal, tool_calls, ...).
        known = cls.model_fields
        return {k: v for k, v in value.items() if k in known or v not in (None, [], {})}

    def text(self) -> str:
        """Return the content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class StreamOptions(BaseModel):
    """What a stream contains besides the answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = Field(
        default=None, description="End the stream with a chunk that has no choices but the usage."
    )
    include_obfuscation: bool | None = Field(default=None, description="Accepted and ignored.")


class RagCacheOptions(SearchOptions):
    """Which documents the answer comes from, and which stored KV it may use."""

    reuse: Literal["exact", "blend", "off"] | None = Field(
        default=None,
        description=(
            "exact: load stored KV that is bit-equal to computed KV. blend: also load KV that was "
            "computed after other chunks, and recompute a share of it; the answer may differ "
            "from that of a full computation. off: compute everything. Default: the platform's "
            "setting."
        ),
    )
    max_recompute_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        strict=True,
        description=(
            "Most that blend recomputes, as a share of the tokens taken from after other chunks; "
            "only with blend. Default: the platform's setting."
        ),
    )

    stable_prefix: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description=(
            "Leading characters of the system prompt that other requests have, too: what comes "
            "before a date, a user or a session. Their KV is stored once. Default: the gateway "
            "finds what recent system prompts have in common."
        ),
    )
    trial: bool = Field(
        default=False,
        strict=True,
        description=(
            "Measure quality: nothing of this request is stored, no earlier computation of the "
            "same prompt is used, and blend is not refused. `ragcache quality` sets it."
        ),
    )


class ChatRequest(BaseModel):
    """A question to answer from documents.

    The gateway refuses unknown fields, and OpenAI's fields that would change the answer and are not
    listed. It ignores fields that control an engine's cache, such as kv_transfer_params.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "messages": [{"role": "user", "content": "Which region does billing run in?"}],
                    "stream": True,
                    "ragcache": {"collection": "default", "top_k": 4},
                }
            ]
        },
    )

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: Text | None = Field(default=None, description="The served model; see /v1/models.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, strict=True)
    max_completion_tokens: int | None = Field(
        default=None, ge=1, strict=True, description="OpenAI's newer name of max_tokens."
    )
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64, strict=True)
    stop: Stop | None = None
    n: Literal[1] | None = Field(default=None, description="The gateway gives one answer.")
    ragcache: RagCacheOptions = Field(default_factory=RagCacheOptions)

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, value: Any) -> Any:
        return screen_fields(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_consistency(self) -> ChatRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidInput(
                "stream_options", "is only for streams", "set stream to true or leave it out"
            )
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidInput(
                "max_completion_tokens", f"differs from max_tokens {old}", "send one of the two"
            )
        return self

    def answer_tokens(self) -> int | None:
        """Return the most tokens the answer may have; None if the client sets no limit."""
        return self.max_completion_tokens or self.max_tokens

    def sampling(self) -> dict[str, Any]:
        """Return the fields that the engine gets as they are."""
        fields = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        return {name: value for name, value in fields.items() if value is not None}


def screen_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body without ignored fields. Raises InvalidInput for a refused field."""
    kept = {}
    for name, value in body.items():
        if value is None or name in IGNORED_FIELDS:
            continue
        if name in REFUSED_FIELDS:
            if value not in REFUSED_FIELDS[name]:
                raise InvalidInput(name, "is not supported", "leave it out")
            continue
        kept[name] = value
    return kept


class Citation(BaseModel):
    """A retrieved chunk that is in the prompt."""

    document_id: str
    title: str
    chunk: str = Field(description="Id of the chunk: document id, '#', position in the document.")
    heading_path: list[str]
    score: float = Field(description="Cosine similarity, or the fused or reranked score.")
    version: str = Field(description="`content_hash` of the document that the chunk is from.")
    updated: str | None = Field(description="When that version was written (ISO 8601, UTC).")
    text_preview: str


class AnswerTiming(BaseModel):
    """Time of each step, in milliseconds; null where the engine gave no record."""

    retrieve: float = Field(
        description="The whole search as the gateway measures it, embedding included."
    )
    stages: int = Field(description="How many stages the search streamed (a count, no time).")
    embed: float = Field(description="Embedding the question.")
    search: float = Field(description="Searching the index.")
    tokenize: float = Field(description="Assembling the prompt, token ids included.")
    queue: float | None = Field(default=None, description="Waiting in the engine.")
    load: float | None = Field(
        default=None, description="Loading stored KV, recomputation of blended tokens included."
    )
    recompute: float | None = Field(
        default=None, description="The part of load that recomputed blended tokens."
    )
    prefill: float | None = Field(default=None, description="Computing the rest of the prompt.")
    first_token: float = Field(description="From the request to the first token.")
    total: float


class AnswerCacheUse(BaseModel):
    """How much of the prompt's KV was reused; null where the engine gave no record."""

    prompt_tokens: int | None = None
    local_tokens: int | None = Field(
        default=None, description="Found in the engine's own prefix cache."
    )
    loaded_tokens: int | None = Field(
        default=None,
        description="Loaded from the cache store, and recomputed between or among the loaded ones.",
    )
    loaded_bytes: int | None = None
    blended_tokens: int | None = Field(
        default=None,
        description="Of loaded_tokens, those that are approximate: computed after other chunks.",
    )
    recomputed_tokens: int | None = Field(
        default=None,
        description="Of blended_tokens, those that the engine recomputed: the share that blend "
        "recomputes, and missing chunks between others.",
    )
    miss: str | None = Field(
        default=None, description="Why no more was loaded; empty if everything planned was loaded."
    )


class AnswerQuality(BaseModel):
    """What is known of the quality of blended answers, for a question that asked for a blend."""

    verdict: Verdict = Field(
        description="passed or failed: what a report of `ragcache quality`, or trials while "
        "serving, say of this model. unverified: nothing was measured."
    )
    reuse: Literal["exact", "blend"] = Field(
        description="exact: a quality target is set and the verdict is not passed, so the "
        "question was not blended."
    )


class RagCacheAnswer(BaseModel):
    """Where an answer comes from, and what it cost."""

    citations: list[Citation]
    timing_ms: AnswerTiming
    cache: AnswerCacheUse
    quality: AnswerQuality | None = Field(
        default=None, description="Null if the question did not ask for a blend."
    )
    first_token_logprobs: dict[str, float] | None = Field(
        default=None,
        description="Of the likeliest first tokens, by token id; only with `ragcache.trial`.",
    )


class AnswerMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class Choice(BaseModel):
    """The one answer of a completion."""

    index: Literal[0] = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: str = Field(description="stop, or length when max_tokens ended the answer.")


class ChatCompletion(BaseModel):
    """A complete answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = Field(description="Null if the engine did not report it.")
    ragcache: RagCacheAnswer


class Delta(BaseModel):
    """The next text of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """The one answer of a stream."""

    index: Literal[0] = 0
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None


class RagCacheChunk(BaseModel):
    """The ragcache extension: citations in the first chunk of a stream, the rest in the last."""

    citations: list[Citation] | None = None
    timing_ms: AnswerTiming | None = None
    cache: AnswerCacheUse | None = None
    quality: AnswerQuality | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a stream; its data is this object, and `[DONE]` after the last one."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    ragcache: RagCacheChunk | None = None
