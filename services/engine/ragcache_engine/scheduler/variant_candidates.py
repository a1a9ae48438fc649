"""Finds the stored variants of a prompt's chunks, with what engines observed of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ragcache_core.blend.observation import ChunkObservation, observation_key
from ragcache_core.blend.variant_selection import VariantCandidate, most_promising
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.reuse_plan import Action
from ragcache_core.plan.segments import NamedSegment
from ragcache_core.store_api import StoredVariant
from ragcache_kv.store_client.shard_router import ShardedLookup
from ragcache_kv.store_client.sharded import ShardedStore

log = logging.getLogger("vllm.ragcache")

MAX_CANDIDATES = 16
"""Variants of one chunk whose observations are compared, at most: the most promising ones."""


def find_candidates(
    client: ShardedStore,
    segments: Sequence[NamedSegment],
    answer: ShardedLookup,
    domain: str,
    timeout_s: float,
) -> Mapping[int, Sequence[VariantCandidate]]:
    """Return the candidates of each segment that may blend, by the segment's index.

    Args:
        client: The store, which this function asks for observations.
        segments: The prompt's segments.
        answer: The store's answer to a lookup of ``segments``.
        domain: Access domain of the plan.
        timeout_s: Bounds the request. A candidate whose observation does not arrive has none.
    """
    stored = {
        index: most_promising(found.stored, segments, index, MAX_CANDIDATES)
        for index, (named, found) in enumerate(zip(segments, answer.variants, strict=True))
        if named.segment.action is Action.BLEND and found.stored
    }
    all_stored = [entry for entries in stored.values() for entry in entries]
    observations = _observations(client, all_stored, domain, timeout_s)
    return {
        index: [VariantCandidate(e.key, e.info, observations.get(e.key)) for e in entries]
        for index, entries in stored.items()
    }


def _observations(
    client: ShardedStore, stored: Sequence[StoredVariant], domain: str, timeout_s: float
) -> Mapping[VariantKey, ChunkObservation]:
    observations: dict[VariantKey, ChunkObservation] = {}
    if not stored or timeout_s <= 0:
        return observations
    keys = [observation_key(entry.key) for entry in stored]
    try:
        answers = client.get(keys, timeout_s, domain=domain)
        for entry, (_, value) in zip(stored, answers, strict=False):
            observation = None if isinstance(value, Miss) else _parse(value.value)
            if observation is not None and len(observation.influence) == entry.info.num_tokens:
                observations[entry.key] = observation
    except RagCacheError as error:
        log.warning("lookup: cannot read observations of chunks error=%s", error)
    return observations


def _parse(raw: memoryview) -> ChunkObservation | None:
    try:
        return ChunkObservation.from_bytes(raw)
    except ValueError as error:
        log.warning("lookup: an observation of a chunk is malformed error=%s", error)
        return None
