"""What the audit log records, and the form of its lines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.audit import (
    CHANGES,
    MAX_ID_CHARS,
    MAX_LINE_DOCUMENTS,
    AuditAction,
    AuditedDocument,
    AuditEvent,
    AuditOutcome,
    RefusalThrottle,
    action_of,
    encode_line,
    is_recorded,
    key_digest,
    outcome_of,
    throttle_source,
)
from ragcache_core.access.key_file import digest_of, key_of

EVENT = AuditEvent(
    unix_s=1_700_000_000.25,
    request_id="f00d",
    action=AuditAction.DOCUMENT_WRITE,
    outcome=AuditOutcome.DONE,
    status=200,
    method="POST",
    route="/v1/documents",
    address="10.0.0.7",
    key="ingest",
    tenant="red",
    documents=(AuditedDocument("hr", "a.md"),),
)


def test_a_line_has_what_is_known_and_nothing_else() -> None:
    line = encode_line(EVENT.fields(), gateway="g", sequence=3)
    assert line.endswith(b"\n")
    assert json.loads(line) == {
        "stream": "ragcache.audit",
        "gateway": "g",
        "sequence": 3,
        "time": "2023-11-14T22:13:20.250Z",
        "request_id": "f00d",
        "action": "document.write",
        "outcome": "done",
        "status": 200,
        "method": "POST",
        "route": "/v1/documents",
        "address": "10.0.0.7",
        "key": "ingest",
        "tenant": "red",
        "documents": [{"collection": "hr", "id": "a.md"}],
    }


@given(st.text(max_size=2 * MAX_ID_CHARS))
def test_no_id_breaks_a_line_or_makes_it_long(name: str) -> None:
    event = replace(EVENT, documents=(AuditedDocument("c", name),), object=name, collection=name)
    line = encode_line(event.fields())
    assert line.count(b"\n") == 1
    assert all(32 <= one < 127 for one in line[:-1])
    found = json.loads(line)
    assert found["documents"][0]["id"] == name[:MAX_ID_CHARS]
    assert len(line) < 40 * MAX_ID_CHARS


def test_many_documents_take_several_lines_and_none_is_left_out() -> None:
    documents = tuple(AuditedDocument("c", str(i)) for i in range(2 * MAX_LINE_DOCUMENTS + 1))
    parts = list(replace(EVENT, documents=documents).parts())
    assert [len(one.documents) for one in parts] == [MAX_LINE_DOCUMENTS, MAX_LINE_DOCUMENTS, 1]
    assert [one for part in parts for one in part.documents] == list(documents)
    assert list(replace(EVENT, documents=()).parts()) == [replace(EVENT, documents=())]


@pytest.mark.parametrize(
    ("method", "path", "action"),
    [
        ("POST", "/v1/documents", "document.write"),
        ("POST", "/v1/documents:batch", "document.batch"),
        ("GET", "/v1/documents/a/b.md", "document.read"),
        ("DELETE", "/v1/documents/a/b.md", "document.delete"),
        ("PATCH", "/v1/collections/hr", "collection.write"),
        ("GET", "/v1/backup", "backup"),
        ("POST", "/v1/responses", "answer"),
        ("GET", "/v1/models", "other"),
        ("TRACE", "/v1/documents/x", "other"),
    ],
)
def test_actions(method: str, path: str, action: str) -> None:
    assert action_of(method, path) == action


def test_what_is_not_an_action_is_recorded_only_if_it_is_refused() -> None:
    outcomes = {one: is_recorded(AuditAction.OTHER, one) for one in AuditOutcome}
    assert {one for one, recorded in outcomes.items() if recorded} == {
        AuditOutcome.UNKNOWN_KEY,
        AuditOutcome.FORBIDDEN,
        AuditOutcome.REFUSED,
    }
    assert all(is_recorded(AuditAction.SEARCH, one) for one in AuditOutcome)


def test_outcomes_of_statuses() -> None:
    wanted = {
        200: "done",
        204: "done",
        401: "unknown_key",
        403: "forbidden",
        404: "invalid",
        429: "refused",
        499: "disconnected",
        503: "failed",
    }
    assert {status: outcome_of(status) for status in wanted} == wanted


def test_changes_and_copies_of_all_documents_are_refused_without_a_log() -> None:
    assert AuditAction.BACKUP in CHANGES
    assert AuditAction.DOCUMENT_DELETE in CHANGES
    assert AuditAction.ANSWER not in CHANGES
    assert AuditAction.DOCUMENT_READ not in CHANGES


def test_an_unknown_key_is_shown_as_the_beginning_of_its_digest() -> None:
    key = key_of(b"k" * 32)
    shown = key_digest(key)
    assert digest_of(key).hex().startswith(shown)
    assert len(shown) == 8


def test_a_flood_of_one_source_is_bounded_counted_and_hides_no_other() -> None:
    throttle = RefusalThrottle(
        source_burst=3, source_per_s=1, total_burst=100, total_per_s=10, max_sources=10
    )
    first = [throttle.admit("flood", 0.0) for _ in range(1000)]
    assert first[:3] == [0, 0, 0]
    assert set(first[3:]) == {None}
    assert throttle.admit("other", 0.0) == 0
    assert throttle.admit("flood", 1.0) == 997
    assert throttle.admit("flood", 1.0) is None


def test_many_sources_together_are_bounded() -> None:
    throttle = RefusalThrottle(total_burst=50, total_per_s=5, max_sources=100)
    flood = [throttle.admit(f"address {i}", i / 10_000) for i in range(10_000)]
    assert sum(one is not None for one in flood) <= 50 + 5 + 1


def test_only_refusals_have_a_source() -> None:
    assert throttle_source(EVENT) is None
    refused = replace(EVENT, outcome=AuditOutcome.REFUSED)
    assert throttle_source(refused) == "key ingest"
    unknown = replace(EVENT, outcome=AuditOutcome.UNKNOWN_KEY, key=None)
    assert throttle_source(unknown) == "address 10.0.0.7"
