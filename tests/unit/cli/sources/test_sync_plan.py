"""What a sync is to do, and how it says what it did."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ragcache_cli.clients.gateway_client import CollectionDocument
from ragcache_cli.sources.documents import DocumentFile
from ragcache_cli.sources.reading import RejectedDocument, SourceContents
from ragcache_cli.sources.sync_plan import (
    Failure,
    Gathered,
    OwnedDocument,
    Result,
    gather,
    obsolete,
)
from ragcache_core.errors import InvalidInput, Unavailable

OWNER = "team/handbook"


def reading(*ids: str, refused: tuple[str, ...] = (), revision: str = "") -> SourceContents:
    return SourceContents(
        tuple(DocumentFile(name, Path(name)) for name in ids),
        tuple(RejectedDocument(name, "is too large; split it") for name in refused),
        revision,
    )


def ids(gathered: Gathered) -> list[str]:
    return [one.id for one in gathered.wanted]


def owned(origin: str, owner: str = OWNER) -> OwnedDocument:
    return OwnedDocument(owner, origin, "digest", 1)


def test_documents_of_a_sole_source_have_plain_ids() -> None:
    gathered = gather([("git x", "x", reading("b.md", "a/c.md", revision="1234"))])
    assert ids(gathered) == ["a/c.md", "b.md"]
    assert gathered.revision == "1234"


def test_several_sources_keep_apart_what_has_one_name() -> None:
    gathered = gather([("git x", "x", reading("README.md")), ("git y", "y", reading("README.md"))])
    assert ids(gathered) == ["x/README.md", "y/README.md"]
    assert gathered.failures == ()


def test_a_clash_names_both_and_the_first_keeps_the_id() -> None:
    gathered = gather([("git x", "p", reading("a.md")), ("git y", "p", reading("a.md", "b.md"))])
    assert [(one.id, one.origin) for one in gathered.wanted] == [
        ("p/a.md", "git x"),
        ("p/b.md", "git y"),
    ]
    [failure] = gathered.failures
    assert (failure.source, failure.document) == ("git y", "a.md")
    assert "as one of git x has" in failure.problem


def test_a_source_that_fails_leaves_the_others_be() -> None:
    gathered = gather(
        [
            ("git x", "x", Unavailable("git x", "it is away")),
            ("git y", "y", InvalidInput("git y", "is empty", "fill it")),
            ("git z", "z", reading("a.md")),
        ]
    )
    assert ids(gathered) == ["z/a.md"]
    assert [one.source for one in gathered.failures] == ["git x", "git y"]
    assert gathered.failures[1].problem == "is empty; fill it"
    assert not gathered.whole


def test_a_refused_document_keeps_what_was_there_before() -> None:
    gathered = gather([("git x", "x", reading("a.md", refused=("b.md",)))])
    held = {name: owned("git x") for name in ("a.md", "b.md", "c.md")}
    assert obsolete(held, OWNER, gathered) == ["c.md"]


def test_a_name_that_is_no_text_is_refused_in_words_that_are() -> None:
    gathered = gather([("volume v", "v", reading("a\udcff.md", "b.md"))])
    assert ids(gathered) == ["b.md"]
    assert gathered.failures[0].document.encode() == b"a?.md"


def test_documents_of_others_are_never_obsolete() -> None:
    held = {"a.md": owned("git x", "team/other"), "b.md": owned("", "")}
    assert obsolete(held, OWNER, gather([("git x", "x", reading("c.md"))])) == []


def test_documents_of_a_source_that_fails_stay() -> None:
    gathered = gather([("git x", "x", Unavailable("git x", "")), ("git y", "y", reading("a.md"))])
    held = {
        "x/a.md": owned("git x"),
        "y/a.md": owned("git y"),
        "y/b.md": owned("git y"),
        "z/a.md": owned("git z"),
    }
    # What came from a source that is no longer named may be what the failing one would bring.
    assert obsolete(held, OWNER, gathered) == ["y/b.md"]


def test_documents_of_a_source_taken_out_go() -> None:
    gathered = gather([("git y", "y", reading("a.md"))])
    assert obsolete({"x/a.md": owned("git x")}, OWNER, gathered) == ["x/a.md"]


origins = st.sampled_from(["git x", "git y", "git z"])
names = st.lists(st.sampled_from(["a.md", "b.md", "c/a.md"]), unique=True)


@given(
    sources=st.dictionaries(origins, st.one_of(st.none(), names), min_size=1),
    held=st.dictionaries(
        st.sampled_from(["a.md", "b.md", "x/a.md", "y/b.md", "z/c/a.md"]),
        st.tuples(st.sampled_from([OWNER, "team/other", ""]), origins),
    ),
)
def test_only_ones_own_and_only_what_no_source_has_goes(
    sources: dict[str, list[str] | None], held: dict[str, tuple[str, str]]
) -> None:
    gathered = gather(
        (origin, origin[-1], Unavailable(origin, "") if found is None else reading(*found))
        for origin, found in sources.items()
    )
    owned_documents = {key: owned(origin, owner) for key, (owner, origin) in held.items()}
    failing = {origin for origin, found in sources.items() if found is None}
    for key in obsolete(owned_documents, OWNER, gathered):
        assert owned_documents[key].owner == OWNER
        assert owned_documents[key].origin not in failing
        assert key not in ids(gathered)


@given(
    failures=st.lists(
        st.builds(Failure, st.text(max_size=400), st.text(max_size=400), st.text(max_size=400)),
        max_size=40,
    )
)
def test_a_result_fits_where_it_goes_and_counts_what_does_not(failures: list[Failure]) -> None:
    result = Result(True, documents=3, failures=tuple(failures), warnings=tuple(failures[::-1]))
    text = result.to_json()
    assert len(text.encode()) <= 4096
    said = json.loads(text)
    assert said["failureCount"] == said["warningCount"] == len(failures)
    assert len(said["failures"]) >= min(1, len(failures))


def test_warnings_follow_the_failures() -> None:
    warning = Failure("git x", "a.pdf", "page 2 was not read")
    said = json.loads(Result(finished=True, warnings=(warning,)).to_json())
    assert said["warnings"] == [
        {"source": "git x", "document": "a.pdf", "problem": "page 2 was not read"}
    ]


def test_only_a_whole_success_ends_with_0() -> None:
    assert Result(finished=True).exit_status == 0
    assert Result(finished=False).exit_status == 1
    assert Result(finished=True, failures=(Failure("", "a", "b"),)).exit_status == 1


def test_a_list_in_the_metadata_of_warnings_does_not_end_a_sync() -> None:
    held = CollectionDocument("a", {"ragcache-warnings": ["x", "y"]}, 1)
    assert OwnedDocument.of(held).warnings == "x\ny"
