"""Where the values of a load are: in a tier of the worker's own, or in one of the store's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.store_api import Held
from ragcache_engine.kv_cache.incoming_value import STORE
from ragcache_kv.values.layout import value_bytes


class Places:
    """What the scheduler side knows of the worker's tiers; they tell of what comes and goes."""

    def __init__(self, space: KVSpace) -> None:
        self._space = space
        self._own: dict[VariantKey, str] = {}

    def note(self, changes: Mapping[VariantKey, str | None]) -> None:
        """Values have come to a tier of the worker's, by its name; None: they are in none."""
        for key, tier in changes.items():
            if tier is None:
                self._own.pop(key, None)
            else:
                self._own[key] = tier

    def bytes_in(
        self, variants: Iterable[VariantKey], stored: Mapping[VariantKey, Held]
    ) -> Mapping[str, int]:
        """How much of these there is to load, by where it is. stored: what the store holds."""
        loads: Counter[str] = Counter()
        for variant in variants:
            held = stored.get(variant)
            if held is None:
                continue
            if (own := self._own.get(variant)) is not None:
                loads[own] += value_bytes(self._space, held.info.num_tokens)
            else:
                loads[held.tier] += held.info.num_bytes
        return loads

    def bytes_taken(
        self,
        bytes_from: Mapping[str, int],
        variants: Iterable[VariantKey],
        stored: Mapping[VariantKey, Held],
    ) -> Mapping[str, int]:
        """How much a load of these has brought, by where it was.

        bytes_from: as the worker has it, to whom the store is one place: its tiers have shares in
        that as they were expected to have.
        """
        shares: Counter[str] = Counter()
        for one in self._away(variants, stored):
            shares[one.tier] += one.info.num_bytes
        taken = Counter({place: size for place, size in bytes_from.items() if place != STORE})
        for tier, share in shares.items():
            taken[tier] += bytes_from.get(STORE, 0) * share // shares.total()
        return +taken

    def waited_for(
        self, variants: Iterable[VariantKey], stored: Mapping[VariantKey, Held]
    ) -> set[str]:
        """Where that is of these which a late load was late for."""
        return {one.tier for one in self._away(variants, stored)}

    def _away(
        self, variants: Iterable[VariantKey], stored: Mapping[VariantKey, Held]
    ) -> list[Held]:
        held = {variant: stored[variant] for variant in variants if variant in stored}
        away = [one for variant, one in held.items() if variant not in self._own]
        return away or [*held.values()]  # or what was thought to be here has left
