"""Quotas: the most requests and tokens of a key or a tenant in a window of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ragcache_core.access.usage import Period
from ragcache_core.errors import InvalidInput

MAX_LIMIT: Final = 10**15
DEFAULT_CACHED_TOKEN_PRICE: Final = 0.1


class QuotaResource(StrEnum):
    """What a quota limits."""

    REQUESTS = "requests"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Spend:
    """Requests, and tokens as quotas count them."""

    requests: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: Spend) -> Spend:
        return Spend(self.requests + other.requests, self.tokens + other.tokens)

    def __neg__(self) -> Spend:
        return Spend(-self.requests, -self.tokens)

    def of(self, resource: QuotaResource) -> float:
        """Return the amount of one resource."""
        return self.requests if resource is QuotaResource.REQUESTS else self.tokens


@dataclass(frozen=True, slots=True)
class QuotaLimit:
    """The most of one resource in a window."""

    resource: QuotaResource
    period: Period
    limit: int

    @property
    def name(self) -> str:
        """Its name in the key file, such as ``tokens_per_day``."""
        return f"{self.resource}_per_{self.period}"


Quota = tuple[QuotaLimit, ...]
"""The limits of one key or tenant."""

_LIMITS: Final = {
    f"{resource}_per_{period}": (resource, period)
    for resource in QuotaResource
    for period in Period
}


def read_quota(path: str, value: object) -> Quota:
    """Parse the ``quota`` of an entry of the key file.

    Raises:
        InvalidInput: A limit is unknown or out of range.
    """
    if not isinstance(value, dict):
        raise InvalidInput(path, "is no table", "write { tokens_per_day = 1000000 }")
    limits = []
    for name, limit in value.items():
        if name not in _LIMITS:
            raise InvalidInput(f"{path}.{name}", "is no limit", f"use {', '.join(_LIMITS)}")
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
            fix = f"use a whole number from 1 to {MAX_LIMIT}"
            raise InvalidInput(f"{path}.{name}", "is out of range", fix)
        limits.append(QuotaLimit(*_LIMITS[name], limit))
    return tuple(limits)


def quota_fields(quota: Quota) -> dict[str, int]:
    """Return the table that ``read_quota`` reads."""
    return {one.name: one.limit for one in quota}


def exceeded(quota: Quota, used: Mapping[Period, Spend], wanted: Spend) -> QuotaLimit | None:
    """Return the limit that a request would exceed. None: it fits.

    If it would exceed several, it is the one whose window ends last: only then it fits.

    Args:
        used: What counts in each window that the quota names, with all reservations.
        wanted: What the request adds.
    """
    over = [one for one in quota if (used[one.period] + wanted).of(one.resource) > one.limit]
    return max(over, key=lambda one: list(Period).index(one.period), default=None)


def scarcest(
    quota: Quota, used: Mapping[Period, Spend], resource: QuotaResource
) -> QuotaLimit | None:
    """Return the limit of a resource with the least share left, which clients are told."""
    limits: Iterable[QuotaLimit] = (one for one in quota if one.resource is resource)
    return max(limits, key=lambda one: used[one.period].of(resource) / one.limit, default=None)
