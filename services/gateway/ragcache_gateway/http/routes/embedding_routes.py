"""Routes of embeddings and reranking, which the retriever computes."""

from __future__ import annotations

import array
import base64
import sys
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, Tag

from ragcache_core.errors import InvalidInput, NotFound, RagCacheError, TooLarge
from ragcache_gateway.documents.retriever_errors import to_rest_error
from ragcache_gateway.http.disconnect import cancel_on_disconnect
from ragcache_gateway.http.json_body import JsonRoute
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.services import GatewayServices, Services
from ragcache_gateway.telemetry.spans import record_reading
from ragcache_wire.rest_fields.fields import NonEmptyText, PositiveCount, Text, union_by
from ragcache_wire.v1 import retriever_pb2 as pb

EMBEDDER = "ragcache-embedder"
RERANKER = "ragcache-reranker"
MAX_EMBEDDED = 2048
MAX_SCORED = 1000

router = APIRouter(
    route_class=JsonRoute, tags=["embeddings"], responses={**ERRORS, **UPSTREAM_ERRORS}
)


def _tag(value: object) -> str | None:
    if isinstance(value, str):
        return "~text"
    if isinstance(value, list):
        return "~list"
    return "~object" if isinstance(value, dict | RerankDocument) else None


class EmbeddingRequest(BaseModel):
    """Texts to embed."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={"examples": [{"input": "Where does billing run?"}]},
    )

    input: Annotated[
        Annotated[NonEmptyText, Tag("~text")]
        | Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_EMBEDDED), Tag("~list")],
        union_by(_tag, "a text or a list of texts"),
    ] = Field(description="A text or several. Token ids are refused: their tokenizer is not known.")
    model: Text | None = Field(default=None, description=f"{EMBEDDER}, or the served model.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveCount | None = Field(
        default=None, description="No other than the embedder's."
    )


class Embedding(BaseModel):
    """The embedding of one text, of length 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(
        description="Numbers; with encoding_format base64, float32 values, little endian."
    )


class EmbeddingUsage(BaseModel):
    """Tokens of the texts, as the served model's tokenizer counts them."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Embeddings in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RerankDocument(BaseModel):
    """A text to score."""

    model_config = ConfigDict(extra="allow", strict=True)

    text: NonEmptyText


_Scored = Annotated[
    Annotated[NonEmptyText, Tag("~text")] | Annotated[RerankDocument, Tag("~object")],
    union_by(_tag, "a text or an object with a text"),
]


class TextRankRequest(BaseModel):
    """Texts to order by how well they answer a query."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={
            "examples": [{"query": "Where?", "documents": ["It runs in Oslo.", "It is blue."]}]
        },
    )

    query: NonEmptyText
    documents: list[_Scored] = Field(min_length=1, max_length=MAX_SCORED)
    model: Text | None = Field(default=None, description=f"{RERANKER}, or the served model.")
    top_n: PositiveCount | None = None
    return_documents: bool = True


class RerankResult(BaseModel):
    """A text with its score."""

    index: int = Field(description="Position in the request, from 0.")
    relevance_score: float = Field(description="Of the retriever's reranker, or a cosine.")
    document: RerankDocument | None = None


class RerankList(BaseModel):
    """The texts, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


@router.post("/v1/embeddings", summary="Embed texts as the retriever does")
async def embed(request: Request, body: EmbeddingRequest, services: Services) -> EmbeddingList:
    """Return the embeddings of texts."""
    _check_model(services, body.model, EMBEDDER)
    record_reading(services.chat.tracer)
    texts = [body.input] if isinstance(body.input, str) else body.input
    found = await cancel_on_disconnect(request.receive, _embed(services, texts))
    if body.dimensions not in (None, found.dimension):
        raise InvalidInput(
            "dimensions", f"is {body.dimensions}", f"leave it out or send {found.dimension}"
        )
    size = 4 * found.dimension
    rows = [found.vectors[i * size : (i + 1) * size] for i in range(len(texts))]
    encode = _base64 if body.encoding_format == "base64" else _numbers
    data = [Embedding(index=i, embedding=encode(row)) for i, row in enumerate(rows)]
    return EmbeddingList(data=data, model=EMBEDDER, usage=await _usage(services, texts))


@router.post("/v1/rerank", summary="Order texts by how well they answer a query")
async def rerank(request: Request, body: TextRankRequest, services: Services) -> RerankList:
    """Return the texts with their scores, best first."""
    _check_model(services, body.model, RERANKER)
    record_reading(services.chat.tracer, body.query)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    scores = await cancel_on_disconnect(request.receive, _rerank(services, body.query, texts))
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    results = [
        RerankResult(
            index=i,
            relevance_score=round(scores[i], 6),
            document=RerankDocument(text=texts[i]) if body.return_documents else None,
        )
        for i in order[: body.top_n]
    ]
    usage = await _usage(services, [body.query, *texts])
    return RerankList(id=f"rerank-{uuid.uuid4().hex}", model=RERANKER, results=results, usage=usage)


async def _embed(services: GatewayServices, texts: Sequence[str]) -> pb.EmbedReply:
    try:
        return await services.retriever.embed(texts)
    except RagCacheError as error:
        raise _named(error, {"texts": "input"}) from error


async def _rerank(services: GatewayServices, query: str, texts: Sequence[str]) -> list[float]:
    try:
        return await services.retriever.rerank(query, texts)
    except RagCacheError as error:
        raise _named(error, {"texts": "documents"}) from error


def _named(error: RagCacheError, names: dict[str, str]) -> RagCacheError:
    """Return an error of the retriever with the request's name of the field."""
    error = to_rest_error(error)
    if not isinstance(error, InvalidInput):
        return error
    name, bracket, index = error.field.partition("[")
    kind = TooLarge if isinstance(error, TooLarge) else InvalidInput
    return kind(names.get(name, name) + bracket + index, error.problem, error.fix)


def _check_model(services: GatewayServices, model: str | None, own: str) -> None:
    if model not in (None, own, *(chat.model.name for chat in services.chats)):
        raise NotFound("model", str(model), f"ask for {own!r}")


async def _usage(services: GatewayServices, texts: Sequence[str]) -> EmbeddingUsage:
    count = await services.chat.prompts.run(lambda prompts: prompts.count_tokens(texts))
    return EmbeddingUsage(prompt_tokens=count, total_tokens=count)


def _numbers(row: bytes) -> Any:
    values = array.array("f", row)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _base64(row: bytes) -> Any:
    return base64.b64encode(row).decode()
