"""Measures what prefill and decode in separate engines gain for answers beside long prompts.

Two engines with one core each and a cache store are behind two gateways. For one gateway the
first engine has the role ``prefill`` and the second one ``decode``; for the other gateway both
engines do all. Turns of the gateways alternate. In each turn a few clients read long answers, while
another one asks questions with long prompts, one after the other. All prompts are new.

- ``tbt_p99_together_over_apart``: 99th percentile of the time between two tokens of the long
  answers while a long prompt is computed, without roles over with them.
- ``ttft_pair_over_one``: median time to the first token of long prompts, with roles over without.
- ``pair_share``: share of the long prompts that two engines answered, with roles.
- ``load_share``: median share of that time, with roles, in which the second engine loads. What an
  engine could gain at most if it loaded a prompt while the other one computes it.
- ``visible_ms``: from an engine's first token until a lookup finds the KV of its prompt, if layers
  are sent as they end, and if they are sent after the pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.support.gateway_load.simulated_parts import HOST, start_gateway
from bench.support.gateway_load.stand_ins import FixedRetriever, serve_parts
from bench.support.number_type import fast_number_type
from bench.support.program import is_quick, print_figures, say
from harness.completion import complete
from harness.processes import Engine, free_port, launch_engine, running_cachestore, wait_for_engine
from ragcache_cli.models.cache import fetch_model
from ragcache_core.plan.prompt import assemble, plan_exact
from ragcache_core.plan.reuse_plan import Handoff
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import retriever_pb2 as pb

APART, TOGETHER = "apart", "together"
TOP_K = 4
CHUNK_TOKENS = 256
NUM_ANSWERS = 4
"""Long answers at once."""
ANSWER_TOKENS = 1000
QUESTION_TOKENS = 4
"""Of the answers to long prompts."""
PASS_TOKENS = 256
"""Prompt tokens in one step of an engine, so that a prompt delays each token of others a little."""
VISIBLE_TOKENS = 1024


class FreshRetriever(FixedRetriever):
    """Returns chunks to every search that no other search has got."""

    async def Search(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        numbers = [random.getrandbits(60) for _ in range(request.top_k)]
        chunks = [self._chunk(number, CHUNK_TOKENS) for number in numbers]
        hits = [pb.Hit(chunk=chunk, score=1.0) for chunk in chunks]
        yield pb.SearchStage(hits=hits, final=True, progress=1)


@dataclass(slots=True)
class Contestant:
    """A gateway, and what was measured of it, in seconds.

    Attributes:
        tbt_s: Between two tokens of a long answer, while a long prompt was computed.
        ttft_s: Of long prompts.
        load_share: Of the time to the first token, for long prompts that two engines answered.
    """

    client: httpx.AsyncClient
    tbt_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    load_share: list[float] = field(default_factory=list)

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[tuple[float, dict[str, Any]]]:
        """Ask, and yield the time and the content of each event with text, and of the last one."""
        asked = {"temperature": 0, "stream": True, "ignore_eos": True, **body}
        async with self.client.stream("POST", "/v1/chat/completions", json=asked) as reply:
            if reply.status_code != httpx.codes.OK:
                raise RuntimeError(f"the gateway said {reply.status_code}: {await reply.aread()!r}")
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                event = json.loads(data)
                has_text = any(one["delta"].get("content") for one in event.get("choices", ()))
                if has_text or event.get("ragcache"):
                    yield time.monotonic(), event


async def measure_turn(contestant: Contestant, num_questions: int) -> None:
    """Ask long prompts one after the other while long answers are generated."""
    prefilling: list[tuple[float, float]] = []
    tokens: list[list[float]] = []
    started = [asyncio.Event() for _ in range(NUM_ANSWERS)]

    async def read_answers(has_started: asyncio.Event) -> None:
        while True:
            times: list[float] = []
            tokens.append(times)
            name = uuid.uuid4().hex
            question = {"role": "user", "content": f"{name}: tell a long story."}
            body = {"messages": [question], "max_tokens": ANSWER_TOKENS}
            async for at, _ in contestant.stream({**body, "ragcache": {"retrieve": False}}):
                times.append(at)
                has_started.set()

    readers = [asyncio.create_task(read_answers(one)) for one in started]
    try:
        await asyncio.gather(*(one.wait() for one in started))
        for _ in range(num_questions):
            began = time.monotonic()
            body = {
                "messages": [{"role": "user", "content": uuid.uuid4().hex}],
                "max_tokens": QUESTION_TOKENS,
                "ragcache": {"reuse": "exact", "top_k": TOP_K, "explain": True},
            }
            first_s = None
            async for at, event in contestant.stream(body):
                if first_s is None:
                    first_s = at
                extension = event.get("ragcache", {})
                if "explanation" in extension:  # in the last event
                    plan, timing = extension["explanation"]["plan"], extension["timing_ms"]
                    if plan["prefill_engine"] != plan["engine"]:
                        contestant.load_share.append(
                            (timing["load"] or 0.0) / timing["first_token"]
                        )
            assert first_s is not None
            contestant.ttft_s.append(first_s - began)
            prefilling.append((began, first_s))
    finally:
        for reader in readers:
            reader.cancel()
        ended = await asyncio.gather(*readers, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    for times in tokens:
        for before, at in itertools.pairwise(times):
            if any(began < at and before < first for began, first in prefilling):
                contestant.tbt_s.append(at - before)


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Have processes that are started inside run on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def running_engines(folder: Path, model: Path, store: str) -> Iterator[list[Engine]]:
    """Run two engines, each on a core of its own if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        engines = []
        for name, core in (("first", cores[0]), ("second", cores[-1])):
            with on_core(core):
                engine = launch_engine(
                    folder / name,
                    model,
                    store,
                    *("--max-num-batched-tokens", str(PASS_TOKENS)),
                    number_type=fast_number_type(),
                    settings={
                        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                        "OMP_NUM_THREADS": "1",
                        "RAGCACHE_LOAD_ALWAYS": "off",
                    },
                )
            stack.callback(engine.service.stop)
            engines.append(engine)
        for engine in engines:
            wait_for_engine(engine)
        yield engines


def measure_visible(engine: Engine, model: Path, store: str, rounds: int) -> dict[str, float]:
    """Return how long after the first token the store has a prompt's KV, in milliseconds."""
    loaded = load_model_folder(str(model))
    space = loaded.space(fast_number_type())
    found: defaultdict[str, list[float]] = defaultdict(list)
    ways = {"as_layers_end": Handoff.PREFILL, "after_the_pass": None}
    with contextlib.closing(StoreClient(store)) as client:
        for number in range(rounds + 1):
            for way, part in ways.items():
                ids = [random.randrange(1000, 20_000) for _ in range(VISIBLE_TOKENS)]
                prompt = assemble(ids, (), [1, 2])
                plan = plan_exact(prompt, space, "public", uuid.uuid4().hex)
                [named] = checked_segments(plan, prompt.token_ids, space)
                text = replace(plan, handoff=part).encode()
                complete(engine.url, prompt.token_ids, max_tokens=1, plan=text)
                ended = time.monotonic()
                key = LookupKey.for_variant(named.variant)
                while not client.lookup([key]).variants[0].stored:
                    time.sleep(0.001)
                if number:  # the first round warms up
                    found[way].append(time.monotonic() - ended)
    return {way: round(1e3 * statistics.median(seconds), 1) for way, seconds in found.items()}


@contextlib.asynccontextmanager
async def running_gateways(
    folder: Path, model: Path, engines: list[Engine], store: str
) -> AsyncIterator[dict[str, Contestant]]:
    """Run a gateway with roles and one without."""
    port = free_port()
    parts = await serve_parts(port, FreshRetriever(load_tokenizer(model)))  # type: ignore[abstract]  # other calls are not served
    try:
        async with contextlib.AsyncExitStack() as stack:
            contestants = {}
            for name, roles in ((APART, (";role=prefill", ";role=decode")), (TOGETHER, ("", ""))):
                url = await start_gateway(
                    stack,
                    folder,
                    name,
                    RAGCACHE_RETRIEVER=f"{HOST}:{port}",
                    RAGCACHE_ENGINES=",".join(
                        f"{engine.address}{role}"
                        for engine, role in zip(engines, roles, strict=True)
                    ),
                    RAGCACHE_CACHESTORE=store,
                    RAGCACHE_MODEL=str(model),
                    RAGCACHE_MODEL_DTYPE=fast_number_type(),
                    RAGCACHE_MAX_MODEL_LEN="4096",
                )
                client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=600)
                contestants[name] = Contestant(await stack.enter_async_context(client))
            yield contestants
    finally:
        await parts.stop()


async def run(folder: Path, turns: int, num_questions: int) -> dict[str, Any]:
    model = fetch_model("smollm2")
    with (
        running_cachestore(folder / "store", memory_bytes=2 << 30) as store,
        running_engines(folder, model, store.address) as engines,
    ):
        say("the engines are up")
        visible_ms = measure_visible(engines[0], model, store.address, 2 * turns)
        async with running_gateways(folder, model, engines, store.address) as contestants:
            for one in contestants.values():  # warms up
                await measure_turn(one, 1)
                one.tbt_s, one.ttft_s, one.load_share = [], [], []
            for turn in range(turns):
                for name in (APART, TOGETHER) if turn % 2 else (TOGETHER, APART):
                    await measure_turn(contestants[name], num_questions)
                    say(f"turn {turn + 1} of {turns}, {name}")
    apart, together = contestants[APART], contestants[TOGETHER]
    p99_s = {name: float(np.percentile(one.tbt_s, 99)) for name, one in contestants.items()}
    return {
        "tbt_p99_together_over_apart": round(p99_s[TOGETHER] / p99_s[APART], 3),
        "ttft_pair_over_one": round(
            statistics.median(apart.ttft_s) / statistics.median(together.ttft_s), 3
        ),
        "pair_share": round(len(apart.load_share) / len(apart.ttft_s), 3),
        "load_share": round(statistics.median(apart.load_share or [0.0]), 4),
        "visible_ms": visible_ms,
        "tbt_p99_ms": {name: round(1e3 * one, 1) for name, one in p99_s.items()},
        "tbt_median_ms": {
            name: round(1e3 * statistics.median(one.tbt_s), 1) for name, one in contestants.items()
        },
        "ttft_median_ms": {
            name: round(1e3 * statistics.median(one.ttft_s), 1) for name, one in contestants.items()
        },
        "tokens": {name: len(one.tbt_s) for name, one in contestants.items()},
        "questions": {name: len(one.ttft_s) for name, one in contestants.items()},
        "prompt_tokens": TOP_K * CHUNK_TOKENS,
    }


def main() -> None:
    turns, num_questions = (
        (2, 3) if is_quick(__doc__, "under four minutes on two cores") else (6, 8)
    )
    print_figures(lambda folder: asyncio.run(run(folder, turns, num_questions)))


if __name__ == "__main__":
    main()
