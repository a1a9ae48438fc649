"""OpenAI's chat completions as the gateway takes and gives them, with the ragcache extension."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from ragcache_core.errors import InvalidInput
from ragcache_gateway.documents.text_type import Text

MAX_TOP_K = 50
MAX_MESSAGES = 1024
MAX_STOPS = 4
_INT64 = 2**63

DROPPED = frozenset(
    {
        # Where KV comes from and who shares it is the gateway's to say, never a client's.
        "cache_salt", "ec_transfer_params", "kv_transfer_params", "priority", "prompt_cache_key",
        "prompt_cache_retention", "prompt_embeds", "prompt_token_ids", "request_id", "session_id",
        "vllm_xargs",
        # Bookkeeping of OpenAI's own platform.
        "metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "user",
    }
)  # fmt: skip
"""Fields that are taken and forgotten."""

REFUSED: dict[str, tuple[object, ...]] = {
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
"""OpenAI's fields that would change the answer and are not served, with the values that ask for
nothing; null asks for nothing anywhere."""


class TextPart(BaseModel):
    """A part of a message's content; only text is served."""

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

    System (or developer) messages come first and then stand in the place of the built-in system
    prompt; the last message is the user's question.
    """

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = Field(default=None, description="Taken and forgotten.")

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # An answer sent back as history brings its empty fields along (refusal, tool_calls, ...).
        known = cls.model_fields
        return {k: v for k, v in value.items() if k in known or v not in (None, [], {})}

    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class StreamOptions(BaseModel):
    """What a stream carries besides the answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = Field(
        default=None, description="End the stream with a chunk that has no choices but the usage."
    )
    include_obfuscation: bool | None = Field(default=None, description="Taken and forgotten.")


class RagCacheOptions(BaseModel):
    """Which documents the answer comes from, and whether stored KV may be used for it."""

    model_config = ConfigDict(extra="forbid")

    collection: Text = "default"
    top_k: int = Field(
        default=4, ge=1, le=MAX_TOP_K, strict=True, description="Chunks to retrieve."
    )
    reuse: Literal["exact", "blend", "off"] | None = Field(
        default=None,
        description=(
            "exact: load stored KV that is bit-equal to computed KV. blend: also load KV that was "
            "computed behind other chunks, and compute a share of it anew; the answer may differ "
            "from that of a full computation. off: compute it all. Without it, what the platform "
            "is set to."
        ),
    )
    max_recompute: float | None = Field(
        default=None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        strict=True,
        description=(
            "Most that blend computes anew, as a share of the tokens taken from behind other "
            "chunks; only with blend. Without it, what the platform is set to."
        ),
    )


class ChatRequest(BaseModel):
    """A question to answer from documents.

    Fields of OpenAI that are not listed are refused if they would change the answer, and so are
    unknown ones. Those that steer an engine's cache (kv_transfer_params, cache_salt and the like)
    are taken and dropped.
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
    n: Literal[1] | None = Field(default=None, description="One answer is given.")
    ragcache: RagCacheOptions = Field(default_factory=RagCacheOptions)

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, value: Any) -> Any:
        return screen_fields(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidInput(
                "stream_options", "is only for streams", "set stream to true or leave it out"
            )
        longest, newer = self.max_tokens, self.max_completion_tokens
        if longest is not None and newer is not None and longest != newer:
            raise InvalidInput(
                "max_completion_tokens", f"differs from max_tokens {longest}", "send one of the two"
            )
        return self

    def answer_tokens(self) -> int | None:
        """Most tokens the answer may have; None if the client sets no bound."""
        return self.max_completion_tokens or self.max_tokens


def screen_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what is dropped. Raises InvalidInput for what is refused."""
    kept = {}
    for name, value in body.items():
        if value is None or name in DROPPED:
            continue
        if name in REFUSED:
            if value not in REFUSED[name]:
                raise InvalidInput(name, "is not supported", "leave it out")
            continue
        kept[name] = value
    return kept


class Citation(BaseModel):
    """A retrieved chunk that the prompt holds, best first."""

    document_id: str
    title: str
    chunk: str = Field(description="Id of the chunk: document id, '#', place in the document.")
    heading_path: list[str]
    score: float = Field(description="Cosine similarity of question and chunk.")
    text_preview: str


class Timing(BaseModel):
    """Where the time went, in milliseconds; null where a part gave no record."""

    retrieve: float = Field(description="The search as the gateway saw it, embedding included.")
    stages: int = Field(description="How many stages the search streamed (a count, no time).")
    embed: float = Field(description="Embedding the question.")
    search: float = Field(description="In the index.")
    tokenize: float = Field(description="Assembling the prompt, token ids included.")
    queue: float | None = Field(default=None, description="Waiting in the engine.")
    load: float | None = Field(default=None, description="Loading stored KV, repair included.")
    repair: float | None = Field(
        default=None, description="Of load, computing a share of what was blended anew."
    )
    prefill: float | None = Field(default=None, description="Computing the rest of the prompt.")
    first_token: float = Field(description="From the request to the first token.")
    total: float


class CacheUse(BaseModel):
    """How much of the prompt's KV was there already; null where the engine gave no record."""

    prompt_tokens: int | None = None
    local_tokens: int | None = Field(
        default=None, description="Found in the engine's own prefix cache."
    )
    loaded_tokens: int | None = Field(
        default=None,
        description="Loaded from the cache store, and what was repaired between or among them.",
    )
    loaded_bytes: int | None = None
    blended_tokens: int | None = Field(
        default=None,
        description="Of loaded_tokens, those that are not exact: computed behind other chunks.",
    )
    recomputed_tokens: int | None = Field(
        default=None,
        description="Of blended_tokens, those that were computed anew: the share that blend "
        "recomputes, and chunks between others of which nothing was held.",
    )
    miss: str | None = Field(
        default=None, description="Why no more was loaded; empty when all that was planned was."
    )


class RagCacheAnswer(BaseModel):
    """Where an answer comes from, and what it took."""

    citations: list[Citation]
    timing_ms: Timing
    cache: CacheUse


class PromptTokensDetails(BaseModel):
    """Share of the prompt that was not computed."""

    cached_tokens: int | None = None


class Usage(BaseModel):
    """Tokens as the engine counted them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


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
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = Field(description="Null if the engine did not say.")
    ragcache: RagCacheAnswer


class Delta(BaseModel):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """The one answer of a stream."""

    index: Literal[0] = 0
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None


class RagCacheChunk(BaseModel):
    """Citations come with the first chunk of a stream, the rest with the last one."""

    citations: list[Citation] | None = None
    timing_ms: Timing | None = None
    cache: CacheUse | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a stream; its data is this object, and `[DONE]` after the last one."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    ragcache: RagCacheChunk | None = None
