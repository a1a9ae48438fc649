"""Whether a search finds the document of a question that refers to earlier turns.

A real retriever with the bundled embedder has the documents. Each conversation's last question is
searched as it is, and as the rules rewrite it. ``follow_up`` questions need the turns before them;
``new_topic`` questions stand alone, and the rules must not make them worse.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.support.retrieval.follow_ups import DOCUMENTS, FOLLOW_UPS, NEW_TOPICS, FollowUp
from bench.support.retrieval.retriever_process import running_retriever
from ragcache_core.retrieval.query_rewriting import rewrite_query
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

MODEL = Path(__file__).resolve().parents[1] / "models" / "tinyrag" / "model"
TOP_K = 3

Query = Callable[[FollowUp], str]


def as_asked(conversation: FollowUp) -> str:
    """Return the question itself."""
    return conversation.question


def by_rules(conversation: FollowUp) -> str:
    """Return the question as the rules rewrite it."""
    return rewrite_query(conversation.turns, conversation.question)


async def recall(
    client: RetrieverClient, asked: Sequence[FollowUp], query: Query, show: bool
) -> tuple[float, float]:
    """Return the shares of conversations whose document is first, and among the first three."""
    ranks = []
    for one in asked:
        *_, final = [stage async for stage in client.search("default", query(one), TOP_K)]
        found = [hit.chunk.document_id for hit in final.hits]
        ranks.append(found.index(one.document) if one.document in found else TOP_K)
        if show and ranks[-1]:
            print(f"{query(one)!r} found {found}, not {one.document}")
    count = len(asked)
    return sum(rank == 0 for rank in ranks) / count, sum(rank < TOP_K for rank in ranks) / count


async def run(show: bool) -> dict[str, float]:
    """Fill a retriever, search, and return the recalls by name."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        async with running_retriever(Path(folder), MODEL, {}) as retriever:
            client = retriever.client
            for name, text in DOCUMENTS.items():
                document = pb.Document(
                    collection="default", id=name, text=text, content_type=pb.CONTENT_TYPE_TEXT
                )
                await client.upsert_document(document)
            for kind, asked in (("follow_up", FOLLOW_UPS), ("new_topic", NEW_TOPICS)):
                for mode, query in (("off", as_asked), ("rules", by_rules)):
                    first, best = await recall(client, asked, query, show)
                    figures[f"{kind}_recall_at_1_{mode}"] = round(first, 3)
                    figures[f"{kind}_recall_at_{TOP_K}_{mode}"] = round(best, 3)
    return figures


def main() -> None:
    """Print the recalls; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: the set is small")
    parser.add_argument("--show", action="store_true", help="print what was not found first")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(run(arguments.show))))


if __name__ == "__main__":
    main()
