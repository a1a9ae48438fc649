"""Quotas and usage of keys and tenants, on gateways that share a retriever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from ragcache_cli.clients import gateway_client
from ragcache_cli.main import app
from ragcache_core.access.usage import Period
from ragcache_gateway.admission import usage_counter
from ragcache_retriever.store.usage import UsageWanted
from tests.kit.gateway import CONFIG, FakeRetriever, World, bearer, key, write_keys
from tests.kit.wait import until

QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Where does billing run?"}],
    "max_tokens": 20,
}
ASK = 'scopes = ["ask"]\n'
ALWAYS = 1 << 40


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share counts soon."""
    monkeypatch.setattr(usage_counter, "SEND_S", 0.02)


@asynccontextmanager
async def gateways(
    folder: Path, model: Path, entries: dict[str, str], count: int = 1, more: str = ""
) -> AsyncIterator[list[World]]:
    """Run gateways with keys that share a retriever."""
    file = write_keys(folder / "keys.toml", entries)
    file.write_text(file.read_text() + more)
    retriever = FakeRetriever()
    async with AsyncExitStack() as stack:
        settings = CONFIG.replace(api_keys_file=file)
        yield [await World(settings, retriever).start(stack, model) for _ in range(count)]


async def ask(gateway: World, name: str, **more: Any) -> httpx.Response:
    return await gateway.client.post(
        "/v1/chat/completions", json=QUESTION | more, headers=bearer(name)
    )


async def usage(gateway: World, name: str, **query: Any) -> list[dict[str, Any]]:
    response = await gateway.client.get("/v1/usage", params=query, headers=bearer(name))
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["data"]
    return found


async def until_used(gateway: World, name: str, **counts: int) -> dict[str, Any]:
    """Wait until a key has used this much of its model."""
    found: dict[str, Any] = {}

    async def has_used() -> bool:
        nonlocal found
        for one in await usage(gateway, name):
            if one["key"] == name and one["model"] is not None:
                found = one
        return {field: found.get(field) for field in counts} == counts

    await until(has_used, str(counts))
    return found


async def test_a_quota_of_requests_holds_across_gateways(tmp_path: Path, tiny_model: Path) -> None:
    entries = {"app": ASK + "quota = { requests_per_month = 3 }", "free": ASK}
    async with gateways(tmp_path, tiny_model, entries, count=2) as (first, second):
        for _ in range(2):
            assert (await ask(first, "app")).status_code == 200
        await until_used(first, "app", requests=2)
        answer = await ask(second, "app")
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        await until_used(second, "app", requests=3)

        async def is_refused() -> bool:
            # The first one after a pause may be let in on what was known before.
            return (await ask(second, "app")).status_code == 429

        await until(is_refused, "a refusal")
        refused = await ask(second, "app")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "quota_exceeded")
        assert error["type"] == "rate_limit_error"
        assert "requests_per_month" in error["message"]
        assert "'app'" in error["message"]
        assert int(refused.headers["Retry-After"]) > 0
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert await second.metric('refusals_total{reason="quota_exceeded"}') > 0
        assert (await ask(second, "free")).status_code == 200


async def test_tokens_are_counted_by_their_origin(tmp_path: Path, tiny_model: Path) -> None:
    entries = {"app": ASK + 'tenant = "red"', "admin": 'scopes = ["admin"]'}
    async with gateways(tmp_path, tiny_model, entries) as [gateway]:
        assert (await ask(gateway, "app")).status_code == 200
        counts = {
            "requests": 1,
            "refusals": 0,
            "computed_tokens": 30,
            "cached_tokens": 10,
            "loaded_tokens": 55,
            "recomputed_tokens": 5,
            "output_tokens": 3,
        }
        found = await until_used(gateway, "app", **counts)
        assert found["tenant"] == "red"
        assert found["model"] == "tiny"
        assert found["quota_tokens"] == pytest.approx(30 + 5 + 3 + 6.5)
        assert (await ask(gateway, "app", stream=True)).status_code == 200
        await until_used(gateway, "app", requests=2, output_tokens=6)
        [month] = await usage(gateway, "admin", period="month", tenant="red")
        assert month["requests"] == 2
        assert month["start"].endswith("-01T00:00:00Z")


async def test_cached_tokens_take_little_of_a_quota(tmp_path: Path, tiny_model: Path) -> None:
    entries = {"app": ASK + 'tenant = "red"', "site": ASK + 'tenant = "red"'}
    more = '[[tenants]]\nname = "red"\nquota = { tokens_per_day = 400 }\n'
    async with gateways(tmp_path, tiny_model, entries, more=more) as [gateway]:
        fields: dict[str, Any] = {"prompt_tokens": 200, "loaded_bytes": 1}
        reused = fields | {"local_tokens": 200, "loaded_tokens": 0, "blended_tokens": 0}
        gateway.records.fields = reused | {"recomputed_tokens": 0}
        for number in range(1, 4):
            assert (await ask(gateway, "app")).status_code == 200
            await until_used(gateway, "app", cached_tokens=200 * number)
        gateway.records.fields["local_tokens"] = 0
        statuses: list[int] = []
        while len(statuses) < 10 and 429 not in statuses:
            statuses.append((await ask(gateway, "site")).status_code)
        assert statuses[0] == 200
        assert statuses[-1] == 429
        refused = await ask(gateway, "app")
        assert "tokens_per_day" in refused.json()["error"]["message"]
        assert "tenant 'red'" in refused.json()["error"]["message"]


async def test_a_caller_sees_its_own_tenant(tmp_path: Path, tiny_model: Path) -> None:
    entries = {
        "a": ASK + 'tenant = "red"',
        "b": ASK + 'tenant = "red"',
        "c": ASK + 'tenant = "blue"',
        "d": ASK,
        "e": ASK,
        "admin": 'scopes = ["admin"]',
    }
    async with gateways(tmp_path, tiny_model, entries) as [gateway]:
        for name in "abcde":
            assert (await ask(gateway, name)).status_code == 200
        seen = {"a": "ab", "b": "ab", "c": "c", "d": "d", "e": "e", "admin": "decab"}

        async def all_is_there() -> bool:
            return len(await usage(gateway, "admin")) == 5

        await until(all_is_there, "all usage")
        for name, keys in seen.items():
            assert {one["key"] for one in await usage(gateway, name)} == set(keys)
        refused = await gateway.client.get("/v1/usage?tenant=red", headers=bearer("c"))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tenant"
        first = await gateway.client.get("/v1/usage?limit=3", headers=bearer("admin"))
        rest = await gateway.client.get(
            "/v1/usage", params={"limit": 3, "after": first.json()["next"]}, headers=bearer("admin")
        )
        pages = [one["key"] for page in (first, rest) for one in page.json()["data"]]
        assert sorted(pages) == list("abcde")
        assert rest.json()["next"] is None
        wrong = await gateway.client.get("/v1/usage?after=x", headers=bearer("admin"))
        assert wrong.json()["error"]["param"] == "after"


async def test_an_answer_that_is_cancelled_counts_as_far_as_it_came(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with gateways(tmp_path, tiny_model, {"app": ASK}) as [gateway]:
        gateway.engine.hold_after = 2
        body = QUESTION | {"stream": True}
        async with gateway.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=bearer("app")
        ) as stream:
            async for line in stream.aiter_lines():
                if "eu-north" in line:
                    break
        # The role and two words.
        found = await until_used(gateway, "app", requests=1, output_tokens=3)
        assert found["computed_tokens"] > 20


async def test_counts_survive_a_retriever_that_is_away(tmp_path: Path, tiny_model: Path) -> None:
    entries = {"app": ASK + "quota = { requests_per_day = 4 }"}
    async with gateways(tmp_path, tiny_model, entries) as [gateway]:
        retriever = gateway.retriever
        assert (await ask(gateway, "app")).status_code == 200
        retriever.forgets_usage_reply = True
        for _ in range(3):
            assert (await ask(gateway, "app")).status_code == 200
        # It goes on with what it knows.
        assert (await ask(gateway, "app")).status_code == 429
        retriever.forgets_usage_reply = False
        await until_used(gateway, "app", requests=4)
        assert (await ask(gateway, "app")).status_code == 429
    rows = retriever.usage.page(UsageWanted(Period.DAY, 0, ALWAYS), 10)
    assert [one.counts.requests for one in rows if one.model] == [4]


async def test_the_command_shows_every_page(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_client, "_PAGE", 1)
    entries = {"a": ASK + 'tenant = "red"', "b": ASK, "admin": 'scopes = ["admin"]'}
    async with gateways(tmp_path, tiny_model, entries) as [gateway]:
        for name in "ab":
            assert (await ask(gateway, name)).status_code == 200
            await until_used(gateway, name, requests=1)
        words = ["usage", "--gateway", gateway.base_url, "--api-key", key("admin")]
        runner = CliRunner()
        found = await asyncio.to_thread(runner.invoke, app, [*words, "--output", "json"])
        assert [one["key"] for one in json.loads(found.stdout)] == ["b", "a"]
        shown = await asyncio.to_thread(runner.invoke, app, [*words, "--period", "month"])
        assert shown.exit_code == 0
        assert {"MONTH", "TENANT", "red", "QUOTA"} <= set(shown.stdout.split())
        wrong = await asyncio.to_thread(runner.invoke, app, [*words, "--start", "yesterday"])
        assert wrong.exit_code == 2
        assert "--start" in wrong.stderr


async def test_searches_and_completions_count_as_well(tmp_path: Path, tiny_model: Path) -> None:
    async with gateways(tmp_path, tiny_model, {"app": ASK}) as [gateway]:
        client, headers = gateway.client, bearer("app")
        search = await client.post("/v1/search", json={"query": "x"}, headers=headers)
        assert search.status_code == 200
        gateway.engine.reports_cached = False
        for stream in (False, True):
            body = {"prompt": [1, 2, 3], "stream": stream, "max_tokens": 5}
            plain = await client.post("/v1/completions", json=body, headers=headers)
            assert plain.status_code == 200, plain.text
        await until_used(gateway, "app", requests=2, computed_tokens=6, output_tokens=6)

        async def has_search() -> bool:
            return [one["requests"] for one in await usage(gateway, "app") if not one["model"]] == [
                1
            ]

        await until(has_search, "the search")
