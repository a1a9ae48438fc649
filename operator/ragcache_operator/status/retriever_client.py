"""Asks the pods of a retriever for their state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ragcache_core.errors import RagCacheError
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

_TIMEOUT_S = 2.0


async def ask_pods(addresses: Iterable[str]) -> list[pb.RetrieverStatus | None]:
    """Return the answer of each pod, or None for a pod that does not answer in two seconds.

    Args:
        addresses: "host:port" of the gRPC ports.
    """
    return await asyncio.gather(*map(_ask, addresses))


async def _ask(address: str) -> pb.RetrieverStatus | None:
    # Pods come and go, and are asked a few times a minute. An open connection has no benefit.
    client = RetrieverClient(address)
    try:
        return await client.status(_TIMEOUT_S)
    except RagCacheError:
        return None
    finally:
        await client.close()
