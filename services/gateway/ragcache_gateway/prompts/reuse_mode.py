"""How an answer may use stored KV: as its request says, or as the platform is set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.variant import LOSSLESS, PrecisionUse
from ragcache_core.plan.prompt import plan_blend, plan_compute, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.quality.controller import AskedQuestion


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What every request to an engine needs to know of the model.

    Args:
        name: Name under which the engines serve the model.
        max_model_len: Most tokens of a prompt and its answer together.
        space: KV space of the model; only KV of one space can be exchanged.
    """

    name: str
    max_model_len: int
    space: KVSpace


Mode = Literal["exact", "blend", "off"]


@dataclass(frozen=True, slots=True)
class ReuseMode:
    """Which stored KV may replace computation.

    Args:
        max_recompute_share: Most that ``blend`` recomputes, as a share in [0, 1] of the tokens
            taken from after other prefixes.
        alpha: As in ``ReusePlan``; set by quality trials, never by a request.
        trial: As in ``ReusePlan``; set by quality trials, and by requests that measure quality.
        precision: As in ``ReusePlan``; set by the quality gate, and by requests that measure.
    """

    mode: Mode
    max_recompute_share: float
    alpha: float | None = None
    trial: bool = False
    precision: PrecisionUse = LOSSLESS


def requested_reuse(
    mode: Mode | None, max_recompute_share: float | None, default: ReuseMode
) -> ReuseMode:
    """Return how a request wants KV to be reused.

    Args:
        mode: The request's mode; None for the default.
        max_recompute_share: The request's share; None for the default.

    Raises:
        InvalidInput: The request sets a share for a mode that recomputes nothing.
    """
    mode = mode or default.mode
    if max_recompute_share is None:
        return ReuseMode(mode, default.max_recompute_share)
    if mode != "blend":
        raise InvalidInput(
            "ragcache.max_recompute_share",
            f"is given, and ragcache.reuse is {mode}",
            "set ragcache.reuse to blend or leave it out",
        )
    return ReuseMode(mode, max_recompute_share)


def plan_reuse(
    reuse: ReuseMode, asked: AskedQuestion, model: ServedModel, request_id: str
) -> ReusePlan:
    """Make the plan that tells an engine which chunks of a question's prompt it may load."""
    prompt, space, domain = asked.prompt, model.space, asked.domain
    documents, planned_at_ms = asked.documents, asked.planned_at_ms
    match reuse.mode:
        case "off":
            return plan_compute(prompt, space, domain, request_id)
        case "exact":
            plan = plan_exact(prompt, space, domain, request_id, documents, planned_at_ms)
            return replace(plan, trial=reuse.trial, reader=asked.reader)
        case "blend":
            share = reuse.max_recompute_share
            plan = plan_blend(prompt, space, domain, request_id, share, documents)
            return replace(
                plan,
                planned_at_ms=planned_at_ms,
                alpha=reuse.alpha,
                trial=reuse.trial,
                precision=reuse.precision,
                reader=asked.reader,
            )
