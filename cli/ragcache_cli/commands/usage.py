"""``ragcache usage``: what keys and tenants have used."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Literal

import typer
from rich.table import Table

from ragcache_cli.commands.options import GatewayOptions, OutputOption, grouped
from ragcache_cli.output.console import make_console, print_json
from ragcache_core.errors import InvalidInput

_COUNTS = (
    "requests",
    "refusals",
    "computed_tokens",
    "cached_tokens",
    "loaded_tokens",
    "recomputed_tokens",
    "output_tokens",
    "quota_tokens",
)


@grouped
def usage_command(
    gateway: GatewayOptions,
    period: Annotated[
        Literal["day", "month"], typer.Option("--period", help="Length of an entry.")
    ] = "day",
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            metavar="DATE",
            help="First day, like 2026-11-01.",
            show_default="that of this month; with months, a year ago",
        ),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option("--end", metavar="DATE", help="Last day.", show_default="today, in UTC"),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", help="Only this tenant; needs the scope admin."),
    ] = None,
    output: OutputOption = "text",
) -> None:
    """Show what keys have used: requests, and tokens by where their KV came from."""
    query: dict[str, str] = {"period": period}
    for name, value in (("start", start), ("end", end)):
        if value is not None:
            query[name] = _checked_date(f"--{name}", value)
    if tenant is not None:
        query["tenant"] = tenant
    entries = gateway.call(lambda client: client.usage(query))
    if output == "json":
        print_json(entries)
        return
    table = Table(box=None, pad_edge=False)
    for name in (period, "tenant", "key", "model"):
        table.add_column(name.upper())
    for name in _COUNTS:
        table.add_column(name.removesuffix("_tokens").upper(), justify="right")
    for one in entries:
        begin = datetime.fromisoformat(one["start"])
        table.add_row(
            f"{begin:%Y-%m-%d}" if period == "day" else f"{begin:%Y-%m}",
            *(one[name] or "-" for name in ("tenant", "key", "model")),
            *(f"{one[name]:,.0f}" for name in _COUNTS),
        )
    make_console().print(table)


def _checked_date(option: str, text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise InvalidInput(option, f"{text!r} is no date", "write it like 2026-11-01") from error
