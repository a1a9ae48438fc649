"""The console in a real browser: ask, see the waterfall, a miss explained, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.browser import (
    FITS,
    QUESTION,
    Page,
    begin_to_ask,
    compare_and_wait,
    fill,
    needs_chromium,
    select_tab,
    texts,
    until_answered,
)
from ragcache_wire.v1 import cachestore_pb2, engine_pb2
from tests.kit.gateway import MODEL, World, until_predicted, world

pytestmark = needs_chromium


async def explained(gateway: World) -> list[dict[str, Any]]:
    """Have the engine report its first chunk as loaded and its second one as evicted."""
    asked = await gateway.ask(QUESTION, ragcache={"explain": True})
    parts: list[dict[str, Any]] = asked.json()["ragcache"]["explanation"]["parts"]
    records = []
    chunks = 0
    for part in parts[:-1]:
        record = engine_pb2.SegmentRecord(start=part["start"], end=part["start"] + part["tokens"])
        chunks += part["chunk"] is not None
        if part["chunk"] is None:
            record.cached_tokens = part["tokens"]
        elif chunks < 3:
            record.loaded_tokens = part["tokens"]
            record.source.CopyFrom(
                engine_pb2.LoadSource(tier="memory", num_bytes=9000, base_position=part["start"])
            )
        else:
            record.reason = "evicted"
        records.append(record)
    gateway.records.segments = records
    gateway.records.fields = {
        "queue_s": 0.004,
        "load_s": 0.020,
        "recompute_s": 0.0,
        "prefill_s": 0.120,
        "miss": "evicted",
        "blended_tokens": 0,
        "recomputed_tokens": 0,
    }
    return parts


async def ask_and_wait(page: Page) -> None:
    await begin_to_ask(page)
    await until_answered(page)


async def test_a_question_has_a_waterfall_and_its_miss_is_explained(
    gateway: World, page: Page
) -> None:
    await explained(gateway)
    await ask_and_wait(page)
    [answer] = await texts(page, "#ask-answer .answer-text")
    assert answer == "".join(gateway.engine.words)
    steps = await texts(page, ".steps td:first-child")
    for name in ("Embed", "Search2 stages", "Wait", "Load", "Recompute", "Prefill", "Generate"):
        assert any(step.startswith(name) for step in steps), steps
    assert "120 ms" in await texts(page, ".steps td:nth-child(4)")
    widths = await page.evaluate(
        "[...document.querySelectorAll('.steps .bar')].map((bar) => parseFloat(bar.style.width))"
    )
    assert max(widths) > 10
    assert await page.evaluate(FITS)
    [missed] = [
        row for row in await texts(page, ".parts tbody tr") if "evicted for lack of space" in row
    ]
    assert "Title of search.md" in missed
    assert "Miss" in missed
    [loaded, _] = [row for row in await texts(page, ".parts tbody tr") if "billing.md" in row]
    assert "memory" in loaded
    [_, summary] = await texts(page, "#ask-answer .summary")
    assert "1 chunk was computed at least in part. It cost" in summary
    assert page.errors == []


async def test_the_field_of_the_model_offers_those_that_are_served(page: Page) -> None:
    await page.evaluate("document.querySelector('#ask-model').focus()")
    names = "[...document.querySelectorAll('#models option')].map((one) => one.value).join()"
    await page.until(f"{names} === '{MODEL}'")


async def test_the_plan_of_each_chunk_is_shown_beside_its_outcome(
    gateway: World, page: Page
) -> None:
    await until_predicted(gateway.client)
    await explained(gateway)
    await ask_and_wait(page)
    engine = gateway.config.engines[0]
    address = f"{engine.host}:{engine.http_port}"
    rows = [row for row in await texts(page, ".parts tbody tr") if ".md" in row]
    planned = await texts(page, ".parts td:nth-child(3)")
    words = f"Cachedfrom device of engine {address}It is in the engine's prefix cache."
    # The question is no part of the plan.
    assert planned[:-1] == [words] * (len(planned) - 1)
    # The engine loaded two of the chunks, and computed the third one.
    outcomes = await texts(page, ".parts td:nth-child(4)")
    chunks = outcomes[-len(rows) - 1 : -1]
    assert chunks == ["Loadedfrom memorynot as planned"] * 2 + ["Missnot as planned"]
    assert page.errors == []


async def test_a_plan_names_tier_source_and_reason(page: Page) -> None:
    parts: list[dict[str, Any]] = [
        {"planned": "load", "planned_reason": "stored", "outcome": "loaded"},
        {"planned": "blend", "planned_reason": "other_prefix", "outcome": "computed"},
        {"planned": "compute", "planned_reason": "not_stored", "outcome": "unknown"},
        {"planned": None, "planned_reason": "", "outcome": "computed"},
    ]
    sources = [("disk", "store:10.0.0.7:7000"), ("host", "engine:10.0.0.9:8100"), (None, None)]
    for part, (tier, source) in zip(parts, [*sources, (None, None)], strict=True):
        part |= {"planned_tier": tier, "planned_source": source, "chunk": None, "tokens": 9}
        part |= {"cached_tokens": 0, "loaded_tokens": 0, "computed_tokens": 9}
        part |= {"recomputed_tokens": 0, "reason": "", "tier": None}
    explanation = {"parts": parts, "plan": {"predicted_ms": None}, "time": None}
    planned = await page.evaluate(
        "import('./console/explain.js').then((explain) =>"
        f"explain.explainParts({json.dumps(explanation)}).map((part) => part.planned))"
    )
    assert planned == [
        {
            "word": "Load",
            "from": "disk of store 10.0.0.7:7000",
            "reason": "It is stored after the same prefix.",
            "isKept": True,
        },
        {
            "word": "Blend",
            "from": "host of engine 10.0.0.9:8100",
            "reason": "It is stored, but only after another prefix.",
            "isKept": False,
        },
        {"word": "Compute", "from": "", "reason": "It is not stored.", "isKept": True},
        None,
    ]


async def test_side_by_side_compares_times_tokens_and_answers(gateway: World, page: Page) -> None:
    await explained(gateway)
    await compare_and_wait(page)
    modes = [body["ragcache"]["reuse"] for body in map(json.loads, page.bodies)]
    assert modes == ["exact", "off"]
    rows = await texts(page, "#compare-result .pairs tbody tr")
    assert any(row.startswith("Time to the first token") and "ms" in row for row in rows)
    assert any(row.startswith("Tokens loaded") for row in rows)
    assert "The two answers are equal." in await texts(page, "#compare-result .summary")
    assert len(await texts(page, ".sides .steps")) == 2
    assert page.errors == []


async def test_a_question_can_limit_its_answer(gateway: World, page: Page) -> None:
    for limit in ("", "48"):
        await fill(page, "ask-max-tokens", limit)
        await ask_and_wait(page)
    bodies = [json.loads(body) for body in page.bodies]
    assert "max_tokens" not in bodies[0]
    assert bodies[1]["max_tokens"] == 48
    assert page.errors == []


async def test_a_long_answer_does_not_hide_the_steps_before_it(page: Page) -> None:
    steps = [("Prefill", "prefill", 0, 100), ("Generate the answer", "answer", 100, 5000)]
    drawn = await page.evaluate(
        "import('./console/steps.js').then(({drawSteps, step}) => {"
        f"const rows = {json.dumps(steps)}.map((one) => step(...one));"
        "const table = drawSteps('Steps', rows, 5000, 100);"
        "const bars = [...table.querySelectorAll('.bar')];"
        "return bars.map((bar) => [bar.className, parseFloat(bar.style.width)]);})"
    )
    # The time line ends after 140 ms.
    assert [name for name, _ in drawn] == ["bar prefill", "bar answer cut"]
    assert [width for _, width in drawn] == pytest.approx([100 / 1.4, 40 / 1.4], abs=0.01)


async def test_tabs_are_used_by_keyboard(page: Page) -> None:
    focused = "document.activeElement.id"
    shown = "[...document.querySelectorAll('[role=tabpanel]')].filter((p) => !p.hidden)[0].id"
    await page.evaluate("document.getElementById('key').focus()")
    await page.press("Tab")
    await page.press("Tab")
    assert await page.evaluate(focused) == "tab-ask"
    for key, view in (
        ("ArrowRight", "compare"),
        ("End", "platform"),
        ("ArrowRight", "ask"),
        ("ArrowLeft", "platform"),
        ("Home", "ask"),
    ):
        await page.press(key)
        assert await page.evaluate(focused) == f"tab-{view}"
        assert await page.evaluate(shown) == f"panel-{view}"
    await page.press("Tab")
    await page.press("Tab")
    assert await page.evaluate(focused) == "ask-question"
    assert page.errors == []


async def test_markup_in_an_answer_stays_text(gateway: World, page: Page) -> None:
    gateway.engine.words = ["<img src=x ", "onerror=alert(1)>"]
    await ask_and_wait(page)
    assert await texts(page, "#ask-answer .answer-text") == ["<img src=x onerror=alert(1)>"]
    assert await texts(page, "#ask-answer img") == []


async def test_the_platform_shows_engines_tiers_and_collections(gateway: World, page: Page) -> None:
    gateway.store.stats = cachestore_pb2.StatsReply(
        variants=4821,
        memory_bytes=3 << 29,
        memory_capacity_bytes=1 << 31,
        hits_memory=90,
        misses=10,
    )
    await gateway.ask()
    await select_tab(page, "platform")
    await page.until("document.querySelectorAll('#panel-platform table').length === 5")
    cache = await texts(page, "#platform-cache tr")
    assert "Variants4,821" in cache
    assert "Memory tier1.5 GiB of 2.0 GiB" in cache
    assert "Hit rate90.0 %" in cache
    engines = await texts(page, "#platform-engines tbody tr")
    assert ["ready000.00 ms0" in row for row in engines] == [True]
    assert (await texts(page, "#platform-collections tbody td"))[0] == "default"
    assert "Prompt tokens reused65" in await texts(page, "#platform-savings tr")
    assert page.errors == []


async def test_the_page_sends_requests_to_its_gateway_alone(gateway: World, page: Page) -> None:
    await ask_and_wait(page)
    assert page.urls
    assert {url.startswith(gateway.base_url) for url in page.urls if url != "about:blank"} == {True}


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_is_accessible(
    gateway: World, page: Page, screenshots: Path, scheme: str
) -> None:
    await explained(gateway)
    await page.set_color_scheme(scheme)
    await ask_and_wait(page)
    assert await page.serious_findings() == []
    await page.screenshot(screenshots / f"ask-{scheme}.png")
    await compare_and_wait(page)
    assert await page.serious_findings() == []
    await page.screenshot(screenshots / f"compare-{scheme}.png")
    await select_tab(page, "platform")
    await page.until("document.querySelectorAll('#panel-platform table').length === 5")
    assert await page.serious_findings() == []
    await page.screenshot(screenshots / f"platform-{scheme}.png")


async def test_a_phone_needs_no_sideways_scrolling(
    gateway: World, page: Page, screenshots: Path
) -> None:
    await explained(gateway)
    await page.set_size(390, 844, is_phone=True)
    await ask_and_wait(page)
    assert await page.evaluate(FITS)
    assert await page.serious_findings() == []
    await page.screenshot(screenshots / "ask-phone.png")
    await compare_and_wait(page)
    assert await page.evaluate(FITS)
    await page.screenshot(screenshots / "compare-phone.png")


async def test_the_console_can_be_off(tiny_model: Path) -> None:
    async with world(tiny_model, console="off") as gateway:
        assert (await gateway.client.get("/console")).status_code == 404
        assert (await gateway.client.get("/console/main.js")).status_code == 404


async def test_the_page_is_also_found_with_a_slash(gateway: World) -> None:
    moved = await gateway.client.get("/console/", follow_redirects=True)
    assert moved.status_code == 200
    assert moved.url.path == "/console"


async def test_answers_are_compared_by_words(page: Page) -> None:
    words = await page.evaluate(
        "import('./console/explain.js')"
        ".then((explain) => explain.diffWords('It runs in Oslo.', 'It is in Oslo.'))"
    )
    assert [(word["text"], word["side"]) for word in words] == [
        ("It", "both"),
        ("runs", "left"),
        ("is", "right"),
        ("in", "both"),
        ("Oslo.", "both"),
    ]


async def test_events_are_found_wherever_the_stream_is_cut(page: Page) -> None:
    stream = 'event: ragcache.stage\ndata: {"stage": "plan"}\n\n'
    stream += 'data: {"a": 1}\n\n: waiting\n\ndata: {"b": "x y"}\n\ndata: [DONE]\n\n'
    found = await page.evaluate(
        "import('./console/api.js').then(({EventParser}) => {"
        "const parser = new EventParser();"
        f"return [...{json.dumps(stream)}].flatMap((one) => parser.push(one));}})"
    )
    assert found == [
        {"name": "ragcache.stage", "data": {"stage": "plan"}},
        {"name": "", "data": {"a": 1}},
        {"name": "", "data": {"b": "x y"}},
    ]
