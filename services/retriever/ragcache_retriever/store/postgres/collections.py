"""Collections and generations in PostgreSQL. Changes need a transaction.

A change of a collection or of its documents locks the collection's row until the end of the
transaction. So the counters and quotas hold for any number of retrievers.
"""

from __future__ import annotations

from ragcache_core.errors import NotFound
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.store.postgres.connections.database import (
    APPLICATION_NAME,
    PostgresDatabase,
    Row,
)
from ragcache_retriever.store.postgres.schema import (
    create_generation,
    postings_table,
    vector_table,
)
from ragcache_retriever.store.records import Generation, Recipe, StoredCollection

_COLLECTION = (
    'SELECT name, size_tokens, overlap_tokens, "window", index_kind, max_documents,'
    " max_text_bytes, lexical_weight, num_documents, text_bytes, is_deleting, row FROM collections"
)
_GENERATION = (
    "SELECT row, state, splitter, size_tokens, overlap_tokens, tokenizer, embedder, dimension,"
    " num_documents, num_chunks, collection FROM generations"
)
_ABANDON_BUILDS = """
SELECT pg_cancel_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE relation = to_regclass(%s) AND mode = 'ShareUpdateExclusiveLock' AND pid != pg_backend_pid()
    AND application_name = %s AND usename = current_user
"""


class PostgresCollections:
    """The tables of collections and generations."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    def lock(self, name: str) -> int:
        """Return the row of a collection, and let no other transaction change the collection.

        Raises:
            NotFound: There is no such collection.
        """
        found = self._database.query_one(
            "SELECT row FROM collections WHERE name = %s FOR UPDATE", (name,)
        )
        if found is None:
            raise NotFound("collection", name, "create it with PutCollection, or use 'default'")
        return int(found[0])

    def put(self, name: str, settings: CollectionSettings) -> None:
        """See DocumentStore.put_collection."""
        chunking = settings.chunking
        self._database.execute(
            'INSERT INTO collections (name, size_tokens, overlap_tokens, "window", index_kind,'
            " max_documents, max_text_bytes, lexical_weight)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (name) DO UPDATE SET size_tokens = excluded.size_tokens,"
            ' overlap_tokens = excluded.overlap_tokens, "window" = excluded."window",'
            " index_kind = excluded.index_kind, max_documents = excluded.max_documents,"
            " max_text_bytes = excluded.max_text_bytes, lexical_weight = excluded.lexical_weight",
            (
                name,
                chunking and chunking.size_tokens,
                chunking and chunking.overlap_tokens,
                settings.window,
                settings.index and settings.index.value,
                settings.max_documents,
                settings.max_text_bytes,
                settings.lexical_weight,
            ),
        )

    def add_generation(self, name: str, recipe: Recipe) -> int:
        """See DocumentStore.add_generation.

        Another retriever may have added the generation just now. Then this one is returned.
        """
        home = self.lock(name)
        present = self._of_recipe(home, recipe)
        if present is not None:
            return present
        serving = self._in_state(home, "serving")
        has_documents = self._database.query_one(
            "SELECT 1 FROM documents WHERE collection = %s LIMIT 1", (home,)
        )
        state = "building" if serving is not None and has_documents else "serving"
        self._set_state(home, state, "retired")
        if state == "serving":
            self._set_state(home, "building", "retired")
        chunking = recipe.chunking
        [(row,)] = self._database.query(
            "INSERT INTO generations (collection, state, splitter, size_tokens,"
            " overlap_tokens, tokenizer, embedder, dimension)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s) RETURNING row",
            (
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
        for statement in create_generation(row, recipe.dimension):
            self._database.execute(statement)
        return int(row)

    def switch_generation(self, name: str) -> bool:
        """See DocumentStore.switch_generation."""
        home = self.lock(name)
        unprepared = self._database.query_one(
            "SELECT generations.num_documents != collections.num_documents"
            " FROM collections JOIN generations ON generations.collection = collections.row"
            " WHERE collections.row = %s AND state = 'building'",
            (home,),
        )
        if unprepared is None or unprepared[0]:
            return False
        self._set_state(home, "serving", "retired")
        self._set_state(home, "building", "serving")
        return True

    def retire_building(self, name: str) -> None:
        """See DocumentStore.retire_building."""
        self._set_state(self.lock(name), "building", "retired")

    def are_current(self, home: int, generations: set[int]) -> bool:
        """Whether all generations serve or are being built in a collection that stays."""
        found = self._database.query(
            "SELECT generations.row FROM generations JOIN collections"
            " ON collections.row = generations.collection"
            " WHERE collection = %s AND state != 'retired' AND NOT is_deleting",
            (home,),
        )
        return generations <= {row for (row,) in found}

    def drop_tables(self, generation: int) -> None:
        """Remove the tables of a generation, if they are there.

        An index that a retriever builds meanwhile is abandoned. Its build waits for this
        transaction, and this one would wait for the build.
        """
        self._database.query(_ABANDON_BUILDS, (vector_table(generation), APPLICATION_NAME))
        self._database.execute(
            f"DROP TABLE IF EXISTS {vector_table(generation)}, {postings_table(generation)}"
        )

    def remove_generation(self, generation: int) -> None:
        """Remove a generation without documents."""
        self.drop_tables(generation)
        self._database.execute("DELETE FROM generations WHERE row = %s", (generation,))

    def start_deleting(self, name: str) -> None:
        """See DocumentStore.start_deleting."""
        self._database.execute("UPDATE collections SET is_deleting = true WHERE name = %s", (name,))

    def drop(self, name: str) -> None:
        """See DocumentStore.drop_collection."""
        home = self.lock(name)
        for (generation,) in self._database.query(
            "SELECT row FROM generations WHERE collection = %s", (home,)
        ):
            self.remove_generation(generation)
        self._database.execute("DELETE FROM collections WHERE row = %s", (home,))

    # Reads

    def all(self) -> dict[str, StoredCollection]:
        """See DocumentStore.collections."""
        with self._database.snapshot() as connection:
            rows = connection.execute(f"{_COLLECTION} ORDER BY name").fetchall()
            generations = connection.execute(f"{_GENERATION} ORDER BY row").fetchall()
        return {row[0]: _collection(row, generations) for row in rows}

    def one(self, name: str) -> StoredCollection | None:
        """See DocumentStore.collection."""
        with self._database.snapshot() as connection:
            row = connection.execute(f"{_COLLECTION} WHERE name = %s", (name,)).fetchone()
            if row is None:
                return None
            generations = connection.execute(
                f"{_GENERATION} WHERE collection = %s ORDER BY row", (row[11],)
            ).fetchall()
        return _collection(row, generations)

    def _of_recipe(self, home: int, recipe: Recipe) -> int | None:
        """Return the generation of a recipe that is being built, or that serves alone."""
        found = self._database.query(
            f"{_GENERATION} WHERE collection = %s AND state != 'retired' ORDER BY row DESC LIMIT 1",
            (home,),
        )
        return int(found[0][0]) if found and _generation(found[0]).recipe == recipe else None

    def _in_state(self, home: int, state: str) -> int | None:
        found = self._database.query_one(
            "SELECT row FROM generations WHERE collection = %s AND state = %s", (home, state)
        )
        return None if found is None else int(found[0])

    def _set_state(self, home: int, state: str, new_state: str) -> None:
        self._database.execute(
            "UPDATE generations SET state = %s WHERE collection = %s AND state = %s",
            (new_state, home, state),
        )


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
        is_deleting=row[10],
    )


def _generation(row: Row) -> Generation:
    splitter, size, overlap, tokenizer, embedder, dimension = row[2:8]
    recipe = Recipe(splitter, Chunking(size, overlap), tokenizer, embedder, dimension)
    return Generation(row[0], recipe, row[8], row[9])
