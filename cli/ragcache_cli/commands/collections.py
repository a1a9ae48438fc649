"""``ragcache collection``: lists, shows, changes and deletes collections."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal

import typer
from rich.table import Table

from ragcache_cli.clients.gateway_client import GatewayApiClient
from ragcache_cli.commands.options import GatewayOptions, OutputOption, grouped
from ragcache_cli.output.console import counting_bar, make_console, print_json
from ragcache_core.errors import InvalidInput

_POLL_S: Final = 1.0

collection_app = typer.Typer(no_args_is_help=True, help="Manage collections of documents.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The collection.")]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait until all documents are prepared again.")
]


@dataclass(frozen=True, slots=True)
class CollectionChange:
    """The settings of a collection. None means that one is not given."""

    chunk_size: Annotated[
        int | None,
        typer.Option("--chunk-size", metavar="TOKENS", min=1, help="Most tokens of a chunk."),
    ] = None
    chunk_overlap: Annotated[
        int | None,
        typer.Option(
            "--chunk-overlap",
            metavar="TOKENS",
            min=0,
            help="Tokens repeated from the chunk before; needs a size.",
        ),
    ] = None
    window: Annotated[
        int | None,
        typer.Option("--window", min=0, help="Neighbouring chunks of a hit, on each side."),
    ] = None
    index: Annotated[
        Literal["auto", "flat", "ivf", "hnsw"] | None,
        typer.Option("--index", help="How chunks are searched."),
    ] = None
    max_documents: Annotated[
        int | None, typer.Option("--max-documents", metavar="N", min=0, help="Quota; 0: none.")
    ] = None
    max_text_bytes: Annotated[
        int | None,
        typer.Option("--max-text-bytes", metavar="BYTES", min=0, help="Quota; 0: none."),
    ] = None
    lexical_weight: Annotated[
        float | None,
        typer.Option(
            "--lexical-weight",
            metavar="SHARE",
            min=0,
            max=1,
            help="Share of the lexical score in the scores of hybrid searches, from 0 to 1.",
        ),
    ] = None

    labels: Annotated[
        bool | None,
        typer.Option(
            "--labels/--no-labels",
            help="Whether prompts name the document and the section before each chunk.",
        ),
    ] = None

    def to_json(self) -> dict[str, Any]:
        """Return the settings that are given, as the gateway reads them. Raises InvalidInput."""
        if self.chunk_overlap is not None and self.chunk_size is None:
            raise InvalidInput("--chunk-overlap", "is given without a size", "add --chunk-size")
        given = {name: value for name, value in asdict(self).items() if value is not None}
        overlap = given.pop("chunk_overlap", 0)
        if "chunk_size" in given:
            given["chunking"] = {
                "size_tokens": given.pop("chunk_size"),
                "overlap_tokens": overlap,
            }
        return given


@collection_app.command(name="list")
@grouped
def list_command(gateway: GatewayOptions, output: OutputOption = "text") -> None:
    """Show all collections."""
    collections = gateway.call(lambda client: client.collections())
    if output == "json":
        print_json(collections)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("NAME")
    for name in ("DOCUMENTS", "CHUNKS", "TEXT"):
        table.add_column(name, justify="right")
    table.add_column("INDEX")
    table.add_column("REMAKE")
    for one in collections:
        table.add_row(
            one["name"],
            _of_quota(one["documents"], one["max_documents"]),
            f"{one['chunks']:,}",
            _of_quota(_mib(one["text_bytes"]), _mib(one["max_text_bytes"])) + " MiB",
            one["index"],
            _remake(one["remake"]),
        )
    make_console().print(table)


@collection_app.command(name="get")
@grouped
def get_command(name: NameArgument, gateway: GatewayOptions, output: OutputOption = "text") -> None:
    """Show settings and counts of a collection."""
    _show(gateway.call(lambda client: client.collection(name)), output)


@collection_app.command(name="put")
@grouped
def put_command(
    name: NameArgument,
    settings: CollectionChange,
    gateway: GatewayOptions,
    wait: WaitOption = False,
    output: OutputOption = "text",
) -> None:
    """Create a collection, or replace its settings: those left out get the platform's defaults."""
    given = settings.to_json()
    put = gateway.call(lambda client: client.put_collection(name, given))
    _show(gateway.call(lambda client: _wait_for_remake(client, name)) if wait else put, output)


@collection_app.command(name="patch")
@grouped
def patch_command(
    name: NameArgument,
    settings: CollectionChange,
    gateway: GatewayOptions,
    wait: WaitOption = False,
    output: OutputOption = "text",
) -> None:
    """Create a collection, or change the settings that are given: the others stay."""
    given = settings.to_json()
    if not given:
        raise InvalidInput("SETTINGS", "none is given", "give one, like --window 2")
    patched = gateway.call(lambda client: client.patch_collection(name, given))
    _show(gateway.call(lambda client: _wait_for_remake(client, name)) if wait else patched, output)


@collection_app.command(name="delete")
@grouped
def delete_command(
    name: NameArgument,
    gateway: GatewayOptions,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    output: OutputOption = "text",
) -> None:
    """Delete a collection with all its documents and their stored KV."""
    if not yes:
        found = gateway.call(lambda client: client.collection(name))
        question = f"Delete collection {name!r} with {found['documents']:,} documents?"
        typer.confirm(question, abort=True, err=True)
    deleted = gateway.call(lambda client: client.delete_collection(name))
    if output == "json":
        print_json(deleted)
    else:
        print(f"deleted collection {name!r} with {deleted['documents']:,} documents")


async def _wait_for_remake(client: GatewayApiClient, name: str) -> dict[str, Any]:
    """Return the collection when no document of it waits to be prepared again."""
    with counting_bar(make_console(stderr=True), "preparing", "documents") as report:
        while True:
            collection = await client.collection(name)
            remake = collection["remake"]
            if remake is None:
                return collection
            report(remake["documents_done"], remake["documents"])
            await asyncio.sleep(_POLL_S)


def _show(collection: dict[str, Any], output: str) -> None:
    if output == "json":
        print_json(collection)
        return
    chunking = collection["chunking"]
    rows = {
        "name": collection["name"],
        "documents": _of_quota(collection["documents"], collection["max_documents"]),
        "chunks": f"{collection['chunks']:,}",
        "text": f"{_mib(collection['text_bytes'])} MiB",
        "text quota": f"{_mib(collection['max_text_bytes'])} MiB"
        if collection["max_text_bytes"]
        else "none",
        "chunk size": f"{chunking['size_tokens']} tokens, {chunking['overlap_tokens']} repeated",
        "window": str(collection["window"]),
        "index": collection["index"],
        "labels": "yes" if collection["labels"] else "no",
        "lexical weight": f"{collection['lexical_weight']:g}",
        "remake": _remake(collection["remake"]),
    }
    for label, value in rows.items():
        print(f"{label:<14} {value}")


def _of_quota(count: int, quota: int) -> str:
    return f"{count:,} of {quota:,}" if quota else f"{count:,}"


def _mib(num_bytes: int) -> int:
    """Return a size in MiB, rounded up: what is there is not shown as nothing."""
    return (num_bytes + (1 << 20) - 1) >> 20


def _remake(remake: dict[str, Any] | None) -> str:
    if remake is None:
        return "none"
    return f"{remake['documents_done']:,} of {remake['documents']:,} ({remake['reason']})"
