"""What every document store has to do. A module that runs it has a fixture ``store``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache_core.access.usage import Period, UsageCounts, window_start
from ragcache_core.errors import TooLarge
from ragcache_core.retrieval.filters import (
    And,
    Exists,
    Filter,
    In,
    InPeriod,
    InRange,
    Not,
    Or,
    Prefix,
    matches,
)
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_core.retrieval.lexical import word_choice
from ragcache_core.retrieval.lexical.terms import is_identifier, terms_of
from ragcache_core.retrieval.metadata import MetadataValue, instant_of
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.operations import (
    KEPT_MS,
    OperationState,
    OperationTarget,
    pack,
    unpack,
)
from ragcache_retriever.store.outbox import CLAIM_MS
from ragcache_retriever.store.records import DocumentChange, OutboxDelete
from ragcache_retriever.store.usage import CountedUse, UsageSender, UsageWanted
from tests.kit.stored_documents import (
    NOW_MS,
    RECIPE,
    a_document,
    add_collection,
    chunks_of,
    delete,
    digest_of_text,
    put,
    put_into,
    vector_of,
    version_of,
)

OTHER = replace(RECIPE, chunking=Chunking(32, 0))

names = st.sampled_from(["team", "year", "id", "title", "updated_unix_ms", "missing", "a\0"])
values = st.sampled_from(
    [
        "",
        "a",
        "ab",
        "b",
        "2020",
        "-1e3",
        "inf",
        "nan",
        "ü",
        "\U0010ffff",
        "d1",
        "7",
        "a\0",
        "x" * 70,
        "true",
        "2.5",
        "2024-02-20",
    ]
)
bounds = st.none() | st.sampled_from([-1000.0, 6.5, 7.0, 2020.0, 2021.0, math.inf])
instants = st.none() | st.sampled_from(
    [instant_of(text) for text in ("0001-01-01", "2024-02-20", "2024-02-21", "9999-12-31")]
)
tests_of_fields: st.SearchStrategy[Filter] = st.one_of(
    st.builds(In, names, st.lists(values, max_size=3).map(tuple)),
    st.builds(InRange, names, bounds, bounds, bounds, bounds),
    st.builds(InPeriod, names, instants, instants),
    st.builds(Exists, names),
    st.builds(Prefix, names, values),
)
filters: st.SearchStrategy[Filter] = st.recursive(
    tests_of_fields,
    lambda inner: st.one_of(
        st.builds(And, st.lists(inner, max_size=3).map(tuple)),
        st.builds(Or, st.lists(inner, max_size=3).map(tuple)),
        st.builds(Not, inner),
    ),
    max_leaves=6,
)
FILTERED: tuple[tuple[str, str, dict[str, MetadataValue]], ...] = (
    ("d0", "a", {"team": "a", "year": "2020", "id": "hidden"}),
    ("d1", "ab", {"team": "ab", "year": "2021"}),
    ("d2", "7", {"team": "b", "year": "-1e3"}),
    ("d3", "t", {"team": "ü", "year": "inf"}),
    ("d4", "b", {"team": "", "year": "nan"}),
    ("\U0010ffffx", "2020", {}),
    ("7", "x", {"team": "\U0010ffff\U0010ffff"}),
    ("long", "x", {"team": "x" * 5000}),
    ("almost", "x", {"team": "x" * 69}),
    ("types", "2024-02-20", {"team": ["a", True, 7], "year": 2020}),
    ("2024-02-21", "x", {"team": [], "year": [2021.0, 2.5, -1000]}),
    ("dates", "x", {"team": "2024-02-20", "year": ["2024-02-20T23:00:00-01:00", "b"]}),
    ("far", "x", {"team": "9999-12-31T23:59:59-12:00", "year": "0001-01-01T00:00:00+14:00"}),
)
"""Documents by id, title and metadata. A field of metadata cannot hide one of the document."""


def serving(store: DocumentStore, collection: str = "c") -> int:
    found = store.collections.one(collection)
    assert found is not None
    assert found.serving is not None
    return found.serving.row


def texts_of(store: DocumentStore, document_id: str) -> list[str]:
    return [
        chunk.text for chunk, _ in store.embeddings.of_document("c", document_id, serving(store))
    ]


def acknowledge(store: DocumentStore, deletes: Sequence[OutboxDelete]) -> None:
    with store.database.transaction():
        store.outbox.acknowledge([], [one.id for one in deletes], NOW_MS)
        store.database.commit()


def removed_digests(change: DocumentChange) -> list[bytes]:
    return [digest for delete in change.deletes for digest in delete.token_digests]


def pending(store: DocumentStore) -> list[OutboxDelete]:
    with store.database.transaction():
        claim = store.outbox.claim(1000, NOW_MS)
        store.database.commit()
    return list(claim.deletes)


def added_rows(change: DocumentChange) -> tuple[int, ...]:
    [index] = change.indexes
    return index.added


def start_building(store: DocumentStore, recipe: object = OTHER) -> int:
    with store.database.transaction():
        generation = store.collections.add_generation("c", recipe)  # type: ignore[arg-type]
        store.database.commit()
    return generation


def switch(store: DocumentStore) -> bool:
    with store.database.transaction():
        has_switched = store.collections.switch_generation("c")
        store.database.commit()
    return has_switched


class DocumentsContract:
    """Documents, generations, quotas and deletes. The fixture ``store`` has collection c."""

    def test_what_was_put_is_read_back(self, store: DocumentStore) -> None:
        document = a_document(
            "d",
            "body",
            title="T",
            content_type=2,
            metadata={"k": "v", "ü": "", "n": [1, 2.5, True, "x"]},
        )
        with store.database.transaction():
            chunks = {serving(store): chunks_of(["body"])}
            store.documents.replace(
                "c", document, version_of(document), chunks, now_ms=NOW_MS, claim=False
            )
            store.database.commit()
        found = store.reads.get("c", "d")
        assert found is not None
        assert (found.document, found.version, found.num_chunks) == (
            document,
            version_of(document),
            1,
        )
        assert found.prepared == {serving(store)}
        assert store.reads.find("c", "d") == replace(found, document=replace(document, text=""))
        assert store.reads.get("c", "other") is None
        assert store.reads.get("other", "d") is None

    def test_an_uncommitted_change_never_happened(self, store: DocumentStore) -> None:
        put(store, "d", ["one"])
        put(store, "d", ["two"], commit=False)
        assert texts_of(store, "d") == ["one"]

    def test_an_error_inside_a_transaction_undoes_it(self, store: DocumentStore) -> None:
        def fail() -> None:
            with store.database.transaction():
                store.documents.delete("c", "d", NOW_MS)
                raise KeyError

        put(store, "d", ["one"])
        with pytest.raises(KeyError):
            fail()
        assert store.reads.get("c", "d") is not None
        put(store, "e", ["two"])

    def test_removed_digests_are_those_of_no_other_chunk_in_the_collection(
        self,
        store: DocumentStore,
    ) -> None:
        add_collection(store, "other")
        put(store, "elsewhere", ["b"], collection="other")
        put(store, "d", ["a", "b", "c", "b"])
        put(store, "e", ["c"])
        replacement = put(store, "d", ["a", "new"], claim=True)
        assert removed_digests(replacement) == [digest_of_text("b")]
        acknowledge(store, replacement.deletes)
        change = delete(store, "d")
        assert change is not None
        assert removed_digests(change) == [digest_of_text("a"), digest_of_text("new")]
        assert delete(store, "d") is None

    def test_a_change_and_its_deletes_are_one_transaction(self, store: DocumentStore) -> None:
        put(store, "d", ["a"])
        with store.database.transaction():
            store.documents.delete("c", "d", NOW_MS)
        assert store.outbox.removals(0, 10) == ([], 0)
        assert pending(store) == []
        put(store, "d", ["b"])
        [update] = pending(store)
        assert (update.token_digests, update.names_document) == ((digest_of_text("a"),), False)
        delete(store, "d")
        with store.database.transaction():
            [deletion] = store.outbox.claim_of("c", "d", NOW_MS, is_repeated=True)[1:]
        assert (deletion.token_digests, deletion.names_document) == ((digest_of_text("b"),), True)
        removals, last = store.outbox.removals(0, 10)
        assert [(one.collection, one.document) for one in removals] == [("c", "d")] * 2
        assert removals[-1].sequence == last

    def test_a_change_returns_earlier_deletes_of_the_document_that_no_shard_has(
        self,
        store: DocumentStore,
    ) -> None:
        put(store, "d", ["a"])
        put(store, "other", ["x"])
        put(store, "other", ["y"])
        put(store, "d", ["b"])  # its gateway may have ended
        second = put(store, "d", ["c"], claim=True)
        assert set(removed_digests(second)) == {digest_of_text("a"), digest_of_text("b")}
        assert (
            put(store, "d", ["c"], claim=True).deletes == second.deletes
        )  # removes nothing itself
        acknowledge(store, second.deletes[:1])
        deletion = delete(store, "d")
        assert deletion is not None
        assert set(removed_digests(deletion)) == {digest_of_text("b"), digest_of_text("c")}

    def test_rows_are_never_reused(self, store: DocumentStore) -> None:
        first = put(store, "d", ["a", "b"])
        second = put(store, "d", ["c"])
        assert second.indexes[0].removed == added_rows(first)
        assert min(added_rows(second)) > max(added_rows(first))
        delete(store, "d")
        assert min(added_rows(put(store, "d", ["c"]))) > max(added_rows(second))

    def test_neighbours_stay_within_their_document(self, store: DocumentStore) -> None:
        rows = added_rows(put(store, "d", ["0", "1", "2", "3", "4"]))
        others = added_rows(put(store, "e", ["5"]))
        found = store.reads.neighbourhoods([rows[2], rows[0], others[0], 10**9], window=1)
        assert found.keys() == {rows[2], rows[0], others[0]}
        middle = found[rows[2]]
        assert [c.text for c in (*middle.before, middle.chunk, *middle.after)] == ["1", "2", "3"]
        assert middle.chunk.heading_path == ("A", "B")
        assert (middle.chunk.page, middle.chunk.page_end) == (3, 4)
        assert middle.chunk.tokenizer == "tokenizer"
        assert middle.chunk.token_ids == np.arange(1, dtype="<u4").tobytes()
        stored = store.reads.find("c", "d")
        assert stored is not None
        assert (middle.chunk.content_hash, middle.chunk.updated_unix_ms) == (stored.content_hash, 7)
        assert not found[rows[0]].before
        assert not found[others[0]].before
        assert not found[others[0]].after
        assert store.reads.positions([rows[3], others[0], 10**9]) == {
            rows[3]: ("d", 3),
            others[0]: ("e", 0),
        }

    def test_pages_follow_each_other(self, store: DocumentStore) -> None:
        names = [f"d{i}" for i in range(5)]
        for name in reversed(names):
            put(store, name, ["a"])
        seen: list[str] = []
        after: str | None = ""
        while after is not None:
            page, after = store.reads.page("c", after, 2)
            assert len(page) <= 2
            assert all(stored.document.text == "" for stored in page)
            seen += [stored.document.id for stored in page]
        assert seen == names

    def test_a_page_of_large_metadata_ends_early_and_the_next_one_goes_on(
        self, store: DocumentStore
    ) -> None:
        for name in "abc":
            put(store, name, ["text"], metadata={"k": "x" * (3 << 20)})
        first, after = store.reads.page("c", "", 10)
        assert ([one.document.id for one in first], after) == (["a", "b"], "b")
        rest, after = store.reads.page("c", "b", 10)
        assert ([one.document.id for one in rest], after) == (["c"], None)

    def test_embeddings_come_back_by_generation_and_row(self, store: DocumentStore) -> None:
        rows = [*added_rows(put(store, "d", ["a", "b"])), *added_rows(put(store, "e", ["c"]))]
        generation = serving(store)
        assert store.embeddings.rows(generation).tolist() == rows
        found, vectors = store.embeddings.after(generation, 0, 2)
        assert found.tolist() == rows[:2]
        assert np.array_equal(vectors, np.array([vector_of("a"), vector_of("b")]))
        rest, _ = store.embeddings.after(generation, rows[1], 2)
        assert rest.tolist() == rows[2:]
        some, vectors = store.embeddings.of_rows(generation, [rows[2], 10**9])
        assert some.tolist() == [rows[2]]
        assert np.array_equal(vectors, [vector_of("c")])
        assert len(store.embeddings.rows(generation + 1)) == 0
        assert len(store.embeddings.after(generation + 1, 0, 5)[0]) == 0

    def test_settings_and_counters(self, store: DocumentStore) -> None:
        settings = CollectionSettings(
            Chunking(64, 8), 0, IndexKind.HNSW, 10, 1000, 0.7, labels=False
        )
        add_collection(store, "own", settings)
        put(store, "d", ["a", "bü"])
        put(store, "e", ["c"])
        delete(store, "e")
        put(store, "d", ["a", "bü", "c"])
        found = store.collections.all()
        assert list(found) == ["c", "own"]
        assert found["own"].settings == settings
        assert found["c"] == store.collections.one("c")
        assert (found["c"].num_documents, found["c"].text_bytes) == (1, len("a bü c".encode()))
        assert found["c"].serving is not None
        assert (found["c"].serving.num_documents, found["c"].serving.num_chunks) == (1, 3)
        assert found["c"].serving.recipe == RECIPE
        settings = replace(settings, lexical_weight=0.1)
        with store.database.transaction():
            store.collections.put("own", settings)
            store.database.commit()
        assert store.collections.all()["own"].settings == settings

    def test_a_quota_refuses_growth_and_nothing_else(self, store: DocumentStore) -> None:
        put(store, "d", ["abc"])
        put(store, "e", ["abc"])
        settings = CollectionSettings(max_documents=1, max_text_bytes=4)
        with store.database.transaction():
            store.collections.put("c", settings)
            store.database.commit()
        with pytest.raises(TooLarge, match="quota") as caught:
            put(store, "f", ["a"])
        assert caught.value.field == "document"
        with pytest.raises(TooLarge, match="quota of 4") as caught:
            put(store, "d", ["abcdef"])
        assert caught.value.field == "document.text"
        assert texts_of(store, "d") == ["abc"]
        put(store, "d", ["ab"])  # a smaller one is welcome, even above the quota
        delete(store, "e")
        put(store, "d", ["abcd"])

    def test_a_collection_without_documents_serves_a_new_generation_at_once(
        self,
        store: DocumentStore,
    ) -> None:
        first, second = serving(store), start_building(store)
        found = store.collections.one("c")
        assert found is not None
        assert (serving(store), found.building, found.retired) == (second, None, (first,))

    def test_a_generation_serves_when_every_document_is_prepared_in_it(
        self,
        store: DocumentStore,
    ) -> None:
        first = serving(store)
        put(store, "d", ["a", "b"])
        put(store, "e", ["c"])
        second = start_building(store)
        assert store.reads.unprepared("c", second, "", 10) == ["d", "e"]
        assert store.reads.unprepared("c", second, "d", 10) == ["e"]
        change = put_into(store, second, "d", chunks_of(["a b"]), "a b")
        assert change is not None
        assert change.removed == ()
        assert put_into(store, second, "d", chunks_of(["a b"]), "a b") is None
        assert put_into(store, second, "e", chunks_of(["c"]), "older text") is None
        assert not switch(store)
        assert serving(store) == first
        # A write changes both, so the building one is complete.
        both = put(store, "e", ["x"])
        assert [one.generation for one in both.indexes] == [first, second]
        assert switch(store)
        found = store.collections.one("c")
        assert found is not None
        assert (serving(store), found.building, found.retired) == (second, None, (first,))
        assert texts_of(store, "d") == ["a b"]
        listed = store.reads.find("c", "d")
        assert listed is not None
        assert listed.num_chunks == 1

    def test_retired_chunks_are_removed_in_steps_with_their_deletes(
        self,
        store: DocumentStore,
    ) -> None:
        first = serving(store)
        put(store, "d", ["a", "b"])
        put(store, "e", ["c"])
        second = start_building(store)
        put_into(store, second, "d", chunks_of(["a b"]), "a b")
        put_into(store, second, "e", chunks_of(["c"]), "c")
        assert switch(store)
        assert pending(store) == []
        num_documents = []
        deletes: list[OutboxDelete] = []
        while True:
            with store.database.transaction(frees_space=True):
                step = store.documents.remove_retired(first, 1, NOW_MS)
                store.database.commit()
            num_documents.append(step.num_documents)
            deletes += step.deletes
            if step.is_done:
                break
        assert num_documents[:2] == [1, 1]
        assert not any(num_documents[2:])
        # The other document's only chunk is the same in both.
        [removed] = deletes
        assert (removed.document, removed.names_document) == ("d", True)
        assert set(removed.token_digests) == {digest_of_text("a"), digest_of_text("b")}
        found = store.collections.one("c")
        assert found is not None
        assert found.retired == ()
        assert len(store.embeddings.rows(first)) == 0
        with store.database.transaction():
            assert store.documents.remove_retired(first, 1, NOW_MS).is_done

    def test_a_step_removes_a_bounded_number_of_chunks(self, store: DocumentStore) -> None:
        for name, count in {"a": 3, "b": 3, "c": 9, "d": 0, "e": 2}.items():
            put(store, name, [f"{name}{i}" for i in range(count)])
        with store.database.transaction():
            store.collections.start_deleting("c")
            store.database.commit()
        removed = []
        while True:
            with store.database.transaction(frees_space=True):
                step = store.documents.remove_of_collection("c", 6, NOW_MS)
                store.database.commit()
            removed.append(sorted({delete.document for delete in step.deletes}))
            if step.is_done:
                break
        # A document of more chunks is removed by itself.
        assert [names for names in removed if names] == [["a", "b"], ["c"], ["d", "e"]]

    def test_a_document_that_another_tokenizer_read_is_deleted_by_name_too(
        self,
        store: DocumentStore,
    ) -> None:
        put(store, "d", ["a", "b"])
        document = a_document("d", "a c")
        with store.database.transaction():
            chunks = {serving(store): chunks_of(["a", "c"], tokenizer="other")}
            change = store.documents.replace(
                "c", document, version_of(document), chunks, now_ms=NOW_MS, claim=True
            )
            store.database.commit()
        [removed] = change.deletes
        assert removed.names_document
        assert removed.token_digests == (digest_of_text("b"),)

    def test_a_building_generation_can_be_abandoned(self, store: DocumentStore) -> None:
        put(store, "d", ["a"])
        second = start_building(store)
        third = start_building(store, replace(RECIPE, embedder="third"))
        found = store.collections.one("c")
        assert found is not None
        assert found.building is not None
        assert (found.building.row, found.retired) == (third, (second,))
        with store.database.transaction():
            store.collections.retire_building("c")
            store.database.commit()
        found = store.collections.one("c")
        assert found is not None
        assert (found.building, found.retired) == (None, (second, third))

    def test_a_collection_is_deleted_in_steps(self, store: DocumentStore) -> None:
        add_collection(store, "other")
        put(store, "kept", ["a"], collection="other")
        for name in "abc":
            put(store, name, [name])
        with store.database.transaction():
            store.collections.start_deleting("c")
            store.database.commit()
        assert store.collections.all()["c"].is_deleting
        steps = []
        while True:
            with store.database.transaction(frees_space=True):
                step = store.documents.remove_of_collection("c", 2, NOW_MS)
                if step.is_done:
                    store.collections.drop("c")
                store.database.commit()
            if step.is_done:
                break
            steps.append([(one.document, one.names_document) for one in step.deletes])
        assert steps[:2] == [[("a", True), ("b", True)], [("c", True)]]
        assert not any(steps[2:])
        assert list(store.collections.all()) == ["other"]
        assert store.reads.get("other", "kept") is not None

    def test_chunks_without_embeddings_are_found_by_words_only(self, store: DocumentStore) -> None:
        document = a_document("d", "zebra")
        with store.database.transaction():
            chunks = {serving(store): chunks_of(["zebra"], is_embedded=False)}
            store.documents.replace(
                "c", document, version_of(document), chunks, now_ms=NOW_MS, claim=False
            )
            store.database.commit()
        assert len(store.embeddings.rows(serving(store))) == 0
        [hit] = store.lexical.hits(serving(store), ["zebras"], 10)
        assert store.reads.positions([hit.row]) == {hit.row: ("d", 0)}

    def test_uncommitted_removals_are_not_seen(self, store: DocumentStore) -> None:
        put(store, "d", ["a"])
        with store.database.transaction():
            store.documents.delete("c", "d", NOW_MS)
            assert store.reads.get("c", "d") is not None
            assert len(store.embeddings.rows(serving(store))) == 1
            store.database.commit()
        assert store.reads.get("c", "d") is None
        assert len(store.embeddings.rows(serving(store))) == 0

    def test_a_claim_ends_and_an_acknowledgement_stays(self, store: DocumentStore) -> None:
        for name in "ab":
            put(store, name, [name])
            put(store, name, ["new"])
        first = sorted(pending(store), key=lambda one: one.document)
        assert [one.document for one in first] == ["a", "b"]
        assert pending(store) == []
        with store.database.transaction():
            store.outbox.acknowledge([first[0].id], [], NOW_MS)
            again = store.outbox.claim(10, NOW_MS + CLAIM_MS + 1)
            store.database.commit()
        assert [one.id for one in again.deletes] == [first[1].id]
        assert again.num_unacknowledged == 1

    def test_one_delete_of_everything_replaces_what_no_shard_has(
        self, store: DocumentStore
    ) -> None:
        for name in "abc":
            put(store, name, [name])
            put(store, name, ["new"])
        partial = pending(store)[0]
        with store.database.transaction():
            store.outbox.acknowledge([], [partial.id], NOW_MS)
            everything = store.outbox.add_everything(NOW_MS)
            claimed = store.outbox.claim(10, NOW_MS + 2 * CLAIM_MS)
            store.database.commit()
        assert everything.everything
        assert [one.id for one in claimed.deletes] == [everything.id]

    def test_reports_replace_each_other(self, store: DocumentStore) -> None:
        assert store.reads.report("r") is None
        for body, at_ms in ((b"one", 1), (b"\0two", 2)):
            with store.database.transaction():
                store.documents.put_report("r", body, at_ms)
                store.database.commit()
        assert store.reads.report("r") == (b"\0two", 2)

    def test_usage_is_added_once_and_listed(self, store: DocumentStore) -> None:
        counts = UsageCounts(1, 2, 3, 4, 5, 6, 7)
        day_s = window_start(Period.DAY, NOW_MS / 1000)
        counted = [CountedUse(day_s, tenant, "k", "m", counts) for tenant in ("", "red")]
        for sequence in (1, 1, 2):
            with store.database.transaction():
                sender = UsageSender(bytes(16), sequence, b"waiting")
                store.usage.add(sender, counted, NOW_MS)
                store.database.commit()
        [day] = [one for one in store.usage.totals("key", ["k"], day_s) if one.period is Period.DAY]
        assert day.counts == UsageCounts(4, 8, 12, 16, 20, 24, 28)
        assert store.usage.waiting(bytes(range(16)), NOW_MS) == [b"waiting"]
        rows = store.usage.page(UsageWanted(Period.DAY, day_s, day_s + 1), 10)
        assert rows == [
            CountedUse(day_s, tenant, "k", "m", counts + counts) for tenant in ("", "red")
        ]
        rest = UsageWanted(Period.DAY, day_s, day_s + 1, after=rows[0].position)
        assert store.usage.page(rest, 10) == rows[1:]


class FiltersContract:
    """A filter allows the same documents as ``filters.matches``."""

    @given(wanted=filters)
    @settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_filters_agree_with_their_meaning(
        self, filtered_store: DocumentStore, wanted: Filter
    ) -> None:
        rows = filtered_store.reads.allowed_rows(serving(filtered_store), wanted)
        found = filtered_store.reads.positions(rows.tolist())
        expected = [
            document_id
            for document_id, title, metadata in FILTERED
            if matches(
                wanted, metadata | {"id": document_id, "title": title, "updated_unix_ms": "7"}
            )
        ]
        assert rows.tolist() == sorted(rows.tolist())
        assert sorted(document_id for document_id, _ in found.values()) == sorted(expected)


def fill_filtered(store: DocumentStore) -> None:
    """Put the documents of the filters' contract into a new collection c."""
    add_collection(store, "c")
    for document_id, title, metadata in FILTERED:
        put(store, document_id, ["text"], title=title, metadata=metadata)


def target_of(name: str, owner: str = "red", asker: str = "key") -> OperationTarget:
    return OperationTarget(owner, asker, "c", name, f"hash of {name}")


class OperationContract:
    """What the operations of every document store have to do."""

    def test_an_operation_is_claimed_once_and_ended_once(self, store: DocumentStore) -> None:
        table, document = store.operations, a_document("a", "text")
        with store.database.transaction():
            added = table.put(target_of("a"), pack(document), NOW_MS)
            (row,) = table.first(NOW_MS).values()
            claimed = table.claim(row, "key", NOW_MS, NOW_MS + 10)
            assert claimed is not None
            assert (claimed.collection, unpack(claimed.packed)) == ("c", document)
            assert table.claim(row, "key", NOW_MS + 9, NOW_MS + 20) is None
            assert not table.first(NOW_MS + 9)
            assert table.first(NOW_MS + 10) == {"key": row}
            assert table.renew(row, NOW_MS + 99)
            assert not table.first(NOW_MS + 98)
            table.release_all()
            assert table.first(NOW_MS) == {"key": row}
            told = {"changed": True, "chunks": 3}
            assert table.finish(row, OperationState.DONE, told, NOW_MS + 1)
            assert not table.finish(row, OperationState.FAILED, {}, NOW_MS + 2)
            assert not table.renew(row, NOW_MS + 99)
            assert not table.first(NOW_MS + 99)
            store.database.commit()
        found = table.find(added.id, "red")
        assert found == replace(
            added, state=OperationState.DONE, result=told, updated_unix_ms=NOW_MS + 1
        )
        assert table.find(added.id, "blue") is None

    def test_the_first_operation_of_each_key_is_found(self, store: DocumentStore) -> None:
        table = store.operations
        with store.database.transaction():
            for name, asker in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "x")):
                table.put(target_of(name, asker=asker), b"text", NOW_MS)
            first = table.first(NOW_MS)
            assert set(first) == {"x", "y"}
            assert table.claim(first["x"], "x", NOW_MS, NOW_MS + 10) is not None
            assert table.first(NOW_MS)["x"] == first["x"] + 1

    def test_pending_documents_count_for_their_owner(self, store: DocumentStore) -> None:
        table = store.operations
        with store.database.transaction():
            for name, owner, size in (("a", "red", 10), ("b", "red", 5), ("c", "", 1)):
                table.put(target_of(name, owner), b"x" * size, NOW_MS)
            assert table.pending_bytes() == {"red": 15, "": 1}
            assert table.cancel("c", "a", NOW_MS)
            assert not table.cancel("c", "a", NOW_MS)
            assert table.pending_bytes() == {"red": 5, "": 1}
            assert table.cancel("c", None, NOW_MS)
            assert table.pending_bytes() == {}

    def test_another_operation_of_a_document_cancels_the_first(self, store: DocumentStore) -> None:
        table = store.operations
        with store.database.transaction():
            old = table.put(target_of("a"), b"old", NOW_MS)
            new = table.put(replace(target_of("a"), content_hash="new"), b"new", NOW_MS + 1)
            assert table.first(NOW_MS + 1).keys() == {"key"}
            store.database.commit()
        states = [table.find(one.id, "red") for one in (old, new)]
        assert [one and one.state for one in states] == ["cancelled", "pending"]
        with store.database.transaction():
            again = table.put(target_of("a"), b"old", NOW_MS + 2)
            store.database.commit()
        assert (again.id, again.state) == (old.id, "pending")
        ended = table.find(new.id, "red")
        assert ended is not None
        assert ended.state == "cancelled"

    def test_operations_are_forgotten_a_while_after_their_end(self, store: DocumentStore) -> None:
        table = store.operations
        with store.database.transaction():
            old = table.put(target_of("a"), b"x", NOW_MS)
            table.cancel("c", "a", NOW_MS)
            pending = table.put(target_of("b"), b"x", NOW_MS)
            table.put(target_of("c"), b"x", NOW_MS + KEPT_MS + 1)
            store.database.commit()
        assert table.find(old.id, "red") is None
        assert table.find(pending.id, "red") is not None


class LexicalContract:
    """The lexical leg finds chunks by their words, in one generation."""

    def test_words_find_their_chunks_in_their_generation(self, store: DocumentStore) -> None:
        first, second = serving(store), add_collection(store, "other")
        put(store, "cats", ["Cats sleep on the sofa, and other cats sleep elsewhere."])
        put(store, "dogs", ["Dogs bark at the cat next door whenever it is awake."])
        put(store, "fish", ["Fish swim."], collection="other")
        assert documents_of(store, first, "cat", "sleeping") == ["cats", "dogs"]
        assert documents_of(store, first, "fish") == []
        assert documents_of(store, second, "swimming") == ["fish"]
        assert documents_of(store, first) == []

    def test_rare_words_count_more(self, store: DocumentStore) -> None:
        for i in range(8):
            put(store, f"d{i}", ["common words are here", "rest"])
        put(store, "rare", ["rare words are here", "rest"])
        assert documents_of(store, serving(store), "common", "rare")[0] == "rare"

    def test_titles_count_and_removed_texts_are_forgotten(self, store: DocumentStore) -> None:
        generation = serving(store)
        put(store, "d", ["alpha", "beta"], title="The quarterly report")
        assert set(documents_of(store, generation, "quarterly")) == {"d"}
        put(store, "d", ["beta", "gamma"], title="Minutes")
        assert documents_of(store, generation, "quarterly") == []
        assert documents_of(store, generation, "alpha") == []
        assert set(documents_of(store, generation, "MINUTES")) == {"d"}
        delete(store, "d")
        assert documents_of(store, generation, "beta", "gamma", "minutes") == []

    @pytest.mark.parametrize(
        "word", ['"', 'a" OR "b', "NEAR(", "title:x", "*", "a*", "-", "^x", "\0", "(", "ü.é", "%s"]
    )
    def test_words_are_never_read_as_a_query(self, store: DocumentStore, word: str) -> None:
        put(store, "d", ["apple"])
        assert documents_of(store, serving(store), word, "apple") == ["d"]

    @pytest.mark.parametrize(
        "names",
        [
            ("192.168.7.31", "192.168.31.7", "168.192.7.31", "31.7.168.192", "192.168.7.310"),
            ("2022-07-11", "2022-11-07", "2022-07-12", "11.07.2022"),
            ("C++", "C#", "C", ".NET", "net", "F#"),
            ("--no-color", "--color", "-c", "no_color", "NO-COLOR"),
            ("TX300S", "TX300", "TX-300", "TX300/S", "300-TX"),
            ("/var/log/app.log", "/var/app/log.log", "app.log", "log/app"),
            ("jo.kim@example.org", "kim.jo@example.org", "example.org", "jo@kim.example.org"),
        ],
        ids=["addresses", "dates", "languages", "options", "parts", "paths", "mail"],
    )
    def test_a_chunk_with_the_identifier_comes_first(
        self, store: DocumentStore, names: Sequence[str]
    ) -> None:
        generation = serving(store)
        for i, name in enumerate(names):
            put(store, f"d{i}", [f"About {name}: it is checked, cleaned and signed."], title="log")
        for i, name in enumerate(names):
            if any(map(is_identifier, terms_of(name))):
                assert documents_of(store, generation, f"What is {name}?")[0] == f"d{i}"

    def test_a_name_is_a_word_with_the_number_after_it(self, store: DocumentStore) -> None:
        generation = serving(store)
        halls = [("3", "5"), ("5", "3"), ("7", "5"), ("8", "3")]
        for hall, years in halls:
            text = f"The lease of hall {hall} is for {years} years and more."
            put(store, f"hall{hall}", [text], title="")
        put(store, "other", [f"page x{i}" for i in range(8)], title="")
        for hall, _ in halls:
            assert documents_of(store, generation, f"lease of hall {hall}")[0] == f"hall{hall}"

    def test_a_stemmer_changes_no_identifier(self, store: DocumentStore) -> None:
        put(store, "d", ["part AB120S, error E500ing", "parts"], title="")
        found = [
            [hit.num_identifiers for hit in store.lexical.hits(serving(store), terms_of(name), 5)]
            for name in ("AB120S", "AB120", "E500ing", "E500")
        ]
        assert found == [[1], [], [1], []]
        assert documents_of(store, serving(store), "part") == ["d", "d"]

    @pytest.mark.parametrize(
        ("texts", "question", "found"),
        [
            (("灭火器每年检查一次", "电梯每月保养一次"), "电梯", "d1"),
            (("灭火器每年检查一次", "故障码F0815表示过热"), "F0815是什么", "d1"),
            (("受付で鍵を借りる", "会議室の予約を取り消す"), "予約", "d1"),
            (("ลิฟต์เสียให้โทรแจ้งช่าง", "ถังดับเพลิงอยู่ที่ชั้นสอง"), "ถังดับเพลิง", "d1"),
            (("소화기는 매년 점검한다", "승강기를 매월 점검한다"), "승강기", "d1"),
            (("the lift", "the ex\u00adtin\u200bguisher"), "extinguisher", "d1"),
            (("the lift", "\uff26\uff10\uff18\uff11\uff15"), "f0815", "d1"),
            (("lift", "Stra\u00dfe nai\u0308ve"), "STRASSE", "d1"),
        ],
        ids=["Chinese", "code", "Japanese", "Thai", "Korean", "invisible", "full width", "case"],
    )
    def test_words_are_found_in_any_script(
        self, store: DocumentStore, texts: Sequence[str], question: str, found: str
    ) -> None:
        for i, text in enumerate(texts):
            put(store, f"d{i}", [text], title="")
        assert documents_of(store, serving(store), question)[0] == found
        delete(store, found)
        assert found not in documents_of(store, serving(store), question)

    def test_only_allowed_rows_are_found(self, store: DocumentStore) -> None:
        generation = serving(store)
        for i in range(12):
            put(store, f"d{i:02}", ["apple " * (12 - i)], metadata={"parity": str(i % 2)})
        allowed = store.reads.allowed_rows(generation, In("parity", ("1",)))
        assert len(allowed) == 6
        hits = store.lexical.hits(generation, ["apple"], 3, allowed=allowed)
        everything = store.lexical.hits(generation, ["apple"], 20)
        assert [hit.row for hit in hits] == [h.row for h in everything if h.row in allowed][:3]
        assert not store.lexical.hits(generation, ["apple"], 3, allowed=np.empty(0, np.int64))

    def test_scores_tell_nothing_of_rows_that_are_not_allowed(self, store: DocumentStore) -> None:
        generation = serving(store)
        words = terms_of("merger office F0815")
        texts = ("the merger of F0815", "office hours, long ones", "an office in Lyon", "bread")
        for i, text in enumerate(texts):
            put(store, f"d{i}", [text, f"office {i}"], metadata={"public": "yes"})
        allowed = store.reads.allowed_rows(generation, In("public", ("yes",)))
        before = store.lexical.hits(generation, words, 10, allowed=allowed)
        assert (len(before), before[0].num_identifiers) == (7, 1)
        assert len({hit.score for hit in before}) > 1
        # Hidden ones change the frequencies of words and the mean length.
        for i in range(30):
            put(store, f"hidden{i}", ["merger F0815 " * 20], metadata={"public": "no"})
        assert store.lexical.hits(generation, words, 10, allowed=allowed) == before
        put(store, "d0", ["the mergers"], metadata={"public": "yes"})
        allowed = store.reads.allowed_rows(generation, In("public", ("yes",)))
        assert store.lexical.hits(generation, words[:1], 10, allowed=allowed)[0].score > 0

    def test_hits_have_the_scores_that_all_words_give(
        self, store: DocumentStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        generation = serving(store)
        texts = [
            f"{'rare ' * (i % 5 == 0)}{'common ' * (i % 2 + i % 3)}word{i} end" for i in range(60)
        ]
        put(store, "d", texts, title="")
        words = ["common", "rare", "end", "absent"]
        everything = {hit.row: hit.score for hit in store.lexical.hits(generation, words, 100)}
        assert len(everything) == 60
        monkeypatch.setattr(word_choice, "MIN_CANDIDATES", 10)
        monkeypatch.setattr(word_choice, "MAX_CANDIDATES", 12)
        found = store.lexical.hits(generation, words, 100)
        assert len(found) == 12
        # "end" is in all chunks and has the least weight, which is not zero.
        assert [hit.score for hit in found] == pytest.approx(
            [everything[hit.row] for hit in found], abs=1e-5
        )
        assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
        put(store, "e", ["absent"], title="")
        assert len(store.lexical.hits(generation, words, 100)) == 13

    def test_few_allowed_rows_are_found_by_all_words(
        self, store: DocumentStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        generation = serving(store)
        put(store, "d", [f"{'rare ' * (i < 10)}common word{i}" for i in range(100)], title="")
        monkeypatch.setattr(word_choice, "MIN_CANDIDATES", 5)
        monkeypatch.setattr(word_choice, "MAX_CANDIDATES", 5)
        words = ["rare", "common"]
        assert len(store.lexical.hits(generation, words, 100)) == 10
        allowed = store.embeddings.rows(generation)[50:60]
        hits = store.lexical.hits(generation, words, 100, allowed=allowed)
        assert [hit.row for hit in hits] == allowed.tolist()


def documents_of(store: DocumentStore, generation: int, *words: str) -> list[str]:
    hits = store.lexical.hits(generation, terms_of(" ".join(words)), 10)
    ranks = [(hit.num_identifiers, hit.score) for hit in hits]
    assert ranks == sorted(ranks, reverse=True)
    positions = store.reads.positions([hit.row for hit in hits])
    return [positions[hit.row][0] for hit in hits]
