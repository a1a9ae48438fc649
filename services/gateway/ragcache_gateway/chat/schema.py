"""OpenAI's chat completions in the REST API, with the ragcache extension."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator

from ragcache_core.access.json_bounds import MAX_VALUES
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Precision
from ragcache_core.quality.report import Verdict
from ragcache_gateway.chat.client_passages import MAX_PASSAGES, ClientPassage
from ragcache_gateway.chat.content import MessageText, media_warnings, read_content
from ragcache_gateway.documents.search_schema import PAGE_END_HELP, PAGE_HELP, SearchOptions
from ragcache_gateway.engines.completion import CONTROL_FIELDS, Usage
from ragcache_gateway.explain.schema import Explanation
from ragcache_gateway.prompts.conversation import Layout
from ragcache_wire.rest_fields.fields import INTEGRAL, PositiveCount, Text

RefusedFields = Mapping[str, tuple[tuple[object, ...], str]]
"""Fields that no engine acts on although clients expect it: the values that have no effect, and
what to do instead."""

_Location = tuple[int | str, ...]

MAX_DEPTH = 64
"""Deepest nesting of values in a request. JSON schemas of tools need less."""

_SEND_TEXT = "send text; other content is not supported"


def screen_fields(body: Mapping[str, Any], refused: RefusedFields) -> dict[str, Any]:
    """Return the body without nulls and without the fields that only the gateway may set.

    Raises:
        InvalidInput: A field is refused, or a value cannot be passed on.
    """
    kept = {}
    for name, value in body.items():
        if value is None or name in CONTROL_FIELDS:
            continue
        if name in refused:
            neutral, fix = refused[name]
            if value not in neutral:
                raise InvalidInput(name, "is not supported", fix)
            continue
        kept[name] = value
    check_values(kept)
    return kept


def check_values(fields: Mapping[str, Any]) -> None:
    """Refuse values that cannot be part of a prompt, or are nested too deep.

    Args:
        fields: Values by their paths.

    Raises:
        InvalidInput: It names the path of the value.
    """
    # A path is built for an error only: a request has thousands of values.
    stack: list[tuple[_Location, Mapping[str, Any] | list[Any]]] = [((), fields)]
    while stack:
        location, container = stack.pop()
        if len(location) > MAX_DEPTH:
            problem = f"is nested over {MAX_DEPTH} levels deep"
            raise InvalidInput(_path(location), problem, "send less")
        items: Iterable[tuple[int | str, Any]] = (
            enumerate(container) if isinstance(container, list) else container.items()
        )
        for key, value in items:
            if fault := _fault(key):
                raise InvalidInput(_path(location), *fault)
            if isinstance(value, dict | list):
                stack.append(((*location, key), value))
            elif fault := _fault(value):
                raise InvalidInput(_path((*location, key)), *fault)


def _path(location: _Location) -> str:
    first, *rest = location or ("body",)
    inner = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in rest)
    return "".join((str(first), *inner))


def _fault(value: object) -> tuple[str, str] | None:
    """Return what is wrong with a value or a name, and the fix."""
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a finite number", "send a number"
    if isinstance(value, str):
        # The prompt builder marks the position of the chunks with NUL.
        if "\0" in value:
            return "holds a NUL character", _SEND_TEXT
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                return "holds half of a surrogate pair", "send whole characters"
    return None


MAX_MESSAGES = MAX_VALUES
MAX_PARTS = MAX_VALUES
MAX_SEARCHES = 8
MAX_DEADLINE_MS = 3_600_000

_TEXT_ONLY: Final = "leave it out; messages and answers are text"

REFUSED_FIELDS: Final[RefusedFields] = {
    "audio": ((), _TEXT_ONLY),
    "chat_template": ((), "leave it out; the served model's template applies"),
    "echo": ((False,), "leave it out; the prompt holds documents, which an answer does not repeat"),
    "function_call": (("none", "auto"), "send tool_choice, which has replaced it"),
    "functions": (([],), "send tools, which have replaced it"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "web_search_options": ((), "leave it out; name a collection in ragcache.collection"),
}
"""Fields of chat completions that vLLM ignores, or that contradict retrieval: the values that have
no effect, and the fix. Null has no effect in any field."""


def _tag(value: object) -> str | None:
    if isinstance(value, str):
        return "~text"
    return "~list" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[str | dict[str, Any]], Field(max_length=MAX_PARTS), Tag("~list")],
    Discriminator(_tag),
]


class ChatMessage(BaseModel):
    """One turn of the conversation.

    System (or developer) messages at the beginning replace the built-in system prompt. The user's
    last message is the question. Tool calls and their results are turns like others.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = Field(
        default=None,
        description="A text, or parts of the types text, refusal and thinking. Thoughts are not "
        "repeated to the model. Images, audio, videos and files are left out, and "
        "`ragcache.warnings` says so. Null is empty; a user's message may not have it.",
    )
    refusal: str | None = Field(default=None, description="Content of an answer that refused.")
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    _read: MessageText = PrivateAttr(default=MessageText(""))

    def read(self, path: str) -> None:
        """Read the content.

        Args:
            path: Of the message, for errors.

        Raises:
            InvalidInput: A part cannot be read. The error names it.
        """
        found = read_content(self.content, f"{path}.content")
        if self.refusal and self.role == "assistant" and not found.text:
            found = replace(found, text=self.refusal, is_plain=False)
        # An engine takes null from the model alone, beside its tool calls.
        is_empty = self.content is None and self.role != "assistant"
        self._read = replace(found, is_plain=False) if is_empty else found

    @property
    def body(self) -> MessageText:
        """What the prompt has of the content."""
        return self._read


class StreamOptions(BaseModel):
    """What a stream contains besides the answer."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = Field(
        default=None, description="End the stream with a chunk that has no choices but the usage."
    )


DeadlineMilliseconds = Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS, strict=True), INTEGRAL]


class RagCacheOptions(SearchOptions):
    """Which documents the answer comes from, and which stored KV it may use."""

    retrieve: bool | None = Field(
        default=None,
        description="Whether to answer from documents. Default: true for chats and responses; for "
        "completions, true if this object is given.",
    )
    passages: Annotated[list[ClientPassage], Field(max_length=MAX_PASSAGES)] | None = Field(
        default=None,
        description="What the client has retrieved itself, best first: the answer comes from these "
        "texts, and nothing is searched. Their KV is stored and reused as that of documents. The "
        "options of a search have no effect beside it and are refused.",
    )
    rewrite: Literal["off", "rules", "model"] | None = Field(
        default=None,
        description="How the search query is made from a conversation. off: the user's last "
        "message. rules: with the nouns of earlier turns where the message refers to them. model: "
        "the served model writes it. Default: the platform's setting.",
    )
    max_searches: Annotated[int, Field(ge=1, le=MAX_SEARCHES, strict=True), INTEGRAL] = Field(
        default=1,
        description="Most searches for one answer. With more than one, the served model may ask "
        "for another search after it has seen what was found.",
    )
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
    order: Literal["rank", "cached"] | None = Field(
        default=None,
        description=(
            "rank: the prompt has the documents best first. cached: it begins with documents whose "
            "KV is stored in this order, so that more is reused; the answer may differ, because "
            "models attend to positions differently. Citations are best first in both. Default: "
            "the platform's setting."
        ),
    )
    stable_prefix: PositiveCount | None = Field(
        default=None,
        description=(
            "Leading characters of the system prompt that other requests have, too: what comes "
            "before a date, a user or a session. Their KV is stored once. Default: the gateway "
            "finds what recent system prompts have in common."
        ),
    )
    layout: Layout | None = Field(
        default=None,
        description=(
            "system-first: the prompt begins with the system prompt. documents-first: the system "
            "prompt follows the documents, but for its stable_prefix. A date or a user in it then "
            "does not prevent the reuse of their KV. The answer may differ. Default: the "
            "platform's setting."
        ),
    )
    cite: Literal["inline"] | None = Field(
        default=None,
        description=(
            "inline: the answer has markers such as [1] after sentences that a chunk supports; the "
            "number is that of the citation. `ragcache.inline_citations` has the quoted text. Only "
            "for chats and responses that are texts."
        ),
    )
    deadline_ms: DeadlineMilliseconds | None = Field(
        default=None,
        description=(
            "Milliseconds from the arrival of the request until its first token must have come; "
            "without `stream`, until the whole answer must have. A question that is predicted to "
            "be late is answered with 429, and one whose time has passed with 504. The header "
            "X-RagCache-Deadline-Ms sets it, too; the lower one counts."
        ),
    )
    explain: bool = Field(
        default=False,
        strict=True,
        description="Explain for each chunk where its KV came from (`ragcache.explanation`).",
    )
    events: bool = Field(
        default=False,
        strict=True,
        description=(
            "Begin a stream with events named `ragcache.stage`, which say what happens before the "
            "first token. Clients of OpenAI's do not expect them. Only for streams."
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

    precision: str | None = Field(
        default=None,
        max_length=32,
        description=(
            "Measure quality as if all blended values were stored in these codecs of keys and "
            "values, like `int8` or `int8/e4m3`. Only for blend with `trial`."
        ),
    )

    def rounding(self, mode: str) -> Precision | None:
        """Return the precision to measure. Raises InvalidInput."""
        if self.precision is None:
            return None
        if not self.trial or mode != "blend":
            raise InvalidInput(
                "ragcache.precision",
                "is given without trial and blend",
                "leave it out: cacheStore.precision of the RagCache sets it",
            )
        try:
            return Precision.parse(self.precision)
        except ValueError as error:
            raise InvalidInput(
                "ragcache.precision", f"is wrong: {error}", "name codecs, like int8"
            ) from error

    @model_validator(mode="after")
    def _check_passages(self) -> Self:
        if self.passages is not None:
            searching = {*SearchOptions.model_fields, "retrieve", "rewrite", "max_searches"}
            for name in sorted(searching & self.model_fields_set):
                raise InvalidInput(
                    f"ragcache.{name}",
                    "is for searches, and ragcache.passages replaces the search",
                    "leave out one of the two",
                )
        return self

    def retrieves(self, *, default: bool) -> bool:
        """Whether documents are searched."""
        if self.passages is not None:
            return False
        return default if self.retrieve is None else self.retrieve

    def lower_deadline(self, deadline_ms: int | None) -> None:
        """Apply a second deadline, in milliseconds: the lower one counts."""
        if deadline_ms is not None:
            self.deadline_ms = min(deadline_ms, self.deadline_ms or deadline_ms)

    def check_events(self, stream: bool | None) -> None:
        """Refuse events for an answer in one piece. Raises InvalidInput."""
        if self.events and not stream:
            raise InvalidInput(
                "ragcache.events", "is only for streams", "set stream to true or leave it out"
            )


def allow_null(schema: dict[str, Any]) -> None:
    """Let a field's schema allow null, which requests may send for its default."""
    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"type": "null"}]


class AnswerRequest(BaseModel):
    """What every request for an answer has. Further fields reach the engine as they are."""

    REFUSED: ClassVar[RefusedFields]

    model_config = ConfigDict(extra="allow", strict=True)

    model: Text | None = Field(default=None, description="The served model; see /v1/models.")
    stream: bool | None = None
    ragcache: RagCacheOptions = Field(default_factory=RagCacheOptions, json_schema_extra=allow_null)

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, value: Any) -> Any:
        return screen_fields(value, cls.REFUSED) if isinstance(value, dict) else value


class EndpointRequest(AnswerRequest):
    """A request in the format of an engine's own endpoint."""

    ID_PREFIX: ClassVar[str]
    MAX_TOKENS_FIELD: ClassVar[str]

    stream_options: StreamOptions | None = None
    max_tokens: PositiveCount | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidInput(
                "stream_options", "is only for streams", "set stream to true or leave it out"
            )
        self.ragcache.check_events(self.stream)
        return self

    def answer_tokens(self) -> int | None:
        """Return the most tokens the answer may have; None if the client sets no limit."""
        return self.max_tokens

    def num_choices(self) -> int:
        """Return the number of answers in the response. The engine refuses an invalid ``n``."""
        n = (self.model_extra or {}).get("n", 1)
        return n if isinstance(n, int) and n > 0 else 1


class ChatRequest(EndpointRequest):
    """A question to answer from documents.

    All further fields of OpenAI and vLLM reach the engine as they are: tools, response formats, log
    probabilities, sampling. The gateway ignores fields that control an engine's cache or its queue,
    such as kv_transfer_params and priority.
    """

    ID_PREFIX: ClassVar = "chatcmpl"
    MAX_TOKENS_FIELD: ClassVar = "max_completion_tokens"
    REFUSED: ClassVar = REFUSED_FIELDS

    model_config = ConfigDict(
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
    max_completion_tokens: PositiveCount | None = Field(
        default=None, description="OpenAI's newer name of max_tokens."
    )
    tools: list[dict[str, Any]] | None = Field(
        default=None, description="Functions that the model may call, in OpenAI's format."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further arguments of the model's chat template."
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> ChatRequest:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidInput(
                "max_completion_tokens", f"differs from max_tokens {old}", "send one of the two"
            )
        for i, message in enumerate(self.messages):
            if message.content is None and message.role in ("user", "system", "developer"):
                raise InvalidInput(f"messages[{i}].content", "is missing", "send a text")
            message.read(f"messages[{i}]")
        extra = self.model_extra or {}
        wanted = extra.get("response_format")
        is_text = not isinstance(wanted, dict) or wanted.get("type") == "text"
        if self.ragcache.cite and (not is_text or extra.get("structured_outputs")):
            raise InvalidInput(
                "ragcache.cite",
                "adds markers, which break an answer of a given format",
                "leave it out, or response_format and structured_outputs",
            )
        return self

    def retrieves(self) -> bool:
        """Whether documents are searched. Without a user's message there is no query."""
        return self.ragcache.retrieves(default=any(one.role == "user" for one in self.messages))

    def answer_tokens(self) -> int | None:
        """Return the most tokens the answer may have; None if the client sets no limit."""
        return self.max_completion_tokens or self.max_tokens

    def warnings(self) -> list[str]:
        """Say what the prompt lacks of the request."""
        found = media_warnings(kind for one in self.messages for kind in one.body.left_out)
        options = self.ragcache
        if not self.retrieves() and options.retrieve is None and options.passages is None:
            found.append("messages: none is of the user, so no documents were searched")
        return found

    def engine_fields(self) -> dict[str, Any]:
        """Return the fields that the engine gets as they are, with the text of other content.

        vLLM would ignore the token ids of the prompt beside content that is not text.
        """
        exclude = {"ragcache", "max_tokens", "max_completion_tokens"}
        fields = self.model_dump(exclude_unset=True, exclude=exclude)
        for message, sent in zip(self.messages, fields["messages"], strict=True):
            if not message.body.is_plain:
                sent["content"] = message.body.text
        return fields


class Citation(BaseModel):
    """A retrieved chunk that is in the prompt."""

    document_id: str
    title: str
    chunk: str = Field(
        description="Id of the chunk: document id, '#', position in the document; for a passage of "
        "the client, a hash of its text."
    )
    heading_path: list[str]
    page: int | None = Field(description=PAGE_HELP)
    page_end: int | None = Field(description=PAGE_END_HELP)
    score: float | None = Field(
        description="Cosine similarity, or the fused or reranked score. Null for a neighbour of a "
        "hit, which only `ragcache.cite` lists."
    )
    version: str = Field(description="`content_hash` of the document that the chunk is from.")
    updated: str | None = Field(description="When that version was written (ISO 8601, UTC).")
    text_preview: str


class InlineCitation(BaseModel):
    """A marker in the answer: a sentence, and the text of a chunk that supports it.

    Offsets count characters (Unicode code points), from 0.
    """

    choice: int = Field(description="Index of the choice.")
    marker: str = Field(description="The number of the citation in brackets, from 1.")
    start: int = Field(description="First character of the sentence in the answer.")
    end: int = Field(description="After its last character. A space and the marker follow.")
    document_id: str
    title: str
    chunk: str
    page: int | None = Field(description="First page of the chunk; null: there are no pages.")
    quote: str = Field(description="The text of the chunk that supports the sentence.")
    quote_start: int = Field(description="First character of the quote in the chunk's text.")
    quote_end: int

    @property
    def is_url(self) -> bool:
        """Whether the document is known by its URL."""
        return self.document_id.startswith(("http://", "https://"))

    def url_fields(self) -> dict[str, Any]:
        """Return OpenAI's fields of a citation of a URL. The range is that of the marker."""
        start = self.end + 1
        named = {"url": self.document_id, "title": self.title or self.document_id}
        return {**named, "start_index": start, "end_index": start + len(self.marker)}


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
    first_token: float | None = Field(
        description="From the request to the first token. Of an answer in one piece, it follows "
        "from the engine's record."
    )
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


class AnswerTokens(BaseModel):
    """The prompt's tokens, by where their KV came from. Their sum is prompt_tokens."""

    cached_tokens: int = Field(description="Found in the engine's own prefix cache.")
    loaded_tokens: int = Field(description="Loaded from the cache store, exact.")
    blended_tokens: int = Field(description="Loaded, and approximate: computed after other chunks.")
    recomputed_tokens: int = Field(description="Loaded as approximate, and recomputed.")
    computed_tokens: int = Field(description="Computed.")


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
    warnings: list[str] = Field(
        default=[], description="What the prompt or the answer lacks of what was requested."
    )
    queries: list[str] = Field(description="What was searched for; empty without retrieval.")
    timing_ms: AnswerTiming
    cache: AnswerCacheUse
    quality: AnswerQuality | None = Field(
        default=None, description="Null if the question did not ask for a blend."
    )
    inline_citations: list[InlineCitation] | None = Field(
        default=None, description="Only with `ragcache.cite`, in the order of the markers."
    )
    explanation: Explanation | None = Field(
        default=None, description="Only with `ragcache.explain`; see /v1/requests/{request_id}."
    )
    first_token_logprobs: dict[str, float] | None = Field(
        default=None,
        description="Of the likeliest first tokens, by token id; only with `ragcache.trial`.",
    )


class AnswerMessage(BaseModel):
    """An answer, with everything that the engine says of it."""

    model_config = ConfigDict(extra="allow")

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Choice(BaseModel):
    """One of the answers of a completion."""

    model_config = ConfigDict(extra="allow")

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = Field(
        description="stop, length when max_tokens ended the answer, or tool_calls."
    )


class AnswerUsage(Usage):
    """Tokens as the engine counted them."""

    ragcache: AnswerTokens | None = None


class ChatCompletion(BaseModel):
    """A complete answer."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: AnswerUsage | None = Field(description="Null if the engine did not report it.")
    ragcache: RagCacheAnswer


class Delta(BaseModel):
    """The next part of an answer."""

    model_config = ConfigDict(extra="allow")

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChunkChoice(BaseModel):
    """The next part of one of the answers of a stream."""

    model_config = ConfigDict(extra="allow")

    index: int
    delta: Delta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class RagCacheChunk(BaseModel):
    """The ragcache extension: citations in the first chunk of a stream, the rest in the last."""

    citations: list[Citation] | None = None
    warnings: list[str] | None = None
    queries: list[str] | None = None
    timing_ms: AnswerTiming | None = None
    cache: AnswerCacheUse | None = None
    quality: AnswerQuality | None = None
    inline_citations: list[InlineCitation] | None = None
    explanation: Explanation | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a stream; its data is this object, and `[DONE]` after the last one."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: AnswerUsage | None = None
    ragcache: RagCacheChunk | None = None
