"""Measures what computing a prompt while its search runs saves and costs, in a real engine.

Two gateways share an engine, a cache store and a retriever: one with ``speculation: auto``, one
with ``off``. Their turns alternate. The retriever repeats recorded searches of a real index, with
the probabilities that it has learned. A search that scans all vectors takes as long as the prefill
of a prompt, and one that scans a share of them takes this share of the time. A stage comes after
the share of the time that it has scanned. All prompts are new to the engine.

* ``ttft_gain``: median time to the first token with ``off`` over that with ``auto``, by vector
  search ratio, one question at a time (RAGCache Fig. 22). ``ttft_gain_full_search`` is that of
  searches of all vectors.
* ``final_progress``: mean share of a search after which its hits are final.
* ``wasted_prefill_share``: tokens of guesses that the prompts of their questions do not begin with,
  by the gateway's count, over the tokens of all these prompts.
* ``second_request_share``: time to the first token of a prompt that a request of one token has
  computed, over that of a new prompt. A guess is such a request. A guess that were a whole answer
  would save at most this share of a prefill.
* ``throughput_ratio_at_saturation``: answers per second with ``auto`` over those with ``off``, with
  more questions at once than the engine can answer in time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.support.number_type import fast_number_type
from bench.support.processes import Engine, running_cachestore, running_engine
from bench.support.speculation.recorded_searches import final_progress, record_searches
from bench.support.speculation.staged_retriever import StagedQuestion, StagedRetriever
from ragcache_cli.models.cache import fetch_model
from ragcache_gateway.app import create_app
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model_folder import load_model_folder
from ragcache_wire.watched.members import FixedMembers
from tests.kit.gateway import CONFIG, serving, serving_retriever

OFF, AUTO = "off", "auto"
SHARES = (0.125, 0.25, 0.5, 1.0)
FULL = 1.0
TOP_K = 10
MAX_LENGTH = 4096
ANSWER_TOKENS = 4
_RUNNING = "vllm:num_requests_running"


@dataclass(slots=True)
class Contestant:
    """A gateway, and what was measured of it. ``ttft_s`` is by vector search ratio."""

    client: httpx.AsyncClient
    ttft_s: dict[float, list[float]] = field(default_factory=dict)
    answers: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class Site:
    """The gateways and the engine behind them."""

    contestants: dict[str, Contestant]
    engine: httpx.AsyncClient
    prefill_s: float = 0.0

    async def counters(self) -> dict[str, float]:
        """Return vLLM's counters and gauges as of its last step."""
        lines = (await self.engine.get("/metrics")).text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.split("{")[0]: float(value) for name, value in pairs}

    async def wait_until_idle(self) -> None:
        """Wait until the engine computes no more."""
        while (await self.counters())[_RUNNING]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def running_site(
    model: Path, engine: Engine, store: str, retriever: StagedRetriever
) -> AsyncIterator[Site]:
    """Start the retriever and both gateways."""
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_retriever(retriever))
        config = CONFIG.replace(
            model=str(model),
            model_name="model",
            max_model_len=MAX_LENGTH,
            retriever=address,
            cachestore=FixedMembers((store,)),
            engines=(engine.address,),
            engine_watch_s=5.0,
            first_token_timeout_s=300,
            next_token_timeout_s=300,
            log_level="warning",
        )
        space = load_model_folder(str(model)).space(fast_number_type())
        options: dict[str, Any] = {"trust_env": False, "timeout": 600}
        contestants = {}
        for name in (OFF, AUTO):
            app = create_app(config.replace(speculation=name), space, prompt_builder(model))
            port = await stack.enter_async_context(serving(app))
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", **options)
            contestants[name] = Contestant(await stack.enter_async_context(client))
        client = httpx.AsyncClient(base_url=engine.url, **options)
        yield Site(contestants, await stack.enter_async_context(client))


def prompt_builder(model: Path) -> PromptBuilder:
    """Return a builder of prompts for a model."""
    return PromptBuilder(
        load_tokenizer(model),
        max_model_len=MAX_LENGTH,
        default_max_tokens=ANSWER_TOKENS,
        cache_bytes=1 << 20,
    )


async def ask(contestant: Contestant, question: StagedQuestion) -> float:
    """Ask one question, and return the seconds to its first token as a client sees it."""
    body = {
        "messages": [{"role": "user", "content": question.text()}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "ragcache": {"reuse": "exact", "top_k": TOP_K},
    }
    began = time.monotonic()
    first_s = None
    async with contestant.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != httpx.codes.OK:
            raise RuntimeError(f"the gateway said {reply.status_code}: {await reply.aread()!r}")
        async for line in reply.aiter_lines():
            if first_s is None and '"content":"' in line and '"content":""' not in line:
                first_s = time.monotonic() - began
    if first_s is None:
        raise RuntimeError("an answer had no token")
    return first_s


def new_question(share: float, number: int, duration_s: float) -> StagedQuestion:
    """Make a question whose chunks no other question has."""
    return StagedQuestion(share, number, duration_s, uuid.uuid4().hex[:8])


async def measure_prefill(site: Site, count: int) -> float:
    """Set the time of a prefill, and return the share of it that a second request takes."""
    contestant = site.contestants[OFF]
    await ask(contestant, new_question(FULL, 0, 0.0))  # warms up
    first_s, second_s = [], []
    for number in range(count):
        question = new_question(FULL, number, 0.0)
        first_s.append(await ask(contestant, question))
        second_s.append(await ask(contestant, question))
    site.prefill_s = statistics.median(first_s)
    return statistics.median(second_s) / site.prefill_s


async def measure_ttft(site: Site, shares: Sequence[float], count: int) -> None:
    """Ask questions one at a time, in turns."""
    for number in range(count):
        for share in shares:
            names = (OFF, AUTO) if number % 2 else (AUTO, OFF)
            for name in names:
                contestant = site.contestants[name]
                await site.wait_until_idle()
                question = new_question(share, number, share * site.prefill_s)
                ttft_s = await ask(contestant, question)
                contestant.ttft_s.setdefault(share, []).append(ttft_s)
        log(f"{number + 1} of {count} questions of each share")


async def measure_throughput(site: Site, options: argparse.Namespace) -> None:
    """Ask many questions at once, in turns: off, auto, auto, off."""
    for name in (OFF, AUTO, AUTO, OFF) * options.rounds:
        await _saturate(site, name, options)


async def _saturate(site: Site, name: str, options: argparse.Namespace) -> None:
    contestant = site.contestants[name]
    left = iter(range(options.answers))

    async def client() -> None:
        for number in left:
            await ask(contestant, new_question(FULL, number % options.recorded, site.prefill_s))

    await site.wait_until_idle()
    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(options.clients)))
    contestant.busy_s += time.monotonic() - began
    contestant.answers += options.answers
    log(f"{name}: {contestant.answers / contestant.busy_s:.2f} answers/s at saturation")


async def counted(contestant: Contestant, name: str) -> dict[str, float]:
    """Return a counter of a gateway by its label."""
    lines = (await contestant.client.get("/metrics")).text.splitlines()
    wanted = f"ragcache_gateway_speculation_{name}_total"
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith(wanted)]
    return {
        key.removeprefix(wanted)[1:-1].partition("=")[2].strip('"'): float(value)
        for key, value in pairs
    }


async def measure(site: Site, options: argparse.Namespace) -> dict[str, Any]:
    """Run the whole measurement."""
    second_share = await measure_prefill(site, options.questions)
    log(f"a prefill takes {site.prefill_s:.2f} s")
    await measure_ttft(site, options.shares, options.questions)
    off, auto = (site.contestants[name] for name in (OFF, AUTO))
    gains = {
        share: statistics.median(off.ttft_s[share]) / statistics.median(auto.ttft_s[share])
        for share in options.shares
    }
    guesses = await counted(auto, "guesses")
    wasted_tokens = (await counted(auto, "wasted_tokens"))[""]
    prompt_tokens = sum(map(len, auto.ttft_s.values())) * options.prompt_tokens
    await measure_throughput(site, options)
    return {
        "ttft_gain_full_search": round(gains[FULL], 3),
        "ttft_gain": {str(share): round(gain, 3) for share, gain in gains.items()},
        "ttft_ms": {
            name: {
                str(share): round(1e3 * statistics.median(found))
                for share, found in site.contestants[name].ttft_s.items()
            }
            for name in (OFF, AUTO)
        },
        "wasted_prefill_share": round(wasted_tokens / prompt_tokens, 4),
        "second_request_share": round(second_share, 3),
        "throughput_ratio_at_saturation": round(
            (auto.answers / auto.busy_s) / (off.answers / off.busy_s), 3
        ),
        "answers_per_s_at_saturation": round(off.answers / off.busy_s, 3),
        "prefill_ms": round(1e3 * site.prefill_s),
        "guesses": guesses,
        "guesses_at_saturation": {
            name: value - guesses.get(name, 0.0)
            for name, value in (await counted(auto, "guesses")).items()
        },
    }


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the services and measure."""
    recorded = record_searches(options.shares, options.recorded)
    log("searches are recorded")
    model = options.model or fetch_model("smollm2")
    identity = load_tokenizer(model).identity
    chunk_tokens = options.prompt_tokens // TOP_K
    retriever = StagedRetriever(recorded, prompt_builder(model), chunk_tokens, identity)  # type: ignore[abstract]  # other calls are not served
    arguments = ("--scheduling-policy", "priority")
    with (
        running_cachestore(folder / "store") as store,
        running_engine(
            *(folder / "engine", model, store.address, *arguments),
            number_type=fast_number_type(),
        ) as engine,
    ):
        log("the engine is up")
        async with running_site(model, engine, store.address, retriever) as site:
            found = await measure(site, options)
    return found | {
        "final_progress": {
            str(share): round(statistics.fmean(map(final_progress, searches)), 3)
            for share, searches in recorded.items()
        },
        "prompt_tokens": options.prompt_tokens,
        "questions": options.questions,
        "clients": options.clients,
    }


def log(text: str) -> None:
    """Write a line for the reader who waits."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under four minutes on two cores")
    option = parser.add_argument
    option("--model", type=Path, help="folder of a model; default: smollm2")
    option("--prompt-tokens", type=int, default=640, help="tokens of all chunks of a prompt")
    option("--questions", type=int, default=20, help="of each vector search ratio and gateway")
    option("--shares", type=float, nargs="+", default=list(SHARES), help="vector search ratios")
    option("--clients", type=int, default=6, help="questions at once at saturation")
    option("--answers", type=int, default=30, help="answers of a turn at saturation")
    option("--rounds", type=int, default=2, help="of two turns of each gateway at saturation")
    options = parser.parse_args()
    if options.quick:
        options.questions, options.answers, options.rounds = 3, 12, 1
    if FULL not in options.shares:
        parser.error("--shares needs 1.0, the search of all vectors")
    options.recorded = max(options.questions, 20)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(run(options, Path(folder)))))


if __name__ == "__main__":
    main()
