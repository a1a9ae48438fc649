"""What the routes work with, built once per process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ragcache_core.access.caller import Caller
from ragcache_core.errors import NotFound
from ragcache_gateway.documents.erasure import ErasureCheck
from ragcache_gateway.documents.writer import DocumentWriter
from ragcache_gateway.explain.tree_outline import TreeReader
from ragcache_gateway.extraction.extractor import TextExtractor
from ragcache_gateway.http.component_watch import ComponentWatch
from ragcache_gateway.http.middleware.key_check import CALLER
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.planning.cache_view import CacheView
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class GatewayServices:
    """The services behind the routes.

    Args:
        chat: Of the model of requests that name none.
        others: Of the other models.
    """

    settings: GatewaySettings
    metrics: Metrics
    chat: ChatServices
    others: tuple[ChatServices, ...]
    documents: DocumentWriter
    erasure: ErasureCheck
    extractor: TextExtractor
    retriever: RetrieverClient
    store: AsyncShardedStore
    component_watch: ComponentWatch
    cache_view: CacheView
    tree_reader: TreeReader

    @property
    def platform_keys(self) -> tuple[bytes, ...]:
        """The keys that sign plans and receipts; empty: there are none."""
        keys = self.settings.signing_key_file
        return () if keys is None else keys.current()

    @property
    def chats(self) -> tuple[ChatServices, ...]:
        """The services of each model."""
        return (self.chat, *self.others)

    def chat_with(self, model: str | None) -> ChatServices:
        """Return the services of a model; None: of the first one. Raises NotFound."""
        if model is None:
            return self.chat
        for chat in self.chats:
            if chat.model.name == model:
                return chat
        names = " or ".join(repr(chat.model.name) for chat in self.chats)
        raise NotFound("model", model, f"ask for {names}")


# FastAPI runs dependencies that are plain functions in threads.
async def _services_of(request: Request) -> GatewayServices:
    services: GatewayServices = request.app.state.services
    return services


async def _caller_of(request: Request) -> Caller:
    caller: Caller = getattr(request.state, CALLER)
    return caller


Services = Annotated[GatewayServices, Depends(_services_of)]
"""Type of a route's parameter that gets the services."""

Asking = Annotated[Caller, Depends(_caller_of)]
"""Type of a route's parameter that gets the caller."""
