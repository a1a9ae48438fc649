"""The local copy of a kind: kept by list and watch, whatever they bring."""

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
    """Gives each list its objects and each watch its events; the last watch goes on for ever."""

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
    """An informer after all of it, and the names of what changed from and to."""
    changes: list[tuple[str | None, str | None]] = []

    def named(found: dict[str, Any] | None) -> str | None:
        return found and found["metadata"]["name"]

    api = FakeApi(lists, watches)
    informer = Informer(api, CONFIG_MAPS, "", lambda a, b: changes.append((named(a), named(b))))  # type: ignore[arg-type]
    task = asyncio.create_task(informer.run())
    await asyncio.wait_for(api.done.wait(), 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return informer, changes


async def test_it_holds_what_is_listed_and_what_comes_after() -> None:
    informer, changes = await followed(
        [[obj("a", 1)]], [[("ADDED", obj("b", 2)), ("DELETED", obj("a", 3))]]
    )
    assert changes == [(None, "a"), (None, "b"), ("a", None)]
    assert informer.get("ns", "a") is None
    assert informer.get("ns", "b") is not None


async def test_what_is_gone_by_the_next_list_is_gone() -> None:
    informer, changes = await followed(
        [[obj("a", 1), obj("b", 1)], [obj("b", 5)]], [[Expired(410, "Expired", "")], []]
    )
    assert ("a", None) in changes
    assert informer.get("ns", "a") is None


@pytest.mark.parametrize("trouble", [ApiError(500, "x", "busy"), RuntimeError("unforeseen")])
async def test_no_trouble_ends_the_following(trouble: Exception) -> None:
    informer, _ = await followed([[], [obj("a", 7)]], [[trouble], []])
    assert informer.get("ns", "a") is not None


async def test_what_a_write_gave_back_is_not_undone_by_older_news() -> None:
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


async def test_a_wake_during_a_pass_is_kept_for_the_next_wait() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe(("ns", "a")) as flag:
        wakeups.wake(("ns", "a"))
        wakeups.wake(("ns", "b"))
        await asyncio.wait_for(wait_for_wakeup(flag, None), 5)
        assert not flag.is_set()


async def test_a_successor_of_the_name_has_a_flag_of_its_own() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe(("ns", "a")) as old, wakeups.subscribe(("ns", "a")) as new:
        wakeups.wake(("ns", "a"))
        assert new.is_set()
        assert not old.is_set()
    wakeups.wake(("ns", "a"))
    assert not old.is_set()
