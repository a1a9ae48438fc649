"""JSON becomes lines, each with the path of its value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.extraction.extracted import UnreadableDocument
from ragcache_gateway.extraction.json_text import read_json

NAMES = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=5)
VALUES = st.recursive(
    st.integers() | st.booleans() | st.none() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def text_of(value: Any) -> str:
    return read_json(json.dumps(value).encode()).text


def leaves(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for one in value.values() for leaf in leaves(one)]
    if isinstance(value, list) and value:
        return [leaf for one in value for leaf in leaves(one)]
    return [value if isinstance(value, str) else json.dumps(value)]


@given(VALUES)
def test_every_value_is_in_the_text_in_its_order(value: Any) -> None:
    text, start = text_of(value), 0
    for leaf in leaves(value):
        start = text.index(leaf, start) + len(leaf)


def test_a_line_has_the_path_of_its_value() -> None:
    value = {"server": {"port": 8443, "tls": {"on": True}}, "zones": ["eu", "us"], "old": None}
    assert text_of(value).splitlines() == [
        *("server.port: 8443", "server.tls.on: true", "zones: eu, us", "old: null")
    ]


def test_objects_of_a_list_are_paragraphs() -> None:
    value = {"services": [{"name": "billing", "ports": [1, 2]}, {"name": "web"}]}
    assert text_of(value) == (
        "services[0].name: billing\nservices[0].ports: 1, 2\n\nservices[1].name: web"
    )
    assert text_of([{"name": "a", "v": 1}, {"name": "b"}]) == "name: a\nv: 1\n\nname: b"


def test_long_values_have_lines_of_their_own() -> None:
    text = text_of({"body": "one\ntwo", "list": ["x" * 150, "y" * 150]})
    assert text.startswith("body:\none\ntwo\n\nlist[0]: xxx")
    assert "\n\nlist[1]: yyy" in text


def test_numbers_stay_as_they_are_written_and_repeated_names_stay() -> None:
    read = read_json(b'{"version": 1.10, "big": 12345678901234567890123, "version": 2e5}')
    assert read.text == "version: 1.10\nbig: 12345678901234567890123\nversion: 2e5"


@pytest.mark.parametrize(
    ("content", "title"),
    [(b'{"title": "Guide"}', "Guide"), (b'{"name": "cfg"}', "cfg"), (b'{"title": {}}', "")],
)
def test_the_title_is_that_of_the_object(content: bytes, title: str) -> None:
    assert read_json(content).title == title


@pytest.mark.parametrize(
    ("content", "problem", "fix"),
    [
        (b'{"a": 1}\n{"a": 2}\n', "not valid JSON", "name it .jsonl"),
        (b'{"a": 1', "not valid JSON", "correct it"),
        (b"[" * 200_000, "nested too deeply", "divide it"),
        (b"", "is empty", "send a document"),
    ],
)
def test_other_files_are_refused_with_the_fix(content: bytes, problem: str, fix: str) -> None:
    with pytest.raises(UnreadableDocument) as caught:
        read_json(content)
    assert problem in caught.value.problem
    assert fix in caught.value.fix
