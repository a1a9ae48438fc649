"""Measures the operator's API calls for a hundred RagCaches, from a real API server's audit log.

No node runs the pods, so only the operator's own work is measured.

- ``seconds_to_observed``: from the first RagCache created to the last status with its generation.
- ``writes_on_noop``: writes of a restarted operator over a second reconcile of every object and an
  idle interval after it, without Leases.
- ``idle_calls_per_minute``: all its calls in that interval.
- ``drift_corrected``: whether children that were changed or deleted by hand were corrected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.support.program import is_quick, print_figures, say
from harness.availability import Unavailable
from harness.cluster.control_plane import start_control_plane
from harness.cluster.kubeconfig import ADMIN_GROUP, User
from harness.cluster.operator_process import install, quickstart, running_operator_process
from harness.processes import free_port
from ragcache_operator.kube import resources
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.discovery import discover
from ragcache_operator.kube.resources import Object
from ragcache_operator.reconcile.children import child_resources

NAMESPACE = "default"
OPERATOR = User("operator", (ADMIN_GROUP,))
_WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_LIMIT_S = 300
_QUIET_S = 2.0


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run. ``idle_s`` is the interval in which idle calls are counted."""

    caches: int
    idle_s: float


FULL = Size(100, 60.0)
QUICK = Size(15, 10.0)


class AuditLog:
    """The operator's calls, from the API server's audit log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def calls(self) -> list[Object]:
        """Return the operator's calls since the last query, without Leases."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._position += whole
        entries = map(json.loads, data[:whole].splitlines())
        return [
            entry
            for entry in entries
            if entry["user"]["username"] == OPERATOR.name
            and (entry.get("objectRef") or {}).get("resource") != "leases"
        ]


@dataclass(frozen=True, slots=True)
class Bench:
    """One run against one API server."""

    size: Size
    admin_config: Path
    operator_config: Path
    audit_path: Path

    async def run(self) -> dict[str, Any]:
        audit = AuditLog(self.audit_path)
        async with await Api.connect(self.admin_config) as api:
            await install(api)
            port = free_port()
            with self._operator(port):
                started = time.monotonic()
                await self._create(api)
                await _eventually(lambda: self._observed(api), "every object is observed")
                seconds = time.monotonic() - started
                first = await self._until_quiet(audit)
                say(f"observed {self.size.caches} objects in {seconds:.1f} s, {len(first)} calls")
            async with self._second_pass(audit, port) as passes:
                await asyncio.sleep(self.size.idle_s)
                idle = audit.calls()
                drift, corrections = await self._drift(api, audit)
            second = passes["calls"]
            writes = [call for call in (*second, *idle) if call["verb"] in _WRITES]
            for call in writes:
                say(f"wrote: {call['verb']} {call['requestURI']}")
            return {
                "objects": self.size.caches,
                "children": await self._count_children(api),
                "seconds_to_observed": round(seconds, 2),
                "writes_to_create": sum(call["verb"] in _WRITES for call in first),
                "passes_on_noop": passes["passes"],
                "writes_on_noop": len(writes),
                "calls_on_noop": len(second),
                "idle_s": self.size.idle_s,
                "idle_calls_per_minute": round(len(idle) * 60 / self.size.idle_s, 1),
                "drift_corrected": drift,
                "writes_to_correct_drift": corrections,
            }

    def _operator(self, port: int) -> contextlib.AbstractContextManager[None]:
        return running_operator_process(self.audit_path.parent, self.operator_config, port)

    @contextlib.asynccontextmanager
    async def _second_pass(self, audit: AuditLog, port: int) -> AsyncIterator[dict[str, Any]]:
        """Restart the operator and wait until it has reconciled every object."""
        audit.calls()
        with self._operator(port):

            async def reconciled() -> bool:
                return await self._passes(port) >= self.size.caches

            await _eventually(reconciled, "every object is reconciled at again")
            calls = await self._until_quiet(audit)
            yield {"calls": calls, "passes": await self._passes(port)}

    async def _passes(self, port: int) -> int:
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        name = 'ragcache_operator_reconcile_seconds_count{kind="RagCache",outcome="done"}'
        counts = [line.split()[-1] for line in text.splitlines() if line.startswith(name)]
        return int(float(counts[0])) if counts else 0

    async def _create(self, api: Api) -> None:
        for number in range(self.size.caches):
            meta = {"name": f"bench-{number}", "namespace": NAMESPACE}
            await api.create(resources.RAG_CACHES, {**quickstart(), "metadata": meta})

    async def _observed(self, api: Api) -> bool:
        listing = await api.list(resources.RAG_CACHES, NAMESPACE)
        seen = [
            (item.get("status") or {}).get("observedGeneration") == item["metadata"]["generation"]
            for item in listing.items
        ]
        return len(seen) == self.size.caches and all(seen)

    async def _until_quiet(self, audit: AuditLog) -> list[Object]:
        """Return the operator's calls until it makes none."""
        calls = audit.calls()
        while True:
            await asyncio.sleep(_QUIET_S)
            more = audit.calls()
            calls += more
            if not more:
                return calls

    async def _drift(self, api: Api, audit: AuditLog) -> tuple[bool, int]:
        """Change and delete children by hand; return whether all were corrected, and the writes."""
        audit.calls()
        kinds = child_resources(await discover(api))
        labels = "app.kubernetes.io/instance=bench-0"

        async def held() -> dict[tuple[str, str], Object]:
            found = {}
            for kind in kinds:
                for item in (await api.list(kind, NAMESPACE, labels)).items:
                    found[kind.kind, item["metadata"]["name"]] = item
            return found

        before = await held()
        for (kind, name), obj in before.items():
            resource = next(one for one in kinds if one.kind == kind)
            if kind == "Deployment":
                container = obj["spec"]["template"]["spec"]["containers"][0]
                changed = [{**container, "image": "example.invalid/changed:1"}]
                template = {"spec": {"template": {"spec": {"containers": changed}}}}
                await api.merge(resource, name, NAMESPACE, template)
            elif kind == "ConfigMap":
                await api.merge(resource, name, NAMESPACE, {"data": dict.fromkeys(obj["data"], "")})
            elif kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "StatefulSet"):
                await api.delete(resource, name, NAMESPACE)

        def same(now: Object | None, then: Object) -> bool:
            if now is None:
                return False
            parts = ("data",) if then["kind"] == "ConfigMap" else ("spec",)
            return all(_own(now.get(part)) == _own(then.get(part)) for part in parts)

        async def restored() -> bool:
            now = await held()
            return all(same(now.get(key), obj) for key, obj in before.items())

        try:
            await _eventually(restored, "what was changed by hand is restored", limit_s=60)
        except TimeoutError:
            return False, 0
        calls = await self._until_quiet(audit)
        return True, sum(call["verb"] in _WRITES for call in calls)

    async def _count_children(self, api: Api) -> int:
        kinds = child_resources(await discover(api))
        labels = "app.kubernetes.io/managed-by=ragcache-operator"
        lists = [await api.list(kind, NAMESPACE, labels) for kind in kinds]
        return sum(len(listing.items) for listing in lists)


def _own(value: Any) -> Any:
    """Return a spec without fields that the server chooses for each new object."""
    drawn = ("clusterIP", "clusterIPs")
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items() if key not in drawn}
    return value


async def _eventually(
    check: Callable[[], Awaitable[bool]], what: str, limit_s: float = _LIMIT_S
) -> None:
    deadline = time.monotonic() + limit_s
    while not await check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {limit_s} s it is not so that {what}")
        await asyncio.sleep(0.1)


def run(size: Size, folder: Path) -> dict[str, Any]:
    try:
        with start_control_plane(folder, audit=True, users=[OPERATOR]) as plane:
            assert plane.audit_log is not None
            bench = Bench(size, plane.kubeconfig, plane.kubeconfig_for(OPERATOR), plane.audit_log)
            return asyncio.run(bench.run())
    except Unavailable as reason:
        return {"skipped": str(reason)}


def main() -> None:
    size = QUICK if is_quick(__doc__, "fewer objects, a shorter idle while") else FULL
    sys.exit("skipped" in print_figures(lambda folder: run(size, folder)))


if __name__ == "__main__":
    main()
