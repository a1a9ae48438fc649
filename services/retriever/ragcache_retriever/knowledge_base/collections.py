"""The collections of the knowledge base, and their generations and indexes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

from ragcache_core.errors import NotFound, RagCacheError, TooLarge, Unavailable
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.concurrency.threads import StoreThreads
from ragcache_retriever.documents.collection import (
    DEFAULT_COLLECTION,
    CollectionDefaults,
    CollectionSettings,
)
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.preparer import DocumentPreparer
from ragcache_retriever.store.database import Deadlocked
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Generation, OutboxDelete, Recipe, StoredCollection
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

INDEX_KINDS = {
    IndexKind.AUTO: pb.INDEX_KIND_AUTO,
    IndexKind.FLAT: pb.INDEX_KIND_FLAT,
    IndexKind.IVF: pb.INDEX_KIND_IVF,
    IndexKind.HNSW: pb.INDEX_KIND_HNSW,
}
MAX_COLLECTIONS = 1000
REMOVED_AT_ONCE = 1024
_DELETE_ATTEMPTS = 3
"""Chunks that one transaction removes of a collection that is deleted."""


@dataclass(frozen=True, slots=True)
class CollectionRemoval:
    """Result of deleting a collection: its documents, and the deletes of the first of them."""

    num_documents: int
    deletes: tuple[OutboxDelete, ...]


class CollectionSet:
    """The collections, and where they are stored. The event loop and any thread read it.

    It holds the store's records of the last reload. Their settings and generations are current,
    their counters may be old.

    Attributes:
        is_loaded: Whether calls are accepted.
        is_stale: Whether the last ``reload`` failed, so that it has to be repeated.
    """

    def __init__(
        self,
        store: DocumentStore,
        indexes: GenerationIndexes,
        threads: StoreThreads,
        preparer: DocumentPreparer,
        defaults: CollectionDefaults,
    ) -> None:
        self.store = store
        self.indexes = indexes
        self.threads = threads
        self.preparer = preparer
        self._defaults = defaults
        self._stored: dict[str, StoredCollection] = {}
        self.is_loaded = False
        self.is_stale = False

    # Reads

    def check_loaded(self) -> None:
        """Raise Unavailable until all is loaded."""
        if not self.is_loaded:
            raise Unavailable("retriever", "it is loading its index and its embedder")

    def get(self, name: str) -> StoredCollection:
        """Return a collection. Raises NotFound."""
        self.check_loaded()
        stored = self._stored.get(name)
        if stored is None or stored.is_deleting:
            raise NotFound("collection", name, "create it with PutCollection, or use 'default'")
        return stored

    def all(self) -> list[StoredCollection]:
        """Return all collections by name, those that are being deleted, too."""
        stored = self._stored  # the writer's thread may replace it
        return [stored[name] for name in sorted(stored)]

    def serving(self, name: str) -> Generation:
        """Return the generation that a search uses. Raises NotFound."""
        serving = self.get(name).serving
        if serving is None:
            raise Unavailable("retriever", f"collection {name!r} is being created")
        return serving

    def wanted_recipe(self, stored: StoredCollection) -> Recipe:
        """Return the recipe that the documents of a collection should have."""
        return self.preparer.recipe(self._defaults.chunking_of(stored.settings))

    def window(self, name: str) -> int:
        """Return the number of neighbours of a hit, on each side."""
        return self._defaults.window_of(self.get(name).settings)

    async def info(self, name: str) -> pb.Collection:
        """Return a collection with its counters. Raises NotFound."""
        self.get(name)
        stored = await self.threads.read(self.store.collections.one, name)
        if stored is None:
            raise NotFound("collection", name, "create it with PutCollection, or use 'default'")
        return self._info(stored)

    async def infos(self) -> list[pb.Collection]:
        """Return all collections with their counters, sorted by name."""
        self.check_loaded()
        stored = await self.threads.read(self.store.collections.all)
        return [self._info(one) for one in stored.values() if not one.is_deleting]

    async def index_statuses(self) -> list[pb.IndexStatus]:
        """Return the state of the serving indexes."""
        self.check_loaded()
        stored = await self.threads.read(self.store.collections.all)
        return [
            self._index_status(one, one.serving)
            for one in stored.values()
            if one.serving is not None and not one.is_deleting
        ]

    # Changes

    async def put(
        self, name: str, settings: CollectionSettings, kept: Collection[str] = ()
    ) -> None:
        """Create a collection or change its settings.

        Args:
            kept: Fields of the settings that stay as they are in a collection that exists.
        """
        self.check_loaded()
        await self.threads.write(self._put, name, settings, kept)

    async def delete(self, name: str) -> CollectionRemoval:
        """Delete a collection. Its documents are no longer found; they are removed in steps."""
        self.get(name)
        for _ in range(_DELETE_ATTEMPTS - 1):
            # The build of an index may hold the table that this removes, and have ended by now.
            with contextlib.suppress(Deadlocked):
                return await self.threads.write(self._delete, name)
        return await self.threads.write(self._delete, name)

    async def adopt_embedder(self) -> None:
        """Let the embedder take the identity of one whose vectors are stored, if they compare."""
        stored = await self.threads.read(self.store.collections.all)
        self.preparer.adopt_embedder(
            generation.recipe for one in stored.values() for generation in one.generations
        )

    def reload(self) -> None:
        """Read the collections and open their indexes. In the writer's thread.

        Raises:
            Exception: An index cannot be opened or removed now. The collections are current, and
                their other indexes are open.
        """
        self.is_stale = True
        stored = self.store.collections.all()
        wanted: set[int] = set()
        failure: Exception | None = None
        for one in stored.values():
            for generation in () if one.is_deleting else one.generations:
                if not self.preparer.can_embed(generation.recipe):
                    continue  # nothing can be compared with its vectors
                kind = self._defaults.index_of(one.settings)
                wanted.add(generation.row)
                try:
                    self.indexes.open(generation.row, generation.recipe.dimension, kind)
                except Exception as error:
                    failure = error
        self._stored = stored
        self.indexes.keep_only(wanted)
        if failure is not None:
            raise failure
        self.is_stale = False

    def has_changed(self) -> bool:
        """Whether the store has other collections, settings or generations. Any thread asks."""
        return _without_counters(self.store.collections.all()) != _without_counters(self._stored)

    def add_missing(self) -> None:
        """Create the default collection and missing serving generations. In the writer's thread."""
        stored = self.store.collections.all()
        with self.store.database.transaction():
            if DEFAULT_COLLECTION not in stored:
                self.store.collections.put(DEFAULT_COLLECTION, CollectionSettings())
                chunking = self._defaults.chunking
                recipe = self.preparer.recipe(chunking)
                self.store.collections.add_generation(DEFAULT_COLLECTION, recipe)
            for name, one in stored.items():
                if one.serving is None and not one.is_deleting:
                    self.store.collections.add_generation(name, self.wanted_recipe(one))
            self.store.database.commit()
        self.reload()

    def _put(self, name: str, settings: CollectionSettings, kept: Collection[str]) -> None:
        present = self._stored.get(name)
        if present is not None and present.is_deleting:
            raise Unavailable("retriever", f"collection {name!r} is being deleted", 5.0)
        if present is None and len(self._stored) >= MAX_COLLECTIONS:
            raise TooLarge(
                "collection.name",
                f"there are {MAX_COLLECTIONS} collections already",
                "delete one, or use metadata and filters",
            )
        if present is not None:
            before = {field: getattr(present.settings, field) for field in kept}
            settings = replace(settings, **before)
            if settings == present.settings:
                return
        with self.store.database.transaction():
            self.store.collections.put(name, settings)
            if present is None:
                chunking = self._defaults.chunking_of(settings)
                self.store.collections.add_generation(name, self.preparer.recipe(chunking))
            self.store.database.commit()
        self._reload_or_later()

    def _delete(self, name: str) -> CollectionRemoval:
        stored = self.store.collections.one(name)
        with self.store.database.transaction(frees_space=True):
            self.store.operations.cancel(name, None, self.threads.now_ms())
            self.store.collections.start_deleting(name)
            step = self.store.documents.remove_of_collection(
                name, REMOVED_AT_ONCE, self.threads.now_ms()
            )
            self.store.database.commit()
        self._reload_or_later()
        return CollectionRemoval(0 if stored is None else stored.num_documents, step.deletes)

    def _reload_or_later(self) -> None:
        """Reload after a commit, which stays valid if an index cannot be opened."""
        try:
            self.reload()
        except Exception as error:
            log.warning(
                "collections: an index is not open error=%s",
                error,
                exc_info=not isinstance(error, RagCacheError),
            )

    def _info(self, stored: StoredCollection) -> pb.Collection:
        serving, settings = stored.serving, stored.settings
        chunking = self._defaults.chunking_of(settings)
        return pb.Collection(
            name=stored.name,
            chunking=pb.Chunking(
                size_tokens=chunking.size_tokens, overlap_tokens=chunking.overlap_tokens
            ),
            window=self._defaults.window_of(settings),
            documents=stored.num_documents,
            chunks=0 if serving is None else serving.num_chunks,
            index=INDEX_KINDS[self._defaults.index_of(settings)],
            max_documents=settings.max_documents,
            max_text_bytes=settings.max_text_bytes,
            lexical_weight=settings.lexical_weight,
            labels=settings.labels,
            text_bytes=stored.text_bytes,
            remake=self._remake(stored),
        )

    def _remake(self, stored: StoredCollection) -> pb.Remake | None:
        serving, wanted = stored.serving, self.wanted_recipe(stored)
        if serving is None or serving.recipe == wanted:
            return None
        building = stored.building
        is_begun = building is not None and building.recipe == wanted
        return pb.Remake(
            documents_done=building.num_documents if building is not None and is_begun else 0,
            documents=stored.num_documents,
            reason=", ".join(serving.recipe.differences(wanted)),
        )

    def _index_status(self, stored: StoredCollection, serving: Generation) -> pb.IndexStatus:
        status = pb.IndexStatus(
            collection=stored.name,
            kind=INDEX_KINDS[self._defaults.index_of(stored.settings)],
            remake=self._remake(stored),
        )
        if not self.preparer.can_embed(serving.recipe):
            status.lexical_only = True
            return status
        with contextlib.ExitStack() as stack:
            try:
                index = stack.enter_context(self.indexes.using(serving.row))
            except Unavailable:
                status.building = True  # it is being opened, and its size is not known
                return status
            status.kind = INDEX_KINDS[index.kind]
            status.vectors = len(index)
            status.memory_bytes = index.memory_bytes
            status.building = index.is_building
            status.missed_vectors = self.indexes.num_missed(serving.row)
        return status


def _without_counters(stored: dict[str, StoredCollection]) -> dict[str, object]:
    return {
        name: (
            one.settings,
            [(generation.row, generation.recipe) for generation in one.generations],
            one.building is None,
            one.retired,
            one.is_deleting,
        )
        for name, one in stored.items()
    }
