"""How stored KV is used for an answer: what the platform is set to, unless the request asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, plan_blend, plan_compute, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_gateway.chat.schema import RagCacheOptions


@dataclass(frozen=True, slots=True)
class Reuse:
    """Which stored KV stands for a computation.

    max_recompute: share, in [0, 1], of the tokens taken from other prefixes (``blend``) that may be
    computed anew at most. alpha, trial: as of ``ReusePlan``; nobody asks for them by a request.
    """

    mode: Literal["exact", "blend", "off"]
    max_recompute: float
    alpha: float | None = None
    trial: bool = False


def wanted_reuse(options: RagCacheOptions, default: Reuse) -> Reuse:
    """What a request asks for; default where it does not say. Raises InvalidInput."""
    mode = options.reuse or default.mode
    if options.max_recompute is None:
        return Reuse(mode, default.max_recompute)
    if mode != "blend":
        raise InvalidInput(
            "ragcache.max_recompute",
            f"is given, and ragcache.reuse is {mode}",
            "set ragcache.reuse to blend or leave it out",
        )
    return Reuse(mode, options.max_recompute)


def plan_reuse(
    reuse: Reuse,
    prompt: Prompt,
    space: KVSpace,
    domain: str,
    request: str,
    documents: Sequence[str],
    planned_at_ms: int,
) -> ReusePlan:
    """The plan for a prompt; what is not of ``reuse`` as of ``plan_exact``."""
    match reuse.mode:
        case "off":
            return plan_compute(prompt, space, domain, request)
        case "exact":
            plan = plan_exact(prompt, space, domain, request, documents, planned_at_ms)
            return replace(plan, trial=reuse.trial)
        case "blend":
            return plan_blend(
                prompt,
                space,
                domain,
                request,
                reuse.max_recompute,
                documents,
                planned_at_ms,
                reuse.alpha,
            )
