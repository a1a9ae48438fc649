"""A part to run on this machine, as read from the Kubernetes objects the builders made."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_cli.local.ports import LOOPBACK
from ragcache_operator.builders.labels import WORKLOADS
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.builders.site import Address

_AFTER = {"engine": {"cachestore"}, "gateway": {"cachestore", "retriever"}}
"""What a component is started after: what it would otherwise meet as unavailable in its first
seconds. The gateway does not wait for the engine; it is not ready before it either."""

_STOP_ORDER = ("gateway", "engine")
"""Components stopped before the others: first what asks, then what it asks."""


@dataclass(frozen=True, slots=True)
class Check:
    """How to ask one thing of a part over HTTP: any status from 200 to 399 is a yes.

    failures: how many in a row make a no.
    """

    address: Address
    path: str
    period_s: float
    timeout_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class Part:
    """One container as a local process. after: components that are ready before it starts."""

    name: str
    component: str
    command: tuple[str, ...]
    env: dict[str, str]
    ports: dict[str, Address]
    startup: Check
    readiness: Check
    liveness: Check
    grace_s: float
    after: frozenset[str]

    @property
    def stop_rank(self) -> int:
        """Parts of a lower rank are stopped first."""
        if self.component in _STOP_ORDER:
            return _STOP_ORDER.index(self.component)
        return len(_STOP_ORDER)


def parts_from(children: Iterable[Object], cache_name: str) -> list[Part]:
    """The parts that the workloads among children describe, one process of each.

    Replicas are for more machines than one; the other objects have nothing to run.
    """
    return [_part(child, cache_name) for child in children if child["kind"] in WORKLOADS]


def _part(workload: Object, cache_name: str) -> Part:
    meta = workload["metadata"]
    pod = workload["spec"]["template"]["spec"]
    [container] = pod["containers"]
    component = container["name"]
    return Part(
        name=meta["name"].removeprefix(f"{cache_name}-"),
        component=component,
        command=_command(container),
        # What a pod gets from a Secret is in the environment of the user at their own desk.
        env={v["name"]: v["value"] for v in container["env"] if "value" in v},
        ports={p["name"]: Address(LOOPBACK, p["containerPort"]) for p in container["ports"]},
        startup=_check(container["startupProbe"]),
        readiness=_check(container["readinessProbe"]),
        liveness=_check(container["livenessProbe"]),
        grace_s=pod["terminationGracePeriodSeconds"],
        after=frozenset(_AFTER.get(component, ())),
    )


def _command(container: Object) -> tuple[str, ...]:
    words: list[str] = [*container["command"], *container.get("args", ())]
    # An image's only Python is the right one; here it is the one that runs this.
    program = sys.executable if words[0] == "python" else words[0]
    return (program, *words[1:])


def _check(probe: Object) -> Check:
    get = probe["httpGet"]
    return Check(
        address=Address(LOOPBACK, get["port"]),
        path=get["path"],
        period_s=probe["periodSeconds"],
        timeout_s=probe["timeoutSeconds"],
        failures=probe["failureThreshold"],
    )
