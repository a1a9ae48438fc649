"""What a store holds of a prompt's chunks, and what each variant was seen to take from others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ragcache_core.blend.observation import ChunkObservation, observation_key
from ragcache_core.blend.selection import Candidate
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.reuse_plan import Action
from ragcache_core.plan.segments import NamedSegment
from ragcache_core.store_api import Held
from ragcache_kv.store_client.sharded import ShardedAnswer, ShardedStore

log = logging.getLogger("vllm.ragcache")

MAX_CANDIDATES = 16
"""Variants of one chunk that are compared; which of more is chance."""


def candidates(
    client: ShardedStore,
    segments: Sequence[NamedSegment],
    answer: ShardedAnswer,
    domain: str,
    timeout_s: float,
) -> Mapping[int, Sequence[Candidate]]:
    """By place, the variants of the segments that may come from another prefix.

    answer: of a lookup of segments. Of what cannot be read in time nothing is known.
    """
    held = {
        place: _of_most_use(found.held, named.variant)
        for place, (named, found) in enumerate(zip(segments, answer.variants, strict=True))
        if named.segment.action is Action.BLEND and found.held
    }
    seen = _observations(client, [one for some in held.values() for one in some], domain, timeout_s)
    return {
        place: [Candidate(one.key, one.info, seen.get(one.key)) for one in some]
        for place, some in held.items()
    }


def _of_most_use(held: Sequence[Held], own: VariantKey) -> Sequence[Held]:
    """At most MAX_CANDIDATES; the one of just this prefix among them, which needs no repair."""
    return sorted(held, key=lambda one: one.key != own)[:MAX_CANDIDATES]


def _observations(
    client: ShardedStore, held: Sequence[Held], domain: str, timeout_s: float
) -> Mapping[VariantKey, ChunkObservation]:
    seen: dict[VariantKey, ChunkObservation] = {}
    if not held or timeout_s <= 0:
        return seen
    keys = [observation_key(one.key) for one in held]
    try:
        for one, (_, stored) in zip(held, client.get(keys, timeout_s, domain=domain), strict=False):
            observation = None if isinstance(stored, Miss) else _read(stored.value)
            if observation is not None and len(observation.influence) == one.info.num_tokens:
                seen[one.key] = observation
    except RagCacheError as error:
        log.warning("what chunks took from others is not known: %s", error)
    return seen


def _read(raw: memoryview) -> ChunkObservation | None:
    try:
        return ChunkObservation.from_bytes(raw)
    except ValueError as error:
        log.warning("what a chunk took from others cannot be read: %s", error)
        return None
