"""What a report on a deleted document says if a part could not be asked."""

from __future__ import annotations

from unittest.mock import AsyncMock, MagicMock

from ragcache_core.errors import NotFound
from ragcache_gateway.documents.erasure import ErasureCheck, ErasureIn


async def test_nothing_is_erased_that_no_shard_was_asked_about() -> None:
    deletes, store, retriever = MagicMock(), MagicMock(), AsyncMock()
    deletes.deletions.return_value = []
    store.addresses.return_value = ()
    retriever.get_document.side_effect = NotFound("document", "gone.md", "list them")
    check = ErasureCheck(deletes, store, lambda _: {}, retriever)
    report = await check.report(ErasureIn(id="gone.md"), ())
    assert (report.document, report.shards, report.erased) == ("zero", [], False)
    assert "no shard is known" in report.not_checked[0]
