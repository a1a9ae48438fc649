"""The access domains that may hold KV of documents, and the deletion of those without a tenant.

A document belongs to no tenant, but the KV of its chunks is stored once for each tenant that asked
about it. So a delete goes to the domain of every tenant. When the last key of a tenant disappears,
no caller can use its KV, and the whole domain is deleted. Until every shard has acknowledged that,
the domain still gets the deletes of documents.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

from ragcache_core.access.caller import tenant_domain
from ragcache_core.identity.keys import PUBLIC_DOMAIN
from ragcache_core.store_api import ID_BYTES
from ragcache_gateway.auth.api_keys import ApiKeys
from ragcache_gateway.documents.delete_sender import DeleteSender

log = logging.getLogger(__name__)

POLL_S: Final = 2.0


class TenantDomains:
    """Knows every domain, and deletes those whose tenant has gone. For one event loop.

    Args:
        keys: None: requests need no key, so there are no tenants.
    """

    def __init__(self, keys: ApiKeys | None) -> None:
        self._keys = keys
        self._tenants: frozenset[str] = frozenset()
        self._leaving: dict[str, bytes] = {}  # the id of the delete, by domain
        self._task: asyncio.Task[None] | None = None

    def current(self) -> tuple[str, ...]:
        """Return every domain that may hold KV, the public one first."""
        self._update()
        own = (tenant_domain(tenant) for tenant in sorted(self._tenants))
        return tuple(dict.fromkeys((PUBLIC_DOMAIN, *own, *self._leaving)))

    def start(self, deletes: DeleteSender) -> None:
        """Delete the domains of tenants that disappear from now on."""
        self._update()
        self._task = asyncio.create_task(self._run(deletes), name="tenant domains")

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _update(self) -> None:
        tenants = frozenset() if self._keys is None else self._keys.tenants()
        for tenant in self._tenants - tenants:
            log.info("tenant domains: no key is left tenant=%s", tenant)
            self._leaving[tenant_domain(tenant)] = secrets.token_bytes(ID_BYTES)
        self._tenants = tenants

    async def _run(self, deletes: DeleteSender) -> None:
        while True:
            self._update()
            for domain, id_ in list(self._leaving.items()):
                if await deletes.send_domain(id_, domain):
                    log.info("tenant domains: deleted domain=%s", domain)
                    del self._leaving[domain]
            await asyncio.sleep(POLL_S)
