"""An engine whose values come from the tier that a measurement asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

STORE: Final = "store"
HOST: Final = "host"
DEVICE: Final = "device"


class ChosenTier:
    """Stands for a worker's tiers, and is the host tier, the device pool, or none of both.

    An engine has its values in one tier only. The comparison needs the same value from each.
    """

    def __init__(self, tiers: Mapping[str, Any]) -> None:
        self.tiers = dict(tiers)
        self.choose(STORE)

    def choose(self, tier: str) -> None:
        """Use one of the tiers from now on, and count its reads from 0."""
        self.chosen, self.found, self.not_found = tier, 0, 0

    def read(self, *arguments: Any, **options: Any) -> Any:
        """Read from the chosen tier; None: the value comes from the store."""
        read = self.tiers[self.chosen].read(*arguments, **options)
        self.found += read is not None
        self.not_found += read is None
        return read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tiers[self.chosen], name)

    def close(self) -> None:
        """Close all tiers."""
        for tier in self.tiers.values():
            tier.close()


def install_tiers() -> list[ChosenTier]:
    """Let the connector's worker make a ``ChosenTier``; return the list that will have it."""
    from ragcache_engine.worker import worker  # noqa: PLC0415

    made: list[ChosenTier] = []
    make: Callable[..., Any] = vars(worker)["make_local_tiers"]

    def make_all(settings: Any, *rest: Any) -> Any:
        off = {"host_tier_bytes": 0, "device_pool_bytes": 0}
        made.append(
            ChosenTier(
                {
                    STORE: make(settings.model_copy(update=off), *rest),
                    HOST: make(settings.model_copy(update={"device_pool_bytes": 0}), *rest),
                    DEVICE: make(settings.model_copy(update={"host_tier_bytes": 0}), *rest),
                }
            )
        )
        return made[0]

    vars(worker)["make_local_tiers"] = make_all
    return made
