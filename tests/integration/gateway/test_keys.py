"""API keys: who is let in, what a key allows, and that tenants share no KV."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Origin
from ragcache_core.plan.reuse_plan import document_name
from ragcache_core.plan.segments import PIECE_TOKENS, checked_segments, plain_domain, prefix_pieces
from ragcache_operator.builders.keys import ComponentKeys
from ragcache_wire.watched import watched_file
from tests.kit.gateway import (
    BUILTIN,
    CONFIG,
    OPERATOR,
    World,
    band_of,
    bearer,
    key,
    plan_of,
    write_keys,
)
from tests.kit.store import ServedStore, get_value, put_value, serving
from tests.kit.wait import until

ENTRIES = {
    "app": 'scopes = ["ask"]',
    "writer": 'scopes = ["write"]\ncollections = ["default", "team-*"]',
    "admin": 'scopes = ["admin"]',
    "red": 'scopes = ["ask"]\ntenant = "red"\npriority = -7',
    "blue": 'scopes = ["ask"]\ntenant = "blue"',
    "public": 'scopes = ["ask"]\n'
    'filter = { must = [{ key = "public", match = { value = true } }] }',
    "elsewhere": 'scopes = ["ask"]\ncollections = ["team-*"]',
}
DOCUMENT = {"id": "d", "text": "Billing runs in eu-north."}
QUESTION = {"messages": [{"role": "user", "content": "Where does billing run?"}]}


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a changed file at once."""
    monkeypatch.setattr(watched_file, "CHECK_EVERY_S", 0.0)


class KeyedWorld(World):
    """A gateway with keys, and a real cache store."""

    real_store: ServedStore


def keyed_world(
    store: ServedStore, file: Path, builtin: Sequence[tuple[str, str]] = BUILTIN
) -> KeyedWorld:
    settings = CONFIG.replace(api_keys_file=file, builtin_keys=tuple(builtin), tenant_grace_s=0.0)
    world = KeyedWorld(settings, shards=(store.address,))
    world.real_store = store
    return world


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, tiny_model: Path) -> AsyncIterator[KeyedWorld]:
    file = write_keys(tmp_path / "keys.toml", ENTRIES)
    with serving(tmp_path / "kv") as store:
        async with AsyncExitStack() as stack:
            world = keyed_world(store, file)
            await world.start(stack, tiny_model)
            yield world


async def ask(gateway: KeyedWorld, name: str, **more: Any) -> httpx.Response:
    return await gateway.client.post(
        "/v1/chat/completions", json={**QUESTION, **more}, headers=bearer(name)
    )


def detail(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": f"Bearer {key('unknown')}"},
        {"Authorization": f"Basic {key('app')}"},
        {"Authorization": "Bearer"},
        {"api-key": "rck-wrong"},
        {"X-Forwarded-User": "admin", "X-Tenant": "red"},
        {"Cookie": f"key={key('app')}"},
    ],
)
async def test_a_request_without_a_valid_key_gets_401_and_reaches_nothing(
    gateway: KeyedWorld, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/documents"), ("GET", "/x")):
        response = await gateway.client.request(method, path, json=QUESTION, headers=headers)
        error = detail(response, 401)
        assert error["code"] == "invalid_api_key"
        assert error["type"] == "invalid_request_error"
        assert response.headers["WWW-Authenticate"].startswith("Bearer")
        assert "rck-" not in response.text
    assert gateway.engine.requests == []
    assert gateway.retriever.searches == []
    own = [record.getMessage() for record in caplog.records if record.name.startswith("ragcache")]
    assert own
    assert not [line for line in own if "rck-" in line]


@pytest.mark.parametrize("header", ["api-key", "x-api-key"])
async def test_the_headers_of_other_clients_carry_a_key_as_well(
    gateway: KeyedWorld, header: str
) -> None:
    response = await gateway.client.get("/v1/models", headers={header: key("app")})
    assert response.status_code == 200


async def test_health_and_metrics_need_no_key(gateway: KeyedWorld) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await gateway.client.get(path)).status_code == 200


async def test_a_key_does_only_what_its_scopes_allow(gateway: KeyedWorld) -> None:
    calls: dict[str, tuple[str, str, Any]] = {
        "ask": ("POST", "/v1/chat/completions", QUESTION),
        "write": ("POST", "/v1/documents", DOCUMENT),
        "view": ("GET", "/v1/cache", None),
    }
    allowed = {"app": {"ask"}, "writer": {"write"}, "admin": {"ask", "write", "view"}}
    for name, scopes in allowed.items():
        for scope, (method, path, body) in calls.items():
            response = await gateway.client.request(method, path, json=body, headers=bearer(name))
            if scope in scopes:
                assert response.status_code == 200, response.text
            else:
                error = detail(response, 403)
                assert error["code"] == "missing_scope"
                assert f'scope="{scope}"' in response.headers["WWW-Authenticate"]
                assert name in error["message"]


async def test_the_keys_of_components_are_valid_beside_those_of_the_file(
    gateway: KeyedWorld,
) -> None:
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    assert (await gateway.client.get("/v1/cache", headers=headers)).status_code == 200


async def test_a_key_is_for_some_collections_on_every_route(gateway: KeyedWorld) -> None:
    writer, client = bearer("writer"), gateway.client
    other = {**DOCUMENT, "collection": "secret"}
    refused = [
        await client.post("/v1/documents", json=other, headers=writer),
        await client.get("/v1/documents?collection=secret", headers=writer),
        await client.get("/v1/documents/d?collection=secret", headers=writer),
        await client.delete("/v1/documents/d?collection=secret", headers=writer),
        await client.get("/v1/collections/secret", headers=writer),
        await client.put("/v1/collections/secret", json={}, headers=writer),
        await client.delete("/v1/collections/secret", headers=writer),
        await client.post("/v1/documents:batch?collection=secret", content=b"", headers=writer),
        await ask(gateway, "elsewhere"),
        await client.post("/v1/search", json={"query": "x"}, headers=bearer("elsewhere")),
    ]
    assert {detail(response, 403)["code"] for response in refused} == {"collection_not_allowed"}
    batch = await client.post(
        "/v1/documents:batch",
        content=b'{"id": "d", "text": "x", "collection": "secret"}\n',
        headers={**writer, "Content-Type": "application/jsonl"},
    )
    assert "collection_not_allowed" in batch.text
    assert gateway.retriever.documents == {}
    for name in ("secret", "team-a"):
        path = f"/v1/collections/{name}"
        assert (await client.put(path, json={}, headers=bearer("admin"))).status_code == 200
    listed = (await client.get("/v1/collections", headers=writer)).json()["data"]
    assert [one["name"] for one in listed] == ["default", "team-a"]


async def test_the_filter_of_a_key_applies_to_every_search(gateway: KeyedWorld) -> None:
    assert (await ask(gateway, "public")).status_code == 200
    own = {"must": [{"key": "year", "match": {"value": 2024}}]}
    assert (await ask(gateway, "public", ragcache={"filter": own})).status_code == 200
    search = {"query": "x", "filter": own}
    response = await gateway.client.post("/v1/search", json=search, headers=bearer("public"))
    assert response.status_code == 200
    alone, *both = gateway.retriever.searches
    assert alone.filter.field.name == "public"
    for found in both:
        assert [one.field.name for one in found.filter.all.filters] == ["public", "year"]


async def test_a_plan_says_what_its_key_may_read_and_whose_text_it_has(
    gateway: KeyedWorld,
) -> None:
    own = {"messages": [{"role": "system", "content": "Be brief."}, *QUESTION["messages"]]}
    narrow = {"ragcache": {"filter": {"must": [{"key": "year", "match": {"value": 2024}}]}}}
    for name, more in (("app", {}), ("red", {}), ("public", {}), ("public", narrow), ("app", own)):
        assert (await ask(gateway, name, **more)).status_code == 200
    app, red, public, narrowed, written = map(plan_of, gateway.engine.requests)
    assert app.reader.reads_all
    assert not public.reader.reads_all
    assert app.reader.rights == red.reader.rights != public.reader.rights
    assert app.reader.key != red.reader.key
    assert narrowed.reader == public.reader, "a request's own filter takes no right away"
    assert [one.own_head for one in (app, red, public, narrowed, written)] == [*[False] * 4, True]
    assert {one.num_head for one in (app, red, public, narrowed, written)} <= {1, 2}


async def test_only_the_key_sets_priority_and_salt(gateway: KeyedWorld) -> None:
    for name in ("app", "red", "blue"):
        body = {"priority": -99, "cache_salt": "mine"}
        assert (await ask(gateway, name, **body)).status_code == 200
    app, red, blue = gateway.engine.requests
    assert (band_of(app), band_of(red), band_of(blue)) == (0, -7, 0)
    assert "cache_salt" not in app
    assert (red["cache_salt"], blue["cache_salt"]) == ("tenant:red", "tenant:blue")


async def test_identity_and_key_reach_no_other_component(gateway: KeyedWorld) -> None:
    headers = {"X-Tenant": "blue", "X-Forwarded-User": "root", "Cookie": "a=b"}
    response = await gateway.client.post(
        "/v1/chat/completions", json=QUESTION, headers={**bearer("red"), **headers}
    )
    assert response.status_code == 200
    [sent] = gateway.engine.headers
    assert key("red") not in str(sent)
    assert not {"authorization", "x-tenant", "x-forwarded-user", "cookie"} & sent.keys()
    assert plan_of(gateway.engine.requests[0]).domain == "tenant:red"


def store_prompt(gateway: KeyedWorld, body: dict[str, Any]) -> list[VariantKey]:
    """Store KV of a prompt's segments, as an engine does that got it."""
    plan, client = plan_of(body), gateway.real_store.client
    keys = []
    for named in checked_segments(plan, body["prompt"], gateway.space()):
        origin = Origin(document=named.segment.document, domain=plan.domain)
        put_value(client, named.variant, b"kv" * 512, origin=origin)
        keys.append(named.variant)
    assert stored(gateway, keys) == keys
    return keys


async def store_plain(gateway: KeyedWorld, name: str) -> list[VariantKey]:
    """Have a caller continue a text, and store the KV as an engine does without a plan."""
    text = {"prompt": "Billing runs in the region", "max_tokens": 4}
    response = await gateway.client.post("/v1/completions", json=text, headers=bearer(name))
    assert response.status_code == 200
    body = gateway.engine.requests[-1]
    assert "ragcache" not in body["kv_transfer_params"]
    domain = plain_domain(body.get("cache_salt"))
    keys = [one.variant for one in prefix_pieces(gateway.space(), domain, range(3 * PIECE_TOKENS))]
    for key_ in keys:
        put_value(gateway.real_store.client, key_, b"kv" * 512, origin=Origin(domain=domain))
    assert stored(gateway, keys) == keys
    return keys


def stored(gateway: KeyedWorld, keys: Sequence[VariantKey]) -> list[VariantKey]:
    get = get_value
    return [one for one in keys if get(gateway.real_store.client, one) is not None]


async def variants_of_all(gateway: KeyedWorld) -> dict[str, list[VariantKey]]:
    """Have each caller ask the same question about the same document, and store the KV."""
    for name in ("app", "red", "blue"):
        assert (await ask(gateway, name)).status_code == 200
    bodies = gateway.engine.requests[-3:]
    assert bodies[0]["prompt"] == bodies[1]["prompt"] == bodies[2]["prompt"]
    return {
        name: store_prompt(gateway, body)
        for name, body in zip(("app", "red", "blue"), bodies, strict=True)
    }


async def test_tenants_with_the_same_document_and_question_share_no_variant(
    gateway: KeyedWorld,
) -> None:
    found = await variants_of_all(gateway)
    keys = [one for some in found.values() for one in some]
    assert len(found["red"]) > 2
    assert len(set(keys)) == len(keys)
    assert len({one.chunk for one in keys}) == len(keys), "not one chunk key is shared"
    # The same tenant finds its own again.
    assert (await ask(gateway, "red")).status_code == 200
    again = plan_of(gateway.engine.requests[-1])
    assert {segment.chunk for segment in again.segments} >= {one.chunk for one in found["red"]}


async def test_a_tenant_does_not_learn_how_the_system_prompts_of_others_begin(
    gateway: KeyedWorld,
) -> None:
    def system(user: str) -> dict[str, str]:
        return {"role": "system", "content": f"{'Answer from the documents alone. ' * 20}{user}."}

    async def num_segments(name: str, user: str) -> int:
        messages = [system(user), {"role": "user", "content": "Where?"}]
        assert (await ask(gateway, name, messages=messages)).status_code == 200
        return len(plan_of(gateway.engine.requests[-1]).segments)

    whole = await num_segments("red", "Ann")
    assert await num_segments("red", "Bob") == whole + 1, "the common part is a segment"
    assert await num_segments("blue", "Eve") == whole
    assert await num_segments("blue", "Joe") == whole + 1


async def test_a_delete_removes_the_kv_of_every_tenant(gateway: KeyedWorld) -> None:
    admin = bearer("admin")
    [hit, *_] = gateway.retriever.hits
    name = hit.chunk.document_id
    document = {"id": name, "text": hit.chunk.text}
    assert (await gateway.client.post("/v1/documents", json=document, headers=admin)).is_success
    found = await variants_of_all(gateway)
    bodies = gateway.engine.requests[-3:]
    response = await gateway.client.delete(f"/v1/documents/{name}", headers=admin)
    assert response.status_code == 200
    for (caller, keys), body in zip(found.items(), bodies, strict=True):
        of_document = [
            variant
            for variant, segment in zip(keys, plan_of(body).segments, strict=True)
            if segment.document == document_name("default", name)
        ]
        assert of_document, caller
        assert stored(gateway, of_document) == []


async def test_the_kv_of_a_tenant_without_keys_is_deleted_with_and_without_plans(
    gateway: KeyedWorld,
) -> None:
    found = await variants_of_all(gateway)
    for name in found:
        found[name] += await store_plain(gateway, name)
    assert gateway.config.api_keys_file is not None
    write_keys(gateway.config.api_keys_file, {n: e for n, e in ENTRIES.items() if n != "red"})
    detail(await ask(gateway, "red"), 401)
    await until(lambda: not stored(gateway, found["red"]))
    assert stored(gateway, found["blue"]) == found["blue"]
    assert stored(gateway, found["app"]) == found["app"]


async def test_a_tenant_whose_keys_disappear_while_no_gateway_runs_is_deleted_at_the_next_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    file = write_keys(tmp_path / "keys.toml", ENTRIES)
    with serving(tmp_path / "kv") as store:
        first = keyed_world(store, file)
        reports = first.retriever.reports
        async with AsyncExitStack() as stack:
            await first.start(stack, tiny_model)
            found = await variants_of_all(first)
            await until(lambda: reports.get("tenants") == b'["blue", "red"]')
        write_keys(file, {name: entry for name, entry in ENTRIES.items() if name != "red"})
        second = keyed_world(store, file)
        second.retriever.reports = reports
        async with AsyncExitStack() as stack:
            await second.start(stack, tiny_model)
            await until(lambda: not stored(second, found["red"]))
            assert stored(second, found["blue"]) == found["blue"]
            assert stored(second, found["app"]) == found["app"]
            await until(lambda: reports["tenants"] == b'["blue"]')


async def test_a_changed_file_counts_at_once_and_a_wrong_one_changes_nothing(
    gateway: KeyedWorld, caplog: pytest.LogCaptureFixture
) -> None:
    file = gateway.config.api_keys_file
    assert file is not None
    detail(await ask(gateway, "new"), 401)
    write_keys(file, {**ENTRIES, "new": 'scopes = ["ask"]'})
    assert (await ask(gateway, "new")).status_code == 200
    file.write_text('[[keys]]\nname = "x"\nhash = "sha256:nonsense"\nscopes = ["ask"]\n')
    assert (await ask(gateway, "new")).status_code == 200
    warning = next(r.getMessage() for r in caplog.records if "reload failed" in r.getMessage())
    assert "keys[0].hash" in warning
    assert "nonsense" not in warning


async def test_an_explanation_is_for_the_tenant_that_asked(gateway: KeyedWorld) -> None:
    answer = (await ask(gateway, "red")).json()
    path = f"/v1/requests/{answer['id']}"
    for name, status in (("red", 200), ("admin", 200), ("blue", 404), ("app", 404)):
        assert (await gateway.client.get(path, headers=bearer(name))).status_code == status, name
    detail(await gateway.client.get(path), 401)


async def test_requests_and_tokens_are_counted_by_tenant(gateway: KeyedWorld) -> None:
    assert (await ask(gateway, "red")).status_code == 200
    assert (await ask(gateway, "app")).status_code == 200
    refused = await gateway.client.get("/v1/documents", headers=bearer("red"))
    assert refused.status_code == 403
    assert (await gateway.client.get("/v1/models")).status_code == 401
    page = (await gateway.client.get("/metrics")).text

    def counted(tenant: str, outcome: str) -> str:
        name = "ragcache_gateway_tenant_requests_total"
        return f'{name}{{outcome="{outcome}",tenant="{tenant}"}} '

    lines = page.splitlines()
    assert f"{counted('red', 'answered')}1.0" in lines
    assert f"{counted('_none', 'answered')}1.0" in lines
    for tenant in ("red", "_none"):
        assert f"{counted(tenant, 'refused')}0.0" in lines, "no key allowed those requests"
    times = "ragcache_gateway_tenant_time_to_first_token_seconds_count"
    assert f'{times}{{tenant="red"}} 1.0' in lines
    assert 'tenant="blue"' not in page


async def test_a_syncs_key_reaches_its_own_collection_only(
    tmp_path: Path, tiny_model: Path
) -> None:
    keys = ComponentKeys(bytes(range(32)))
    pairs = (part.partition("=") for part in keys.hashes("uid").split(","))
    builtin = [(name, text) for name, _, text in pairs]
    file = write_keys(tmp_path / "keys.toml", ENTRIES)
    with serving(tmp_path / "kv") as store:
        async with AsyncExitStack() as stack:
            world = keyed_world(store, file, builtin)
            await world.start(stack, tiny_model)
            own, foreign, expired = (
                {"Authorization": f"Bearer {keys.collection_key('faq', uid, at_s)}"}
                for uid, at_s in (("uid", time.time()), ("other", time.time()), ("uid", 1e9))
            )
            put = {**DOCUMENT, "collection": "faq"}
            call = world.client.request
            for refused in (foreign, expired):
                detail(await call("POST", "/v1/documents", json=put, headers=refused), 401)
            # It may write there: the collection does not exist yet.
            detail(await call("POST", "/v1/documents", json=put, headers=own), 404)
            others = "/v1/documents/d?collection=default"
            for method, path, body in (
                ("POST", "/v1/documents", DOCUMENT),
                ("GET", "/v1/documents?collection=default", None),
                ("DELETE", others, None),
                ("PATCH", "/v1/collections/default", {}),
                ("DELETE", "/v1/collections/default", None),
                ("POST", "/v1/chat/completions", QUESTION),
                ("GET", "/v1/backup", None),
            ):
                detail(await call(method, path, json=body, headers=own), 403)
