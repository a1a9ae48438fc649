"""What the connector is told by its environment."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ragcache_core.errors import InvalidInput
from ragcache_core.tiering.tier_placement import DEFAULT_TIER_POLICY, TIER_POLICIES
from ragcache_engine.protocol.messages import LOAD_DEADLINE_S
from ragcache_engine.protocol.roles import Role
from ragcache_wire.tracing import otlp_endpoint
from ragcache_wire.watched.members import Members, members_from
from ragcache_wire.watched.signing_keys import PlanKeys, plan_keys_from

REPAIR_SLICE_TOKENS = 256
"""``bench/interference.py`` says what it does to requests that decode meanwhile."""

REPAIR_RUN_TOKENS = 1
"""``bench/repair_runs.py`` says what longer runs save, ``bench/blend_quality.py`` what is lost."""

_UNITS = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
LOOKUP_DEADLINE_S = 0.5

HANDOFF_WAIT_S = 10.0
"""Longer than most prompts take; what has not come by then stands in a queue, or nobody has it."""

_HANG_S = 120.0
"""A step over a full batch of a large model takes a minute on a CPU; vLLM's own limit is 300 s."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the connector; one value per process, read once.

    cachestore: the store's shards. records_listen: "host:port" where the engine's record of its
    requests is served, or None.
    plan_keys: a plan is acted on only if it is sealed with one of them; None: any plan is.
    lookup_wait_s: how long one scheduling step may wait for the store's answers, all requests of
    it together; they are asked about again in the next step. lookup_deadline_s: after that a lookup
    counts as a miss.
    load_deadline_s: of a load that takes longer, what has not come is computed; it is given less
    time where computing takes little (``Reach.deadline_s``).
    min_load_tokens: fewer tokens than this are computed rather than loaded, because a load costs
    a round trip and an idle engine step or two (so a system prompt alone is not worth one).
    save_queue_bytes: memory bound of values waiting to be sent to the store; what does not fit is
    not saved (a lost save is a future miss, an unbounded queue a dead engine).
    min_blend_share: of the tokens behind what is exact, at least so many must be held if the prompt
    is to be put together from other prompts' chunks; with fewer, computing them all takes little
    longer, and what comes of that is exact.
    load_always: load also where computing is predicted to be faster; for measurements and tests.
    repair_slice_tokens: recomputed in one step at most while other requests run, which decode one
    token in it. repair_run_tokens: recomputed next to each other at least, rather than the most
    needed ones wherever they are. question_tokens: that look at chunks before these are repaired,
    at most.
    plain_prefixes: load and save exact prefixes of requests that carry no plan.
    host_tier_bytes: of values kept in host memory, pinned where there is a GPU. device_pool_bytes:
    of values kept on the model's device, beside vLLM's own cache. 0: none. tier_policy: what of
    them is kept where (``ragcache_core.tiering.tier_placement``).
    role: what the engine does of requests that are handed over; vLLM's kv_role.
    handoff_wait_s: how long one that decodes waits for what another engine computes, before it
    computes what is missing.
    focused_chunks: of a blend, mend only the chunks that the question looks at.
    layerwise: take a request up when its first layers are in place (``layering``).
    observe_deadline_s: how long blocks of a request that has ended are kept, at most, while none of
    its chunks is looked at; the engine does that when it has nothing else to do.
    otlp_endpoint: base URL of an OpenTelemetry collector; None: no spans are made.
    """

    cachestore: Members
    records_listen: str | None = None
    plan_keys: PlanKeys | None = None
    lookup_wait_s: float = 0.005
    lookup_deadline_s: float = LOOKUP_DEADLINE_S
    load_deadline_s: float = LOAD_DEADLINE_S
    save_deadline_s: float = 30.0
    min_load_tokens: int = 64
    save_queue_bytes: int = 1 << 30
    min_blend_share: float = 0.5
    load_always: bool = False
    repair_slice_tokens: int = REPAIR_SLICE_TOKENS
    repair_run_tokens: int = REPAIR_RUN_TOKENS
    question_tokens: int = 128
    observe_deadline_s: float = 60.0
    plain_prefixes: bool = True
    otlp_endpoint: str | None = None
    host_tier_bytes: int = 0
    device_pool_bytes: int = 0
    tier_policy: str = DEFAULT_TIER_POLICY
    role: Role = Role.BOTH
    handoff_wait_s: float = HANDOFF_WAIT_S
    layerwise: bool = False
    focused_chunks: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> EngineConfig:
        """Read RAGCACHE_CACHESTORE, and what else there is in RAGCACHE_*.

        Raises InvalidInput naming the one that is wrong.
        """
        cachestore = env.get("RAGCACHE_CACHESTORE", "")
        if not cachestore:
            raise InvalidInput("RAGCACHE_CACHESTORE", "is not set", "set it to host:port")
        return cls(
            members_from("RAGCACHE_CACHESTORE", cachestore),
            env.get("RAGCACHE_RECORDS_LISTEN") or None,
            plan_keys_from(env),
            load_always=_load(env.get("RAGCACHE_LOAD", "faster")) == "always",
            repair_slice_tokens=_tokens("RAGCACHE_RECOMPUTE_SLICE_TOKENS", env, REPAIR_SLICE_TOKENS),
            repair_run_tokens=_tokens("RAGCACHE_REPAIR_RUN_TOKENS", env, REPAIR_RUN_TOKENS),
            plain_prefixes=_is_on(
                "RAGCACHE_PLAIN_PREFIXES", env.get("RAGCACHE_PLAIN_PREFIXES", "on")
            ),
            otlp_endpoint=otlp_endpoint(env),
            host_tier_bytes=_size("RAGCACHE_HOST_TIER_BYTES", env),
            device_pool_bytes=_size("RAGCACHE_DEVICE_POOL_BYTES", env),
            tier_policy=_tier_policy(env.get("RAGCACHE_TIER_POLICY", DEFAULT_TIER_POLICY)),
            layerwise=is_layerwise(env),
            focused_chunks=_is_on(
                "RAGCACHE_FOCUSED_CHUNKS", env.get("RAGCACHE_FOCUSED_CHUNKS", "off")
            ),
            handoff_wait_s=_seconds("RAGCACHE_HANDOFF_WAIT_S", env, HANDOFF_WAIT_S),
            load_deadline_s=_seconds("RAGCACHE_LOAD_DEADLINE_S", env, LOAD_DEADLINE_S),
            lookup_deadline_s=_seconds("RAGCACHE_LOOKUP_DEADLINE_S", env, LOOKUP_DEADLINE_S),
        )


def _load(text: str) -> str:
    if text not in ("faster", "always"):
        raise InvalidInput("RAGCACHE_LOAD", f"is {text!r}", "set it to faster or always")
    return text


def _is_on(name: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise InvalidInput(name, f"is {text!r}", "set it to on or off")
    return text == "on"


def is_layerwise(env: Mapping[str, str]) -> bool:
    """RAGCACHE_LAYERWISE. Raises InvalidInput."""
    return _is_on("RAGCACHE_LAYERWISE", env.get("RAGCACHE_LAYERWISE", "off"))


def hang_s(env: Mapping[str, str]) -> float:
    """RAGCACHE_HANG_S, of the API server: a step that takes longer will not end.

    Raises InvalidInput.
    """
    return _seconds("RAGCACHE_HANG_S", env, _HANG_S)


def _seconds(name: str, env: Mapping[str, str], default: float) -> float:
    text = env.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidInput(name, f"is {text!r}", "set it to seconds, or leave it out")
    return seconds


def _tokens(name: str, env: Mapping[str, str], default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if not (text.isdecimal() and int(text)):
        raise InvalidInput(name, f"is {text!r}", "set it to 1 or more, or leave it out")
    return int(text)


def _size(name: str, env: Mapping[str, str]) -> int:
    text = env.get(name, "") or "0"
    found = re.fullmatch(r"([0-9]+)(Ki|Mi|Gi)?", text, re.ASCII)
    if found is None:
        raise InvalidInput(name, f"is {text!r}", "set it to bytes, like 4Gi, or 0 for none")
    return int(found[1]) * _UNITS[found[2]]


def _tier_policy(text: str) -> str:
    if text not in TIER_POLICIES:
        names = " or ".join(TIER_POLICIES)
        raise InvalidInput("RAGCACHE_TIER_POLICY", f"is {text!r}", f"set it to {names}")
    return text
