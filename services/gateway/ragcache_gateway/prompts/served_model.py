"""The model that the gateway's engines serve."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_core.identity.keys import KVSpace
from ragcache_wire.watched.signing_keys import SigningKeys


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What every request to an engine needs to know of the model.

    Args:
        name: Name under which the engines serve the model.
        max_model_len: Most tokens of a prompt and its answer together.
        space: KV space of the model; only KV of one space can be exchanged.
        plan_keys: Keys that sign reuse plans; None: plans carry no signature.
    """

    name: str
    max_model_len: int
    space: KVSpace
    plan_keys: SigningKeys | None
