"""The engine's own record of its requests."""

from __future__ import annotations

import pytest

from bench.processes import free_port
from ragcache_core.errors import NotFound, RagCacheError
from ragcache_engine.records import CAPACITY, Record, RecordBook, serve
from ragcache_wire.engine_client import EngineClient


async def test_a_record_is_served_and_an_unknown_one_is_an_error() -> None:
    book = RecordBook()
    address = f"127.0.0.1:{free_port()}"
    server = serve(book, address)
    client = EngineClient(address)
    book.put("r", Record(queue_s=0.5, loaded_tokens=7, loaded_bytes=70, miss="corrupt"))
    record = await client.request_record("r")
    assert (record.queue_s, record.loaded_tokens, record.miss) == (0.5, 7, "corrupt")
    with pytest.raises(RagCacheError) as caught:
        await client.request_record("other")
    assert isinstance(caught.value, NotFound)
    await client.close()
    server.stop(None).wait()


def test_the_book_forgets_the_oldest() -> None:
    book = RecordBook()
    for number in range(CAPACITY + 2):
        book.put(str(number), Record())
    assert book.get("0") is None
    assert book.get("1") is None
    assert book.get("2") is not None
