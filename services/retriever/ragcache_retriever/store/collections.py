"""Collections and generations.

A *generation* is the set of a collection's chunks that one recipe made. Searches use the serving
generation. While documents are prepared again, the building generation exists, too. Both change
with each document, so that the switch is one transaction.

A change of a collection or of its documents locks the collection's row until the end of the
transaction. So the counters and quotas hold for any number of retrievers.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Select, bindparam, delete, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert  # SQLite has the same clause

from ragcache_core.errors import NotFound
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.store.database import Database, Row
from ragcache_retriever.store.generation_tables import EmbeddingTables, LexicalTables
from ragcache_retriever.store.records import Generation, Recipe, StoredCollection
from ragcache_retriever.store.statements import Statement
from ragcache_retriever.store.tables import collections, documents, generations

_SETTINGS = (
    "size_tokens",
    "overlap_tokens",
    "window",
    "index_kind",
    "max_documents",
    "max_text_bytes",
    "lexical_weight",
    "labels",
)
_RECIPE = (
    "splitter",
    "size_tokens",
    "overlap_tokens",
    "labels",
    "tokenizer",
    "embedder",
    "dimension",
)

_COLLECTION = tuple(
    collections.c[name]
    for name in ("name", *_SETTINGS, "num_documents", "text_bytes", "is_deleting")
)
_GENERATION = tuple(
    generations.c[name] for name in ("row", "state", *_RECIPE, "num_documents", "num_chunks")
)
_OF_NAME = collections.c.name == bindparam("name")
_OF_HOME = generations.c.collection == bindparam("home")
_IN_STATE = generations.c.state == bindparam("state")
_IS_CURRENT = generations.c.state != "retired"
_HOMES = generations.join(collections, collections.c.row == generations.c.collection)


def _with_generations() -> Select[tuple[object, ...]]:
    joined = collections.outerjoin(generations, generations.c.collection == collections.c.row)
    selected = select(*_COLLECTION, *_GENERATION).select_from(joined)
    return selected.order_by(collections.c.name, generations.c.row)


def _put() -> Statement:
    inserted = upsert(collections).values({name: bindparam(name) for name in ("name", *_SETTINGS)})
    changed = {name: inserted.excluded[name] for name in _SETTINGS}
    return Statement(inserted.on_conflict_do_update(index_elements=["name"], set_=changed))


_ALL = Statement(_with_generations())
_ONE = Statement(_with_generations().where(_OF_NAME))
_LOCK = Statement(select(collections.c.row).where(_OF_NAME).with_for_update())
_LOCK_HOME = Statement(
    select(collections.c.row, collections.c.name)
    .select_from(_HOMES)
    .where(generations.c.row == bindparam("generation"))
    .with_for_update(of=collections)
)
_PUT = _put()
_ADD_GENERATION = Statement(
    insert(generations)
    .values({name: bindparam(name) for name in ("collection", "state", *_RECIPE)})
    .returning(generations.c.row)
)
_NEWEST = Statement(
    select(*_GENERATION).where(_OF_HOME, _IS_CURRENT).order_by(generations.c.row.desc()).limit(1)
)
_IN_STATE_OF = Statement(select(generations.c.row).where(_OF_HOME, _IN_STATE))
_HAS_DOCUMENTS = Statement(
    select(documents.c.row).where(documents.c.collection == bindparam("home")).limit(1)
)
_IS_UNPREPARED = Statement(
    select(generations.c.num_documents != collections.c.num_documents)
    .select_from(_HOMES)
    .where(_OF_HOME, generations.c.state == "building")
)
_SET_STATE = Statement(
    update(generations).where(_OF_HOME, _IN_STATE).values(state=bindparam("new_state"))
)
_CURRENT = Statement(
    select(generations.c.row)
    .select_from(_HOMES)
    .where(_OF_HOME, _IS_CURRENT, ~collections.c.is_deleting)
)
_GENERATIONS = Statement(select(generations.c.row).where(_OF_HOME).order_by(generations.c.row))
_START_DELETING = Statement(update(collections).where(_OF_NAME).values(is_deleting=True))
_REMOVE_GENERATION = Statement(
    delete(generations).where(generations.c.row == bindparam("generation"))
)
_REMOVE = Statement(delete(collections).where(collections.c.row == bindparam("home")))


class Collections:
    """Collections and their generations. Changes need a transaction."""

    def __init__(
        self, database: Database, lexical: LexicalTables, embeddings: EmbeddingTables
    ) -> None:
        self._database = database
        self._lexical = lexical
        self._embeddings = embeddings

    def lock(self, name: str) -> int:
        """Return the row of a collection, and let no other transaction change the collection.

        Raises:
            NotFound: There is no such collection.
        """
        found = self._database.query_one(_LOCK, {"name": name})
        if found is None:
            raise NotFound("collection", name, "create it with PutCollection, or use 'default'")
        return int(found[0])

    def lock_home(self, generation: int) -> tuple[int, str] | None:
        """Lock the collection of a generation. Return its row and name, or None."""
        found = self._database.query_one(_LOCK_HOME, {"generation": generation})
        return None if found is None else (found[0], found[1])

    def put(self, name: str, settings: CollectionSettings) -> None:
        """Create a collection without a generation, or change the settings of one."""
        chunking = settings.chunking
        self._database.execute(
            _PUT,
            {
                "name": name,
                "size_tokens": chunking and chunking.size_tokens,
                "overlap_tokens": chunking and chunking.overlap_tokens,
                "window": settings.window,
                "index_kind": settings.index and settings.index.value,
                "max_documents": settings.max_documents,
                "max_text_bytes": settings.max_text_bytes,
                "lexical_weight": settings.lexical_weight,
                "labels": settings.labels,
            },
        )

    def add_generation(self, name: str, recipe: Recipe) -> int:
        """Add a generation without chunks and return its row.

        It serves if the collection had none or has no documents. Else it is the building one, and
        an earlier building generation retires. Another retriever may have added the generation just
        now. Then this one is returned.
        """
        home = self.lock(name)
        newest = self._database.query_one(_NEWEST, {"home": home})
        if newest is not None and _generation(newest).recipe == recipe:
            return int(newest[0])
        serving = self._database.query_one(_IN_STATE_OF, {"home": home, "state": "serving"})
        has_documents = self._database.query_one(_HAS_DOCUMENTS, {"home": home}) is not None
        state = "building" if serving is not None and has_documents else "serving"
        self._set_state(home, state, "retired")
        if state == "serving":
            self._set_state(home, "building", "retired")
        added = {
            "collection": home,
            "state": state,
            "splitter": recipe.splitter,
            "size_tokens": recipe.chunking.size_tokens,
            "overlap_tokens": recipe.chunking.overlap_tokens,
            "labels": recipe.chunking.labels,
            "tokenizer": recipe.tokenizer,
            "embedder": recipe.embedder,
            "dimension": recipe.dimension,
        }
        [(row,)] = self._database.query(_ADD_GENERATION, added)
        self._lexical.create(row)
        self._embeddings.create(row, recipe.dimension)
        return int(row)

    def switch_generation(self, name: str) -> bool:
        """Let the building generation serve, and retire the serving one.

        Returns:
            False, without a change, if a document is not prepared in it yet.
        """
        home = self.lock(name)
        unprepared = self._database.query_one(_IS_UNPREPARED, {"home": home})
        if unprepared is None or unprepared[0]:
            return False
        self._set_state(home, "serving", "retired")
        self._set_state(home, "building", "serving")
        return True

    def retire_building(self, name: str) -> None:
        """Retire the building generation, because the serving one has the wanted recipe again."""
        self._set_state(self.lock(name), "building", "retired")

    def are_current(self, home: int, wanted: set[int]) -> bool:
        """Whether all generations serve or are being built in a collection that stays."""
        return wanted <= {row for (row,) in self._database.query(_CURRENT, {"home": home})}

    def generations(self, home: int) -> list[int]:
        """Return all generations of a collection."""
        return [row for (row,) in self._database.query(_GENERATIONS, {"home": home})]

    def detach_generation(self, generation: int) -> None:
        """Let no search use a generation. Repeating it changes nothing."""
        self._lexical.detach(generation)
        self._embeddings.detach(generation)

    def remove_generation(self, generation: int) -> None:
        """Remove a generation without documents and words."""
        self.detach_generation(generation)
        self._database.execute(_REMOVE_GENERATION, {"generation": generation})

    def start_deleting(self, name: str) -> None:
        """Mark a collection. It is then no longer found, and its documents can be removed."""
        self._database.execute(_START_DELETING, {"name": name})

    def drop(self, name: str) -> None:
        """Remove a marked collection that is empty, and all its generations."""
        home = self.lock(name)
        for generation in self.generations(home):
            self.remove_generation(generation)
        self._database.execute(_REMOVE, {"home": home})

    def all(self) -> dict[str, StoredCollection]:
        """Return all collections by name, those that are being deleted, too. Reads counters."""
        return _collections(self._database.read(_ALL))

    def one(self, name: str) -> StoredCollection | None:
        """Return a collection, or None."""
        return _collections(self._database.read(_ONE, {"name": name})).get(name)

    def _set_state(self, home: int, state: str, new_state: str) -> None:
        changed = {"home": home, "state": state, "new_state": new_state}
        self._database.execute(_SET_STATE, changed)


def _collections(rows: Sequence[Row]) -> dict[str, StoredCollection]:
    """Return the collections of rows of ``_with_generations``."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row[0], []).append(row)
    return {name: _collection(own) for name, own in by_name.items()}


def _collection(rows: Sequence[Row]) -> StoredCollection:
    name, size, overlap, window, index_kind, max_documents, max_text_bytes = rows[0][:7]
    weight, labels, num_documents, text_bytes, is_deleting = rows[0][7 : len(_COLLECTION)]
    # A collection without generations has NULL in their columns.
    own = [row[len(_COLLECTION) :] for row in rows if row[len(_COLLECTION)] is not None]
    in_state = {row[1]: _generation(row) for row in own if row[1] != "retired"}
    return StoredCollection(
        name,
        CollectionSettings(
            None if size is None else Chunking(size, overlap),
            window,
            None if index_kind is None else IndexKind(index_kind),
            max_documents,
            max_text_bytes,
            weight,
            bool(labels),
        ),
        num_documents=num_documents,
        text_bytes=text_bytes,
        serving=in_state.get("serving"),
        building=in_state.get("building"),
        retired=tuple(row[0] for row in own if row[1] == "retired"),
        is_deleting=bool(is_deleting),
    )


def _generation(row: Row) -> Generation:
    splitter, size, overlap, labels, tokenizer, embedder, dimension = row[2:9]
    chunking = Chunking(size, overlap, bool(labels))
    recipe = Recipe(splitter, chunking, tokenizer, embedder, dimension)
    return Generation(row[0], recipe, *row[9:11])
