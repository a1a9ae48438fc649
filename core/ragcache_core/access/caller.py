"""A caller: what its API key allows, and whose KV its questions share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final

from ragcache_core.access.quota import DEFAULT_CACHED_TOKEN_PRICE, Quota
from ragcache_core.access.reader import Reader, reader_of
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import PUBLIC_DOMAIN, domain_salt
from ragcache_core.retrieval.filters import And, Filter

TENANT_DOMAIN: Final = "tenant:"
"""Prefix of the access domains of tenants, so that no tenant's domain is another kind of domain."""

MAX_NAMED_TENANTS: Final = 100
"""Tenants that metrics name: the first ones of the key file. Thus all gateways and workers name the
same ones, also after a restart, and who writes the file decides which ones."""
NO_TENANT: Final = "_none"
OTHER_TENANTS: Final = "_other"
"""What metrics name callers without a tenant, and tenants that they do not name. No tenant can be
called so: a tenant's name begins with a letter or a digit."""


class Scope(StrEnum):
    """What a key allows. ``admin`` includes the others, and no other one includes another."""

    ASK = "ask"  # questions, searches and models
    WRITE = "write"  # documents and collections
    VIEW = "view"  # the state of the platform, and no text of documents
    ADMIN = "admin"  # everything


class NotAllowed(RagCacheError):
    """A caller is known and may not do this.

    Args:
        field: What the caller named, such as ``collection``.
        problem: What is not allowed.
        fix: What to do instead.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(f"{field}: {problem}; {fix}")
        self.field = field


@dataclass(frozen=True, slots=True)
class TenantRules:
    """What the key file says of a tenant.

    Attributes:
        weight: Of its share while tenants compete: one of 2 gets twice as much as one of 1.
        quota: The most that all of its keys may use together.
        max_concurrent: Most requests that a gateway answers at once; None: not limited.
        reserved_share: Share of a gateway's slots that other tenants never take.
    """

    weight: float = 1.0
    quota: Quota = ()
    max_concurrent: int | None = None
    reserved_share: float = 0.0


DEFAULT_RULES: Final = TenantRules()


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key.

    Attributes:
        name: Name of the key, for logs and metrics. It is no secret.
        tenant: Whose KV its questions share; None: that of all callers without a tenant.
        scopes: What it may do.
        priority: Of its questions in the engines, as in vLLM: a lower number comes first.
        collections: Patterns like ``team-*`` of the collections it may name; empty: all.
        filter: Documents that its searches consider; None: all of the collection.
        is_named: Whether metrics name its tenant.
        quota: The most that the key may use.
        rules: Of its tenant.
        cached_token_price: What a cached token counts in quotas.
        max_concurrent: Most requests of the key that a gateway answers at once; None: not limited.
    """

    name: str
    tenant: str | None = None
    scopes: frozenset[Scope] = field(default_factory=frozenset)
    priority: int = 0
    collections: tuple[str, ...] = ()
    filter: Filter | None = None
    is_named: bool = True
    quota: Quota = ()
    rules: TenantRules = DEFAULT_RULES
    cached_token_price: float = DEFAULT_CACHED_TOKEN_PRICE
    max_concurrent: int | None = None

    @property
    def tenant_label(self) -> str:
        """Name of its tenant in metrics."""
        if self.tenant is None:
            return NO_TENANT
        return self.tenant if self.is_named else OTHER_TENANTS

    @property
    def domain(self) -> str:
        """Access domain of the KV that its questions store and load."""
        return PUBLIC_DOMAIN if self.tenant is None else tenant_domain(self.tenant)

    @property
    def cache_salt(self) -> str | None:
        """Salt of its prompts in an engine's own prefix cache; None: shared with all callers."""
        return domain_salt(self.domain)

    @property
    def reader(self) -> Reader:
        """What it may read, for the KV that its questions use."""
        return reader_of(self.name, self.collections, self.filter)

    def may(self, *scopes: Scope) -> bool:
        """Whether its key has one of these scopes."""
        return Scope.ADMIN in self.scopes or not self.scopes.isdisjoint(scopes)

    def may_use(self, collection: str) -> bool:
        """Whether it may name a collection."""
        return not self.collections or any(
            fnmatchcase(collection, pattern) for pattern in self.collections
        )

    def check_collection(self, collection: str, field: str = "collection") -> None:
        """Refuse a collection that the key does not allow.

        Args:
            field: Path of the collection in the request, for the error.

        Raises:
            NotAllowed: The key is for other collections.
        """
        if not self.may_use(collection):
            raise NotAllowed(
                field,
                f"the key {self.name!r} may not use {collection!r}",
                "name a collection that the key allows, or ask for another key",
            )

    def narrowed(self, wanted: Filter | None) -> Filter | None:
        """Return the filter of a search: what the request and the key both let through."""
        if self.filter is None or wanted is None:
            return self.filter if wanted is None else wanted
        return And((self.filter, wanted))


ANYONE: Final = Caller("anyone", scopes=frozenset({Scope.ADMIN}))
"""Every caller of a gateway without keys."""


def tenant_domain(tenant: str) -> str:
    """Return the access domain of a tenant."""
    return TENANT_DOMAIN + tenant
