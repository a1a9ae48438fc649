"""Volumes that grow: which claims to change, and what their state means, without side effects.

The claim templates of a StatefulSet are immutable. So the operator raises the requests of the
claims, and replaces the StatefulSet without its pods, which the new one adopts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ragcache_operator.kube.resources import CLAIMS, STATEFUL_SETS, Object
from ragcache_operator.spec.quantity import parse_quantity
from ragcache_operator.status.conditions import Condition, ConditionState, find

VOLUMES_RESIZED = "VolumesResized"


@dataclass(frozen=True, slots=True)
class ClaimGrowth:
    """A live claim and the larger size that it should have."""

    claim: Object
    size: str

    @property
    def name(self) -> str:
        """Name of the claim."""
        return str(self.claim["metadata"]["name"])


def claim_growths(desired: Sequence[Object], children: Sequence[Object]) -> list[ClaimGrowth]:
    """Return the claims that request less than the StatefulSets that use them."""
    return [
        growth
        for growth in _claims(desired, children)
        if _requested_bytes(growth.claim) < parse_quantity(growth.size)
    ]


def has_other_claim_sizes(desired: Object, live: Object) -> bool:
    """Whether a StatefulSet has to be replaced, because its claim templates differ in size."""
    if desired["kind"] != STATEFUL_SETS.kind:
        return False
    found = _sizes(live)  # a webhook may have added a template
    return any(found.get(name) != size for name, size in _sizes(desired).items())


def volume_condition(
    desired: Sequence[Object],
    children: Sequence[Object],
    refusals: Mapping[str, str],
    before: Sequence[Condition],
) -> ConditionState | None:
    """Return the condition about growing volumes; None if none has grown yet.

    Args:
        refusals: Why the API server refused to grow a claim, by name.
        before: The conditions so far.
    """
    refused = [one for one in claim_growths(desired, children) if one.name in refusals]
    if refused:
        message = "; ".join(_refusal(one, refusals[one.name]) for one in refused)
        return ConditionState("False", "ExpansionRefused", message)
    growing = [one for one in _claims(desired, children) if _is_growing(one)]
    if growing:
        message = "; ".join(f"{one.name} grows to {one.size}" for one in growing)
        return ConditionState("False", "Expanding", message)
    if find(before, VOLUMES_RESIZED) is None:
        return None
    return ConditionState("True", "Resized", "every volume has the size of the spec")


def _refusal(growth: ClaimGrowth, reason: str) -> str:
    given = growth.claim["spec"]["resources"]["requests"]["storage"]
    storage_class = growth.claim["spec"].get("storageClassName") or "of the claim"
    return (
        f"{growth.name} stays at {given}, and the spec has {growth.size}: {reason}; if its driver "
        f"can, set allowVolumeExpansion: true in the StorageClass {storage_class}"
    )


def _claims(desired: Sequence[Object], children: Sequence[Object]) -> Iterator[ClaimGrowth]:
    """Yield each live claim of the desired StatefulSets with its desired size."""
    claims = [
        child
        for child in children
        if child["kind"] == CLAIMS.kind and "deletionTimestamp" not in child["metadata"]
    ]
    for workload in (obj for obj in desired if obj["kind"] == STATEFUL_SETS.kind):
        for name, size in _texts(workload).items():
            pattern = re.compile(rf"{name}-{re.escape(workload['metadata']['name'])}-\d+")
            for claim in claims:
                if pattern.fullmatch(claim["metadata"]["name"]):
                    yield ClaimGrowth(claim, size)


def _is_growing(growth: ClaimGrowth) -> bool:
    """Whether a bound claim has less capacity than it should have."""
    status = growth.claim.get("status") or {}
    capacity: str | None = (status.get("capacity") or {}).get("storage")
    if capacity is None or status.get("phase") != "Bound":
        return False
    return parse_quantity(capacity) < parse_quantity(growth.size)


def _requested_bytes(claim: Object) -> int:
    return parse_quantity(claim["spec"]["resources"]["requests"]["storage"])


def _texts(workload: Object) -> dict[str, str]:
    """Return the sizes of a workload's claim templates, by name."""
    templates = workload["spec"].get("volumeClaimTemplates") or ()
    return {
        one["metadata"]["name"]: one["spec"]["resources"]["requests"]["storage"]
        for one in templates
    }


def _sizes(workload: Object) -> dict[str, int]:
    return {name: parse_quantity(size) for name, size in _texts(workload).items()}
