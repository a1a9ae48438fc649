"""Implements ``ragcache sync``: makes a collection equal to the sources of a RagCollection.

A sync changes only documents whose metadata names its owner. The operator starts it as a Job; it
works from any machine that reaches the gateway.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ragcache_cli.clients.gateway_client import (
    API_KEY_VARIABLE,
    SYNC_REPLY_S,
    GatewayApiClient,
    GatewayTarget,
    RequestRefused,
    TryLater,
)
from ragcache_cli.commands.options import grouped
from ragcache_cli.local.signals import interruptible, run_until_stopped
from ragcache_cli.output.console import counting_bar, make_console
from ragcache_cli.sources.read import Surroundings, origin_of, prefix_of, read_source
from ragcache_cli.sources.reading import Scratch, SourceContents
from ragcache_cli.sources.sync_plan import (
    DIGEST,
    ORIGIN,
    OWNER,
    Failure,
    OwnedDocument,
    Result,
    Wanted,
    gather,
    obsolete,
    read_document,
    said,
)
from ragcache_core.access.networks import AddressRules, parse_networks
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_operator.spec.collection import MOUNTS, RagCollection, RagCollectionSpec, SourceSpec
from ragcache_operator.spec.manifest import parse_collection
from ragcache_operator.spec.quantity import parse_quantity

_REVISION_CHARS = 12


class Sync:
    """One run for one RagCollection; ``on_progress`` receives documents done and total."""

    def __init__(
        self,
        client: GatewayApiClient,
        collection: RagCollection,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._client = client
        self._spec = collection.spec
        self._collection = collection.collection_name
        self._owner = f"{collection.metadata.namespace}/{collection.metadata.name}"
        self._on_progress = on_progress
        self._held: dict[str, OwnedDocument] = {}
        self._failures: list[Failure] = []
        self._digests = hashlib.blake2b(digest_size=16)
        self._written = self._unchanged = self._deleted = self._skipped = 0

    async def bring(self, here: Surroundings) -> Result:
        """Read the sources, write changed documents, delete removed ones.

        A failed source or document does not affect the others.

        Raises:
            RequestRefused: The gateway refused the collection itself.
        """
        try:
            await self._ensure_collection()
            with interruptible():
                gathered = gather(_readings(self._spec.sources, here))
            self._failures += gathered.failures
            self._skipped = gathered.skipped
            await self._list()
            for number, document in enumerate(gathered.wanted):
                self._on_progress(number, len(gathered.wanted))
                await self._write(document)
            if self._spec.prune:
                await self._delete(obsolete(self._held, self._owner, gathered))
            self._on_progress(len(gathered.wanted), len(gathered.wanted))
        except (TryLater, Unavailable) as error:
            self._failures.append(Failure("", "", str(error)))
            return self._result(finished=False)
        revision = gathered.revision or self._digests.hexdigest()
        return self._result(finished=True, revision=revision[:_REVISION_CHARS])

    async def remove(self) -> Result:
        """Delete every document of the owner; the collection stays."""
        try:
            if await self._client.find_collection(self._collection) is not None:
                await self._list()
                await self._delete([k for k, one in self._held.items() if one.owner == self._owner])
        except (TryLater, Unavailable) as error:
            self._failures.append(Failure("", "", str(error)))
            return self._result(finished=False)
        return self._result(finished=True)

    async def _ensure_collection(self) -> None:
        """Create the collection, or change the settings that the RagCollection has."""
        there = await self._client.find_collection(self._collection)
        asked = _settings(self._spec)
        if there is None or any(there[name] != value for name, value in asked.items()):
            await self._client.patch_collection(self._collection, asked)

    async def _list(self) -> None:
        async for held in self._client.documents(self._collection):
            self._held[held.id] = OwnedDocument.of(held)

    async def _write(self, document: Wanted) -> None:
        """Write a document unless the collection has an identical one."""
        try:
            content, digest = read_document(document.file)
            self._digests.update(f"{document.id}\0{digest}\0".encode())
            there = self._held.get(document.id)
            if there is not None and there.owner != self._owner:
                raise InvalidInput(document.id, *_taken(there.owner))
            if there is not None and (there.digest, there.origin) == (digest, document.origin):
                self._unchanged += 1
                return
            metadata = {OWNER: self._owner, ORIGIN: document.origin, DIGEST: digest}
            written = await self._client.put_document(
                self._collection, document.id, content, metadata
            )
        except TryLater:
            raise
        except (InvalidInput, RequestRefused) as error:
            problem = said(error)
            self._failures.append(Failure(document.origin, document.id, problem))
        else:
            warnings = "\n".join(written["warnings"])
            self._held[document.id] = OwnedDocument(
                self._owner, document.origin, digest, int(written["chunks"]), warnings
            )
            self._written += 1

    async def _delete(self, ids: Collection[str]) -> None:
        for document_id in ids:
            await self._client.delete_document(self._collection, document_id)
            del self._held[document_id]
            self._deleted += 1

    def _result(self, *, finished: bool, revision: str = "") -> Result:
        mine = {key: one for key, one in self._held.items() if one.owner == self._owner}
        return Result(
            finished=finished,
            documents=len(mine),
            chunks=sum(one.chunks for one in mine.values()),
            written=self._written,
            unchanged=self._unchanged,
            deleted=self._deleted,
            skipped=self._skipped,
            revision=revision,
            failures=tuple(self._failures),
            warnings=tuple(
                Failure(one.origin, key, one.warnings.replace("\n", "; "))
                for key, one in sorted(mine.items())
                if one.warnings
            ),
        )


@dataclass(frozen=True, slots=True)
class SyncGateway:
    """The gateway of a sync, and how long it may be away."""

    gateway: Annotated[
        str, typer.Option(metavar="URL", envvar="RAGCACHE_GATEWAY", help="Gateway to talk to.")
    ]
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for a gateway that is away.")
    ] = 300.0
    certificate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificate that an https gateway shows, in PEM."),
    ] = None

    def client(self) -> GatewayApiClient:
        """Return a patient client."""
        target = GatewayTarget(
            self.gateway, os.environ.get(API_KEY_VARIABLE), certificate=self.certificate
        )
        return GatewayApiClient(target, SYNC_REPLY_S, self.patience)


@dataclass(frozen=True, slots=True)
class SyncLimits:
    """What the sources of a sync may take and reach."""

    scratch: Annotated[
        str, typer.Option(metavar="BYTES", help="Most that fetched sources may take on disk.")
    ] = "1Gi"
    allow_network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR",
            help="Network that is not public, and that sources may have. May be repeated.",
        ),
    ] = None

    @property
    def scratch_bytes(self) -> int:
        """The size limit. Raises InvalidInput."""
        return _parse_bytes("--scratch", self.scratch)

    @property
    def rules(self) -> AddressRules:
        """The addresses that sources may have. Raises InvalidInput."""
        return AddressRules(parse_networks("--allow-network", self.allow_network or ()))


@grouped
def sync_command(
    gateway: SyncGateway,
    limits: SyncLimits,
    manifest: Annotated[
        str, typer.Option("--object", metavar="JSON", help="The RagCollection, as JSON.")
    ],
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete its documents, and bring none.")
    ] = False,
    mounts: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder with a mount per ConfigMap and volume.")
    ] = Path(MOUNTS),
    result: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the result to.")
    ] = None,
) -> None:
    """Make a collection equal to the sources of a RagCollection; the last line is the result.

    Tokens come from RAGCACHE_SOURCE_<n>_TOKEN, where n is the index of the source, and the hosts
    that may have them from RAGCACHE_SOURCE_<n>_HOSTS.
    """

    async def run() -> Result:
        collection = _parse(manifest)
        most_bytes, rules = limits.scratch_bytes, limits.rules
        async with gateway.client() as client:
            with counting_bar(make_console(stderr=True), "syncing", "documents") as show:

                def report(done: int, total: int) -> None:
                    print(json.dumps({"done": done, "total": total}), flush=True)
                    show(done, total)

                sync = Sync(client, collection, report)
                if remove:
                    return await sync.remove()
                with tempfile.TemporaryDirectory(prefix="ragcache-sync-") as folder:
                    space = Scratch(Path(folder), most_bytes)
                    return await sync.bring(Surroundings(mounts, os.environ, space, rules))

    async def bring() -> int:
        try:
            done = await run()
        except RagCacheError as error:
            _report(Result(finished=False, failures=(Failure("", "", str(error)),)), result)
            raise
        _report(done, result)
        return done.exit_status

    # The first process of a container ignores SIGTERM without a handler.
    raise typer.Exit(run_until_stopped(bring(), stopped_status=128 + signal.SIGTERM))


def _parse_bytes(option: str, text: str) -> int:
    """Return the bytes of a quantity like ``2Gi``. Raises InvalidInput."""
    try:
        num_bytes = parse_quantity(text)
    except ValueError as error:
        raise InvalidInput(option, str(error), "write bytes like 512Mi or 2Gi") from error
    if num_bytes < 0:
        raise InvalidInput(option, f"{text!r} is below 0", "write bytes like 512Mi or 2Gi")
    return num_bytes


def _settings(spec: RagCollectionSpec) -> dict[str, Any]:
    """Return the settings that a RagCollection has, as fields of the REST API."""
    asked: dict[str, Any] = {}
    if spec.chunking is not None:
        sizes = {"size_tokens": spec.chunking.size, "overlap_tokens": spec.chunking.overlap}
        asked |= {"chunking": sizes, "window": spec.chunking.window}
    own = {
        "index": spec.index,
        "max_documents": spec.max_documents,
        "max_text_bytes": spec.max_text_bytes,
        "lexical_weight": spec.lexical_weight,
        "labels": spec.labels,
    }
    return asked | {name: value for name, value in own.items() if value is not None}


def _parse(text: str) -> RagCollection:
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise InvalidInput("--object", f"is no JSON ({error})", "give a RagCollection") from error
    if not isinstance(manifest, dict):
        raise InvalidInput("--object", "is no JSON object", "give a RagCollection")
    return parse_collection(manifest)


def _readings(
    sources: Iterable[SourceSpec], here: Surroundings
) -> Iterator[tuple[str, str, SourceContents | RagCacheError]]:
    """Read every source; return origin, prefix and contents, or the error."""
    for index, source in enumerate(sources):
        reading: SourceContents | RagCacheError
        try:
            reading = read_source(index, source, here)
        except RagCacheError as error:
            reading = error
        yield origin_of(source), prefix_of(source), reading


def _report(result: Result, path: Path | None) -> None:
    text = result.to_json()
    print(text, flush=True)
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(
            "--result", f"{path} cannot be written: {error.strerror}", "name another file"
        ) from error


def _taken(owner: str) -> tuple[str, str]:
    """Return problem and fix for an id that another owner's document has."""
    if owner:
        return f"belongs to the RagCollection {owner}", "rename it, or use another collection"
    return "is in the collection already, and not from here", "delete it there, or rename it"
