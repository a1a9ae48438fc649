"""What the routes work with, built once per process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ragcache_gateway.chat.pipeline import ChatServices
from ragcache_gateway.documents.writer import DocumentWriter
from ragcache_gateway.extraction.extractor import TextExtractor
from ragcache_gateway.http.parts_watch import PartsWatch
from ragcache_gateway.status.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class GatewayServices:
    """The services behind the routes."""

    settings: GatewaySettings
    metrics: Metrics
    chat: ChatServices
    documents: DocumentWriter
    extractor: TextExtractor
    retriever: RetrieverClient
    store: AsyncShardedStore
    parts_watch: PartsWatch


def _services_of(request: Request) -> GatewayServices:
    services: GatewayServices = request.app.state.services
    return services


Services = Annotated[GatewayServices, Depends(_services_of)]
"""Type of a route's parameter that gets the services."""
