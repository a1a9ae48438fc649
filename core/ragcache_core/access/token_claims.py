"""Issuers of JSON Web Tokens, and what the claims of their tokens allow a caller.

A token names a user and not a key. So its caller's name begins with the issuer's name and ``:``,
which no name of the key file has. Users of two issuers, and keys, never share a name.

A tenant of a token has to be known before: the issuer's entry lists it, or the key file does. Thus
every gateway knows all domains that may hold KV, and deletes of documents reach each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ragcache_core.access.caller import Caller, NotAllowed, Scope
from ragcache_core.access.key_file import ReadFilter
from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.filters import Filter

MAX_SUBJECT_CHARS: Final = 255
MAX_CLAIM_VALUES: Final = 1024
"""Values of one claim that count."""

_ASK_AN_ADMINISTRATOR: Final = "ask the administrator of the issuer, or use an API key"


@dataclass(frozen=True, slots=True)
class TokenIssuer:
    """An issuer whose tokens a gateway accepts.

    Attributes:
        name: Short name, for callers, logs and metrics.
        issuer: Its URL, which is ``iss`` in its tokens.
        audiences: One of them has to be in ``aud``.
        scopes: For each scope the values of ``scopes_claim`` that give it.
        default_scopes: Of every token.
        scopes_claim: Claim with roles or groups: a list, or words with spaces between.
        name_claim: Claim with the name of the user, which must not change.
        tenant_claim: Claim with the tenant; None: its users have no tenant.
        tenants: Tenant by value of the claim; empty: the value is the name of a tenant.
        collections_claim: Claim with patterns of the collections that the user may name.
        filter_claim: Claim with the filter of the user's searches.
        jwks_url: URL of its public keys; None: its discovery document has it.
    """

    name: str
    issuer: str
    audiences: tuple[str, ...]
    scopes: Mapping[Scope, tuple[str, ...]] = field(default_factory=dict)
    default_scopes: tuple[Scope, ...] = ()
    scopes_claim: str = "roles"
    name_claim: str = "sub"
    tenant_claim: str | None = None
    tenants: Mapping[str, str] = field(default_factory=dict)
    collections_claim: str | None = None
    filter_claim: str | None = None
    jwks_url: str | None = None

    def tenants_among(self, listed: Collection[str]) -> frozenset[str]:
        """Return the tenants that its tokens may name.

        Args:
            listed: Tenants of the key file.
        """
        if self.tenant_claim is None:
            return frozenset()
        return frozenset(self.tenants.values() if self.tenants else listed)


def caller_of(
    issuer: TokenIssuer,
    claims: Mapping[str, Any],
    listed: Collection[str],
    read_filter: ReadFilter,
) -> Caller:
    """Return the caller of a token whose signature and times are verified.

    Args:
        listed: Tenants of the key file.

    Raises:
        NotAllowed: A claim is missing or of no use here. The error has no value of a claim.
    """
    scopes = _scopes(issuer, claims)
    return Caller(
        name=f"{issuer.name}:{_subject(issuer, claims)}",
        tenant=_tenant(issuer, claims, listed),
        scopes=scopes,
        collections=_collections(issuer, claims, scopes),
        filter=_filter(issuer, claims, scopes, read_filter),
    )


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """Return the claim of a name, or else that at a path like ``realm_access.roles``."""
    if path in claims:
        return claims[path]
    found: Any = claims
    for name in path.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def _texts(value: object) -> tuple[str, ...]:
    """Return the texts of a claim with one text or a list; other values have none."""
    values = value if isinstance(value, list) else [value]
    return tuple(one for one in values[:MAX_CLAIM_VALUES] if isinstance(one, str))


def _scopes(issuer: TokenIssuer, claims: Mapping[str, Any]) -> frozenset[Scope]:
    value = _claim(claims, issuer.scopes_claim)
    texts = {*value.split(), value} if isinstance(value, str) else set(_texts(value))
    given = {scope for scope, wanted in issuer.scopes.items() if not texts.isdisjoint(wanted)}
    return frozenset(given | set(issuer.default_scopes))


def _limit(claims: Mapping[str, Any], claim: str | None, *, is_limited: bool) -> Any:
    """Return the claim that limits a caller; None: the issuer has no such limit.

    Args:
        is_limited: Whether the caller's scopes can be limited so. Then the claim is required, and
            otherwise it must not be there: the key file has the same rule.
    """
    if claim is None:
        return None
    value = _claim(claims, claim)
    if value is None and is_limited:
        raise _not_allowed(claim, "is missing")
    if value is not None and not is_limited:
        raise _not_allowed(claim, "has no effect with the scopes of this user")
    return value


def _collections(
    issuer: TokenIssuer, claims: Mapping[str, Any], scopes: frozenset[Scope]
) -> tuple[str, ...]:
    claim = issuer.collections_claim
    value = _limit(claims, claim, is_limited=Scope.ADMIN not in scopes)
    patterns = tuple(filter(None, _texts(value)))
    if value is not None and not patterns:
        raise _not_allowed(claim, "names no collections")
    return patterns


def _filter(
    issuer: TokenIssuer,
    claims: Mapping[str, Any],
    scopes: frozenset[Scope],
    read_filter: ReadFilter,
) -> Filter | None:
    claim = issuer.filter_claim
    value = _limit(claims, claim, is_limited=scopes.isdisjoint({Scope.WRITE, Scope.ADMIN}))
    if value is None:
        return None
    try:
        return read_filter("filter", value)
    except InvalidInput:
        raise _not_allowed(claim, "is no filter of a search") from None


def _subject(issuer: TokenIssuer, claims: Mapping[str, Any]) -> str:
    value = _claim(claims, issuer.name_claim)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise _not_allowed(issuer.name_claim, "is missing, or is no text that can be printed")
    if len(value) > MAX_SUBJECT_CHARS:
        raise _not_allowed(issuer.name_claim, f"has over {MAX_SUBJECT_CHARS} characters")
    return value


def _tenant(issuer: TokenIssuer, claims: Mapping[str, Any], listed: Collection[str]) -> str | None:
    if issuer.tenant_claim is None:
        return None
    values = _texts(_claim(claims, issuer.tenant_claim))
    if issuer.tenants:
        found = {issuer.tenants[one] for one in values if one in issuer.tenants}
    else:
        found = {one for one in values if one in listed}
    if len(found) != 1:
        problem = "names several tenants" if found else "names no tenant of this gateway"
        raise _not_allowed(issuer.tenant_claim, problem)
    return found.pop()


def _not_allowed(claim: str | None, problem: str) -> NotAllowed:
    return NotAllowed("token", f"the claim {claim!r} {problem}", _ASK_AN_ADMINISTRATOR)
