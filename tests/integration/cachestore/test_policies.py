"""Uses that clients report over each transport, and what they change in the order of eviction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin
from ragcache_core.store_api import LookupKey
from ragcache_kv.values.conversions import to_get_request
from ragcache_wire.status import from_rpc_error
from tests.kit.store import (
    TIMEOUT_S,
    ServedStore,
    key,
    put_value,
    serving,
    value,
)
from tests.kit.wait import wait_until

PAGE = 64 << 10
TRANSPORTS = ((), ("socket",), ("shared",))
"""Offered beside gRPC. The client takes the first one that connects."""


@contextmanager
def small_store(folder: Path, policy: str, transports: Sequence[str] = ()) -> Iterator[ServedStore]:
    """Serve a store with 8 pages in memory and 8 on disk."""
    with serving(
        folder, policy=policy, memory_bytes=8 * PAGE, disk_bytes=8 * PAGE, transports=transports
    ) as served:
        yield served


def use(served: ServedStore, used: VariantKey, fix_overhead: float, times: int = 1) -> None:
    """Read a value, as a blend of this CFO does."""
    for _ in range(times):
        ((_, found),) = served.client.get([used], TIMEOUT_S, fix_overheads={used: fix_overhead})
        assert not isinstance(found, Miss)


def wait_for_uses(served: ServedStore, count: int) -> None:
    """Wait until the store has counted all uses. It learns a little later of rereads."""
    wait_until(lambda: served.store.stats().hits_memory == count)


def fill(served: ServedStore, numbers: range, token_s: float = 0.0) -> None:
    """Put more values, so that others leave."""
    for number in numbers:
        put_value(served.client, key(number), value(PAGE), origin=Origin(token_s=token_s))
        served.store.mover.writer.flush()


def stored(served: ServedStore, *keys: VariantKey) -> list[bool]:
    """Return which variants are stored, without a use of them."""
    answer = served.client.lookup([LookupKey.for_variant(one) for one in keys])
    return [bool(found.stored) for found in answer.variants]


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_cachecraft_evicts_what_needs_most_fixing_first(
    tmp_path: Path, transports: tuple[str, ...]
) -> None:
    """f_r += 1 / CFO: one use of CFO 0.1 keeps a variant longer than six of CFO 0.9."""
    fits, needs_fixing = key(1), key(2)
    with small_store(tmp_path, "cachecraft", transports) as served:
        for one in (fits, needs_fixing):
            put_value(served.client, one, value(PAGE))
        served.store.mover.writer.flush()
        use(served, fits, 0.1)
        use(served, needs_fixing, 0.9, times=6)
        assert served.client.transport == (transports[0] if transports else "grpc")
        wait_for_uses(served, 7)
        # These rank between them.
        for number in range(14):
            put_value(served.client, key(10 + number), value(PAGE))
            served.store.mover.writer.flush()
            use(served, key(10 + number), 0.8, times=6)
            wait_for_uses(served, 7 + 6 * (number + 1))
        assert stored(served, fits, needs_fixing) == [True, False]


@pytest.mark.parametrize("sent", [[0.5, 0.5], [1.5], [-0.1], [float("nan")]])
def test_a_get_with_invalid_overheads_is_refused(tmp_path: Path, sent: list[float]) -> None:
    with small_store(tmp_path, "cachecraft") as served:
        request = to_get_request([key(1)], False, "")
        request.fix_overheads.extend(sent)
        with pytest.raises(grpc.RpcError) as refused:
            list(served.stub.Get(request, timeout=TIMEOUT_S))
        assert isinstance(from_rpc_error("cachestore", refused.value), InvalidInput)


def test_the_cost_per_token_survives_a_restart(tmp_path: Path) -> None:
    with small_store(tmp_path, "pgdsf") as served:
        put_value(served.client, key(1), value(PAGE), origin=Origin(token_s=0.5))
        put_value(served.client, key(2), value(PAGE), origin=Origin(token_s=0.125))
    with small_store(tmp_path, "pgdsf") as served:
        fill(served, range(10, 17), token_s=0.25)
        assert stored(served, key(1), key(2)) == [True, False]
