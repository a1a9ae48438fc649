"""Encodes what the knowledge base returns."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ragcache_core.documents.passages import document_name, passage_label
from ragcache_core.errors import TooLarge
from ragcache_retriever.ranking.search import SearchStage
from ragcache_retriever.store.operations import Operation, OperationState
from ragcache_retriever.store.records import OutboxDelete, StoredChunk, StoredDocument
from ragcache_wire.channel import MAX_MESSAGE_BYTES
from ragcache_wire.v1 import retriever_pb2 as pb

T = TypeVar("T", str, pb.OutboxDelete)


def document_message(collection: str, stored: StoredDocument, *, with_text: bool) -> pb.Document:
    """Return the message of a document."""
    document = stored.document
    return pb.Document(
        collection=collection,
        id=document.id,
        title=document.title,
        text=document.text if with_text else "",
        content_type=pb.ContentType.ValueType(document.content_type),
        metadata=json.dumps(document.metadata, ensure_ascii=False),
        num_chunks=stored.num_chunks,
        content_hash=stored.content_hash,
        updated_unix_ms=stored.updated_unix_ms,
    )


_STATES = {
    OperationState.PENDING: pb.OPERATION_STATE_PENDING,
    OperationState.DONE: pb.OPERATION_STATE_DONE,
    OperationState.FAILED: pb.OPERATION_STATE_FAILED,
    OperationState.CANCELLED: pb.OPERATION_STATE_CANCELLED,
}


def operation_message(operation: Operation) -> pb.Operation:
    """Return the message of an operation."""
    result = operation.result
    return pb.Operation(
        id=operation.id,
        collection=operation.collection,
        document_id=operation.document_id,
        state=_STATES[operation.state],
        created_unix_ms=operation.created_unix_ms,
        updated_unix_ms=operation.updated_unix_ms,
        changed=bool(result.get("changed")),
        num_chunks=int(result.get("chunks", 0)),
        error=json.dumps(result["error"]) if "error" in result else "",
    )


def fitting(items: Sequence[T], max_bytes: int) -> list[T]:
    """Return the first items that fit. With large overlaps, chunks outgrow their document."""
    fitting: list[T] = []
    for item in items:
        max_bytes -= message_size(item)
        if max_bytes < 0:
            break
        fitting.append(item)
    return fitting


def message_size(item: str | pb.OutboxDelete) -> int:
    """Return the bytes that an item takes in a message."""
    return len(item.encode()) if isinstance(item, str) else item.ByteSize()


def delete_message(delete: OutboxDelete) -> pb.OutboxDelete:
    """Return the message of a delete."""
    return pb.OutboxDelete(
        id=delete.id,
        collection=delete.collection,
        document_id=delete.document,
        names_document=delete.names_document,
        token_digests=delete.token_digests,
        everything=delete.everything,
        acknowledged_unix_ms=delete.acknowledged_unix_ms,
    )


def stage_message(stage: SearchStage, tokenizer: str) -> pb.SearchStage:
    """Return the message of a stage.

    Args:
        tokenizer: Identity of the serving model's tokenizer. Chunks that another one read are sent
            without token ids.

    Raises:
        TooLarge: The hits exceed a message.
    """
    message = pb.SearchStage(
        hits=_hit_messages(stage, tokenizer),
        final=stage.final,
        progress=stage.progress,
        final_probability=stage.final_probability,
        embed_us=int(stage.embed_s * 1e6),
        search_us=int(stage.search_s * 1e6),
    )
    if message.ByteSize() > MAX_MESSAGE_BYTES:
        raise TooLarge(
            "top_k",
            "the chunks found are larger than one message",
            "ask for fewer, or make the collection's chunks or window smaller",
        )
    return message


def _hit_messages(stage: SearchStage, tokenizer: str) -> Iterator[pb.Hit]:
    for hit in stage.hits:
        found, legs, positions = stage.texts[hit.row], hit.legs, stage.positions
        yield pb.Hit(
            chunk=_chunk_message(found.chunk, tokenizer),
            score=hit.score,
            before=[_chunk_message(chunk, tokenizer) for chunk in found.before],
            after=[_chunk_message(chunk, tokenizer) for chunk in found.after],
            legs=pb.LegScores(
                dense=legs.dense,
                dense_rank=legs.dense_rank,
                lexical=legs.lexical,
                lexical_rank=legs.lexical_rank,
                reranked=legs.reranked,
            ),
            duplicates=[_chunk_id(*positions[row]) for row in hit.duplicates if row in positions],
        )


def _chunk_message(chunk: StoredChunk, tokenizer: str) -> pb.Chunk:
    label = ""
    if chunk.has_label:
        name = document_name(chunk.document_id, chunk.title)
        label = passage_label(name, chunk.heading_path, chunk.text)
    return pb.Chunk(
        id=_chunk_id(chunk.document_id, chunk.ordinal),
        document_id=chunk.document_id,
        title=chunk.title,
        heading_path=chunk.heading_path,
        ordinal=chunk.ordinal,
        text=chunk.text,
        token_ids=chunk.token_ids if chunk.tokenizer == tokenizer else b"",
        tokenizer_identity=tokenizer,
        content_hash=chunk.content_hash,
        updated_unix_ms=chunk.updated_unix_ms,
        label=label,
        page=chunk.page,
        page_end=chunk.page_end,
    )


def _chunk_id(document_id: str, ordinal: int) -> str:
    return f"{document_id}#{ordinal}"


def page_token(after: str) -> str:
    """Return the token of the page after an id."""
    return base64.urlsafe_b64encode(after.encode()).decode()
