"""A real engine is killed in the middle of its answer, and another one carries the answer on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from harness.processes import Engine, Service, free_port, running_cachestore, running_engine
from tests.integration.gateway.test_real_engine import RetrieverThread, is_answering
from tests.kit.engine import samples, total

pytestmark = pytest.mark.timeout(900)

MODEL = Path(__file__).parents[3] / "models" / "tinyrag" / "model"
ASK: Any = [{"role": "user", "content": "Where does billing run?"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
SENT = 8
"""Events that the client gets from the engine that is lost."""


@dataclass(frozen=True)
class Pair:
    """A gateway process and its two engines."""

    client: openai.OpenAI
    engines: tuple[Engine, ...]

    def text_after(self, events: Any) -> str:
        return "".join(one.choices[0].delta.content or "" for one in events if one.choices)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        retriever = RetrieverThread()
        stack.callback(retriever.stop)
        store = stack.enter_context(running_cachestore(tmp_path / "store"))
        engines = tuple(
            stack.enter_context(running_engine(tmp_path / name, MODEL, store.address))
            for name in ("first", "second")
        )
        port = free_port()
        settings = {
            "RAGCACHE_LISTEN": f"127.0.0.1:{port}",
            "RAGCACHE_RETRIEVER": retriever.address,
            "RAGCACHE_ENGINES": ",".join(str(one.address) for one in engines),
            "RAGCACHE_CACHESTORE": store.address,
            "RAGCACHE_MODEL": str(MODEL),
            "RAGCACHE_MODEL_NAME": "model",
            "RAGCACHE_MAX_MODEL_LEN": "4096",
        }
        command = [sys.executable, "-m", "ragcache_gateway"]
        gateway = Service("gateway", command, settings, tmp_path / "gateway.log")
        stack.callback(gateway.stop)
        url = f"http://127.0.0.1:{port}"
        gateway.wait_until("ready", lambda: is_answering(url))
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        yield Pair(client, engines)


def test_an_answer_goes_on_when_its_engine_is_killed(pair: Pair) -> None:
    ask = pair.client.chat.completions
    whole = pair.text_after(ask.create(model="model", messages=ASK, stream=True, **GREEDY))
    events = iter(ask.create(model="model", messages=ASK, stream=True, **GREEDY))
    before = [next(events) for _ in range(SENT)]
    [lost] = [one for one in pair.engines if total(samples(one.url, "vllm:num_requests_running"))]
    lost.service.freeze()
    lost.service.kill()
    after = list(events)
    told = [one.model_extra["ragcache"] for one in after if "ragcache" in (one.model_extra or {})]
    assert [one["resumed"] for one in told if "resumed" in one] == [{"same_text": True}]
    assert pair.text_after(before + after) == whole
