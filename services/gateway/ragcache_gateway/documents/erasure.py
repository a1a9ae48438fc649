"""Receipts of deletes, and the check of what is left of a deleted document.

A receipt names what was deleted by digests, without a text. It is signed with the key of the
platform, so that it can be shown later. The check asks every shard, every engine's feed and the
retriever, and counts; it changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragcache_core.errors import InvalidInput, NotFound, RagCacheError
from ragcache_core.identity.keys import ChunkKey
from ragcache_core.plan.signature import is_signed_receipt, sign_receipt
from ragcache_core.store_api import Deletion, Remains
from ragcache_gateway.documents.delete_sender import DeleteSender
from ragcache_gateway.documents.writer import DeletedDocument
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.rest_fields.fields import Count, Text
from ragcache_wire.v1 import retriever_pb2 as pb

NOT_CHECKED: Final = (
    "backups and snapshots of volumes",
    "pages of memory and of disks that were freed and not written again",
    "logs, traces, and what clients keep",
    "collections and models that the deleted digests do not name",
)
"""Where a text or its KV may still be, which no part of the platform can see."""

_NO_SHARD: Final = "the cache store, because no shard is known"

_State = Literal["zero", "left", "unknown"]
_Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,32}$")]


class ReceiptDelete(BaseModel):
    """One delete that every shard applies."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    token_digests: list[_Hex] = Field(description="Of the chunks whose KV is deleted.")
    names_document: bool = Field(description="Also what is stored in the document's name.")
    everything: bool = Field(description="All stored KV: too many deletes were pending.")


class ErasureReceipt(BaseModel):
    """What a delete has removed. It has no text of the document."""

    model_config = ConfigDict(extra="forbid", strict=True)

    object: Literal["erasure.receipt"] = "erasure.receipt"
    collection: Text
    id: Text
    made_at_ms: Count = Field(description="Unix time of the answer, in milliseconds.")
    deletes: list[ReceiptDelete]
    shards: list[Count | None] = Field(
        description="Variants that each shard has removed, in the order of their addresses; null: "
        "it has not acknowledged yet."
    )
    signature: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="HMAC-SHA256 with the platform's key; null: there is none.",
    )

    def content(self) -> bytes:
        """Return what is signed."""
        return self.model_dump_json(exclude={"signature"}).encode()


class DocumentDeleted(BaseModel):
    """A document after its deletion."""

    object: Literal["document.deleted"] = "document.deleted"
    collection: str
    id: str
    deleted: Literal[True] = True
    removed_variants: int | None = Field(
        description="Variants deleted with its chunks; null: later, the cache store is away."
    )
    receipt: ErasureReceipt


class ErasureIn(BaseModel):
    """A document that was deleted: its receipt, or its name."""

    model_config = ConfigDict(extra="forbid")

    receipt: ErasureReceipt | None = None
    collection: Text = "default"
    id: Text | None = None


class SourceRemains(BaseModel):
    """What one shard or engine holds."""

    address: str
    state: _State
    in_memory: int | None = Field(default=None, description="Variants in memory.")
    on_disk: int | None = Field(default=None, description="Variants on disk.")
    unfreed: int | None = Field(
        default=None, description="Dropped copies whose pages on disk still have their bytes."
    )


class ErasureReport(BaseModel):
    """What is left of a deleted document."""

    object: Literal["erasure.report"] = "erasure.report"
    collection: str
    id: str
    is_genuine: bool | None = Field(
        description="Whether the platform's key signed the receipt; null: one of both is missing."
    )
    checked_at_ms: int
    document: _State = Field(description="The retriever's rows.")
    shards: list[SourceRemains]
    engines: list[SourceRemains] = Field(description="Prefix caches, as their feeds describe them.")
    erased: bool = Field(description="Nothing is left, and nothing is unknown.")
    not_checked: list[str] = Field(description="Where the platform cannot look.")


def make_receipt(
    collection: str, document_id: str, deleted: DeletedDocument, keys: Sequence[bytes]
) -> ErasureReceipt:
    """Return the receipt of a delete.

    Args:
        keys: Of the platform. The first one signs; without one the receipt has no signature.
    """
    receipt = ErasureReceipt(
        collection=collection,
        id=document_id,
        made_at_ms=time.time_ns() // 1_000_000,
        deletes=[
            ReceiptDelete(
                id=one.id.hex(),
                token_digests=[digest.hex() for digest in one.token_digests],
                names_document=one.names_document,
                everything=one.everything,
            )
            for one in deleted.deletes
        ],
        shards=list(deleted.shards),
    )
    if keys:
        receipt.signature = sign_receipt(receipt.content(), keys[0])
    return receipt


class ErasureCheck:
    """Looks for what is left of deleted documents.

    Args:
        engine_remains: Returns how many variants of chunks each engine has, by its address. None:
            it is unknown.
    """

    def __init__(
        self,
        deletes: DeleteSender,
        store: AsyncShardedStore,
        engine_remains: Callable[[Collection[ChunkKey]], Mapping[str, int | None]],
        retriever: RetrieverClient,
    ) -> None:
        self._deletes = deletes
        self._store = store
        self._engine_remains = engine_remains
        self._retriever = retriever

    async def report(self, asked: ErasureIn, keys: Sequence[bytes]) -> ErasureReport:
        """Ask every part. Raises InvalidInput if nothing is named.

        Args:
            keys: Of the platform, with which receipts are signed.
        """
        receipt = asked.receipt
        document_id = receipt.id if receipt is not None else asked.id
        collection = receipt.collection if receipt is not None else asked.collection
        if document_id is None:
            raise InvalidInput("id", "is missing", "name the document, or send its receipt")
        deletions = [
            deletion
            for delete in _outbox_deletes(receipt, collection, document_id)
            for deletion in self._deletes.deletions(delete)
        ]
        document, shards = await asyncio.gather(
            self._document(collection, document_id),
            asyncio.gather(*(self._shard(one, deletions) for one in self._store.addresses())),
        )
        left = self._engine_remains({chunk for one in deletions for chunk in one.chunks})
        engines = [_engine(address, count) for address, count in sorted(left.items())]
        is_genuine = None
        if receipt is not None and keys:  # then a receipt without a signature is not genuine
            is_genuine = is_signed_receipt(receipt.content(), receipt.signature or "", keys)
        states = {document, *(one.state for one in (*shards, *engines))}
        return ErasureReport(
            collection=collection,
            id=document_id,
            is_genuine=is_genuine,
            checked_at_ms=time.time_ns() // 1_000_000,
            document=document,
            shards=list(shards),
            engines=engines,
            erased=states == {"zero"} and bool(shards),
            not_checked=[*(() if shards else (_NO_SHARD,)), *NOT_CHECKED],
        )

    async def _document(self, collection: str, document_id: str) -> _State:
        try:
            await self._retriever.get_document(collection, document_id)
        except NotFound:
            return "zero"
        except RagCacheError:
            return "unknown"
        return "left"

    async def _shard(self, address: str, deletions: Iterable[Deletion]) -> SourceRemains:
        in_memory = on_disk = unfreed = 0
        try:
            for deletion in deletions:
                found: Remains = await self._store.remains_on(address, deletion)
                in_memory += found.in_memory
                on_disk += found.on_disk
                unfreed = max(unfreed, found.unfreed)  # of all deletes together
        except RagCacheError:
            return SourceRemains(address=address, state="unknown")
        return SourceRemains(
            address=address,
            state="left" if in_memory or on_disk or unfreed else "zero",
            in_memory=in_memory,
            on_disk=on_disk,
            unfreed=unfreed,
        )


def _engine(address: str, left: int | None) -> SourceRemains:
    state: _State = "unknown" if left is None else "left" if left else "zero"
    return SourceRemains(address=address, state=state, in_memory=left)


def _outbox_deletes(
    receipt: ErasureReceipt | None, collection: str, document_id: str
) -> list[pb.OutboxDelete]:
    """Return the deletes of a receipt. Without one: what is stored in the document's name."""
    if receipt is None or not receipt.deletes:
        return [
            pb.OutboxDelete(
                id=bytes(16), collection=collection, document_id=document_id, names_document=True
            )
        ]
    return [
        pb.OutboxDelete(
            id=bytes.fromhex(one.id),
            collection=collection,
            document_id=document_id,
            names_document=one.names_document,
            token_digests=map(bytes.fromhex, one.token_digests),
            everything=one.everything,
        )
        for one in receipt.deletes
    ]
