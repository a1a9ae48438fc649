"""Reads what an engine reports of the costs of prefills."""

from __future__ import annotations

from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import InvalidInput
from ragcache_wire.v1 import engine_pb2


def profile_of(message: engine_pb2.PrefillProfile) -> PrefillProfile | None:
    """Read an engine's profile; None if it has none."""
    if not message.computed:
        return None
    width = len(message.computed)
    rows = range(0, len(message.seconds), width)
    try:
        return PrefillProfile(
            tuple(message.cached),
            tuple(message.computed),
            tuple(tuple(message.seconds[first : first + width]) for first in rows),
            message.pass_tokens,
        )
    except InvalidInput:
        return None
