"""Shows status and logs of a RagCache in a cluster."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Console

from ragcache_cli.kubernetes.cluster import connected, find_caches, pick
from ragcache_cli.kubernetes.cluster_choice import ClusterChoice
from ragcache_cli.kubernetes.cluster_status import (
    conditions_table,
    describe_use,
    headline,
    is_ready,
    notes,
    parts_table,
    remake_lines,
)
from ragcache_cli.kubernetes.pod_logs import follow_pods, show_pods
from ragcache_cli.output.form import print_json
from ragcache_cli.output.logs import LogLines, read_words


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
