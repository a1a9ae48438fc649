"""No file and no text that others write makes its reader fail in another way than it says."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from ragcache_cli.output.encrypted_file import BackupEncryption, decrypted_pieces
from ragcache_core.access.caller import Caller
from ragcache_core.access.key_file import hash_text, key_of, parse_key_file
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import ChunkKey
from ragcache_core.plan.reuse_plan import Action, ReusePlan, Segment
from ragcache_core.plan.signature import parse_keys, sign, signed_until_s
from ragcache_operator.spec.manifest import parse
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.backup import SqliteBackups
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_wire.rest_fields.filters import read_filter
from tests.attack.fuzzed_process import Usage
from tests.attack.mutations import mutated, mutated_json, with_odd_bytes, with_odd_value
from tests.kit.manifests import examples

SEED: Final = 37
MAX_GROWTH_BYTES: Final = 64 << 20
COUNTS: Final = [
    pytest.param(10_000, marks=pytest.mark.timeout(300)),
    pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]
KEY: Final = b"k" * 32
TOKENS: Final = list(range(300))


@dataclass(frozen=True, slots=True)
class Reader:
    """What reads something that others write. It raises InvalidInput for what is wrong."""

    corpus: Sequence[Any]
    mutate: Callable[[Any, random.Random], bytes]
    read: Callable[[bytes], object]


def key_files() -> Reader:
    key = key_of(b"a" * 32)
    whole = f"""
cached_token_price = 0.1
[[keys]]
name = "public-site"
hash = "{hash_text(key)}"
scopes = ["ask", "write"]
priority = 10
tenant = "red"
collections = ["handbook", "public-*"]
filter = {{ must = [{{ key = "public", match = {{ value = true }} }}] }}
quota = {{ requests_per_minute = 600, tokens_per_day = 2000000 }}
max_concurrent = 3
[[tenants]]
name = "red"
weight = 2
quota = {{ tokens_per_month = 50000000 }}
max_concurrent = 64
reserved_share = 0.1
"""
    corpus = [whole.encode(), b"keys = []\n"]
    return Reader(corpus, with_odd_bytes, lambda content: parse_key_file(content, read_filter))


def signing_keys() -> Reader:
    corpus = [b"a1" * 32 + b"\n" + b"b2" * 40, b"YWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWE="]
    return Reader(corpus, with_odd_bytes, lambda content: parse_keys("keys", content))


def filters() -> Reader:
    corpus = [
        {"must": [{"key": "public", "match": {"value": True}}], "must_not": [{"key": "a"}]},
        {"all": [{"key": "team", "in": ["a", "b"]}, {"key": "year", "range": {"gte": 2000}}]},
        {"any": [{"not": {"key": "team", "equals": "a"}}, {"key": "id", "prefix": "a"}]},
    ]

    def read(content: bytes) -> None:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return  # the parser of requests refuses it
        read_filter("filter", value)

    return Reader(corpus, mutated_json, read)


def manifests() -> Reader:
    def read(content: bytes) -> None:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return  # the API server refuses it
        if isinstance(value, dict):
            parse(value)

    return Reader(examples(), with_odd_value, read)


def plans() -> Reader:
    segments = [
        Segment(ChunkKey(bytes([i]) * 16), 100 * i, 100 * i + 90, action, "default/a.md")
        for i, action in enumerate(Action)
    ]
    encoded = ReusePlan(
        "request",
        "tenant:red",
        tuple(segments),
        planned_at_ms=1,
        recompute_share=0.2,
        alpha=1.0,
        reader=Caller("red").reader,
        num_head=1,
    ).encode()
    signature = sign(encoded, TOKENS, KEY, 1_700_000_000)

    def read(content: bytes) -> None:
        text = content.decode(errors="replace")
        assert text == encoded or signed_until_s(text, TOKENS, signature, [KEY]) is None
        ReusePlan.decode(text)

    return Reader([encoded.encode()], with_odd_bytes, read)


def encrypted_backups() -> Reader:
    encryption = BackupEncryption(KEY)
    content = b"documents" * 50
    whole = encryption.add(content) + encryption.end()

    def read(changed: bytes) -> None:
        assert b"".join(decrypted_pieces(io.BytesIO(changed), KEY)) == content

    return Reader([whole], with_odd_bytes, read)


READERS: Final = (key_files, signing_keys, filters, manifests, plans, encrypted_backups)


def check(reader: Reader, count: int) -> None:
    """Read mutations, and check memory."""
    usage = Usage.of(os.getpid())
    refused = 0
    for number, (_, content) in enumerate(mutated(reader.corpus, reader.mutate, SEED, count)):
        try:
            reader.read(content)
        except InvalidInput:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {SEED}, number {number}: {content[:3000]!r}") from error
    assert refused > count / 10
    growth = Usage.of(os.getpid()).memory_bytes - usage.memory_bytes
    assert growth <= MAX_GROWTH_BYTES, f"{growth} bytes more"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("make", READERS)
def test_mutated_texts_and_files(make: Callable[[], Reader], count: int) -> None:
    check(make(), count)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_backups(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    store = open_sqlite(folder, DiskReserve(folder, 0))
    whole = b"".join(SqliteBackups(folder).backup())
    store.database.close()
    received = tmp_path / "received"
    received.mkdir()

    def mutate(content: bytes, rng: random.Random) -> bytes:
        # Most bytes of a file are zeros, which say nothing.
        page = rng.randrange(0, len(content), 4096)
        odd = with_odd_bytes(content[page : page + 4096].rstrip(b"\0"), rng)[:4096]
        if rng.random() < 0.05:
            return content[:page]
        return content[:page] + odd.ljust(4096, b"\0") + content[page + 4096 :]

    def read(content: bytes) -> None:
        incoming = SqliteBackups(received).receive()
        try:
            incoming.write(content)
            incoming.finish()
        finally:
            incoming.abort()

    check(Reader([whole], mutate, read), count)
