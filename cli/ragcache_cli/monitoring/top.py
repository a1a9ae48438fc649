"""``ragcache top``: a live view of a running platform, of at most 80 columns."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ragcache_cli.clients.gateway_client import GatewayApiClient, GatewayTarget
from ragcache_cli.commands.options import GatewayOptions, OutputOption, grouped
from ragcache_cli.commands.status import NO_CACHE
from ragcache_cli.local.signals import run_until_stopped
from ragcache_cli.monitoring.frame import PlatformSample, make_frame
from ragcache_cli.monitoring.metric_series import MetricSeries
from ragcache_cli.output.console import make_console, printable
from ragcache_core.errors import RagCacheError, Unavailable

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
    has_models = len({engine["model"] for engine in frame["engines"]}) > 1
    for engine in frame["engines"]:
        state = "ready" if engine["ready"] else printable(str(engine["problem"]))
        serves = f" {printable(engine['model'])}," if has_models else ""
        style = "" if engine["ready"] else "red"
        role = "" if engine.get("role", "both") == "both" else f" ({engine['role']})"
        line = (
            f"{engine['address']}{role}:{serves} {engine['waiting']} waiting, "
            f"{engine['queue_s']:.1f} s, "
            f"{engine['decoding']} decoding, {state}"
        )
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


_REPLY_S: Final = 5.0
"""Longest wait for a response. A later frame asks again."""


@grouped
def top_command(
    gateway: GatewayOptions,
    once: Annotated[bool, typer.Option("--once", help="Show one frame, and end.")] = False,
    output: OutputOption = "text",
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Between two frames.")
    ] = 2.0,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics",
            metavar="URL",
            help="Metrics page of a retriever, for its ingest; may be repeated.",
        ),
    ] = None,
) -> None:
    """Show rates, times, tokens, tiers and engines of a running platform, until Ctrl-C."""
    view = _TopView(gateway.target, tuple(metrics or ()), interval)
    is_json = output == "json"
    if once:
        asyncio.run(view.show_once(make_console(), is_json=is_json))
        return
    raise typer.Exit(run_until_stopped(view.show(make_console(), is_json=is_json)))


class _TopView:
    """Samples a platform and shows frames.

    Args:
        pages: Metrics pages beside the gateway's.
        interval_s: Time between two samples.
    """

    def __init__(self, target: GatewayTarget, pages: tuple[str, ...], interval_s: float) -> None:
        self._target = target
        self._pages = pages
        self._interval_s = interval_s

    async def show_once(self, console: Console, *, is_json: bool) -> None:
        """Show the first frame. Raises RagCacheError if the gateway does not answer."""
        before = await self._sample()
        await asyncio.sleep(self._interval_s)
        self._print(console, make_frame(before, await self._sample()), is_json=is_json)

    async def show(self, console: Console, *, is_json: bool) -> int:
        """Show frames until cancelled, also while the gateway does not answer."""
        before: PlatformSample | None = None
        is_live = console.is_terminal and not is_json
        live = Live(console=console, auto_refresh=False) if is_live else None
        with live or nullcontext():
            while True:
                try:
                    after = await self._sample()
                except RagCacheError as error:
                    before = None
                    line = f"{printable(str(error))}; asked again in {self._interval_s:g} s"
                    if live is None:
                        typer.echo(line, err=True)
                    else:
                        live.update(Text(line, style="red"), refresh=True)
                else:
                    if before is not None:
                        frame = make_frame(before, after)
                        if live is None:
                            self._print(console, frame, is_json=is_json)
                        else:
                            live.update(draw(frame, self._target.url), refresh=True)
                    before = after
                await asyncio.sleep(self._interval_s)

    def _print(self, console: Console, frame: dict[str, Any], *, is_json: bool) -> None:
        if is_json:
            print(json.dumps(frame, ensure_ascii=False), flush=True)
        else:
            console.print(draw(frame, self._target.url))

    async def _sample(self) -> PlatformSample:
        async with GatewayApiClient(self._target, reply_s=_REPLY_S) as client:
            try:
                pages = [await client.metrics(), *[await _read(url) for url in self._pages]]
                return PlatformSample(
                    at_s=time.monotonic(),
                    metrics=MetricSeries.parse(pages),
                    state=await client.read_state(),
                )
            except ValueError as error:
                problem = f"{self._target} does not answer as a gateway does ({error})"
                raise Unavailable("gateway", problem) from error


async def _read(url: str) -> str:
    try:
        async with httpx.AsyncClient(timeout=_REPLY_S) as client:
            reply = await client.get(url)
            reply.raise_for_status()
            return reply.text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(
            "metrics", f"nothing answers at {url} ({error}); see --metrics"
        ) from error
