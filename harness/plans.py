"""Plans of a platform without keys: each reader may use every variant."""

from __future__ import annotations

from dataclasses import replace

from ragcache_core.access.reader import EVERYONE
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, plan_blend, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan


def exact_for_all(prompt: Prompt, space: KVSpace, domain: str, request: str) -> ReusePlan:
    """Return an exact plan (``plan_exact``) of a reader of all."""
    return replace(plan_exact(prompt, space, domain, request), reader=EVERYONE)


def blend_for_all(
    prompt: Prompt, space: KVSpace, domain: str, request: str, recompute_share: float
) -> ReusePlan:
    """Return a blend (``plan_blend``) of a reader of all."""
    plan = plan_blend(prompt, space, domain, request, recompute_share)
    return replace(plan, reader=EVERYONE)
