"""What the connector is told by its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ragcache_core.errors import InvalidInput
from ragcache_wire.members import Members, members_from

REPAIR_SLICE_TOKENS = 256
"""``bench/interference.py`` says what it does to requests that decode meanwhile."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the connector; one value per process, read once.

    cachestore: the store's shards. records_listen: "host:port" where the engine's record of its
    requests is served, or None.
    lookup_wait_s: how long one scheduling step may wait for the store's answers, all requests of
    it together; they are asked about again in the next step. lookup_deadline_s: after that a lookup
    counts as a miss.
    load_deadline_s: a load that takes longer is given up and its tokens are computed.
    min_load_tokens: fewer tokens than this are computed rather than loaded, because a load costs
    a round trip and an idle engine step or two (so a system prompt alone is not worth one).
    save_queue_bytes: memory bound of values waiting to be sent to the store; what does not fit is
    not saved (a lost save is a future miss, an unbounded queue a dead engine).
    min_blend_share: of the tokens behind what is exact, at least so many must be held if the prompt
    is to be put together from other prompts' chunks; with fewer, computing them all takes little
    longer, and what comes of that is exact.
    blend_always: put prompts together also where computing them is predicted to be faster; for
    measurements and tests.
    repair_slice_tokens: recomputed in one step at most while other requests run, which decode one
    token in it. question_tokens: that look at chunks before these are repaired, at most.
    observe_deadline_s: how long blocks of a request that has ended are kept, at most, while none of
    its chunks is looked at; the engine does that when it has nothing else to do.
    """

    cachestore: Members
    records_listen: str | None = None
    lookup_wait_s: float = 0.005
    lookup_deadline_s: float = 0.5
    load_deadline_s: float = 5.0
    save_deadline_s: float = 30.0
    min_load_tokens: int = 64
    save_queue_bytes: int = 1 << 30
    min_blend_share: float = 0.5
    blend_always: bool = False
    repair_slice_tokens: int = REPAIR_SLICE_TOKENS
    question_tokens: int = 128
    observe_deadline_s: float = 60.0

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> EngineConfig:
        """Read RAGCACHE_CACHESTORE, _RECORDS_LISTEN, _BLEND and _REPAIR_SLICE_TOKENS.

        Raises InvalidInput naming the one that is wrong.
        """
        cachestore = env.get("RAGCACHE_CACHESTORE", "")
        if not cachestore:
            raise InvalidInput("RAGCACHE_CACHESTORE", "is not set", "set it to host:port")
        return cls(
            members_from("RAGCACHE_CACHESTORE", cachestore),
            env.get("RAGCACHE_RECORDS_LISTEN") or None,
            blend_always=_blend(env.get("RAGCACHE_BLEND", "faster")) == "always",
            repair_slice_tokens=_slice_tokens(env.get("RAGCACHE_REPAIR_SLICE_TOKENS", "")),
        )


def _blend(text: str) -> str:
    if text not in ("faster", "always"):
        raise InvalidInput("RAGCACHE_BLEND", f"is {text!r}", "set it to faster or always")
    return text


def _slice_tokens(text: str) -> int:
    if not text:
        return REPAIR_SLICE_TOKENS
    if not (text.isdecimal() and int(text)):
        raise InvalidInput(
            "RAGCACHE_REPAIR_SLICE_TOKENS", f"is {text!r}", "set it to 1 or more, or leave it out"
        )
    return int(text)
