"""Converts what an engine has to do to the messages of its feed, and back."""

from __future__ import annotations

import math

from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cluster.sent_requests import AcceptedNumbers
from ragcache_wire.v1 import node_feed_pb2 as pb


def to_load_message(load: EngineLoad, accepted: AcceptedNumbers) -> pb.EngineLoad:
    """Convert a load, with the reader's requests that the engine has accepted."""
    return pb.EngineLoad(
        pending_s=load.pending_s,
        background_s=load.background_s,
        num_pending=load.num_pending,
        num_background=load.num_background,
        num_decoding=load.num_decoding,
        free_tokens=load.free_tokens,
        last_accepted=accepted.last,
        accepted=accepted.recent,
        begun_s=load.begun_s,
    )


def from_load_message(message: pb.EngineLoad) -> tuple[EngineLoad, AcceptedNumbers]:
    """Read a load. Seconds that are no time count as 0."""
    load = EngineLoad(
        pending_s=_seconds(message.pending_s),
        background_s=_seconds(message.background_s),
        num_pending=message.num_pending,
        num_background=message.num_background,
        num_decoding=message.num_decoding,
        free_tokens=message.free_tokens if message.HasField("free_tokens") else None,
        begun_s=_seconds(message.begun_s),
    )
    return load, AcceptedNumbers(message.last_accepted, message.accepted)


def _seconds(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
