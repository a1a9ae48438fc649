"""The access domains that may hold KV of documents, and the deletion of KV without a tenant.

A document belongs to no tenant, but the KV of its chunks is stored once for each tenant that asked
about it. So a delete goes to the domain of every tenant. When the last key of a tenant disappears,
no caller can use its KV. After a time of grace, in which a key may come back, all of it is deleted:
its domain, and the domain in which engines store its prompts without a plan. Until every shard has
acknowledged both, its domain still gets the deletes of documents.

The retriever stores the names of the tenants, so that a gateway that starts finds those whose keys
disappeared while no gateway ran, and those whose deletes another gateway did not complete.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from ragcache_core.access.caller import tenant_domain
from ragcache_core.errors import NotFound
from ragcache_core.identity.keys import PUBLIC_DOMAIN, domain_salt
from ragcache_core.plan.segments import plain_domain
from ragcache_core.store_api import ID_BYTES
from ragcache_gateway.auth.api_keys import ApiKeys
from ragcache_gateway.documents.delete_sender import DeleteSender
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_wire.clients.retriever_client import RetrieverClient

log = logging.getLogger(__name__)

POLL_S: Final = 2.0
REPORT_NAME: Final = "tenants"
"""Report of the retriever: a JSON list of the tenants whose domains may hold KV."""


class TenantDomains(BackgroundTasks):
    """Knows every domain, and deletes those whose tenant has gone. For one event loop.

    Args:
        keys: None: requests need no key, so there are no tenants.
        retriever: Stores the tenants.
        grace_s: From the last key of a tenant to the deletion of its KV.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        keys: ApiKeys | None,
        retriever: RetrieverClient,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._keys = keys
        self._retriever = retriever
        self._grace_s = grace_s
        self._clock = clock
        self._tenants: frozenset[str] = frozenset()
        self._keyless: dict[str, float] = {}  # since when, by tenant, within its grace
        self._leaving: dict[str, bytes] = {}  # the id of the delete, by tenant
        self._deleted: set[str] = set()  # tenants that may still be stored
        self._stored: frozenset[str] | None = None  # None: not read yet

    def current(self) -> tuple[str, ...]:
        """Return every domain that may hold KV, the public one first."""
        self._update()
        own = map(tenant_domain, (*sorted(self._tenants), *self._keyless, *self._leaving))
        return tuple(dict.fromkeys((PUBLIC_DOMAIN, *own)))

    def start(self, deletes: DeleteSender) -> None:
        """Delete the domains of tenants that have disappeared, and of those that will."""
        self._update()
        work = partial(self._delete_left, deletes)
        self._spawn(self._repeat(work, POLL_S, "tenant domains: not stored"), "tenant domains")

    def _update(self) -> None:
        tenants = frozenset() if self._keys is None else self._keys.tenants()
        self._begin_grace(self._tenants - tenants)
        self._tenants = tenants
        now_s = self._clock()
        for tenant, since_s in list(self._keyless.items()):
            if tenant in tenants:
                log.info("tenant domains: a key is back tenant=%s", tenant)
            elif now_s - since_s >= self._grace_s:
                log.info("tenant domains: deleting tenant=%s", tenant)
                self._leaving[tenant] = secrets.token_bytes(ID_BYTES)
            else:
                continue
            del self._keyless[tenant]

    def _begin_grace(self, tenants: frozenset[str]) -> None:
        for tenant in tenants - self._leaving.keys() - self._keyless.keys():
            log.warning(
                "tenant domains: no key is left tenant=%s deletion_in_s=%g", tenant, self._grace_s
            )
            self._keyless[tenant] = self._clock()

    async def _delete_left(self, deletes: DeleteSender) -> None:
        """Delete the domains of tenants without keys, and store the tenants. Raises Unavailable."""
        self._update()
        for tenant, id_ in list(self._leaving.items()):
            if await deletes.send_domains(id_, _all_domains(tenant)):
                log.info("tenant domains: deleted tenant=%s", tenant)
                del self._leaving[tenant]
                self._deleted.add(tenant)
        await self._synchronize()

    async def _synchronize(self) -> None:
        """Take over stored tenants at the first call, and store the tenants if they change."""
        if self._stored is None:
            stored = await self._read()
            self._begin_grace(stored - self._tenants)
            self._stored = stored
        kept = self._tenants | self._keyless.keys() | self._leaving.keys()
        if kept <= self._stored and not (self._deleted - kept) & self._stored:
            return
        # Another gateway may have stored some meanwhile.
        wanted = (await self._read() - self._deleted) | kept
        await self._retriever.put_report(REPORT_NAME, json.dumps(sorted(wanted)).encode())
        self._stored = wanted
        self._deleted.clear()

    async def _read(self) -> frozenset[str]:
        try:
            report = await self._retriever.get_report(REPORT_NAME)
        except NotFound:
            return frozenset()
        return frozenset(json.loads(report.body))


def _all_domains(tenant: str) -> tuple[str, str]:
    """Return the domain of a tenant's plans, and that of its prompts without a plan."""
    domain = tenant_domain(tenant)
    return domain, plain_domain(domain_salt(domain))
