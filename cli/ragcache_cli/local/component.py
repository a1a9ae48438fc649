"""The processes of a local platform, read from the objects of the builders, and their probes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import httpx

from ragcache_cli.local.gpus import DEVICES_VARIABLE
from ragcache_cli.local.ports import LOOPBACK
from ragcache_operator.builders.metadata import WORKLOADS, Object
from ragcache_operator.builders.placement import Address

_AFTER = {"engine": {"cachestore"}, "gateway": {"cachestore", "retriever"}}
"""The components that start before each one, so that it does not find them unavailable. The gateway
does not wait for the engine, and answers 503 to questions until it has heard from one."""

_STOP_ORDER = ("gateway", "engine")
"""Components in the order in which they stop: clients before the servers they call."""


@dataclass(frozen=True, slots=True)
class Check:
    """One HTTP probe of a component: a status from 200 to 399 is a success.

    ``failures`` is the number of consecutive failures that count.
    """

    url: str
    period_s: float
    timeout_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class LocalComponent:
    """One container as a local process; it starts when the components in ``after`` are ready."""

    name: str
    kind: str
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
        """Return its position in the stop order; lower ranks stop first."""
        if self.kind in _STOP_ORDER:
            return _STOP_ORDER.index(self.kind)
        return len(_STOP_ORDER)


def components_from(
    children: Iterable[Object], cache_name: str, devices: Sequence[str] = ()
) -> list[LocalComponent]:
    """Return one process for each workload among the children.

    Replica counts are ignored: they are for several machines.

    Args:
        devices: GPUs as CUDA_VISIBLE_DEVICES names them. Each container gets as many as it asks
            for of an extended resource.
    """
    free = iter(devices)
    return [_component(child, cache_name, free) for child in children if child["kind"] in WORKLOADS]


def _component(workload: Object, cache_name: str, devices: Iterator[str]) -> LocalComponent:
    meta = workload["metadata"]
    pod = workload["spec"]["template"]["spec"]
    [container] = pod["containers"]
    kind = container["name"]
    return LocalComponent(
        name=meta["name"].removeprefix(f"{cache_name}-"),
        kind=kind,
        command=_command(container),
        # A value that a pod reads from a Secret comes from the user's environment here.
        env={v["name"]: v["value"] for v in container["env"] if "value" in v}
        | _device(container, devices),
        ports={p["name"]: Address(LOOPBACK, p["containerPort"]) for p in container["ports"]},
        startup=_check(container["startupProbe"]),
        readiness=_check(container["readinessProbe"]),
        liveness=_check(container["livenessProbe"]),
        grace_s=pod["terminationGracePeriodSeconds"],
        after=frozenset(_AFTER.get(kind, ())),
    )


def _device(container: Object, devices: Iterator[str]) -> dict[str, str]:
    """Return the variable that gives a container the next GPUs, if it asks for some."""
    limits = container["resources"].get("limits", {})
    wanted = sum(int(number) for name, number in limits.items() if "/" in name)
    given = list(islice(devices, wanted))
    return {DEVICES_VARIABLE: ",".join(given)} if given else {}


def _command(container: Object) -> tuple[str, ...]:
    words: list[str] = [*container["command"], *container.get("args", ())]
    # In an image `python` is the right one; here it is the interpreter of this process.
    program = sys.executable if words[0] == "python" else words[0]
    return (program, *words[1:])


def _check(probe: Object) -> Check:
    get = probe["httpGet"]
    return Check(
        url=f"{get['scheme'].lower()}://{Address(LOOPBACK, get['port'])}{get['path']}",
        period_s=probe["periodSeconds"],
        timeout_s=probe["timeoutSeconds"],
        failures=probe["failureThreshold"],
    )


class Prober:
    """Runs the probes of all components."""

    def __init__(self) -> None:
        # No proxies and no check of certificates: all components are on this machine.
        self._http = httpx.AsyncClient(trust_env=False, verify=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, check: Check, api_key: str | None = None) -> str | None:
        """Run a probe within its timeout; return None on success, else the reason."""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            reply = await self._http.get(check.url, timeout=check.timeout_s, headers=headers)
        except httpx.TimeoutException:
            return f"no answer within {check.timeout_s:g} s"
        except httpx.HTTPError:
            return "not listening"
        if reply.status_code >= 400:
            return _reason(reply)
        return None


def _reason(reply: httpx.Response) -> str:
    """Return the reason in a failed probe's body: progress, an error message, or the text."""
    try:
        said = reply.json()
        reason = str(said["progress"] if "progress" in said else said["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = f"status {reply.status_code}: {reply.text}"
    return " ".join(reason.split())[:200]
