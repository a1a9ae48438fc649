"""Shows status and logs of a RagCache in a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragcache_cli.kubernetes.cluster import connected, find_caches, pick
from ragcache_cli.kubernetes.cluster_choice import ClusterChoice
from ragcache_cli.kubernetes.pod_logs import follow_pods, show_pods
from ragcache_cli.output.console import duration, print_json, printable, remake_line
from ragcache_cli.output.logs import LogLines, read_words
from ragcache_operator.kube.resources import Object

_MB = 1e6
_UNSEEN = "no operator has looked at it yet; `ragcache install` installs one"


def is_ready(cache: Object) -> bool:
    """Return whether the current spec is ready."""
    status = _status(cache)
    ready = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), None)
    return ready is not None and ready["status"] == "True" and not _lags(cache)


def headline(cache: Object) -> str:
    """Return name, phase and address in a line."""
    meta, status = cache["metadata"], _status(cache)
    line = f"{meta['name']} in namespace {meta['namespace']}: "
    if not status:
        return line + _UNSEEN
    line += str(status.get("phase") or "Pending")
    model = status.get("model")
    gateway = (status.get("endpoints") or {}).get("gateway")
    if model and gateway:
        line += f"; {printable(model)} at {printable(gateway)}"
    return line


def notes(cache: Object) -> list[str]:
    """Return notes: what it waits for, and whether the operator has seen the latest spec."""
    found = []
    if _lags(cache) and _status(cache):
        found.append("the operator has not seen the last change of its spec yet")
    progress = _status(cache).get("progress")
    if progress:
        found.append(f"waiting for {printable(progress)}")
    return found


def parts_table(cache: Object) -> Table | None:
    """Render ready replicas per part."""
    counts = _counts(_status(cache))
    if not counts:
        return None
    table = _table("PART", "READY")
    for part, (ready, wanted) in counts.items():
        style = "green" if ready >= wanted else "yellow"
        table.add_row(part, Text(f"{ready}/{wanted}", style=style))
    return table


def conditions_table(cache: Object, now: datetime) -> Table | None:
    """Render a row per condition.

    Args:
        now: A time with a time zone.
    """
    conditions = _status(cache).get("conditions")
    if not conditions:
        return None
    table = _table("CONDITION", "STATUS", "SINCE", "REASON", "MESSAGE")
    for condition in conditions:
        status = condition["status"]
        style = {"True": "green", "False": "red"}.get(status, "yellow")
        table.add_row(
            condition["type"],
            Text(status, style=style),
            _since(condition.get("lastTransitionTime"), now),
            condition.get("reason", ""),
            Text(printable(condition.get("message", "")), style="dim"),
        )
    return table


def remake_lines(cache: Object) -> list[str]:
    """Return a line for each collection whose documents are prepared again."""
    remakes = (_status(cache).get("retriever") or {}).get("remakes") or ()
    return [
        remake_line(
            one["collection"],
            one.get("documentsDone", 0),
            one.get("documents", 0),
            one.get("reason", ""),
        )
        for one in remakes
    ]


def describe_use(cache: Object) -> str:
    """Return the cache's content, as of the operator's last query."""
    use = _status(cache).get("cache")
    if not use:
        return "not measured yet"
    line = f"{use.get('bytes', 0) / _MB:,.1f} MB"
    if "hitRate" in use:
        line += f"; {float(use['hitRate']):.0%} of reads hit"
    return line


def _status(cache: Object) -> Mapping[str, Any]:
    return cache.get("status") or {}


def _lags(cache: Object) -> bool:
    generation: int = cache["metadata"].get("generation", 0)
    return bool(_status(cache).get("observedGeneration", 0) < generation)


def _counts(status: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    found = {}
    if "gateway" in status:
        gateway = status["gateway"]
        found["gateway"] = gateway.get("readyReplicas", 0), gateway.get("replicas", 0)
    for engine in status.get("engines") or ():
        name = f"engine-{engine['name']}"
        if (role := engine.get("role", "both")) != "both":
            name += f" ({role})"
        found[name] = engine.get("readyReplicas", 0), engine.get("replicas", 0)
    if "retriever" in status:
        retriever = status["retriever"]
        found["retriever"] = retriever.get("readyReplicas", 0), retriever.get("replicas", 0)
    if "cacheStore" in status:
        store = status["cacheStore"]
        found["cachestore"] = store.get("readyShards", 0), store.get("shards", 0)
    return found


def _since(text: str | None, now: datetime) -> str:
    if text is None:
        return "-"
    return duration((now - datetime.fromisoformat(text)).total_seconds())


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    return table


async def show_status(
    choice: ClusterChoice, name: str | None, console: Console, *, as_json: bool = False
) -> bool:
    """Show the status of a RagCache and return whether it is ready."""
    async with connected(choice) as (api, namespace):
        cache = pick(await find_caches(api, namespace), name, namespace)
    if as_json:
        meta = cache["metadata"]
        found = {"name": meta["name"], "namespace": meta["namespace"], "ready": is_ready(cache)}
        print_json({**found, "status": cache.get("status") or {}})
        return is_ready(cache)
    console.print(headline(cache), markup=False)
    for note in notes(cache):
        console.print(note, markup=False)
    tables = (
        parts_table(cache),
        conditions_table(cache, datetime.now(UTC)),
    )
    for table in tables:
        if table is not None:
            console.print()
            console.print(table)
    if cache.get("status"):
        console.print()
        console.print(f"cache: {describe_use(cache)}")
        for line in remake_lines(cache):
            console.print(line, markup=False)
    return is_ready(cache)


async def show_logs(
    choice: ClusterChoice,
    name: str | None,
    component: str | None,
    console: Console,
    *,
    tail: int,
    follow: bool,
) -> int:
    """Show the logs of a RagCache's pods. Return 0, or follow until cancelled."""
    async with connected(choice) as (api, namespace):
        caches = await find_caches(api, namespace)
        names = [cache["metadata"]["name"] for cache in caches]
        name, part = read_words(name, component, names)
        cache = pick(caches, name, namespace)["metadata"]["name"]
        show = follow_pods if follow else show_pods
        await show(api, namespace, cache, part, tail, LogLines(console).show)
    return 0
