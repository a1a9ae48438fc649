"""Who has no store key names and forges no value: a real store, and a real engine."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from bench.support.tiny_engines import wait_until_stored
from harness.completion import complete, record_of
from harness.processes import COMPUTES_PLAIN, CacheStore, running_cachestore, running_engine
from harness.stored_values import exchange, forge
from ragcache_core.identity.keys import VariantKey, chunk_key
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.prompt import assemble, plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import Ack, Deletion, NewVariant, PutOutcome
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import TRANSPORTS, StoreClient
from ragcache_kv.values.outgoing_value import OutgoingValue, ReadyValue
from ragcache_kv.values.stored_value import StoredValue
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.kit.store import checksum, key, value, variant

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S: Final = 60.0
SECRET: Final = "c3" * 32
STORE_KEY: Final = StoreKey.of_secret(bytes.fromhex(SECRET))
RAW: Final = value(60_000)


@pytest.fixture
def keys(tmp_path: Path) -> SigningKeys:
    """The key of the platform's parts, which the attacker has as well."""
    (tmp_path / "keys").write_text("a1" * 32 + "\n")
    return SigningKeys(tmp_path / "keys")


@contextlib.contextmanager
def running(folder: Path) -> Iterator[CacheStore]:
    env = {"RAGCACHE_SIGNING_KEY_FILE": str(folder / "keys")}
    with running_cachestore(folder / "store", env=env) as store:
        yield store


def read(client: StoreClient, name: VariantKey) -> StoredValue | Miss:
    [(_, answer)] = client.get([name], TIMEOUT_S)
    return answer


def put(client: StoreClient, new: NewVariant, given: OutgoingValue) -> PutOutcome:
    """Put a value that was planned now, so after all deletes."""
    planned = replace(new, as_of=client.lookup([]).as_of)
    return client.put(planned, given, TIMEOUT_S, Ack.DURABLE)


def with_tag(raw: bytes, tag: bytes = b"") -> ReadyValue:
    """A value of one part as an attacker puts it: its checksum holds."""
    return ReadyValue(memoryview(raw), [checksum(raw)], tag=tag)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_part_without_the_store_key_forges_no_value(
    tmp_path: Path, keys: SigningKeys, transport: str
) -> None:
    new = variant(key(1), RAW)
    with (
        running(tmp_path) as store,
        contextlib.closing(
            StoreClient(store.address, (transport,), Credentials(keys), STORE_KEY)
        ) as engine,
        contextlib.closing(StoreClient(store.address, (transport,), Credentials(keys))) as attacker,
    ):
        assert put(engine, new, with_tag(RAW)) is PutOutcome.STORED
        seen = read(engine, new.key)
        assert isinstance(seen, StoredValue)
        assert seen.value == RAW
        assert engine.transport == transport
        forged = bytes(len(RAW))
        for tag in (b"", seen.tag, bytes(16)):
            attacker.delete(Deletion(os.urandom(16), variants=(new.key,)))
            assert put(attacker, new, with_tag(forged, tag)) is PutOutcome.STORED
            assert read(engine, new.key) is Miss.FORGED
            assert read(engine, new.key) is Miss.DELETED, "a forged value is not read twice"
        assert put(engine, new, with_tag(RAW)) is PutOutcome.STORED
        # Under another name, the engine's value is no better.
        for other in (variant(key(2), RAW), variant(key(1, 1), RAW)):
            assert put(attacker, other, with_tag(RAW, seen.tag)) is PutOutcome.STORED
            assert read(engine, other.key) is Miss.FORGED


def test_a_writer_of_the_volume_forges_no_value(tmp_path: Path, keys: SigningKeys) -> None:
    values = {key(n): value(60_000, n) for n in range(4)}
    with (
        running(tmp_path) as store,
        contextlib.closing(
            StoreClient(store.address, credentials=Credentials(keys), store_key=STORE_KEY)
        ) as engine,
    ):
        for name, raw in values.items():
            assert put(engine, variant(name, raw), with_tag(raw)) is PutOutcome.STORED
    forge(tmp_path / "store" / "data", key(0))
    exchange(tmp_path / "store" / "data", key(1), key(2))
    with (
        running(tmp_path) as store,
        contextlib.closing(StoreClient(store.address, credentials=Credentials(keys))) as naive,
        contextlib.closing(
            StoreClient(store.address, credentials=Credentials(keys), store_key=STORE_KEY)
        ) as engine,
    ):
        found = read(naive, key(0))
        assert isinstance(found, StoredValue), "its checksum holds"
        assert found.value != values[key(0)]
        assert [read(engine, key(n)) for n in range(3)] == [Miss.FORGED] * 3
        intact = read(engine, key(3))
        assert isinstance(intact, StoredValue)
        assert intact.value == values[key(3)]


def test_an_engine_computes_instead_of_using_a_forged_value(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "store.key").write_text(SECRET)
    folder = load_model_folder(str(tiny_model))
    space, guessed = folder.space("auto", STORE_KEY), folder.space("auto")
    prompt = assemble(range(10, 90), [range(170, 300)], [20, 21, 22, 23])
    settings = {**COMPUTES_PLAIN, "RAGCACHE_STORE_KEY_FILE": str(tmp_path / "store.key")}
    with (
        running_cachestore(tmp_path / "store") as store,
        running_engine(tmp_path, tiny_model, store.address, settings=settings) as engine,
        contextlib.closing(StoreClient(store.address)) as attacker,
    ):

        def ask() -> tuple[tuple[int, ...], set[str], int]:
            """Return the answer, why the store gave nothing, and the tokens that it gave."""
            request = uuid.uuid4().hex
            plan = plan_exact(prompt, space, "public", request)
            answer = complete(
                *(engine.url, prompt.token_ids),
                max_tokens=8,
                plan=plan.encode(),
                cache_salt=uuid.uuid4().hex,
            )
            record = record_of(engine, request)
            reasons = {one.reason for one in record.segments}
            loaded = sum(one.end - one.start for one in record.segments if one.HasField("source"))
            return answer.token_ids, reasons, loaded

        computed, _, _ = ask()
        plan = plan_exact(prompt, space, "public", "named")
        names = [one.variant for one in checked_segments(plan, prompt.token_ids, space)]
        wait_until_stored(store.address, names)
        # The attacker knows the text, and finds nothing under the names that it can tell.
        for token_ids in (range(10, 90), range(170, 300)):
            digest = chunk_key(guessed, "public", token_ids)
            assert digest not in {one.chunk for one in names}
        for name in names:
            found = read(attacker, name)
            assert isinstance(found, StoredValue)
            forged = bytes(len(found.value))
            sizes = tuple(part.num_bytes for part in found.parts)
            new = replace(
                variant(name, forged), info=found.info, shape=found.shape, part_bytes=sizes
            )
            new = replace(new, value_format=found.value_format)
            attacker.delete(Deletion(os.urandom(16), variants=(name,)))
            given = ReadyValue.with_checksums(memoryview(forged), sizes)
            assert put(attacker, new, given) is PutOutcome.STORED
        answer, reasons, loaded = ask()
        assert (answer, loaded) == (computed, 0)
        assert "forged" in reasons
