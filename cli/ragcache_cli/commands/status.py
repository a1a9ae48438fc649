"""Renders the status of a local platform as tables, and as JSON."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from ragcache_cli.clients.gateway_client import PlatformState
from ragcache_cli.local.process import is_alive
from ragcache_cli.local.state_file import PartRecord, PlatformRecord
from ragcache_cli.output.console import duration

_STYLES = {"ready": "green", "starting": "yellow", "not ready": "yellow", "restarting": "red"}
_MB = 1e6

NO_CACHE: Final = "no shard of the cache store answers"

GONE: Final = "gone"
"""Phase of a process that has ended while its supervisor did not see it."""


def part_phase(part: PartRecord) -> str:
    """Return the recorded phase of a part, or GONE."""
    return GONE if part.pid and not is_alive(part.pid, part.started) else part.phase


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
        "parts": [{**asdict(part), "phase": part_phase(part)} for part in record.parts],
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
        phase = part_phase(part)
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
