"""Converts changes of nodes to messages and back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.change_log import BOOT_BYTES
from ragcache_core.knowledge.feed_position import SnapshotMark
from ragcache_core.knowledge.node_change import NodeChange
from ragcache_core.knowledge.stored_node import StoredNode
from ragcache_wire.v1 import node_feed_pb2 as pb

MARKS: Final = {
    pb.NodeChanges.NONE: SnapshotMark.NONE,
    pb.NodeChanges.BEGIN: SnapshotMark.BEGIN,
    pb.NodeChanges.PART: SnapshotMark.PART,
    pb.NodeChanges.END: SnapshotMark.END,
}

TIERS: Final = frozenset({"device", "host", "memory", "disk"})


def to_messages(changes: Iterable[NodeChange]) -> list[pb.NodeChange]:
    """Convert changes."""
    return [_to_message(change) for change in changes]


def _to_message(change: NodeChange) -> pb.NodeChange:
    node = change.node
    if node is None:
        return pb.NodeChange(key=change.key.to_bytes())
    return pb.NodeChange(
        key=change.key.to_bytes(),
        tier=change.tier,
        parent=b"" if node.parent is None else node.parent.to_bytes(),
        num_tokens=node.num_tokens,
        num_bytes=node.num_bytes,
        exact=node.exact,
        cost_s=node.cost_s,
    )


def from_message(message: pb.NodeChange) -> NodeChange:
    """Read a change.

    Raises:
        InvalidInput: The message is no change of a node.
    """
    key = _key("key", message.key)
    if not message.tier:
        return NodeChange(key)
    if message.tier not in TIERS:
        raise InvalidInput("tier", f"is {message.tier!r}", f"send one of {sorted(TIERS)}")
    if message.num_tokens < 1:
        raise InvalidInput("num_tokens", "is 0", "send the length of the chunk")
    cost_s = message.cost_s if math.isfinite(message.cost_s) and message.cost_s > 0 else 0.0
    node = StoredNode(
        key=key,
        parent=_key("parent", message.parent) if message.parent else None,
        num_tokens=message.num_tokens,
        num_bytes=message.num_bytes,
        exact=message.exact,
        cost_s=cost_s,
    )
    return NodeChange(key, message.tier, node)


def checked_boot(message: pb.NodeChanges) -> bytes:
    """Return the boot id of a message.

    Raises:
        InvalidInput: It is none.
    """
    if len(message.boot) != BOOT_BYTES:
        raise InvalidInput(
            "boot", f"has {len(message.boot)} bytes", f"send {BOOT_BYTES} random bytes"
        )
    return message.boot


def _key(field: str, raw: bytes) -> VariantKey:
    try:
        return VariantKey.from_bytes(raw)
    except ValueError as error:
        raise InvalidInput(field, str(error), "send a chunk key and a prefix key") from None
