"""``ragcache collection``: lists, shows, changes and deletes collections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, Literal, TypeVar

import typer
from rich.table import Table

from ragcache_cli.clients.gateway_client import GatewayApiClient
from ragcache_cli.documents.gateway_option import ApiKeyOption, GatewayOption, gateway_target
from ragcache_cli.output.console import make_console
from ragcache_cli.output.counting_bar import counting_bar
from ragcache_cli.output.form import OutputOption, print_json
from ragcache_core.errors import InvalidInput

R = TypeVar("R")

_POLL_S: Final = 1.0

collection_app = typer.Typer(no_args_is_help=True, help="Manage collections of documents.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The collection.")]
ChunkSizeOption = Annotated[
    int | None,
    typer.Option("--chunk-size", metavar="TOKENS", min=1, help="Most tokens of a chunk."),
]
ChunkOverlapOption = Annotated[
    int | None,
    typer.Option(
        "--chunk-overlap",
        metavar="TOKENS",
        min=0,
        help="Tokens repeated from the chunk before; needs a size.",
    ),
]
WindowOption = Annotated[
    int | None, typer.Option("--window", min=0, help="Neighbouring chunks of a hit, on each side.")
]
IndexOption = Annotated[
    Literal["auto", "flat", "ivf", "hnsw"] | None,
    typer.Option("--index", help="How chunks are searched."),
]
MaxDocumentsOption = Annotated[
    int | None, typer.Option("--max-documents", metavar="N", min=0, help="Quota; 0: none.")
]
MaxTextBytesOption = Annotated[
    int | None, typer.Option("--max-text-bytes", metavar="BYTES", min=0, help="Quota; 0: none.")
]
LexicalWeightOption = Annotated[
    float | None,
    typer.Option(
        "--lexical-weight",
        metavar="SHARE",
        min=0,
        max=1,
        help="Share of the lexical score in the scores of hybrid searches, from 0 to 1.",
    ),
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait until all documents are prepared again.")
]


@collection_app.command(name="list")
def list_command(
    output: OutputOption = "text", gateway: GatewayOption = None, api_key: ApiKeyOption = None
) -> None:
    """Show all collections."""
    collections = _call(gateway, api_key, lambda client: client.collections())
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
def get_command(
    name: NameArgument,
    output: OutputOption = "text",
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Show settings and counts of a collection."""
    _show(_call(gateway, api_key, lambda client: client.collection(name)), output)


@collection_app.command(name="put")
def put_command(
    name: NameArgument,
    chunk_size: ChunkSizeOption = None,
    chunk_overlap: ChunkOverlapOption = None,
    window: WindowOption = None,
    index: IndexOption = None,
    max_documents: MaxDocumentsOption = None,
    max_text_bytes: MaxTextBytesOption = None,
    lexical_weight: LexicalWeightOption = None,
    wait: WaitOption = False,
    output: OutputOption = "text",
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Create a collection, or replace its settings: those left out get the platform's defaults."""
    given = _settings(
        chunk_size,
        chunk_overlap,
        window,
        index,
        max_documents=max_documents,
        max_text_bytes=max_text_bytes,
        lexical_weight=lexical_weight,
    )
    put = _call(gateway, api_key, lambda client: client.put_collection(name, given))
    if wait:
        put = _call(gateway, api_key, lambda client: _wait_for_remake(client, name))
    _show(put, output)


@collection_app.command(name="patch")
def patch_command(
    name: NameArgument,
    chunk_size: ChunkSizeOption = None,
    chunk_overlap: ChunkOverlapOption = None,
    window: WindowOption = None,
    index: IndexOption = None,
    max_documents: MaxDocumentsOption = None,
    max_text_bytes: MaxTextBytesOption = None,
    lexical_weight: LexicalWeightOption = None,
    wait: WaitOption = False,
    output: OutputOption = "text",
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Create a collection, or change the settings that are given: the others stay."""
    given = _settings(
        chunk_size,
        chunk_overlap,
        window,
        index,
        max_documents=max_documents,
        max_text_bytes=max_text_bytes,
        lexical_weight=lexical_weight,
    )
    if not given:
        raise InvalidInput("SETTINGS", "none is given", "give one, like --window 2")
    patched = _call(gateway, api_key, lambda client: client.patch_collection(name, given))
    if wait:
        patched = _call(gateway, api_key, lambda client: _wait_for_remake(client, name))
    _show(patched, output)


@collection_app.command(name="delete")
def delete_command(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    output: OutputOption = "text",
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Delete a collection with all its documents and their stored KV."""
    if not yes:
        found = _call(gateway, api_key, lambda client: client.collection(name))
        question = f"Delete collection {name!r} with {found['documents']:,} documents?"
        typer.confirm(question, abort=True, err=True)
    deleted = _call(gateway, api_key, lambda client: client.delete_collection(name))
    if output == "json":
        print_json(deleted)
    else:
        print(f"deleted collection {name!r} with {deleted['documents']:,} documents")


def _settings(
    chunk_size: int | None,
    chunk_overlap: int | None,
    window: int | None,
    index: str | None,
    *,
    max_documents: int | None,
    max_text_bytes: int | None,
    lexical_weight: float | None,
) -> dict[str, Any]:
    """Return the settings that are given, as the gateway reads them."""
    if chunk_overlap is not None and chunk_size is None:
        raise InvalidInput("--chunk-overlap", "is given without a size", "add --chunk-size")
    chunking = {"size_tokens": chunk_size, "overlap_tokens": chunk_overlap or 0}
    settings = {
        "chunking": None if chunk_size is None else chunking,
        "window": window,
        "index": index,
        "max_documents": max_documents,
        "max_text_bytes": max_text_bytes,
        "lexical_weight": lexical_weight,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _call(
    gateway: str | None, api_key: str | None, action: Callable[[GatewayApiClient], Awaitable[R]]
) -> R:
    async def run() -> R:
        async with GatewayApiClient(gateway_target(gateway, api_key)) as client:
            return await action(client)

    return asyncio.run(run())


async def _wait_for_remake(client: GatewayApiClient, name: str) -> dict[str, Any]:
    """Return the collection when no document of it waits to be prepared again."""
    with counting_bar(make_console(stderr=True), "preparing", "documents") as tell:
        while True:
            collection = await client.collection(name)
            remake = collection["remake"]
            if remake is None:
                return collection
            tell(remake["documents_done"], remake["documents"])
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
