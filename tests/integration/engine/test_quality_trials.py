"""A target quality, kept by a real gateway and a real engine with the bundled model.

Handbook questions over full pages, in any order. The stored KV of a page was computed without the
page's beginning, which names the service.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.processes import (
    CacheStore,
    Engine,
    running_cachestore,
    running_engine,
)
from models.tinyrag.chunking import cut
from models.tinyrag.examples import ask
from models.tinyrag.handbook import KINDS, Document, Question, make_handbook
from ragcache_core.quality.controller import (
    MIN_QUESTIONS,
    SAMPLE_UNDECIDED_EVERY,
    alpha_ladder,
)
from ragcache_gateway.app import create_app
from ragcache_gateway.prompts.model_runtime import load_models
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_wire.v1 import retriever_pb2
from ragcache_wire.watched.members import FixedMembers
from tests.kit.gateway import CONFIG, FakeRetriever, serving, serving_retriever
from tests.kit.wait import until

pytestmark = pytest.mark.timeout(900)

MODEL = Path(__file__).resolve().parents[3] / "models" / "tinyrag" / "model"
PAGES = 6  # per question
CHUNK_TOKENS = 100


@dataclass
class Platform:
    """A store, and an engine with the bundled model."""

    store: CacheStore
    engine: Engine


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("quality")
    with (
        running_cachestore(folder / "store") as store,
        running_engine(folder, MODEL, store.address) as engine,
    ):
        yield Platform(store, engine)


class Reader:
    """Asks a gateway about pages of one handbook."""

    def __init__(self, retriever: FakeRetriever, client: httpx.AsyncClient, seed: int) -> None:
        self._retriever, self._client = retriever, client
        self._rng = random.Random(seed)
        self._pages = make_handbook(seed, PAGES + 2, "held_out").documents
        tokenizer = load_tokenizer(MODEL)
        self._count = lambda text: len(tokenizer.encode_template(text))

    def pick(self) -> tuple[Sequence[Document], Question]:
        """Return some pages in some order, and a question about them."""
        while True:
            pages = self._rng.sample(self._pages, PAGES)
            question = ask(self._rng, pages, "held_out", self._rng.choice(KINDS))
            if question is not None:
                return pages, question

    async def capture(self) -> None:
        """Store all chunks of each page, the first one separately from the others."""
        for part in (slice(1), slice(1, None)):
            wanted = self._find(self._pages, part) + await self._stored()
            await self._complete("Which?", {"reuse": "exact"})
            await until(partial(self._has_stored, wanted))  # saved after the answer

    async def _has_stored(self, count: int) -> bool:
        return await self._stored() >= count

    async def _has_tried(self, count: int) -> bool:
        return await self.metric('blend_trials_total{outcome="tried"}') >= count

    async def _stored(self) -> int:
        return int((await self._client.get("/v1/cache")).json()["variants"])

    async def ask(self, pages: Sequence[Document], question: Question, **options: Any) -> Any:
        """Return the gateway's answer."""
        self._find(pages, slice(None))
        return await self._complete(question.text, options)

    def _find(self, pages: Sequence[Document], part: slice) -> int:
        """Set what retrieval finds: a part of each page. Return the number of chunks."""
        self._retriever.hits = [
            retriever_pb2.Hit(
                chunk=retriever_pb2.Chunk(
                    id=f"{page.id}#{n}", document_id=page.id, ordinal=n, text=chunk.text
                ),
                score=1.0,
            )
            for page in pages
            for n, chunk in list(enumerate(cut(page, self._count, CHUNK_TOKENS, 0)))[part]
        ]
        return len(self._retriever.hits)

    async def _complete(self, question: str, options: dict[str, Any]) -> Any:
        body = {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 64,
            "ragcache": {"top_k": 50, **options},
        }
        reply = await self._client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def metric(self, name: str) -> float:
        """Return a metric of the gateway, 0 if it has no sample yet."""
        text = (await self._client.get("/metrics")).text
        found = [a for a in text.splitlines() if a.startswith(f"ragcache_gateway_{name} ")]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    async def learn(self, alphas: int) -> list[Any]:
        """Ask until MIN_QUESTIONS questions have been tried, and return the answers.

        Before the decision, every SAMPLE_UNDECIDED_EVERY-th question is tried.
        """
        answers: list[Any] = []
        for number in range(1, MIN_QUESTIONS + 1):
            for _ in range(SAMPLE_UNDECIDED_EVERY):
                answers.append(await self.ask(*self.pick()))
            await until(partial(self._has_tried, alphas * number), timeout_s=600)
        return answers


@asynccontextmanager
async def reader(platform: Platform, seed: int, **settings: Any) -> AsyncGenerator[Reader, None]:
    """Return a reader of a new gateway with these settings."""
    retriever = FakeRetriever()  # other calls are not served
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_retriever(retriever))
        config = CONFIG.replace(
            model=str(MODEL),
            model_name="model",
            max_model_len=4096,
            retriever=address,
            cachestore=FixedMembers((platform.store.address,)),
            engines=(platform.engine.address,),
            reuse="blend",
            **settings,
        )
        app = create_app(config, load_models(config))
        port = await stack.enter_async_context(serving(app))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)
        )
        asking = Reader(retriever, client, seed)
        await asking.capture()
        yield asking


async def test_later_questions_use_the_alpha_that_trials_chose(
    platform: Platform,
) -> None:
    """Every quality suffices, so in the end nothing is recomputed."""
    async with reader(platform, 1, quality=0.0, max_recompute_share=0.2) as asking:
        before = await asking.learn(len(alpha_ladder(0.2)))
        assert await asking.metric('blend_alpha{model="model"}') == 0.0
        assert await asking.metric('blend_expected_recomputed{model="model"}') == 0.0
        used = [answer["ragcache"]["cache"]["blended_tokens"] for answer in before]
        assert not any(used[:-1]), "reuse is exact until the trials have decided"
        later = [await asking.ask(*asking.pick()) for _ in range(4)]
        cache = [answer["ragcache"]["cache"] for answer in later]
        assert any(use["blended_tokens"] for use in cache)
        assert not any(use["recomputed_tokens"] for use in cache)


async def test_with_an_unreachable_quality_answers_are_fully_computed(
    platform: Platform,
) -> None:
    """Without recomputation, some answers differ from a full computation."""
    async with reader(platform, 3, quality=1.0, max_recompute_share=0.0) as asking:
        await asking.learn(len(alpha_ladder(0.0)))
        assert await asking.metric('blend_alpha{model="model"}') == math.inf
        for _ in range(6):
            picked = asking.pick()
            answer = await asking.ask(*picked)
            assert answer["ragcache"]["cache"]["blended_tokens"] == 0
            full = await asking.ask(*picked, reuse="off")
            assert answer["choices"] == full["choices"]
