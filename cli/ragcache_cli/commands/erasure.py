"""``ragcache erasure``: what is left of a deleted document."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from ragcache_cli.clients.gateway_client import GatewayApiClient
from ragcache_cli.commands.options import (
    FAILED,
    CollectionOption,
    GatewayOptions,
    OutputOption,
    grouped,
)
from ragcache_cli.output.console import make_console, print_json, printable
from ragcache_core.errors import InvalidInput

_POLL_S: Final = 1.0


@grouped
def erasure_command(
    gateway: GatewayOptions,
    document: Annotated[
        str | None, typer.Argument(metavar="DOCUMENT", help="Id of the document.")
    ] = None,
    receipt: Annotated[
        Path | None,
        typer.Option("--receipt", metavar="FILE", help="Answer of its DELETE, as JSON."),
    ] = None,
    collection: CollectionOption = "default",
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to ask again until nothing is left.")
    ] = 0.0,
    output: OutputOption = "text",
) -> None:
    """Look in every shard, every engine and the retriever for what is left of a document.

    The exit status is 1 if something is left or a part does not answer.
    """
    if (document is None) == (receipt is None):
        raise InvalidInput("DOCUMENT", "is needed, or --receipt", "give one of both")
    body: dict[str, Any] = {"collection": collection, "id": document}
    if receipt is not None:
        body = {"receipt": _read_receipt(receipt)}

    async def ask(client: GatewayApiClient) -> dict[str, Any]:
        end_s = time.monotonic() + wait_s
        report = await client.erasure(body)
        while not report["erased"] and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)
            report = await client.erasure(body)
        return report

    report = gateway.call(ask)
    if receipt is not None and report["erased"]:
        elapsed_ms = report["checked_at_ms"] - body["receipt"]["made_at_ms"]
        report["zero_after_s"] = max(0, elapsed_ms) / 1e3
    if output == "json":
        print_json(report)
    else:
        _print(report)
    if not report["erased"] or report["is_genuine"] is False:
        raise typer.Exit(FAILED)


def _read_receipt(path: Path) -> dict[str, Any]:
    """Return the receipt of a file: the answer of a DELETE, or the receipt alone."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "--receipt", f"{path}: {error}", "name the answer of a DELETE"
        ) from error
    receipt = found.get("receipt", found) if isinstance(found, dict) else None
    if not isinstance(receipt, dict) or not isinstance(receipt.get("made_at_ms"), int):
        raise InvalidInput("--receipt", f"{path} has no receipt", "name the answer of a DELETE")
    return receipt


def _print(report: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("PART", "STATE", "MEMORY", "DISK", "UNFREED"):
        table.add_column(name, justify="left" if name in ("PART", "STATE") else "right")
    table.add_row("retriever", report["document"])
    for kind in ("shards", "engines"):
        for one in report[kind]:
            counts = (one[name] for name in ("in_memory", "on_disk", "unfreed"))
            shown = ("-" if count is None else f"{count:,}" for count in counts)
            table.add_row(f"{kind[:-1]} {one['address']}", one["state"], *shown)
    console = make_console()
    console.print(table)
    name = printable(f"{report['collection']}/{report['id']}")
    print(f"{name}: {'nothing is left' if report['erased'] else 'not proved to be erased'}")
    if "zero_after_s" in report:
        print(f"zero at the latest {report['zero_after_s']:.1f} s after the DELETE")
    if report["is_genuine"] is not None:
        genuine = "is" if report["is_genuine"] else "is NOT"
        print(f"the receipt {genuine} signed by this platform")
    print(f"not checked: {'; '.join(report['not_checked'])}")
