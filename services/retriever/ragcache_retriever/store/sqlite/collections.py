"""Collections and generations in SQLite. Changes need a transaction."""

from __future__ import annotations

from ragcache_core.errors import NotFound
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.store.records import Generation, Recipe, StoredCollection
from ragcache_retriever.store.sqlite.database import Database, Row
from ragcache_retriever.store.sqlite.lexical import LexicalTables

_COLLECTION = (
    "SELECT name, size_tokens, overlap_tokens, window, index_kind, max_documents,"
    " max_text_bytes, lexical_weight, num_documents, text_bytes, is_deleting, row FROM collections"
)
_GENERATION = (
    "SELECT row, state, splitter, size_tokens, overlap_tokens, tokenizer, embedder, dimension,"
    " num_documents, num_chunks, collection FROM generations"
)


class CollectionTables:
    """The tables of collections and generations."""

    def __init__(self, database: Database, lexical: LexicalTables) -> None:
        self._database = database
        self._lexical = lexical

    def row(self, name: str) -> int:
        """Return the row of a collection, in the writer's thread. Raises NotFound."""
        found = self._database.query_one("SELECT row FROM collections WHERE name = ?", (name,))
        if found is None:
            raise NotFound("collection", name, "create it with PutCollection, or use 'default'")
        return int(found[0])

    def put(self, name: str, settings: CollectionSettings) -> None:
        """See DocumentStore.put_collection."""
        chunking = settings.chunking
        self._database.execute(
            "INSERT INTO collections (name, size_tokens, overlap_tokens, window, index_kind,"
            " max_documents, max_text_bytes, lexical_weight)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET size_tokens = excluded.size_tokens,"
            " overlap_tokens = excluded.overlap_tokens, window = excluded.window,"
            " index_kind = excluded.index_kind, max_documents = excluded.max_documents,"
            " max_text_bytes = excluded.max_text_bytes, lexical_weight = excluded.lexical_weight",
            (
                name,
                None if chunking is None else chunking.size_tokens,
                None if chunking is None else chunking.overlap_tokens,
                settings.window,
                None if settings.index is None else settings.index.value,
                settings.max_documents,
                settings.max_text_bytes,
                settings.lexical_weight,
            ),
        )

    def add_generation(self, name: str, recipe: Recipe) -> int:
        """See DocumentStore.add_generation."""
        home = self.row(name)
        found = self._database.query_one(
            "SELECT seq FROM sqlite_sequence WHERE name = 'generations'"
        )
        row = 1 + (int(found[0]) if found else 0)
        serving = self._in_state(home, "serving")
        has_documents = self._database.query_one(
            "SELECT 1 FROM documents WHERE collection = ? LIMIT 1", (home,)
        )
        state = "building" if serving is not None and has_documents else "serving"
        self._set_state(home, state, "retired")
        if state == "serving":
            self._set_state(home, "building", "retired")
        chunking = recipe.chunking
        self._database.execute(
            "INSERT INTO generations (row, collection, state, splitter, size_tokens,"
            " overlap_tokens, tokenizer, embedder, dimension) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row,
                home,
                state,
                recipe.splitter,
                chunking.size_tokens,
                chunking.overlap_tokens,
                recipe.tokenizer,
                recipe.embedder,
                recipe.dimension,
            ),
        )
        self._lexical.create(row)
        return row

    def switch_generation(self, name: str) -> bool:
        """See DocumentStore.switch_generation."""
        home = self.row(name)
        building = self._in_state(home, "building")
        unprepared = self._database.query_one(
            "SELECT 1 FROM collections JOIN generations ON generations.collection = collections.row"
            " WHERE collections.row = ? AND generations.row = ?"
            " AND generations.num_documents != collections.num_documents",
            (home, building),
        )
        if building is None or unprepared is not None:
            return False
        self._set_state(home, "serving", "retired")
        self._set_state(home, "building", "serving")
        return True

    def retire_building(self, name: str) -> None:
        """See DocumentStore.retire_building."""
        self._set_state(self.row(name), "building", "retired")

    def remove_generation(self, generation: int) -> None:
        """Remove a generation without documents and words."""
        self._database.execute("DELETE FROM generations WHERE row = ?", (generation,))

    def start_deleting(self, name: str) -> None:
        """See DocumentStore.start_deleting."""
        self._database.execute("UPDATE collections SET is_deleting = 1 WHERE name = ?", (name,))

    def drop(self, name: str) -> None:
        """See DocumentStore.drop_collection."""
        home = self.row(name)
        for (generation,) in self._database.query(
            "SELECT row FROM generations WHERE collection = ? ORDER BY row", (home,)
        ):
            self.remove_generation(generation)
        self._database.execute("DELETE FROM collections WHERE row = ?", (home,))

    def _in_state(self, home: int, state: str) -> int | None:
        found = self._database.query_one(
            "SELECT row FROM generations WHERE collection = ? AND state = ?", (home, state)
        )
        return None if found is None else int(found[0])

    def _set_state(self, home: int, state: str, new_state: str) -> None:
        self._database.execute(
            "UPDATE generations SET state = ? WHERE collection = ? AND state = ?",
            (new_state, home, state),
        )

    # Reads

    def all(self) -> dict[str, StoredCollection]:
        """See DocumentStore.collections."""
        with self._database.snapshot():
            rows = self._database.read(f"{_COLLECTION} ORDER BY name")
            generations = self._database.read(f"{_GENERATION} ORDER BY row")
        return {row[0]: _collection(row, generations) for row in rows}

    def one(self, name: str) -> StoredCollection | None:
        """See DocumentStore.collection."""
        with self._database.snapshot():
            row = self._database.read_one(f"{_COLLECTION} WHERE name = ?", (name,))
            if row is None:
                return None
            generations = self._database.read(
                f"{_GENERATION} WHERE collection = ? ORDER BY row", (row[11],)
            )
        return _collection(row, generations)


def _collection(row: Row, generations: list[Row]) -> StoredCollection:
    name, size, overlap, window, index_kind, max_documents, max_text_bytes, weight = row[:8]
    own = [one for one in generations if one[10] == row[11]]
    in_state = {one[1]: _generation(one) for one in own if one[1] != "retired"}
    return StoredCollection(
        name,
        CollectionSettings(
            None if size is None else Chunking(size, overlap),
            window,
            None if index_kind is None else IndexKind(index_kind),
            max_documents,
            max_text_bytes,
            weight,
        ),
        num_documents=row[8],
        text_bytes=row[9],
        serving=in_state.get("serving"),
        building=in_state.get("building"),
        retired=tuple(one[0] for one in own if one[1] == "retired"),
        is_deleting=bool(row[10]),
    )


def _generation(row: Row) -> Generation:
    splitter, size, overlap, tokenizer, embedder, dimension = row[2:8]
    recipe = Recipe(splitter, Chunking(size, overlap), tokenizer, embedder, dimension)
    return Generation(row[0], recipe, row[8], row[9])
