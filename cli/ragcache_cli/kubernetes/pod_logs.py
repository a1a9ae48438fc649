"""Shows and follows the logs of a RagCache's pods, across restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from ragcache_core.errors import NotFound
from ragcache_operator.builders.metadata import (
    COMPONENT_LABEL,
    ENGINE_LABEL,
    instance_selector,
    selector_text,
)
from ragcache_operator.kube.api import Api, ApiError
from ragcache_operator.kube.resources import PODS, Object

_RELIST_S = 2.0
_NANOSECOND_DIGITS = 9
_DENIED = (401, 403)

Show = Callable[[str, str], None]
"""A callback for a pod's name and a line of its log."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one container; each run has its own log."""

    namespace: str
    pod: str
    container: str
    restarts: int

    @property
    def path(self) -> str:
        """Return the API path of its log."""
        return f"{PODS.path(self.namespace, self.pod)}/log"


async def show_pods(
    api: Api, namespace: str, cache: str, part: str | None, tail: int, show: Show
) -> None:
    """Show the last lines of every pod. Raises NotFound without pods."""
    pods = await _pods(api, namespace, cache, part)
    if not pods:
        raise NotFound("pod of", _named(cache, part), "`ragcache status` says what it waits for")
    for pod in pods:
        started = list(runs(pod, part))
        for run in started:
            text = await api.text(run.path, container=run.container, tailLines=str(tail))
            for line in text.removesuffix("\n").split("\n") if text else ():
                show(run.pod, line)
        if not started:
            show(pod["metadata"]["name"], f"({waits_for(pod)})")


async def follow_pods(
    api: Api, namespace: str, cache: str, part: str | None, tail: int, show: Show
) -> None:
    """Show the last lines of every pod, then follow until cancelled.

    Pods and containers that start later are shown from their first line.
    """
    tasks: dict[Run, asyncio.Task[None]] = {}
    waiting: dict[str, str] = {}
    first = True
    try:
        while True:
            for pod in await _pods(api, namespace, cache, part):
                started = list(runs(pod, part))
                for run in started:
                    if run not in tasks:
                        lines = _followed(api, run, tail if first else None)
                        tasks[run] = asyncio.create_task(_pass_on(lines, run.pod, show))
                name = pod["metadata"]["name"]
                words = "" if started else waits_for(pod)
                if words and waiting.get(name) != words:
                    show(name, f"({words})")
                waiting[name] = words
            first = False
            await asyncio.sleep(_RELIST_S)
            for task in tasks.values():
                if task.done():
                    task.result()
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def runs(pod: Object, part: str | None = None) -> Iterator[Run]:
    """Return the containers of a pod that have a log.

    Args:
        part: Only the container of this name, if the pod has one.
    """
    meta, status = pod["metadata"], pod.get("status") or {}
    only = part if part in _containers(pod) else None
    for container in status.get("containerStatuses") or ():
        if only not in (None, container["name"]):
            continue
        state = container.get("state") or {}
        restarts = container.get("restartCount", 0)
        # Between two attempts the API still serves the log of the previous one.
        if restarts or "running" in state or "terminated" in state:
            yield Run(meta["namespace"], meta["name"], container["name"], restarts)


def waits_for(pod: Object) -> str:
    """Return why no container of a pod has started."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return ": ".join(filter(None, (waiting.get("reason"), waiting.get("message"))))
    for condition in status.get("conditions") or ():
        if condition.get("status") == "False" and condition.get("message"):
            return f"{condition.get('reason', condition['type'])}: {condition['message']}"
    return str(status.get("phase") or "Pending")


def is_meant(pod: Object, part: str | None) -> bool:
    """Return whether a pod belongs to the named part or component, or has a container of it."""
    labels = pod["metadata"].get("labels") or {}
    component = labels.get(COMPONENT_LABEL)
    names = (None, component, f"{component}-{labels.get(ENGINE_LABEL)}", *_containers(pod))
    return part in names


def _containers(pod: Object) -> list[str]:
    """Return the names of a pod's containers. A container has the name of its component."""
    return [one["name"] for one in (pod.get("spec") or {}).get("containers") or ()]


async def _pods(api: Api, namespace: str, cache: str, part: str | None) -> list[Object]:
    selector = selector_text(instance_selector(cache))
    listing = await api.list(PODS, namespace, selector)
    meant = [pod for pod in listing.items if is_meant(pod, part)]
    return sorted(meant, key=lambda pod: str(pod["metadata"]["name"]))


async def _pass_on(lines: AsyncIterator[str], source: str, show: Show) -> None:
    async for line in lines:
        show(source, line)


async def _followed(api: Api, run: Run, tail: int | None) -> AsyncIterator[str]:
    """Yield the lines of a run until it ends, and reconnect if the stream breaks."""
    seen = ""
    while True:
        query = {"container": run.container, "follow": "true", "timestamps": "true"}
        if seen:
            query["sinceTime"] = seen
        elif tail is not None:
            query["tailLines"] = str(tail)
        try:
            async for line in api.lines(run.path, **query):
                stamp, _, text = line.partition(" ")
                # The API rounds sinceTime to whole seconds, so a reconnection repeats some lines.
                if seen and timestamp(stamp) <= timestamp(seen):
                    continue
                seen = stamp
                yield text
        except ApiError as error:
            if error.status in _DENIED:
                raise
            await asyncio.sleep(_RELIST_S)
        # A stream ends with its container, or when a proxy closes it.
        pod = await api.get(PODS, run.pod, run.namespace)
        if pod is None or not _runs_on(pod, run):
            return


def _runs_on(pod: Object, run: Run) -> bool:
    """Return whether that run of the container is still going on."""
    return any(
        container["name"] == run.container
        and container.get("restartCount", 0) == run.restarts
        and "running" in (container.get("state") or {})
        for container in (pod.get("status") or {}).get("containerStatuses") or ()
    )


def timestamp(stamp: str) -> tuple[str, str]:
    """Normalize an RFC 3339 time in UTC, with any fraction, so that strings compare by time."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return seconds, fraction.ljust(_NANOSECOND_DIGITS, "0")


def _named(cache: str, part: str | None) -> str:
    return f"{cache} {part}" if part else cache
