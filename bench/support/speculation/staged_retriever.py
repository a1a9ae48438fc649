"""A retriever that repeats recorded searches at another speed."""

from __future__ import annotations

import array
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_retriever.search.vector_index import IndexStage
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.gateway import FakeRetriever

WORDS = """
account answer archive budget build cable change client cloud copy cost data date device disk engine
error event field file graph group host image index input layer limit list log market
""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class StagedQuestion:
    """What a question's text says of its search.

    Attributes:
        share: Vector search ratio.
        number: Number of the recorded search.
        duration_s: Time of the whole search.
        name: Makes the tokens of the question's chunks unique.
    """

    share: float
    number: int
    duration_s: float
    name: str

    def text(self) -> str:
        """Return the question as a client asks it."""
        return json.dumps(asdict(self))


class StagedRetriever(FakeRetriever):
    """Repeats the stages of recorded searches.

    A stage comes when the share of the duration has passed that it had scanned, as in a search
    whose time is that of comparing vectors.

    Args:
        recorded: Stages of searches, by vector search ratio.
        chunk_tokens: Length of each chunk.
        identity: Of the model's tokenizer.
    """

    def __init__(
        self,
        recorded: dict[float, list[Sequence[IndexStage]]],
        prompts: PromptBuilder,
        chunk_tokens: int,
        identity: str,
    ) -> None:
        super().__init__()
        self._recorded = recorded
        self._words = list({prompts.encode_chunk(word)[0]: None for word in WORDS})
        self._separator = prompts.encode_chunk("a")[1:]
        self._chunk_tokens = chunk_tokens
        self._identity = identity

    async def Search(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        question = StagedQuestion(**json.loads(request.query))
        stages = self._recorded[question.share][question.number]
        loop = asyncio.get_running_loop()
        began = loop.time()
        for stage in stages:
            await asyncio.sleep(began + stage.progress * question.duration_s - loop.time())
            yield pb.SearchStage(
                hits=[self._hit(question.name, row) for row in stage.rows],
                final=stage.final,
                progress=stage.progress,
                search_us=round(1e6 * stage.progress * question.duration_s),
                final_probability=stage.final_probability,
            )

    def _hit(self, name: str, row: int) -> pb.Hit:
        text = f"{name} {row}"
        digits = int.from_bytes(text.encode(), "big")
        words = []
        while digits:
            digits, word = divmod(digits, len(self._words))
            words.append(self._words[word])
        length = self._chunk_tokens - len(self._separator)
        ids = (words * (length // len(words) + 1))[:length] + self._separator
        return pb.Hit(
            chunk=pb.Chunk(
                id=f"{text}#0",
                document_id=text,
                text=text,
                content_hash=text,
                token_ids=array.array("I", ids).tobytes(),
                tokenizer_identity=self._identity,
            ),
            score=1.0,
        )
