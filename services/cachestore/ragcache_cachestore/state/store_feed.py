"""The feed of a store: the changes of its variants, for gateways that follow its contents."""

from __future__ import annotations

import os
from collections.abc import Callable

from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_core.knowledge.node_change import (
    BOOT_BYTES,
    MAX_CHANGES,
    NodeChange,
    NodeChangeLog,
    StoredNode,
)
from ragcache_core.plan.reuse_plan import PLAIN_DOMAIN


class StoreFeed:
    """The last changes since the store started. The store's lock guards it.

    Variants of requests without a plan are left out: no plan of a gateway can name them.
    """

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self.log = NodeChangeLog(os.urandom(BOOT_BYTES), max_changes)
        self._watchers: list[Callable[[], None]] = []

    def publish(self, variant: CatalogVariant) -> None:
        """Tell where a variant is now, and wake the watchers."""
        if not is_announced(variant):
            return
        self.log.append(node_change(variant))
        for wake in self._watchers:
            wake()

    def watch(self, wake: Callable[[], None]) -> None:
        """Call wake at every change from now on. It must not block and must not call back."""
        self._watchers.append(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Stop calling wake."""
        self._watchers.remove(wake)


def is_announced(variant: CatalogVariant) -> bool:
    """Return whether a plan of a gateway can name a variant."""
    return not variant.origin.domain.startswith(PLAIN_DOMAIN)


def node_change(variant: CatalogVariant) -> NodeChange:
    """Return where a variant is now. Without a copy it is dropped."""
    if variant.memory is None and variant.disk is None:
        return NodeChange(variant.key)
    info, origin = variant.info, variant.origin
    node = StoredNode(
        key=variant.key,
        parent=origin.parent,
        num_tokens=info.num_tokens,
        num_bytes=info.num_bytes,
        exact=info.serves_exact,
        cost_s=origin.token_s * info.num_tokens or origin.cost_s,
    )
    return NodeChange.stored(variant.tier.value, node)
