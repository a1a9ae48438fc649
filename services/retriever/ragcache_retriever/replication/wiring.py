"""Makes a replica from the settings."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from pathlib import Path

from ragcache_core.errors import InvalidInput
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.replication.copies import store_copy
from ragcache_retriever.replication.file_lease import FileLease
from ragcache_retriever.replication.kubernetes_lease import KubernetesLease
from ragcache_retriever.replication.lease_store import LeaseStore
from ragcache_retriever.replication.replica import Replica, ReplicaOptions
from ragcache_retriever.replication.replicated_knowledge_base import ReplicatedKnowledgeBase
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore
from ragcache_wire.settings import RetrieverSettings


def make_replica(
    settings: RetrieverSettings,
    knowledge_base: KnowledgeBase,
    is_fit: Callable[[], bool],
    restart: Callable[[], None],
) -> Replica | None:
    """Return the replica of the settings, or None if there is only one.

    Args:
        is_fit: Whether this replica could write now.
        restart: Ends the process, so that it starts again with a copy of the documents.

    Raises:
        InvalidInput: Another backend than the embedded one has peers, or the Lease cannot be used.
    """
    if not settings.peers:
        return None
    store = knowledge_base.store
    if settings.backend != "embedded" or not isinstance(store, SqliteDocumentStore):
        raise InvalidInput(
            "RAGCACHE_PEERS", f"backend {settings.backend} has no replicas", "remove the peers"
        )
    assert settings.own_address is not None, "settings check it"
    options = ReplicaOptions(
        identity=f"{settings.own_address}#{secrets.token_hex(8)}",
        own_address=settings.own_address,
        peers=settings.peers,
        max_lag_s=settings.max_lag_s,
    )
    return Replica(
        ReplicatedKnowledgeBase(knowledge_base, store),
        _lease_store(settings.lease or ""),
        options,
        is_fit=is_fit,
        take_copy=functools.partial(store_copy, settings.data_dir),
        restart=restart,
        threads=knowledge_base.threads.readers,
    )


def _lease_store(name: str) -> LeaseStore:
    kind, _, rest = name.partition(":")
    if kind == "file":
        return FileLease(Path(rest))
    namespace, _, lease = rest.partition("/")
    return KubernetesLease.of_this_pod(namespace, lease)
