"""Sends the deletes of the retriever's outbox to every shard of the cache store.

The retriever writes a delete in the transaction that removes the text, and keeps it until every
shard has acknowledged it. This gateway sends the deletes of its own requests at once. Every two
seconds it also claims deletes that no gateway is sending: those of a gateway that has ended, those
that a shard has not acknowledged, and those of documents that were split again.

A delete has one id in each access domain. A shard that has applied it ignores a repetition, so an
attempt that was interrupted is repeated as a whole.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.identity.keys import PUBLIC_DOMAIN, KVSpace, chunk_key_of_digest
from ragcache_core.plan.reuse_plan import document_name
from ragcache_core.store_api import Deletion
from ragcache_gateway.prompts.model_runtime import ModelRuntime
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_kv.transport.transport import SERVICE
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

POLL_S = 2.0

CLAIM_LIMIT = 64
"""Deletes that are claimed at once."""

CALLS_PER_SHARD = 4
"""Most calls of one shard at once."""

RETRY_S = 5.0
"""Time for which a shard that has failed is not called. A shard that hangs must not delay the
deletes on the others."""

ANSWER_WAIT_S = 1.0
"""How long a caller waits for the other shards after one has acknowledged."""


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


def _id_in(domain: str, delete: bytes) -> bytes:
    """Return the id of a delete in one domain. A shard applies each id once."""
    if domain == PUBLIC_DOMAIN:
        return delete
    return blake2b(domain.encode(), key=delete, digest_size=len(delete)).digest()


@dataclass(frozen=True, slots=True)
class DigestSpaces:
    """KV spaces of the served models, for the digests of chunks that the retriever has.

    Args:
        named: Those of models with the tokenizer of the digests.
        has_others: Whether there are further ones. In them the digests name nothing, so the KV of a
            document is deleted there by the document's name.
    """

    named: tuple[KVSpace, ...]
    has_others: bool = False

    @classmethod
    def of(cls, models: Sequence[ModelRuntime]) -> DigestSpaces:
        """Return the spaces of models. The first one has the tokenizer of the digests."""
        tokenizer = models[0].prompts.tokenizer_identity
        alike = [one for one in models if one.prompts.tokenizer_identity == tokenizer]
        return cls(tuple(one.served.space for one in alike), len(alike) < len(models))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One attempt to send a delete.

    Args:
        calls: The call of each shard, by its address. Each returns how many variants the shard has
            removed, or None if it has not acknowledged.
    """

    id: bytes
    calls: dict[str, asyncio.Task[int | None]]

    @property
    def acknowledged(self) -> dict[str, int]:
        """How many variants each shard has removed that has acknowledged so far."""
        done = {
            address: call.result()
            for address, call in self.calls.items()
            if call.done() and not call.cancelled()
        }
        return {address: removed for address, removed in done.items() if removed is not None}


def removed_variants(acknowledged: Sequence[Mapping[str, int]]) -> int | None:
    """Return how many variants deletes have removed; None if one has no acknowledgement yet.

    Args:
        acknowledged: Of each delete, by the shard's address.
    """
    if not all(acknowledged):
        log.warning("deletes: no shard has acknowledged yet deletes=%d", len(acknowledged))
        return None
    return sum(sum(removed.values()) for removed in acknowledged)


class DeleteSender(BackgroundTasks):
    """Sends deletes, and tells the outbox which of them the shards have acknowledged.

    Args:
        spaces: KV spaces in which chunks have keys.
        domains: Returns every access domain that may hold KV of a document.
        now_ms: Returns the Unix time.
    """

    def __init__(
        self,
        spaces: DigestSpaces,
        domains: Callable[[], Sequence[str]],
        retriever: RetrieverClient,
        store: AsyncShardedStore,
        metrics: Metrics,
        now_ms: Callable[[], int] = _unix_ms,
    ) -> None:
        super().__init__()
        self._spaces = spaces
        self._domains = domains
        self._retriever = retriever
        self._store = store
        self._metrics = metrics
        self._now_ms = now_ms
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(CALLS_PER_SHARD)
        )
        self._failed_s: dict[str, float] = {}
        self._wake = asyncio.Event()

    def start(self) -> None:
        """Claim and send deletes from now on."""
        self._spawn(self._run(), "deletes")

    def wake(self) -> None:
        """Claim deletes now."""
        self._wake.set()

    async def send(self, deletes: Iterable[pb.OutboxDelete]) -> int | None:
        """Send deletes that the retriever has returned.

        Returns when every shard has acknowledged or failed, or ANSWER_WAIT_S after the first
        acknowledgement. The rest is sent in the background.

        Returns:
            How many variants the shards have removed; None if a delete has no acknowledgement yet.
        """
        return removed_variants(await self.deliver(deletes))

    async def deliver(self, deletes: Iterable[pb.OutboxDelete]) -> list[dict[str, int]]:
        """Send deletes as ``send`` does.

        Returns:
            For each delete how many variants a shard has removed, by the address of each shard
            that has acknowledged.
        """
        attempts = [self._begin(delete) for delete in deletes]
        if attempts:
            self._spawn(self._finish(attempts), "deletes")
            await asyncio.gather(*map(self._wait_for_answers, attempts))
        return [attempt.acknowledged for attempt in attempts]

    def shards(self) -> tuple[str, ...]:
        """Return the addresses of the shards that deletes are sent to."""
        return self._store.addresses()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            has_backlog = False
            try:
                has_backlog = await self._send_claimed()
            except RagCacheError as error:
                log.info("deletes: none claimed error=%s", error)
            except Exception:
                log.exception("deletes: none claimed")
            if not has_backlog:
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _send_claimed(self) -> bool:
        """Claim deletes and send them.

        Returns:
            Whether to claim more at once: there may be more, and a shard acknowledges deletes.
        """
        reply = await self._retriever.claim_deletes(CLAIM_LIMIT)
        for address in (self._slots.keys() | self._failed_s.keys()) - set(self._store.addresses()):
            self._slots.pop(address, None)
            self._failed_s.pop(address, None)
        self._metrics.deletes_waiting.set(reply.unacknowledged)
        attempts = [self._begin(delete) for delete in reply.deletes]
        await self._finish(attempts)
        is_full = len(attempts) == CLAIM_LIMIT
        return is_full and any(attempt.acknowledged for attempt in attempts)

    async def send_domains(self, id_: bytes, domains: Sequence[str]) -> bool:
        """Delete everything in some domains. Return whether every shard has acknowledged all.

        Args:
            id_: From which the id in each domain is made. A repetition has the same one.
        """
        now_ms = self._now_ms()
        deletions = [
            Deletion(id=_id_in(domain, id_), domain=domain, made_at_ms=now_ms) for domain in domains
        ]
        calls = [self._call(address, lambda: deletions) for address in self._store.addresses()]
        return None not in await asyncio.gather(*calls)

    def _begin(self, delete: pb.OutboxDelete) -> _Attempt:
        return _Attempt(
            delete.id,
            {
                address: self._spawn(
                    self._call(address, partial(self.deletions, delete)), "deletes"
                )
                for address in self._store.addresses()
            },
        )

    async def _call(self, address: str, deletions: Callable[[], Sequence[Deletion]]) -> int | None:
        """Delete on one shard. Return how many variants it removed; None: it failed.

        Args:
            deletions: Makes what to send, when the call has its turn.
        """
        removed = 0
        async with self._slots[address]:
            if time.monotonic() - self._failed_s.get(address, -math.inf) < RETRY_S:
                return None
            try:
                for deletion in deletions():
                    removed += await self._delete(address, deletion)
            except Exception as error:
                self._record_failure(address, error)
                return None
        self._failed_s.pop(address, None)
        return removed

    async def _delete(self, address: str, deletion: Deletion) -> int:
        try:
            return await self._store.delete_on(address, deletion)
        except InvalidInput as error:
            # A repetition would be refused, too.
            log.error("deletes: shard refused shard=%s error=%s", address, error)  # noqa: TRY400
            self._metrics.deletes_lost.inc()
            return 0

    def deletions(self, delete: pb.OutboxDelete) -> list[Deletion]:
        """Return what is deleted on each shard, in every domain and space."""
        return [
            self._deletion(delete, domain, number)
            for domain in self._domains()
            for number in range(len(self._spaces.named) if delete.token_digests else 1)
        ]

    def _deletion(self, delete: pb.OutboxDelete, domain: str, number: int) -> Deletion:
        """Return what is deleted in a domain of the chunks of a space.

        With the first space, all is deleted that the document's name has in any space.
        """
        names_document = number == 0 and (
            delete.names_document or (self._spaces.has_others and bool(delete.token_digests))
        )
        names_domain = names_document or (number == 0 and delete.everything)
        space = self._spaces.named[number]
        return Deletion(
            # Each space has a deletion of its own, because a shard bounds the chunks of one.
            id=_id_in(f"{domain}\0{number}" if number else domain, delete.id),
            chunks=tuple(
                chunk_key_of_digest(space, domain, digest) for digest in delete.token_digests
            ),
            documents=(document_name(delete.collection, delete.document_id),)
            if names_document
            else (),
            domain=domain if names_domain else "",
            # The time of a delete is the one at which it first reaches a shard.
            made_at_ms=delete.acknowledged_unix_ms or self._now_ms(),
        )

    def _record_failure(self, address: str, error: Exception) -> None:
        self._metrics.upstream_failures.labels(SERVICE).inc()
        if address not in self._failed_s:
            log.warning(
                "deletes: shard has not acknowledged shard=%s error=%s",
                address,
                error,
                exc_info=None if isinstance(error, RagCacheError) else error,
            )
        self._failed_s[address] = time.monotonic()

    async def _wait_for_answers(self, attempt: _Attempt) -> None:
        """Wait until each shard has answered, or one has acknowledged and the wait is over."""
        loop = asyncio.get_running_loop()
        waiting = set(attempt.calls.values())
        deadline: float | None = None
        while waiting:
            left_s = None if deadline is None else max(0.0, deadline - loop.time())
            done, waiting = await asyncio.wait(
                waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return
            if deadline is None and attempt.acknowledged:
                deadline = loop.time() + ANSWER_WAIT_S

    async def _finish(self, attempts: Iterable[_Attempt]) -> None:
        """Wait for the calls of attempts, and tell the outbox what the shards have acknowledged."""
        complete: list[bytes] = []
        incomplete: list[bytes] = []
        for attempt in attempts:
            if attempt.calls:
                await asyncio.wait(attempt.calls.values())
            if not attempt.acknowledged:
                continue
            # A shard that has joined meanwhile may have older KV.
            silent = set(self._store.addresses()) - attempt.acknowledged.keys()
            (incomplete if silent else complete).append(attempt.id)
        if complete or incomplete:
            try:
                await self._retriever.acknowledge_deletes(complete, incomplete)
            except RagCacheError as error:
                log.info("deletes: sent again later, the outbox is away error=%s", error)
