"""``ragcache backup`` and ``ragcache restore``: all documents as one file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ragcache_cli.clients.gateway_client import GatewayApiClient, GatewayTarget
from ragcache_cli.commands.options import GatewayOptions, OutputOption, grouped
from ragcache_cli.output.console import make_console, print_json
from ragcache_cli.output.encrypted_file import (
    BackupEncryption,
    decrypted_pieces,
    is_encrypted,
    read_key,
)
from ragcache_core.documents.backup_file import BackupReader
from ragcache_core.errors import InvalidInput

_PIECE_BYTES: Final = 1 << 20

KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="File with a key, which encrypts and authenticates the backup.",
    ),
]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The file of the backup.")]


@grouped
def backup_command(
    file: FileArgument,
    gateway: GatewayOptions,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    key: KeyOption = None,
    output: OutputOption = "text",
) -> None:
    """Write all documents with their embeddings into a file, while they are served."""
    if file.exists() and not force:
        raise InvalidInput("FILE", f"{file} exists", "name another one, or add --force")
    if not file.absolute().parent.is_dir():
        raise InvalidInput("FILE", f"{file} is in no folder", "create the folder")
    encryption = None if key is None else BackupEncryption(read_key(key))
    num_bytes = asyncio.run(_backup(gateway.target, file, encryption, make_console(stderr=True)))
    if output == "json":
        print_json({"file": str(file), "bytes": num_bytes})
    else:
        print(f"wrote {file} ({num_bytes:,} bytes)")


@grouped
def restore_command(
    file: FileArgument,
    gateway: GatewayOptions,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    key: KeyOption = None,
    output: OutputOption = "text",
) -> None:
    """Replace all documents of all collections by those of a backup.

    With --key, only a backup that was made with this key is restored.
    """
    secret = None if key is None else read_key(key)
    check_file(file, secret)
    url = gateway.target
    if not yes:
        question = f"Replace all documents at {url} by {file}?"
        typer.confirm(question, abort=True, err=True)
    num_bytes = file.stat().st_size
    pieces = _pieces(file, secret)
    documents = asyncio.run(_restore(url, pieces, num_bytes, make_console(stderr=True)))
    if output == "json":
        print_json({"documents": documents})
    else:
        print(f"restored {documents:,} documents")


def check_file(file: Path, key: bytes | None) -> None:
    """Raise InvalidInput unless a file is a complete backup, made with the key if there is one."""
    reader = BackupReader("FILE")
    for piece in _pieces(file, key):
        reader.add(piece)
    reader.end()


async def _backup(
    url: GatewayTarget, file: Path, encryption: BackupEncryption | None, console: Console
) -> int:
    """Download a backup and return its size. A file that is not complete is never left."""
    partial = file.with_name(f"{file.name}.partial")
    reader = BackupReader(str(url))
    try:
        # Only its owner may read the texts of all documents.
        partial.touch(mode=0o600)
        with partial.open("wb") as opened, _progress(console) as progress:
            task = progress.add_task("backup", total=None)
            async with GatewayApiClient(url) as client, aclosing(client.backup()) as parts:
                async for part in parts:
                    reader.add(part)
                    written = part if encryption is None else encryption.add(part)
                    await asyncio.to_thread(opened.write, written)
                    progress.advance(task, len(part))
            reader.end()
            opened.write(b"" if encryption is None else encryption.end())
            opened.flush()
            os.fsync(opened.fileno())
            num_bytes = opened.tell()
        partial.rename(file)
    except OSError as error:
        raise InvalidInput(
            "FILE", f"{partial} cannot be written: {error.strerror}", "name another file"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return num_bytes


async def _restore(
    url: GatewayTarget, pieces: Iterator[bytes], num_bytes: int, console: Console
) -> int:
    with _progress(console) as progress:
        task = progress.add_task("restore", total=num_bytes)

        async def parts() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
                progress.advance(task, len(piece))

        async with GatewayApiClient(url) as client:
            return await client.restore(parts())


def _pieces(file: Path, key: bytes | None) -> Iterator[bytes]:
    """Yield a backup, decrypted if it is encrypted. Raises InvalidInput."""
    try:
        encrypted = is_encrypted(file)
        if encrypted and key is None:
            raise InvalidInput("--key", f"is missing, and {file} is encrypted", "give its key")
        if key is not None and not encrypted:
            raise InvalidInput("FILE", "was made without a key", "leave --key out if you trust it")
        with file.open("rb") as opened:
            if key is not None:
                yield from decrypted_pieces(opened, key)
                return
            while piece := opened.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise InvalidInput(
            "FILE", f"{file} cannot be read: {error.strerror}", "name a file of `ragcache backup`"
        ) from error


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
