"""Changes of documents reach each subscriber."""

from __future__ import annotations

import pytest

from ragcache_gateway.documents.events import DocumentChanged, DocumentEvents

CHANGE = DocumentChanged("default", "public", "a.md", (bytes(16),), None, 1000, 1001)


@pytest.mark.parametrize(
    ("counts", "total"), [([], 0), ([0, 3], 3), ([2, 3], 5), ([3, None], None), ([None, 0], None)]
)
async def test_publishing_tells_each_subscriber_and_sums_the_removed_variants(
    counts: list[int | None], total: int | None
) -> None:
    events = DocumentEvents()
    told: list[tuple[int, DocumentChanged]] = []

    for index, count in enumerate(counts):

        async def subscriber(
            change: DocumentChanged, index: int = index, count: int | None = count
        ) -> int | None:
            told.append((index, change))
            return count

        events.subscribe(subscriber)
    assert await events.publish(CHANGE) == total
    assert told == [(index, CHANGE) for index in range(len(counts))]


async def test_a_failing_subscriber_keeps_no_other_from_being_told() -> None:
    events = DocumentEvents()
    told: list[DocumentChanged] = []

    async def failing(change: DocumentChanged) -> int | None:
        raise ValueError("broken")

    async def subscriber(change: DocumentChanged) -> int | None:
        told.append(change)
        return 0

    events.subscribe(failing)
    events.subscribe(subscriber)
    with pytest.raises(ValueError, match="broken"):
        await events.publish(CHANGE)
    assert told == [CHANGE]


def test_a_change_without_chunks_written_is_a_deletion() -> None:
    assert CHANGE.is_deletion
    assert CHANGE.document_name == "default/a.md"
    assert not DocumentChanged("default", "public", "a.md", (), (), 1, 2).is_deletion
