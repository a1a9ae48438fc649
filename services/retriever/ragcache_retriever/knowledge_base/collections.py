"""The collections of the knowledge base, and their generations and indexes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from dataclasses import replace

from ragcache_core.errors import NotFound, RagCacheError, TooLarge, Unavailable
from ragcache_retriever.documents.collection import (
    DEFAULT_COLLECTION,
    CollectionDefaults,
    CollectionSettings,
)
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.knowledge_base.results import (
    CollectionInfo,
    CollectionRemoval,
    IndexInfo,
    RemakeProgress,
)
from ragcache_retriever.knowledge_base.store_threads import StoreThreads
from ragcache_retriever.preparer import DocumentPreparer
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Generation, Recipe, StoredCollection

log = logging.getLogger(__name__)

MAX_COLLECTIONS = 1000
REMOVED_AT_ONCE = 1024
"""Chunks that one transaction removes of a collection that is deleted."""


class CollectionSet:
    """What the knowledge base knows of collections. The event loop and any thread read it.

    It holds the store's records of the last reload. Their settings and generations are current,
    their counters may be old.
    """

    def __init__(
        self,
        store: DocumentStore,
        indexes: GenerationIndexes,
        threads: StoreThreads,
        preparer: DocumentPreparer,
        defaults: CollectionDefaults,
    ) -> None:
        self._store = store
        self._indexes = indexes
        self._threads = threads
        self._preparer = preparer
        self._defaults = defaults
        self._stored: dict[str, StoredCollection] = {}
        self._is_loaded = False
        self._is_stale = False

    # Reads

    @property
    def is_loaded(self) -> bool:
        """Whether ``finish_loading`` was called."""
        return self._is_loaded

    def finish_loading(self) -> None:
        """Accept calls from now on."""
        self._is_loaded = True

    @property
    def is_stale(self) -> bool:
        """Whether the last ``reload`` failed, so that it has to be repeated."""
        return self._is_stale

    def check_loaded(self) -> None:
        """Raise Unavailable until ``finish_loading``."""
        if not self._is_loaded:
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
        return self._preparer.recipe(self._defaults.chunking_of(stored.settings))

    def window(self, name: str) -> int:
        """Return the number of neighbours of a hit, on each side."""
        return self._defaults.window_of(self.get(name).settings)

    async def info(self, name: str) -> CollectionInfo:
        """Return a collection with its counters. Raises NotFound."""
        self.get(name)
        stored = await self._threads.read(self._store.collections.one, name)
        if stored is None:
            raise NotFound("collection", name, "create it with PutCollection, or use 'default'")
        return self._info(stored)

    async def infos(self) -> list[CollectionInfo]:
        """Return all collections with their counters, sorted by name."""
        self.check_loaded()
        stored = await self._threads.read(self._store.collections.all)
        return [self._info(one) for one in stored.values() if not one.is_deleting]

    async def index_infos(self) -> list[IndexInfo]:
        """Return the state of the serving indexes."""
        stored = await self._threads.read(self._store.collections.all)
        return [
            self._index_info(one, one.serving)
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
        await self._threads.write(self._put, name, settings, kept)

    async def delete(self, name: str) -> CollectionRemoval:
        """Delete a collection. Its documents are no longer found; they are removed in steps."""
        self.get(name)
        return await self._threads.write(self._delete, name)

    async def adopt_embedder(self) -> None:
        """Let the embedder take the identity of one whose vectors are stored, if they compare."""
        stored = await self._threads.read(self._store.collections.all)
        self._preparer.adopt_embedder(
            generation.recipe for one in stored.values() for generation in one.generations
        )

    def reload(self) -> None:
        """Read the collections and open their indexes. In the writer's thread.

        Raises:
            Exception: An index cannot be opened or removed now. The collections are current, and
                their other indexes are open.
        """
        self._is_stale = True
        stored = self._store.collections.all()
        wanted: set[int] = set()
        failure: Exception | None = None
        for one in stored.values():
            for generation in () if one.is_deleting else one.generations:
                if not self._preparer.can_embed(generation.recipe):
                    continue  # nothing can be compared with its vectors
                kind = self._defaults.index_of(one.settings)
                wanted.add(generation.row)
                try:
                    self._indexes.open(generation.row, generation.recipe.dimension, kind)
                except Exception as error:
                    failure = error
        self._stored = stored
        self._indexes.keep_only(wanted)
        if failure is not None:
            raise failure
        self._is_stale = False

    def has_changed(self) -> bool:
        """Whether the store has other collections, settings or generations. Any thread asks."""
        return _without_counters(self._store.collections.all()) != _without_counters(self._stored)

    def add_missing(self) -> None:
        """Create the default collection and missing serving generations. In the writer's thread."""
        stored = self._store.collections.all()
        with self._store.database.transaction():
            if DEFAULT_COLLECTION not in stored:
                self._store.collections.put(DEFAULT_COLLECTION, CollectionSettings())
                chunking = self._defaults.chunking
                recipe = self._preparer.recipe(chunking)
                self._store.collections.add_generation(DEFAULT_COLLECTION, recipe)
            for name, one in stored.items():
                if one.serving is None and not one.is_deleting:
                    self._store.collections.add_generation(name, self.wanted_recipe(one))
            self._store.database.commit()
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
        with self._store.database.transaction():
            self._store.collections.put(name, settings)
            if present is None:
                chunking = self._defaults.chunking_of(settings)
                self._store.collections.add_generation(name, self._preparer.recipe(chunking))
            self._store.database.commit()
        self._reload_or_later()

    def _delete(self, name: str) -> CollectionRemoval:
        stored = self._store.collections.one(name)
        with self._store.database.transaction(frees_space=True):
            self._store.collections.start_deleting(name)
            step = self._store.documents.remove_of_collection(
                name, REMOVED_AT_ONCE, self._threads.now_ms()
            )
            self._store.database.commit()
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

    def _info(self, stored: StoredCollection) -> CollectionInfo:
        serving = stored.serving
        return CollectionInfo(
            stored.name,
            self._defaults.chunking_of(stored.settings),
            self._defaults.window_of(stored.settings),
            self._defaults.index_of(stored.settings),
            stored.settings.max_documents,
            stored.settings.max_text_bytes,
            stored.settings.lexical_weight,
            stored.num_documents,
            0 if serving is None else serving.num_chunks,
            stored.text_bytes,
            self._remake(stored),
        )

    def _remake(self, stored: StoredCollection) -> RemakeProgress | None:
        serving, wanted = stored.serving, self.wanted_recipe(stored)
        if serving is None or serving.recipe == wanted:
            return None
        building = stored.building
        is_begun = building is not None and building.recipe == wanted
        return RemakeProgress(
            building.num_documents if building is not None and is_begun else 0,
            stored.num_documents,
            ", ".join(serving.recipe.differences(wanted)),
        )

    def _index_info(self, stored: StoredCollection, serving: Generation) -> IndexInfo:
        remake = self._remake(stored)
        kind = self._defaults.index_of(stored.settings)
        if not self._preparer.can_embed(serving.recipe):
            return IndexInfo(stored.name, kind, 0, 0, False, True, 0, remake)
        with contextlib.ExitStack() as stack:
            try:
                index = stack.enter_context(self._indexes.using(serving.row))
            except Unavailable:
                return IndexInfo(stored.name, kind, 0, 0, True, False, 0, remake)
            return IndexInfo(
                stored.name,
                index.kind,
                len(index),
                index.memory_bytes,
                index.is_building,
                False,
                self._indexes.num_missed(serving.row),
                remake,
            )


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
