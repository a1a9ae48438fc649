"""Tests of the labels of passages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.documents.passages import MAX_LABEL_BYTES, document_name, passage_label


@pytest.mark.parametrize(
    ("name", "path", "text", "label"),
    [
        ("Pump P4", (), "It is quiet.", "[Pump P4]\n"),
        ("Pump P4", ("Upkeep", "Oil"), "Every year.", "[Pump P4 > Upkeep > Oil]\n"),
        ("", ("Upkeep",), "Every year.", "[Upkeep]\n"),
        ("", (), "Every year.", ""),
        # A title that is the first heading, and headings that the chunk has itself
        ("Pump P4", ("Pump P4", "Oil"), "Every year.", "[Pump P4 > Oil]\n"),
        ("Pump P4", ("Pump P4", "Oil"), "## Oil\n\nEvery year.", "[Pump P4]\n"),
        ("Pump P4", ("Pump P4",), "# Pump P4\n\nIt is quiet.", ""),
        ("Pump P4", ("Pump P4", "Oil"), "# Pump P4\n\n## Oil ##\nEvery year.", ""),
        ("Pump P4", ("Pump P4", "Oil"), "Pump P4\n=======\n\n**Oil**\nEvery year.", ""),
        ("Pump P4", ("Oil",), "<h2 id='oil'>Oil</h2>\nEvery year.", "[Pump P4]\n"),
        ("Pump P4", ("Notes", "Notes"), "None.", "[Pump P4 > Notes]\n"),
        # A heading further down does not begin the chunk
        ("Pump P4", ("Oil",), "As before.\n\n## Oil\nEvery year.", "[Pump P4 > Oil]\n"),
        # One line for any title
        ("Pump\r\nP4\u2028 now", ("O\til",), "x", "[Pump P4 now > O il]\n"),
    ],
)
def test_label_names_what_the_chunk_does_not(
    name: str, path: tuple[str, ...], text: str, label: str
) -> None:
    assert passage_label(name, path, text) == label


@pytest.mark.parametrize(
    ("document_id", "name"),
    [
        ("manuals/pump-p4.md", "pump-p4"),
        ("C:\\manuals\\Pump P4.PDF", "Pump P4"),
        ("https://example.org/pumps/p4-manual.html?lang=en#oil", "p4-manual"),
        ("notes-v1.2", "notes-v1.2"),
        ("C#/delegates", "delegates"),
        ("取扱説明書.pdf", "取扱説明書"),
        ("api/feed.md", "feed"),
        ("17", ""),
        ("2024-11-27", ""),
        ("0b5c1f3e-90ab-4cde-8fed-facedeadbeef", ""),
        ("d41d8cd98f00b204e9800998ecf8427e.txt", ""),
        ("01HZX3K9Q2", ""),
        ("...", ""),
        ("/", ""),
    ],
)
def test_document_without_a_title_has_the_name_of_its_file(document_id: str, name: str) -> None:
    assert document_name(document_id, document_id) == name
    assert document_name(document_id, "A title") == "A title"


def test_long_titles_that_differ_at_their_ends_have_different_labels() -> None:
    begin = "Agreement on the supply of electrical energy between the parties named in annex B, "
    labels = {passage_label(begin + f"lot {n}, Northern Power", (), "") for n in range(3)}
    assert len(labels) == 3
    assert all(len(label) < len(begin) + 20 and " ... " in label for label in labels)


def test_long_path_keeps_the_name_and_the_inner_headings() -> None:
    path = tuple(f"{part} of the second part of the manual" for part in ("A", "B", "C", "D", "E"))
    label = passage_label("Pump P4", path, "x")
    assert label.startswith("[Pump P4 > D of the second part of the manual > E")
    assert label.endswith("manual]\n")


@given(st.text(), st.lists(st.text(), max_size=6), st.text())
def test_label_is_one_short_line(name: str, path: list[str], text: str) -> None:
    label = passage_label(name, path, text)
    assert len(label.encode()) <= MAX_LABEL_BYTES
    assert label == "" or label.splitlines(keepends=True) == [label]
    assert label == passage_label(name, path, text)
