"""OpenAI's completions in the REST API, with the ragcache extension."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from ragcache_core.errors import InvalidInput
from ragcache_gateway.chat.schema import (
    AnswerUsage,
    EndpointRequest,
    RagCacheAnswer,
    RagCacheOptions,
    RefusedFields,
    allow_null,
)
from ragcache_wire.rest_fields.fields import Count

MAX_PROMPTS = 2048


def _tag(value: object) -> str | None:
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    return "~texts" if isinstance(first, str) else "~lists" if isinstance(first, list) else "~ids"


Prompt = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("~texts")]
    | Annotated[list[Count], Field(min_length=1), Tag("~ids")]
    | Annotated[
        list[Annotated[list[Count], Field(min_length=1)]],
        Field(min_length=1, max_length=MAX_PROMPTS),
        Tag("~lists"),
    ],
    Discriminator(_tag),
]

_REFUSED: Final[RefusedFields] = {
    "best_of": ((1,), "leave it out and send n"),
}


class CompletionRequest(EndpointRequest):
    """A text to continue, with documents before it if ``ragcache`` is given.

    All further fields of OpenAI and vLLM reach the engine as they are.
    """

    ID_PREFIX: ClassVar = "cmpl"
    MAX_TOKENS_FIELD: ClassVar = "max_tokens"
    REFUSED: ClassVar = _REFUSED

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "Billing runs in the region", "max_tokens": 16}]
        },
    )

    prompt: Prompt = Field(description="A text, token ids, or several of either.")
    ragcache: RagCacheOptions = Field(
        default_factory=RagCacheOptions,
        json_schema_extra=allow_null,
        description="Given: chunks that the prompt finds come before it.",
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> CompletionRequest:
        if self.ragcache.layout:
            raise InvalidInput("ragcache.layout", "is for chats and responses", "leave it out")
        if self.ragcache.cite:
            raise InvalidInput("ragcache.cite", "is for chats and responses", "leave it out")
        if self.ragcache.passages is not None:
            raise InvalidInput("ragcache.passages", "is for chats and responses", "ask a chat")
        if not self.retrieves():
            return self
        if not isinstance(self.prompt, str):
            raise InvalidInput("prompt", "is no single text, which retrieval needs", "send a text")
        for name in ("suffix", "echo"):
            if (self.model_extra or {}).get(name):
                raise InvalidInput(name, "does not go with retrieval", "leave out ragcache or this")
        return self

    def retrieves(self) -> bool:
        """Whether the answer comes from documents."""
        return self.ragcache.retrieves(default="ragcache" in self.model_fields_set)

    def question(self) -> str:
        """Return the text to search for and to continue."""
        assert isinstance(self.prompt, str)
        return self.prompt

    def warnings(self) -> list[str]:
        """Say what the prompt lacks of the request."""
        return []

    def engine_fields(self) -> dict[str, Any]:
        """Return the fields that the engine gets as they are."""
        return self.model_dump(exclude_unset=True, exclude={"ragcache"})

    def num_choices(self) -> int:
        """Return the number of answers in the response."""
        is_list = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return super().num_choices() * (len(self.prompt) if is_list else 1)


class CompletionChoice(BaseModel):
    """One of the texts of a completion."""

    model_config = ConfigDict(extra="allow")

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class TextCompletion(BaseModel):
    """A completion, or a chunk of its stream."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: AnswerUsage | None = None
    ragcache: RagCacheAnswer | None = Field(
        default=None, description="Only if the request has retrieved."
    )
