"""Draws a frame of the live view as text of at most 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ragcache_cli.commands.status import NO_CACHE
from ragcache_cli.output.console import printable

_COLUMNS: Final = 80
_UNKNOWN: Final = "-"
_BAR_CELLS: Final = 20


def draw(frame: Mapping[str, Any], where: str) -> Table:
    """Render a frame.

    Args:
        frame: Of ``make_frame``.
        where: The gateway's URL.
    """
    rows = Table(box=None, show_header=False, pad_edge=False, width=_COLUMNS)
    rows.add_column(style="cyan", no_wrap=True)
    rows.add_column(overflow="ellipsis", no_wrap=True)
    status, requests = frame["status"], frame["requests"]
    problem = Text(printable(str(status["problem"])), style="red")
    rows.add_row("gateway", Text(where))
    rows.add_row("status", Text("answering", style="green") if status["answering"] else problem)
    rows.add_row(
        "requests",
        f"{requests['per_s']:.1f}/s, {requests['failed_per_s']:.1f}/s failed, "
        f"{requests['answers_per_s']:.1f}/s answers, "
        f"{_number(requests['in_flight'])} questions in flight",
    )
    rows.add_row("TTFT now", _times(frame["ttft_s"]))
    rows.add_row("TTFT total", _times(frame["ttft_since_start_s"]))
    tokens = frame["prompt_tokens_per_s"]
    rows.add_row("tokens/s", ", ".join(f"{_number(n)} {name}" for name, n in tokens.items()))
    _add_cache(rows, frame["cache"])
    for engine in frame["engines"]:
        state = "ready" if engine["ready"] else printable(str(engine["problem"]))
        style = "" if engine["ready"] else "red"
        line = f"{engine['address']}: {engine['in_flight']} in flight, {state}"
        rows.add_row("engine", Text(line, style=style))
    retriever, ingest = frame["retriever"], frame["ingest"]
    state = "ready" if retriever["ready"] else printable(str(retriever["problem"]))
    rows.add_row("retriever", Text(state))
    rows.add_row(
        "ingest",
        f"{_number(ingest['documents'])} documents, {_number(ingest['chunks'])} chunks, "
        f"{_number(ingest['chunks_per_s'])} chunks/s",
    )
    if ingest["remake_documents"]:
        done, total = ingest["remake_documents_done"], ingest["remake_documents"]
        rows.add_row("remake", _bar(done, total, f"{done:,} of {total:,} documents"))
    if ingest["precompute_waiting_chunks"]:
        rows.add_row("precompute", f"{_number(ingest['precompute_waiting_chunks'])} chunks wait")
    return rows


def _add_cache(rows: Table, cache: Mapping[str, Any] | None) -> None:
    if cache is None:
        rows.add_row("cache", Text(NO_CACHE, style="red"))
        return
    rows.add_row(
        "cache",
        f"{cache['variants']:,} variants, hit rate {_share(cache['hit_rate'])} now, "
        f"{_share(cache['hit_rate_since_start'])} in total",
    )
    for name, tier in cache["tiers"].items():
        used, capacity = tier["bytes"], tier["capacity_bytes"]
        line = f"{used / 1e6:,.1f} of {capacity / 1e6:,.1f} MB, {tier['evictions']:,} evicted"
        rows.add_row(name, _bar(used, capacity, line))
    away = [address for address, is_up in cache["shards"].items() if not is_up]
    if away:
        rows.add_row("shards", Text(f"no answer from {', '.join(away)}", style="red"))
    states = (f"{count} {state}" for state, count in sorted(cache["sources_by_state"].items()))
    rows.add_row("sources", ", ".join(states) or _UNKNOWN)


def _bar(done: float, total: float, text: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(total=max(total, 1), completed=done, width=_BAR_CELLS), Text(text))
    return grid


def _times(times_s: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {_seconds(value)}" for name, value in times_s.items())


def _seconds(value_s: float | None) -> str:
    if value_s is None:
        return _UNKNOWN
    return f"{value_s * 1e3:,.0f} ms" if value_s < 1 else f"{value_s:,.1f} s"


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}"
