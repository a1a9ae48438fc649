"""Keys of a prompt's parts equal those of the plan that an engine gets."""

from __future__ import annotations

from ragcache_core.identity.keys import KVSpace, token_digest
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_core.plan.prompt import plan_exact
from ragcache_gateway.planning.chunk_keys import ChunkKeys
from ragcache_gateway.prompts.builder import PromptParts, TemplateFrame
from ragcache_gateway.prompts.passages import Passage
from ragcache_gateway.prompts.prompt_text import PromptText
from ragcache_gateway.prompts.reuse_mode import ServedModel
from ragcache_gateway.prompts.tokenizer import ChunkTokens
from ragcache_wire.v1 import retriever_pb2 as pb

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=8, dtype="bfloat16")
DOMAIN = "public"
MODEL = ServedModel("name", 1024, SPACE)


def tokens(*ids: int) -> ChunkTokens:
    return ChunkTokens(PackedIds.of(ids), token_digest(ids))


def parts(stable_head: int) -> PromptParts:
    frame = TemplateFrame([1, 2, 3, 4], [9, 9], PromptText("", "", ()), stable_head)
    chunks = ((tokens(5, 6), tokens(7)), (tokens(8, 8, 8),))
    documents = tuple(
        tuple(Passage(pb.Chunk(document_id=name), 0, 1.0) for _ in group)
        for name, group in zip("ab", chunks, strict=True)
    )
    return PromptParts(frame, documents, chunks, 10)


def test_keys_are_those_of_the_plan_in_every_order() -> None:
    keys = ChunkKeys(MODEL)
    for stable_head in (0, 2):
        for order in ((0, 1), (1, 0)):
            prompt = keys.planned_prompt(parts(stable_head), DOMAIN)
            joined = parts(stable_head).join(order).prompt
            plan = plan_exact(joined, SPACE, DOMAIN, "request")
            ordered = [key for rank in order for key in prompt.documents[rank].chunks]
            assert [*prompt.head, *ordered] == [segment.chunk for segment in plan.segments]
            sizes = [size for rank in order for size in prompt.documents[rank].num_tokens]
            assert [*prompt.head_tokens, *sizes] == [s.end - s.start for s in plan.segments]
            assert prompt.tail_tokens == 2


def test_passages_are_in_the_order_of_the_chunks() -> None:
    joined = parts(0).join((1, 0))
    assert [one.chunk.document_id for one in joined.passages] == ["b", "a", "a"]
    assert tuple(joined.prompt.token_ids) == (1, 2, 3, 4, 8, 8, 8, 5, 6, 7, 9, 9)


def test_the_memory_of_keys_is_bounded() -> None:
    keys = ChunkKeys(MODEL, max_keys=2)
    digests = [token_digest([number]) for number in range(4)]
    first = [keys.key(DOMAIN, digest) for digest in digests]
    assert [keys.key(DOMAIN, digest) for digest in digests] == first
    assert keys.key("tenant:a", digests[0]) != first[0]
    assert len(keys) == 2
