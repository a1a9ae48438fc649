"""Server-sent events: what the gateway encodes, its parser reads."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.engines.completion_stream import MAX_EVENT_BYTES, SseParser
from ragcache_gateway.http.answer_stream import encode_event


def split(stream: bytes, at: list[int]) -> list[bytes]:
    bounds = [0, *sorted(i % (len(stream) + 1) for i in at), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(bounds)]


@given(
    values=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9)), max_size=5),
    at=st.lists(st.integers(0, 10_000), max_size=9),
    line_end=st.sampled_from([b"\n", b"\r", b"\r\n"]),
)
def test_encoded_events_are_parsed_however_the_stream_is_split(
    values: list[dict[str, str]], at: list[int], line_end: bytes
) -> None:
    stream = b"".join(map(encode_event, values)).replace(b"\n", line_end)
    parser = SseParser()
    # A lone CR at the end could yet become a CRLF, so something has to follow it.
    events = [e for piece in [*split(stream, at), b": end\n"] for e in parser.feed(piece)]
    assert [json.loads(event) for event in events] == values


def test_comments_names_and_empty_events_are_skipped() -> None:
    parser = SseParser()
    stream = b": ping\n\nevent: x\nid: 3\ndata: a\ndata: b\n\n\n\ndata:c\n\n"
    assert parser.feed(stream) == [b"a\nb", b"c"]


def test_an_endless_event_is_an_error() -> None:
    parser = SseParser()
    parser.feed(b"data: ")
    with pytest.raises(ValueError, match="longer than"):
        parser.feed(b"x" * MAX_EVENT_BYTES)
