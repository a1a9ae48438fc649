"""Maps variants to the tier that a load reads them from: the worker's own, or the store's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.store_api import StoredVariant
from ragcache_engine.protocol.messages import STORE_TIER, TierChange, VariantSpan
from ragcache_engine.telemetry.segment_outcomes import SpanSource
from ragcache_kv.values.layout import value_bytes


class TierMap:
    """The scheduler's copy of what the worker's own tiers store, kept by their reports."""

    def __init__(self, space: KVSpace) -> None:
        self._space = space
        self._local_tiers: dict[VariantKey, str] = {}

    def update(self, changes: Mapping[VariantKey, TierChange | None]) -> None:
        """Record the worker's tier of each variant. None: no tier stores it any more."""
        for key, change in changes.items():
            if change is None:
                self._local_tiers.pop(key, None)
            else:
                self._local_tiers[key] = change.tier

    def bytes_by_tier(
        self, variants: Iterable[VariantKey], stored: Mapping[VariantKey, StoredVariant]
    ) -> Mapping[str, int]:
        """Return how many bytes of the variants a load would read from each tier.

        Args:
            variants: Variants to load. Those that are not in ``stored`` do not count.
            stored: The store's answer to the lookup.
        """
        sizes: Counter[str] = Counter()
        for variant in variants:
            if (entry := stored.get(variant)) is not None:
                tier, num_bytes = self._source(entry)
                sizes[tier] += num_bytes
        return sizes

    def sources(
        self, spans: Sequence[VariantSpan], stored: Mapping[VariantKey, StoredVariant]
    ) -> Mapping[int, SpanSource]:
        """Return where a load that begins now reads each span from, by the span's start."""
        found = {}
        for span in spans:
            if (entry := stored.get(span.variant)) is not None:
                base = span.start if span.base_position is None else span.base_position
                found[span.start] = SpanSource(
                    span.variant, *self._source(entry), base, span.fix_overhead
                )
        return found

    def loaded_bytes_by_tier(
        self,
        reported: Mapping[str, int],
        variants: Iterable[VariantKey],
        stored: Mapping[VariantKey, StoredVariant],
    ) -> Mapping[str, int]:
        """Return how many bytes a finished load read from each tier.

        Args:
            reported: The worker's report, which does not tell the store's tiers apart. This
                function splits the store's bytes in the proportion that the lookup predicted.
            variants: The variants that were loaded.
            stored: The store's answer to the lookup.
        """
        predicted: Counter[str] = Counter()
        for entry in self._remote(variants, stored):
            predicted[entry.tier] += entry.info.num_bytes
        sizes = Counter({tier: size for tier, size in reported.items() if tier != STORE_TIER})
        for tier, num_bytes in predicted.items():
            sizes[tier] += reported.get(STORE_TIER, 0) * num_bytes // predicted.total()
        return +sizes

    def remote_tiers(
        self, variants: Iterable[VariantKey], stored: Mapping[VariantKey, StoredVariant]
    ) -> set[str]:
        """Return the store's tiers that a load of the variants waits for."""
        return {entry.tier for entry in self._remote(variants, stored)}

    def _source(self, entry: StoredVariant) -> tuple[str, int]:
        """Return the tier that a load reads a stored variant from, and how many bytes."""
        if (tier := self._local_tiers.get(entry.key)) is not None:
            return tier, value_bytes(self._space, entry.info.num_tokens)
        return entry.tier, entry.info.num_bytes

    def _remote(
        self, variants: Iterable[VariantKey], stored: Mapping[VariantKey, StoredVariant]
    ) -> list[StoredVariant]:
        entries = {variant: stored[variant] for variant in variants if variant in stored}
        remote = [entry for variant, entry in entries.items() if variant not in self._local_tiers]
        # If the map says that all are local, some have left the worker's tiers meanwhile.
        return remote or [*entries.values()]
