"""Maps variants to the tier that a load reads them from: the worker's own, or the store's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.store_api import StoredVariant
from ragcache_engine.protocol.messages import STORE_TIER
from ragcache_kv.values.layout import value_bytes


class TierMap:
    """The scheduler's copy of what the worker's own tiers store, kept by their reports."""

    def __init__(self, space: KVSpace) -> None:
        self._space = space
        self._local_tiers: dict[VariantKey, str] = {}

    def update(self, changes: Mapping[VariantKey, str | None]) -> None:
        """Record the worker's tier of each variant. None: no tier stores it any more."""
        for key, tier in changes.items():
            if tier is None:
                self._local_tiers.pop(key, None)
            else:
                self._local_tiers[key] = tier

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
            entry = stored.get(variant)
            if entry is None:
                continue
            if (tier := self._local_tiers.get(variant)) is not None:
                sizes[tier] += value_bytes(self._space, entry.info.num_tokens)
            else:
                sizes[entry.tier] += entry.info.num_bytes
        return sizes

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

    def _remote(
        self, variants: Iterable[VariantKey], stored: Mapping[VariantKey, StoredVariant]
    ) -> list[StoredVariant]:
        entries = {variant: stored[variant] for variant in variants if variant in stored}
        remote = [entry for variant, entry in entries.items() if variant not in self._local_tiers]
        # If the map says that all are local, some have left the worker's tiers meanwhile.
        return remote or [*entries.values()]
