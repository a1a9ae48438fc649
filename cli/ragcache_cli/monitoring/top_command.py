"""``ragcache top``: a live view of a running platform."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import nullcontext
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ragcache_cli.clients.gateway_client import GatewayApiClient, GatewayTarget
from ragcache_cli.documents.gateway_option import ApiKeyOption, GatewayOption, gateway_target
from ragcache_cli.local.signals import run_until_stopped
from ragcache_cli.monitoring.frame import PlatformSample, make_frame
from ragcache_cli.monitoring.metric_series import MetricSeries
from ragcache_cli.monitoring.view import draw
from ragcache_cli.output.console import make_console, printable
from ragcache_cli.output.form import OutputOption
from ragcache_core.errors import RagCacheError, Unavailable

_REPLY_S: Final = 5.0
"""Longest wait for a response. A later frame asks again."""


def top_command(
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
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Show rates, times, tokens, tiers and engines of a running platform, until Ctrl-C."""
    view = _TopView(gateway_target(gateway, api_key), tuple(metrics or ()), interval)
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
