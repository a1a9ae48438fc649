"""Passages that a client has retrieved itself: a search result without a search.

The same text with the same title has the same tokens as a chunk that was ingested, so both share
stored KV within a tenant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from ragcache_core.documents.passages import document_name, passage_label
from ragcache_gateway.chat.search import SearchResult, no_search
from ragcache_wire.rest_fields.fields import NonEmptyText, Text
from ragcache_wire.v1 import retriever_pb2 as pb

MAX_PASSAGES: Final = 256
_ID_CHARS: Final = 16


class ClientPassage(BaseModel):
    """A text to answer from."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: NonEmptyText
    id: Text | None = Field(
        default=None,
        min_length=1,
        description="Of its document, for citations; passages with one id stay together, in the "
        "order given. Default: a hash of the text.",
    )
    title: Text = Field(
        default="",
        description="Stands before the text in the prompt, unless its first lines say the same. "
        "Default: what the id says, if it is a file name.",
    )
    score: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        default=None, description="Repeated in citations."
    )


def passages_found(passages: Sequence[ClientPassage]) -> SearchResult:
    """Return passages as hits, in the order given, without those that repeat one of the same id."""
    hits: dict[str, pb.Hit] = {}
    counts: dict[str, int] = {}
    for passage in passages:
        digest = hashlib.sha256(passage.text.encode()).hexdigest()
        document = passage.id or digest[:_ID_CHARS]
        chunk_id = f"{document}#{digest[:_ID_CHARS]}"
        if chunk_id in hits:
            continue
        ordinal = counts[document] = counts.get(document, -1) + 1
        title = passage.title or (passage.id or "")
        name = document_name(document, title)
        chunk = pb.Chunk(
            id=chunk_id,
            document_id=document,
            title=title,
            ordinal=ordinal,
            text=passage.text,
            content_hash=digest,
            label=passage_label(name, (), passage.text),
        )
        hits[chunk_id] = pb.Hit(chunk=chunk, score=passage.score or 0.0)
    return replace(no_search(), hits=list(hits.values()))
