"""The precision policy of a RagCache, which shards, engines and gateways get alike."""

from __future__ import annotations

from ragcache_core.identity.variant import Codec, Precision
from ragcache_core.tiering.precision_policy import DEFAULT_MAX_ERROR, PrecisionPolicy, Scheme
from ragcache_operator.spec.ragcache import RagCache


def precision_setting(cache: RagCache) -> str | None:
    """Return ``RAGCACHE_PRECISION``; None: all values are native, which is the default."""
    given = cache.spec.cache_store.precision
    policy = PrecisionPolicy(
        Scheme(given.scheme),
        tuple(Precision(Codec(one.key), Codec(one.value)) for one in given.grades),
        tuple(one.share for one in given.grades if one.share is not None),
        DEFAULT_MAX_ERROR if given.max_error is None else given.max_error,
    )
    return str(policy) if policy.encodings else None
