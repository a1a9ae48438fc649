"""Searches in the REST API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragcache_core.access.caller import Caller
from ragcache_wire.rest_fields.fields import INTEGRAL, Text
from ragcache_wire.rest_fields.filters import FilterField, filter_message
from ragcache_wire.v1 import retriever_pb2 as pb

MAX_TOP_K = 50

_MODES: Final[dict[str, pb.SearchMode.ValueType]] = {
    "auto": pb.SEARCH_MODE_AUTO,
    "dense": pb.SEARCH_MODE_DENSE,
    "lexical": pb.SEARCH_MODE_LEXICAL,
    "hybrid": pb.SEARCH_MODE_HYBRID,
}


class SearchOptions(BaseModel):
    """Which chunks a search finds, and how."""

    model_config = ConfigDict(extra="forbid", strict=True)

    collection: Text = "default"
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K), INTEGRAL] = Field(
        default=4, description="Chunks to retrieve."
    )
    filter: FilterField | None = Field(
        default=None, description="Documents to consider. Default: all of the collection."
    )
    mode: Literal["auto", "dense", "lexical", "hybrid"] = Field(
        default="auto",
        description="dense: by embeddings. lexical: by words (BM25). hybrid: both. auto: hybrid, "
        "or one of the two if the lexical_weight of the collection is 0 or 1.",
    )
    min_score: float | None = Field(
        default=None, allow_inf_nan=False, description="Leave out chunks with a lower score."
    )
    diversity: float | None = Field(
        default=None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Weight of the difference from better chunks against the score.",
    )
    recall: float | None = Field(
        default=None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="End the search when this share of the best chunks is expected to be found. "
        "Default: the retriever's setting.",
    )

    def to_search(self, query: str, caller: Caller, path: str = "") -> pb.SearchRequest:
        """Convert to the retriever's message.

        Args:
            caller: Its filter applies to the search, too.
            path: Where the options are in the request, for errors.

        Raises:
            InvalidInput: The filter is too large.
        """
        field = f"{path}.filter" if path else "filter"
        own = None if self.filter is None else self.filter.checked(field)
        wanted = caller.narrowed(own)
        return pb.SearchRequest(
            collection=self.collection,
            query=query,
            top_k=self.top_k,
            filter=None if wanted is None else filter_message(wanted),
            mode=_MODES[self.mode],
            min_score=self.min_score,
            diversity=self.diversity,
            recall=self.recall,
        )


class SearchRequest(SearchOptions):
    """A search without an answer."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {
                    "query": "Where does billing run?",
                    "filter": {"must": [{"key": "team", "match": {"value": "core"}}]},
                }
            ]
        },
    )

    query: Text
    stages: bool = Field(
        default=False, strict=True, description="Also return what each stage of the search found."
    )


class ChunkOut(BaseModel):
    """A chunk of a document."""

    chunk: str
    document_id: str
    title: str
    heading_path: list[str]
    ordinal: int = Field(description="Position in the document, from 0.")
    text: str
    version: str = Field(description="`content_hash` of the document that the chunk is from.")
    updated: str | None = Field(description="When that version was written (ISO 8601, UTC).")


class LegOut(BaseModel):
    """How one part of a search ranked a chunk."""

    score: float
    rank: int = Field(description="From 1.")


class LegsOut(BaseModel):
    """The parts of a search that found a chunk; null: the part did not find it."""

    dense: LegOut | None = Field(description="By embeddings; the score is the cosine similarity.")
    lexical: LegOut | None = Field(description="By words; the score is BM25.")
    reranked: float | None = Field(description="The reranker's score.")


class HitOut(ChunkOut):
    """A ranked chunk with the window around it."""

    score: float = Field(description="Cosine similarity, or the fused or reranked score.")
    legs: LegsOut
    duplicates: list[str] = Field(description="Copies of the chunk that were left out.")
    before: list[ChunkOut]
    after: list[ChunkOut]


class StageHit(BaseModel):
    """A chunk as a stage of a search ranked it."""

    chunk: str
    score: float


class StageOut(BaseModel):
    """What a search had found after one of its stages."""

    progress: float = Field(description="Finished share of the search.")
    final_probability: float = Field(
        description="Probability that the last stage has the same chunks in the same order."
    )
    final: bool
    search_ms: float = Field(description="Time in the index up to this stage.")
    hits: list[StageHit]


class SearchTiming(BaseModel):
    """Time of each step, in milliseconds."""

    retrieve: float = Field(
        description="The whole search as the gateway measures it, embedding included."
    )
    stages: int = Field(description="How many stages the search streamed (a count, no time).")
    embed: float
    search: float


class SearchAnswer(BaseModel):
    """Hits of the final stage, best first."""

    object: Literal["list"] = "list"
    data: list[HitOut]
    stages: list[StageOut] | None = Field(description="Null without `stages` in the request.")
    timing_ms: SearchTiming


def hit_out(hit: pb.Hit) -> HitOut:
    """Convert a hit."""
    return HitOut(
        **chunk_out(hit.chunk).model_dump(),
        score=round(hit.score, 6),
        legs=_legs_out(hit.legs),
        duplicates=list(hit.duplicates),
        before=[chunk_out(chunk) for chunk in hit.before],
        after=[chunk_out(chunk) for chunk in hit.after],
    )


def chunk_out(chunk: pb.Chunk) -> ChunkOut:
    """Convert a chunk."""
    return ChunkOut(
        chunk=chunk.id,
        document_id=chunk.document_id,
        title=chunk.title,
        heading_path=list(chunk.heading_path),
        ordinal=chunk.ordinal,
        text=chunk.text,
        version=chunk.content_hash,
        updated=updated_text(chunk.updated_unix_ms),
    )


def stage_out(stage: pb.SearchStage) -> StageOut:
    """Convert a stage."""
    return StageOut(
        progress=round(stage.progress, 4),
        final_probability=round(stage.final_probability, 4),
        final=stage.final,
        search_ms=stage.search_us / 1e3,
        hits=[StageHit(chunk=hit.chunk.id, score=round(hit.score, 6)) for hit in stage.hits],
    )


def updated_text(unix_ms: int) -> str | None:
    """Return a time in ISO 8601, or None for a time that is not known."""
    if not unix_ms:
        return None
    updated = datetime.fromtimestamp(unix_ms / 1e3, UTC)
    return updated.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _legs_out(legs: pb.LegScores) -> LegsOut:
    return LegsOut(
        dense=_leg(legs.dense, legs.dense_rank) if legs.HasField("dense") else None,
        lexical=_leg(legs.lexical, legs.lexical_rank) if legs.HasField("lexical") else None,
        reranked=round(legs.reranked, 6) if legs.HasField("reranked") else None,
    )


def _leg(score: float, rank: int) -> LegOut:
    return LegOut(score=round(score, 6), rank=rank)
