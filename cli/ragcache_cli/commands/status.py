"""``ragcache status`` and ``ragcache logs``, of this machine or of a cluster."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from ragcache_cli.clients.gateway_client import PlatformState
from ragcache_cli.commands.options import (
    FAILED,
    ClusterOptions,
    DataOption,
    NameArgument,
    OutputOption,
    call_gateway,
    grouped,
    local_target,
)
from ragcache_cli.kubernetes.cluster_choice import is_meant_here
from ragcache_cli.local.log_files import choose, find_logs, show_files
from ragcache_cli.local.process import is_alive
from ragcache_cli.local.signals import run_until_stopped
from ragcache_cli.local.state_file import ROOT, ComponentRecord, PlatformRecord, find_data, recorded
from ragcache_cli.output.console import duration, make_console, print_json, remake_line
from ragcache_cli.output.logs import LogLines, read_words
from ragcache_core.errors import RagCacheError

_STYLES = {"ready": "green", "starting": "yellow", "not ready": "yellow", "restarting": "red"}
_MB = 1e6

NO_CACHE: Final = "no shard of the cache store answers"

GONE: Final = "gone"
"""Phase of a process that has ended while its supervisor did not see it."""


@grouped
def status_command(
    cluster: ClusterOptions,
    name: NameArgument = None,
    data: DataOption = None,
    output: OutputOption = "text",
) -> None:
    """Show the status of a RagCache on this machine or in a cluster."""
    as_json = output == "json"
    if is_meant_here(cluster.choice, name, data, recorded()):
        is_well = _show_local(data or (ROOT / name if name else None), as_json=as_json)
    else:
        from ragcache_cli.kubernetes.cluster_views import show_status  # noqa: PLC0415  slow to import

        is_well = asyncio.run(show_status(cluster.choice, name, make_console(), as_json=as_json))
    if not is_well:
        raise typer.Exit(FAILED)


@grouped
def logs_command(
    cluster: ClusterOptions,
    name: NameArgument = None,
    component: Annotated[
        str | None,
        typer.Argument(
            metavar="[COMPONENT]", help="One of its components, like engine.", show_default="all"
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow new lines until Ctrl-C.")
    ] = False,
    tail: Annotated[
        int, typer.Option("--tail", metavar="N", min=0, help="Lines to show of each component.")
    ] = 100,
    data: DataOption = None,
) -> None:
    """Show the logs of a RagCache on this machine or in a cluster."""
    console, here = make_console(), recorded()
    of, wanted = read_words(name, component, here)
    if is_meant_here(cluster.choice, of, data, here):
        files = choose(find_logs(of, data), wanted)
        showing = show_files(files, tail, LogLines(console).show, follow=follow)
    else:
        from ragcache_cli.kubernetes.cluster_views import show_logs  # noqa: PLC0415  slow to import

        showing = show_logs(cluster.choice, name, component, console, tail=tail, follow=follow)
    raise typer.Exit(run_until_stopped(showing))


def _show_local(data: Path | None, *, as_json: bool) -> bool:
    """Show the local components and the cache; return whether questions can be answered."""
    folder, record = find_data(data)
    state: PlatformState | None = None
    try:
        state = call_gateway(local_target(folder, record), lambda client: client.read_state())
        problem = state.problem
    except RagCacheError as error:
        problem = str(error)
    is_well = record.supervisor_lives and problem is None
    if as_json:
        print_json(status_json(record, problem, state))
        return is_well
    console = make_console()
    phase = record.phase
    if not record.supervisor_lives:
        phase = "its supervisor is gone; clean up with `ragcache down`"
    elif any(part.phase != "ready" for part in record.parts):
        phase = "not ready"
    console.print(f"{record.name}: {phase}; {record.model} at {record.gateway_url}")
    console.print(parts_table(record, time.time()))
    console.print(problem or "the gateway answers questions")
    if state is not None:
        console.print(f"cache: {describe_cache(state.cache)}")
        for one in state.remakes or ():
            line = remake_line(
                one["collection"], one["documents_done"], one["documents"], one["reason"]
            )
            console.print(line, markup=False)
    return is_well


def component_phase(one: ComponentRecord) -> str:
    """Return the recorded phase of a component, or GONE."""
    return GONE if one.pid and not is_alive(one.pid, one.started) else one.phase


def status_json(
    record: PlatformRecord, problem: str | None, state: PlatformState | None
) -> dict[str, Any]:
    """Return the status for programs.

    Args:
        problem: Why questions cannot be answered.
        state: None: the gateway did not tell it.
    """
    is_supervised = record.supervisor_lives
    return {
        **asdict(record),
        "phase": record.phase if is_supervised else GONE,
        "parts": [{**asdict(part), "phase": component_phase(part)} for part in record.parts],
        "answering": is_supervised and problem is None,
        "problem": problem,
        "cache": state and state.cache,
        "remakes": state and state.remakes,
    }


def parts_table(record: PlatformRecord, now: float) -> Table:
    """Render a row per part.

    Args:
        now: Seconds since the epoch.
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("PART", "STATE", "PID", "UPTIME", "RESTARTS", "ADDRESS", ""):
        table.add_column(heading)
    for part in record.parts:
        phase = component_phase(part)
        has_process = part.pid and phase != GONE
        table.add_row(
            part.name,
            Text(phase, style=_STYLES.get(phase, "red")),
            str(part.pid) if has_process else "-",
            duration(now - part.started) if has_process else "-",
            str(part.restarts),
            "  ".join(f"{name} {address}" for name, address in part.addresses.items()),
            Text(part.cause, style="dim"),
        )
    return table


def describe_cache(cache: Mapping[str, Any] | None) -> str:
    """Summarize the cache of a PlatformState in a line."""
    if cache is None:
        return NO_CACHE
    asked = cache["hits"] + cache["misses"]
    rate = f"{cache['hits'] / asked:.0%} of {asked:,} reads hit" if asked else "nothing read yet"
    line = (
        f"{cache['variants']:,} variants, {cache['disk_bytes'] / _MB:,.1f} MB on disk, "
        f"{cache['memory_bytes'] / _MB:,.1f} of {cache['memory_capacity_bytes'] / _MB:,.1f} MB "
        f"in memory; {rate}"
    )
    reasons = sorted(cache["misses_by_reason"].items(), key=lambda item: (-item[1], item[0]))
    if reasons:
        missed = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in reasons)
        line += f" (misses: {missed})"
    for shard in cache["shards"]:
        if not shard["up"]:
            line += f"; no answer from {shard['address']}"
        elif shard["reset_at_ms"]:
            at = datetime.datetime.fromtimestamp(shard["reset_at_ms"] / 1000, datetime.UTC)
            line += f"; {shard['address']} has started empty at {at:%Y-%m-%d %H:%M} UTC, because "
            line += f"its metadata was damaged ({shard['reset_reason']})"
    return line
