"""A trace continues in the engine and in the store, with real servers of both."""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.completion import complete
from harness.otlp import Collector, attributes_of, collector, orphans, traced_request
from harness.plans import blend_for_all, exact_for_all
from harness.processes import (
    Service,
    free_port,
    launch_engine,
    start_cachestore,
    wait_for_engine,
)
from ragcache_core.plan.prompt import Prompt
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_kv.model.folder import load_model_folder
from ragcache_operator.builders.engine import (
    vllm_arguments,
    vllm_environment,
)
from tests.integration.engine.test_blend import ENGINE_ARGUMENTS, make_blend_prompt
from tests.integration.engine.test_vllm import Platform
from tests.integration.gateway.test_real_engine import RetrieverThread, is_answering
from tests.kit.operator import make_cache
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(600)

CALLER = "b7ad6b7169203331"
PROMPT = make_blend_prompt(0, 1, 2)
SEGMENTS = 4  # one of them is the template
TIER = "load tier"
"""A span below that of a load, for each tier that it has read."""

# A short delay, so that the test does not wait. The operator sets the rest.
SETTINGS = {"OTEL_BSP_SCHEDULE_DELAY": "100", "NO_PROXY": "127.0.0.1"}


@dataclass
class Traced:
    """An engine and its store, which send their spans to the receiver."""

    receiver: Collector
    platform: Platform

    def ask(self, prompt: Prompt, plan: ReusePlan, trace_id: str, flags: str = "01") -> None:
        complete(
            self.platform.engine.url,
            prompt.token_ids,
            max_tokens=4,
            plan=plan.encode(),
            # Bypasses vLLM's own prefix cache.
            cache_salt=uuid.uuid4().hex,
            headers={"traceparent": f"00-{trace_id}-{CALLER}-{flags}"},
        )

    def exact(self, prompt: Prompt) -> ReusePlan:
        return exact_for_all(prompt, self.platform.space, "public", uuid.uuid4().hex)

    def blend(self, prompt: Prompt, recompute_share: float) -> ReusePlan:
        return blend_for_all(
            prompt, self.platform.space, "public", uuid.uuid4().hex, recompute_share
        )

    def spans(self, part: str, trace_id: str) -> list[Any]:
        return [s for s in self.receiver.spans_of(part) if s.trace_id.hex() == trace_id]

    def names(self, part: str, trace_id: str) -> Counter[str]:
        return Counter(span.name for span in self.spans(part, trace_id) if span.name != TIER)

    def all_of(self, traces: Container[str]) -> list[Any]:
        return [s for s in self.receiver.spans() if s.trace_id.hex() in traces]


@pytest.fixture(scope="module")
def traced(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    with collector() as receiver:
        cache = make_cache(telemetry={"otlp": {"endpoint": receiver.url}})
        settings = {**SETTINGS, "RAGCACHE_OTLP_ENDPOINT": receiver.url}
        store = start_cachestore(folder / "store", env=settings)
        engine = launch_engine(
            folder,
            tiny_model,
            store.address,
            *ENGINE_ARGUMENTS,
            *vllm_arguments(cache),
            settings={**settings, **vllm_environment(cache)},
        )
        space = load_model_folder(str(tiny_model)).space("auto")
        platform = Platform(folder, tiny_model, store, engine, space)
        try:
            wait_for_engine(engine)
            yield Traced(receiver, platform)
        finally:
            engine.service.stop()
            store.service.stop()


def trace(number: int) -> str:
    return f"{number:032x}"


def parents(spans: list[Any]) -> set[str]:
    return {span.parent_span_id.hex() for span in spans}


def test_a_computed_prompt_has_spans_of_its_lookup_and_saves(traced: Traced) -> None:
    traced.ask(PROMPT, traced.blend(PROMPT, 0.0), trace(1))
    expected = {"llm_request": 1, "lookup": 1, "save": SEGMENTS, "observe": 3}
    expected["save observation"] = 3
    wait_until(lambda: traced.names("engine", trace(1)) == expected)
    puts = [span for span in traced.spans("engine", trace(1)) if span.name.startswith("save")]
    wait_until(lambda: traced.names("cachestore", trace(1))["Put"] == len(puts))
    assert parents(traced.spans("engine", trace(1))) == {CALLER}
    below = [span for span in traced.spans("cachestore", trace(1)) if span.name == "Put"]
    assert parents(below) == {span.span_id.hex() for span in puts}
    assert {attributes_of(span)["outcome"] for span in puts} == {"stored"}


def test_a_loads_span_is_below_its_caller_and_above_the_store(traced: Traced) -> None:
    traced.platform.wait_until_stored(PROMPT)
    traced.ask(PROMPT, traced.exact(PROMPT), trace(2))
    expected = {"llm_request": 1, "lookup": 1, "load": 1}
    wait_until(lambda: traced.names("engine", trace(2)) == expected)
    wait_until(lambda: TIER in {s.name for s in traced.spans("engine", trace(2))})
    by_name = {span.name: span for span in traced.spans("engine", trace(2))}
    tier = by_name.pop(TIER)
    assert tier.parent_span_id == by_name["load"].span_id
    assert attributes_of(tier)["tier"] == "store"
    assert attributes_of(tier)["tokens"] == PROMPT.chunk_ends[-1]
    assert parents(list(by_name.values())) == {CALLER}
    assert attributes_of(by_name["lookup"]) == {
        "segments": SEGMENTS,
        "stored": SEGMENTS,
        "blend": False,
    }
    assert attributes_of(by_name["load"])["tokens"] == PROMPT.chunk_ends[-1]
    assert attributes_of(by_name["load"])["bytes"] == sum(map(len, traced.platform.values(PROMPT)))
    assert "miss" not in attributes_of(by_name["load"])
    wait_until(lambda: set(traced.names("cachestore", trace(2))) == {"Lookup", "Get"})
    for span in traced.spans("cachestore", trace(2)):
        above = by_name["load" if span.name == "Get" else "lookup"]
        assert span.parent_span_id == above.span_id


def test_a_recomputation_has_its_own_span(traced: Traced) -> None:
    prompt = make_blend_prompt(2, 0)
    traced.ask(prompt, traced.blend(prompt, 0.5), trace(3))
    wait_until(lambda: {"load", "recompute"} <= set(traced.names("engine", trace(3))))
    [recompute] = [span for span in traced.spans("engine", trace(3)) if span.name == "recompute"]
    assert parents([recompute]) == {CALLER}
    attributes = attributes_of(recompute)
    assert 0 < attributes["recomputed"] <= attributes["blended"]


def test_unsampled_and_malformed_traces_make_no_spans(traced: Traced) -> None:
    before = len(traced.receiver.spans())
    traced.ask(PROMPT, traced.exact(PROMPT), trace(4), flags="00")
    traced.ask(PROMPT, traced.exact(PROMPT), "nonsense")
    traced.ask(PROMPT, traced.exact(PROMPT), trace(5))
    wait_until(lambda: traced.names("engine", trace(5))["llm_request"] == 1)
    wait_until(lambda: {"load", "lookup"} <= set(traced.names("engine", trace(5))))
    new = traced.receiver.spans()[before:]
    # Spans of the tests before this one may have been late.
    assert {span.trace_id.hex() for span in new} <= {trace(n) for n in (1, 2, 3, 5)}


@contextmanager
def traced_gateway(traced: Traced, retriever: RetrieverThread) -> Iterator[str]:
    """Run a gateway of the traced engine; yield its URL. Its end sends its last spans."""
    platform, port = traced.platform, free_port()
    assert platform.engine.records is not None
    records = platform.engine.records.rpartition(":")[2]
    settings = {
        **SETTINGS,
        "RAGCACHE_OTLP_ENDPOINT": traced.receiver.url,
        "RAGCACHE_LISTEN": f"127.0.0.1:{port}",
        "RAGCACHE_RETRIEVER": retriever.address,
        "RAGCACHE_ENGINES": f"{platform.engine.url};records={records}",
        "RAGCACHE_CACHESTORE": platform.store.address,
        "RAGCACHE_MODEL": str(platform.model),
        "RAGCACHE_MODEL_NAME": "model",
        "RAGCACHE_MAX_MODEL_LEN": "2048",
    }
    command = [sys.executable, "-m", "ragcache_gateway"]
    gateway = Service("gateway", command, settings, platform.folder / "gateway.log")
    url = f"http://127.0.0.1:{port}"
    try:
        gateway.wait_until("ready", lambda: is_answering(url))
        yield url
    finally:
        gateway.stop()


def test_the_parts_of_20_questions_add_up_and_no_span_is_an_orphan(traced: Traced) -> None:
    traces = [trace(number) for number in range(100, 120)]
    route = "/v1/chat/completions"
    retriever = RetrieverThread()
    try:
        with traced_gateway(traced, retriever) as url:
            for number, trace_id in enumerate(traces):
                # Every second question repeats the one before, so that its KV is reused.
                text = f"Where does billing {number // 2} run? " * 40
                body = {
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": 4,
                    "stream": number % 4 < 2,
                    "ragcache": {"retrieve": number % 3 > 0},
                }
                headers = {"traceparent": f"00-{trace_id}-{CALLER}-01"}
                answer = httpx.post(f"{url}{route}", json=body, headers=headers, timeout=60)
                assert answer.status_code == 200, answer.text
    finally:
        retriever.stop()
    wanted = {
        "read",
        "tokenize",
        "plan",
        "engine",
        "llm_request",
        "lookup",
        "Lookup",
        "save",
        "Put",
    }
    wait_until(lambda: wanted <= {span.name for span in traced.all_of(traces)})
    wait_until(lambda: not orphans(traced.all_of(traces), [CALLER]))
    requests = [traced_request(traced.all_of(traces), one, route) for one in traces]
    # A tiny model answers in milliseconds, so a pause of one question may be longer than its time.
    # The three longest gaps do not count. Of each kind of question there are more.
    gaps_s = sorted(one.waited_s() - one.parts_s(one.answered_ns) for one in requests)
    assert abs(sum(gaps_s[:-3])) < 0.05 * sum(one.waited_s() for one in requests)
