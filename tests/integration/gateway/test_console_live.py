"""The console in a real browser: stages as they come, the knowledge tree, curves over time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.browser import (
    FITS,
    Page,
    begin_to_ask,
    console_page,
    needs_chromium,
    select_tab,
    submit,
    texts,
    until_answered,
)
from ragcache_wire.v1 import cachestore_pb2
from tests.integration.gateway.test_speculation import hit, speculating
from tests.kit.gateway import HeldStage, World, until_predicted, world

pytestmark = needs_chromium

MODULES = "const [live, series, platform] = await Promise.all(['live', 'series', 'platform']"
MODULES += ".map((name) => import(`./console/${name}.js`)));"


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with world(tiny_model) as running:
        await until_predicted(running.client)
        yield running


async def until_stage(page: Page, words: str) -> None:
    """Wait until the list of stages has one with these words."""
    listed = "[...document.querySelectorAll('.stages li')]"
    await page.until(f"{listed}.some((one) => one.textContent.includes({json.dumps(words)}))")


async def computed(page: Page, code: str) -> Any:
    """Return what code with the page's modules returns."""
    return await page.evaluate(f"(async () => {{ {MODULES} {code} }})()")


async def test_stages_are_shown_before_the_answer_has_begun(
    gateway: World, page: Page, screenshots: Path
) -> None:
    gateway.retriever.hold = asyncio.Event()
    gateway.engine.prefill = asyncio.Event()
    await begin_to_ask(page)
    await until_stage(page, "50.0 % searched: 1 hit, final with a probability of 0.0 %")
    assert gateway.engine.requests == []
    [clock] = await texts(page, ".clock")
    before = float(clock.removesuffix(" s"))
    await page.until(
        f"parseFloat(document.querySelector('.clock').textContent) > {before}",
    )
    assert [row.startswith("Search") for row in await texts(page, ".steps td:first-child")] == [
        True
    ]
    gateway.retriever.hold.set()
    await until_stage(page, "The search has ended with 2 hits")
    await until_stage(page, "The plan is made: 3 chunks (3 to compute)")
    await until_stage(page, "has accepted the request")
    assert await texts(page, "#ask-answer .answer-text") == [""]
    rows = await texts(page, ".steps td:first-child")
    assert [row.split(" ")[0] for row in rows] == ["Search2", "Build", "Engine:"]
    assert await page.serious_findings() == []
    await page.screenshot(screenshots / "live.png")
    gateway.engine.prefill.set()
    await until_answered(page)
    await until_stage(page, "The first token has come")
    assert await texts(page, "#ask-answer .answer-text") == ["".join(gateway.engine.words)]
    assert await texts(page, ".clock") == []
    assert page.errors == []


async def test_guesses_are_shown_while_the_search_runs(
    tiny_model: Path, tmp_path: Path, screenshots: Path
) -> None:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(speculating(tiny_model))
        page = await stack.enter_async_context(console_page(gateway.base_url, tmp_path / "profile"))
        stages = [HeldStage([hit("one"), hit("two")], 0.9), HeldStage([hit("three")], 0.02)]
        gateway.retriever.stages = stages
        await begin_to_ask(page)
        await until_stage(page, "final with a probability of 90.0 %")
        await until_stage(page, "A guess is computed while the search runs")
        stages[0].go_on.set()
        await until_stage(page, "The guess is cancelled: the hits have changed")
        assert gateway.retriever.stages[1].go_on.is_set() is False
        rows = await texts(page, ".steps td:first-child")
        assert any(row.startswith("Speculationcancelled") for row in rows), rows
        await page.screenshot(screenshots / "live-speculation.png")
        stages[1].go_on.set()
        await until_answered(page)
        await until_stage(page, "The guess was wrong")
        await until_stage(page, "predicted ")
        assert page.errors == []


async def test_an_error_after_the_stages_is_shown(gateway: World, page: Page) -> None:
    gateway.engine.refuse = (400, {"error": {"message": "is far too long", "code": 400}})
    await begin_to_ask(page)
    await page.until("document.querySelector('#ask-answer .error') !== null")
    [error] = await texts(page, "#ask-answer .error")
    assert "is far too long" in error
    await until_stage(page, "The plan is made")
    assert page.errors == []


async def test_a_phone_shows_the_stages_without_sideways_scrolling(
    gateway: World, page: Page, screenshots: Path
) -> None:
    await page.set_size(390, 844, is_phone=True)
    gateway.engine.prefill = asyncio.Event()
    await begin_to_ask(page)
    await until_stage(page, "has accepted the request")
    assert await page.evaluate(FITS)
    await page.screenshot(screenshots / "live-phone.png")
    gateway.engine.prefill.set()
    await until_answered(page)


async def open_tree(gateway: World, page: Page) -> None:
    """Have chunks in the tree, some of them used more than others, and show it."""
    await gateway.ask()
    gateway.retriever.hits = gateway.retriever.hits[1:]
    for _ in range(3):
        await gateway.ask()
    await select_tab(page, "tree")
    await page.until("document.querySelectorAll('[role=treeitem]').length > 0")


def treeitem(expression: str) -> str:
    return f"[...document.querySelectorAll('[role=treeitem]')].{expression}"


async def test_the_tree_shows_heat_and_tiers_in_words(gateway: World, page: Page) -> None:
    await open_tree(gateway, page)
    items = await texts(page, "[role=treeitem]")
    names = await texts(page, "[role=treeitem] .node-name")
    chunks = [name for name in names if "#" in name]
    assert chunks == [
        "Title of search.md (search.md#0)",
        "Title of billing.md (billing.md#0)",
        "Title of billing.md (billing.md#1)",
        "Title of search.md (search.md#0)",
    ]
    hottest = items[names.index("Title of search.md (search.md#0)")]
    # The first of three prompts has added the node, the others have used it.
    [uses] = re.findall(r"([0-9.]+) uses", hottest.removeprefix("Title of search.md (search.md#0)"))
    assert float(uses) == pytest.approx(2, abs=0.1)
    assert "device of engine 127.0.0.1:" in hottest
    assert await texts(page, "[role=treeitem] .badge") == ["device"] * len(items)
    widths = await page.evaluate(
        "[...document.querySelectorAll('.heat > span')].map((bar) => parseFloat(bar.style.width))"
    )
    assert max(widths) == widths[0] == 100
    assert min(widths) < widths[0]
    [state] = await texts(page, "#tree-state")
    assert state == f"{len(items)} of {len(items)} nodes, the most used ones."
    assert page.errors == []


async def test_the_tree_is_used_by_keyboard(gateway: World, page: Page) -> None:
    await open_tree(gateway, page)
    focused = treeitem("indexOf(document.activeElement)")
    expanded = "document.activeElement.getAttribute('aria-expanded')"
    shown = treeitem("filter((one) => one.checkVisibility()).length")
    count = await page.evaluate(treeitem("length"))
    await page.evaluate("document.getElementById('tree-limit').focus()")
    await page.press("Tab")
    await page.press("Tab")
    assert await page.evaluate(focused) == 0
    all_shown = await page.evaluate(shown)
    await page.press("ArrowLeft")
    assert (await page.evaluate(expanded), await page.evaluate(shown)) == ("false", 1)
    await page.press("ArrowRight")
    assert (await page.evaluate(expanded), await page.evaluate(shown)) == ("true", all_shown)
    await page.press("ArrowRight")
    assert await page.evaluate(focused) == 1
    await page.press("ArrowDown")
    second = await page.evaluate(focused)
    assert second > 1
    await page.press("ArrowUp")
    assert await page.evaluate(focused) == 1
    await page.press("End")
    last = await page.evaluate(focused)
    assert last >= second
    await page.press("Home")
    assert await page.evaluate(focused) == 0
    await page.press("Enter")
    assert await page.evaluate(expanded) == "false"
    # A node stays closed when the tree is read again.
    await submit(page, "tree-form")
    await page.until(f"document.getElementById('tree-state').textContent.startsWith('{count}')")
    assert await page.evaluate(shown) == 1
    assert await page.evaluate(treeitem("filter((one) => one.tabIndex === 0).length")) == 1
    assert page.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_tree_and_the_curves_are_accessible(
    gateway: World, page: Page, screenshots: Path, scheme: str
) -> None:
    gateway.store.stats = cachestore_pb2.StatsReply(
        memory_bytes=1 << 30,
        memory_capacity_bytes=1 << 31,
        disk_bytes=1 << 30,
        variants=10,
        disk_capacity_bytes=1 << 32,
        hits_memory=9,
        misses=1,
        bytes_by_precision={"native": 3 << 28, "packed": 1 << 28},
    )
    await page.set_color_scheme(scheme)
    await open_tree(gateway, page)
    assert await page.serious_findings() == []
    await page.screenshot(screenshots / f"tree-{scheme}.png")
    await select_tab(page, "platform")
    await page.until("document.querySelectorAll('#panel-platform .curve').length === 8")
    assert await page.serious_findings() == []
    await page.screenshot(screenshots / f"curves-{scheme}.png")
    curves = await texts(page, "#platform-cache .legend li")
    assert curves == [
        "memory tier used 50.0 %",
        "disk tier used 25.0 %",
        "hit rate 90.0 %",
        "native 75.0 %",
        "packed 25.0 %",
    ]
    assert page.errors == []


async def test_a_phone_shows_tree_and_curves_without_sideways_scrolling(
    gateway: World, page: Page, screenshots: Path
) -> None:
    await page.set_size(390, 844, is_phone=True)
    await open_tree(gateway, page)
    assert await page.evaluate(FITS)
    assert await page.serious_findings() == []
    await page.screenshot(screenshots / "tree-phone.png")
    await select_tab(page, "platform")
    await page.until("document.querySelectorAll('#panel-platform table').length === 5")
    assert await page.evaluate(FITS)
    await page.screenshot(screenshots / "curves-phone.png")


async def test_an_empty_tree_says_so(gateway: World, page: Page) -> None:
    await select_tab(page, "tree")
    await page.until(
        "document.getElementById('tree-state').textContent.startsWith('The tree is empty')"
    )
    assert await texts(page, "[role=treeitem]") == []


async def test_the_progress_of_prepared_documents_is_shown(gateway: World, page: Page) -> None:
    collection = gateway.retriever.collections["default"]
    collection.remake.documents_done, collection.remake.documents = 3, 12
    collection.remake.reason = "chunking"
    await select_tab(page, "platform")
    await page.until("document.querySelector('progress') !== null")
    bar = "(({value, max}) => [value, max])(document.querySelector('progress'))"
    assert await page.evaluate(bar) == [3, 12]
    [state] = await texts(page, "#platform-collections td:last-child")
    assert state == "3 of 12 prepared again: chunking"
    assert await page.serious_findings() == []


async def test_series_are_bounded_and_keep_the_latest_points(page: Page) -> None:
    kept = await computed(
        page,
        "const one = new series.Series();"
        "for (let i = 0; i < 1000; i += 1) one.push({x: i}, i);"
        "return one.points.map((point) => point.values.x);",
    )
    assert kept == list(range(700, 1000))


async def test_a_curve_has_time_and_value_to_scale(page: Page) -> None:
    drawn = await computed(
        page,
        "const points = [[0, 0], [1000, null], [3000, 1], [4000, 0.5]]"
        ".map(([atMs, x]) => ({atMs, values: {x}}));"
        "return [series.polyline(points, 'x', 1), series.polyline(points, 'other', 1)];",
    )
    assert drawn == ["0.0,58.0 180.0,2.0 240.0,30.0", ""]


async def test_the_rate_of_ingest_is_that_since_the_view_was_opened(page: Page) -> None:
    words = await computed(
        page,
        "const point = (atMs, documents, chunks) => ({atMs, values: {documents, chunks}});"
        "const {ingestWords} = platform;"
        "return [ingestWords([point(0, 5, 50)]),"
        " ingestWords([point(0, 5, 50), point(5000, 7, 70), point(10000, 9, 90)]),"
        " ingestWords([point(0, 5, 50), point(10000, 3, 30)])];",
    )
    assert words == [
        "No document has come or gone since this view was opened.",
        "+4 documents and +40 chunks since this view was opened, 4.0 chunks/s.",
        "-2 documents and -20 chunks since this view was opened, -2.0 chunks/s.",
    ]


async def test_rows_of_the_live_waterfall_follow_the_stages(page: Page) -> None:
    stages: list[dict[str, Any]] = [
        {"stage": "search_begun", "elapsed_ms": 2, "search": 1},
        {"stage": "guess", "elapsed_ms": 5, "outcome": "started", "tokens": 40},
        {
            "stage": "search",
            "elapsed_ms": 20,
            "search": 1,
            "hits": 2,
            "progress": 1,
            "final_probability": 1,
            "final": True,
        },
        {"stage": "guess", "elapsed_ms": 21, "outcome": "confirmed", "tokens": 40},
        {
            "stage": "plan",
            "elapsed_ms": 25,
            "engine": "e",
            "prompt_tokens": 100,
            "parts": [
                {"chunk": None, "tokens": 10, "planned": "cached", "reason": "resident"},
                {"chunk": "a#0", "tokens": 40, "planned": "load", "reason": "stored"},
                {"chunk": "b#0", "tokens": 40, "planned": "blend", "reason": "other_prefix"},
            ],
            "predicted_ms": {"total": 30, "queue": 0, "load": 5, "recompute": 5, "prefill": 20},
        },
    ]
    rows = await computed(page, f"return live.liveRows({json.dumps(stages)}, 40, null);")
    assert [(row["name"], row["startMs"], row["endMs"]) for row in rows] == [
        ("Search", 2, 20),
        ("Speculation", 5, 21),
        ("Build and plan the prompt", 20, 25),
        ("Engine: load, recompute and prefill", 25, 40),
    ]
    assert rows[2]["note"] == "2 chunks (1 to load, 1 to blend), 100 tokens, predicted 30.0 ms"
    assert rows[3]["predictedMs"] == 30
    ended = await computed(page, f"return live.liveRows({json.dumps(stages)}, 90, 60);")
    assert [(row["name"], row["endMs"]) for row in ended[-2:]] == [
        ("Engine: load, recompute and prefill", 60),
        ("Generate the answer", 90),
    ]
    alone = await computed(page, "return live.liveRows([], 90, 60).map((row) => row.name);")
    assert alone == ["Search, plan and prefill", "Generate the answer"]
