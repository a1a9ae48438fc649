"""The local copy of a kind, and the wake-up flags."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ragcache_operator.kube.api import ApiError, Expired, Listing
from ragcache_operator.kube.informer import Informer
from ragcache_operator.kube.resources import CONFIG_MAPS
from ragcache_operator.reconcile.wakeups import Wakeups, wait_for_wakeup

Event = tuple[str, dict[str, Any]] | Exception


def obj(name: str, version: int, **fields: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "ns", "resourceVersion": str(version)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, **fields}


class FakeApi:
    """Returns given lists and watch events. The last watch never ends."""

    def __init__(self, lists: list[list[dict[str, Any]]], watches: list[list[Event]]) -> None:
        self._lists = iter(lists)
        self._watches = iter(watches)
        self.done = asyncio.Event()

    async def list(self, *_: object, **__: object) -> Listing:
        items = next(self._lists)
        versions = [int(item["metadata"]["resourceVersion"]) for item in items]
        return Listing(tuple(items), str(max(versions, default=1)))

    async def watch(self, *_: object, **__: object) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        for event in next(self._watches, []):
            if isinstance(event, Exception):
                raise event
            yield event
        self.done.set()
        await asyncio.Event().wait()


async def followed(
    lists: list[list[dict[str, Any]]], watches: list[list[Event]]
) -> tuple[Informer, list[tuple[str | None, str | None]]]:
    """Run an informer over all events. Return it and the names before and after each change."""
    changes: list[tuple[str | None, str | None]] = []

    def named(found: dict[str, Any] | None) -> str | None:
        return str(found["metadata"]["name"]) if found else None

    api = FakeApi(lists, watches)
    informer = Informer(api, CONFIG_MAPS, "", lambda a, b: changes.append((named(a), named(b))))  # type: ignore[arg-type]
    task = asyncio.create_task(informer.run())
    await asyncio.wait_for(api.done.wait(), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return informer, changes


async def test_it_stores_listed_objects_and_later_changes() -> None:
    informer, changes = await followed(
        [[obj("a", 1)]], [[("ADDED", obj("b", 2)), ("DELETED", obj("a", 3))]]
    )
    assert changes == [(None, "a"), (None, "b"), ("a", None)]
    assert informer.get("ns", "a") is None
    assert informer.get("ns", "b") is not None


async def test_an_object_missing_in_the_next_list_is_removed() -> None:
    informer, changes = await followed(
        [[obj("a", 1), obj("b", 1)], [obj("b", 5)]], [[Expired(410, "Expired", "")], []]
    )
    assert ("a", None) in changes
    assert informer.get("ns", "a") is None


@pytest.mark.parametrize("failure", [ApiError(500, "x", "busy"), RuntimeError("unexpected")])
async def test_no_failure_ends_the_watch(failure: Exception) -> None:
    informer, _ = await followed([[], [obj("a", 7)]], [[failure], []])
    assert informer.get("ns", "a") is not None


async def test_older_events_do_not_override_the_response_of_a_write() -> None:
    api = FakeApi([[obj("a", 1)]], [[]])
    informer = Informer(api, CONFIG_MAPS, "", lambda *_: None)  # type: ignore[arg-type]
    task = asyncio.create_task(informer.run())
    await informer.wait_synced()
    assert informer.record_write(obj("a", 9, data={"new": "1"}))
    assert not informer.record_write(obj("b", 1))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    found = informer.get("ns", "a")
    assert found is not None
    assert found["data"] == {"new": "1"}
    assert informer.get("ns", "b") is None


async def test_a_wakeup_during_a_pass_counts_for_the_next_wait() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe(("ns", "a")) as flag:
        wakeups.wake(("ns", "a"))
        wakeups.wake(("ns", "b"))
        await asyncio.wait_for(wait_for_wakeup(flag, None), 60)
        assert not flag.is_set()


async def test_a_new_object_of_the_same_name_has_its_own_flag() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe(("ns", "a")) as old, wakeups.subscribe(("ns", "a")) as new:
        wakeups.wake(("ns", "a"))
        assert new.is_set()
        assert not old.is_set()
    wakeups.wake(("ns", "a"))
    assert not old.is_set()
