"""The connector's parts inside a worker of vLLM, and a greedy decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from bench.support.cache_craft import rank_by_attention
from ragcache_core.blend.fix_overhead import context_impact
from ragcache_core.blend.prefix_overlap import AttendedChunk
from ragcache_core.blend.token_selection import split_into_passes
from ragcache_core.identity.keys import KEY_BYTES
from ragcache_engine.blend.attention import AttentionHook, AttentionObserver
from ragcache_engine.blend.chunk_shift import ChunkShift
from ragcache_engine.blend.recomputer import Recomputer, access_model
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import PromptSlice
from ragcache_kv.rotation import KeyRotation, read_rope

MAX_PROMPT_TOKENS = 4096
FIRST_BLOCK = 64
"""First block of the tables, after those that the engine may have used."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A chunk's KV, [num_layers, 2, num_tokens, num_kv_heads, head_dim], and its attention."""

    value: torch.Tensor
    position: int
    cci: float
    prefix: tuple[AttendedChunk, ...]
    ranking: tuple[int, ...]
    influence: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids without the end token.

    ``log_probs`` are of each token of the answer of full computation and of its end, given the
    tokens before it; of the first token only if there is no such answer. [tokens, vocabulary].
    """

    token_ids: tuple[int, ...]
    log_probs: torch.Tensor


class Lab:
    """Captures, writes, recomputes and decodes. Only the worker's main thread may use it.

    Args:
        worker: A worker of vLLM.
        model_folder: Folder of its model.
        end_ids: Tokens that end an answer.
    """

    def __init__(self, worker: Any, model_folder: Path, end_ids: Sequence[int]) -> None:
        runner = worker.model_runner
        model = access_model(runner, runner.attn_groups[0][0].kv_cache_spec.block_size)
        layers = runner.vllm_config.compilation_config.static_forward_context
        self.cache = PagedCache({name: layers[name] for name in model.layer_names}, model.device)
        self.recomputer = Recomputer(model)
        self._observer = AttentionObserver(self.cache, self.recomputer)
        self._compute_logits = runner.model.compute_logits
        self._end_ids = frozenset(end_ids)
        self._block_size = model.block_size
        config = json.loads((model_folder / "config.json").read_text())
        dtype = str(self.cache.shape.dtype).removeprefix("torch.")
        self._rotation = KeyRotation(read_rope(config), dtype)
        self.recomputer.chunk_shift = ChunkShift(self.cache, self._rotation.rope)

    def table(self, number: int) -> list[int]:
        """Return the block table of a prompt of the longest length."""
        count = -(-MAX_PROMPT_TOKENS // self._block_size)
        return [FIRST_BLOCK + number * count + i for i in range(count)]

    def compute(
        self,
        token_ids: Sequence[int],
        table: Sequence[int],
        runs: Sequence[range],
        chunks: Sequence[range] = (),
        shifted_runs: Sequence[range] = (),
    ) -> Any:
        """Compute runs of positions in as few passes as possible; return the last hidden states.

        The tokens of shifted_runs are shifted by what the pass changes in their chunks.
        """
        passes, hidden = self.recomputer, None
        for one in split_into_passes(runs, max_tokens=passes.max_tokens, max_runs=passes.max_runs):
            part = PromptSlice(token_ids, table, one, chunks, shifted_runs)
            hidden = passes.recompute_slices([part])
        return hidden

    def capture(
        self, head: Sequence[int], before: Sequence[Sequence[int]], chunk: Sequence[int]
    ) -> Captured:
        """Capture a chunk's KV after others, and observe its attention to them."""
        segments, token_ids = [range(len(head))], list(head)
        for ids in (*before, chunk):
            segments.append(range(len(token_ids), len(token_ids) + len(ids)))
            token_ids += ids
        table, positions = self.table(0), segments[-1]
        self.compute(token_ids, table, [range(len(token_ids))])
        single = [range(p, p + 1) for p in positions]
        seen = self._observer.observe(token_ids, table, positions, [*segments[:-1], *single])
        last = len(segments) - 1
        others, own = seen.mass[:, 1:last], seen.mass[:, last:]
        prefix = tuple(
            AttendedChunk(key_of(ids), len(ids), float(others[:, i].sum()))
            for i, ids in enumerate(before)
        )
        return Captured(
            value=self.cache.read(table, positions.start, positions.stop),
            position=positions.start,
            cci=context_impact(len(chunk), float(own.sum()), prefix).cci,
            prefix=prefix,
            ranking=tuple(rank_by_attention(others.sum(1).tolist())),
            influence=tuple(seen.influence.tolist()),
        )

    def capture_unobserved(
        self, head: Sequence[int], before: Sequence[Sequence[int]], chunk: Sequence[int]
    ) -> Captured:
        """Capture a chunk's KV after others, without observing it."""
        token_ids = [*head, *(token for ids in (*before, chunk) for token in ids)]
        table, start = self.table(0), len(token_ids) - len(chunk)
        self.compute(token_ids, table, [range(len(token_ids))])
        return Captured(
            value=self.cache.read(table, start, len(token_ids)),
            position=start,
            cci=1.0,
            prefix=tuple(AttendedChunk(key_of(ids), len(ids), 0.0) for ids in before),
            ranking=tuple(range(len(chunk))),
            influence=(1.0,) * len(chunk),
        )

    def write(self, table: Sequence[int], captured: Captured, start: int) -> None:
        """Write a chunk's KV at its new position."""
        value = captured.value.clone()
        self._rotation.rotate_part(value, start - captured.position)
        slots = self.cache.slots(table, start, start + value.shape[2])
        self.cache.write(value, slots)

    def question_attention(
        self, token_ids: Sequence[int], table: Sequence[int], first: int
    ) -> list[float]:
        """Return what the engine measures of the tokens from position ``first`` on."""
        question = range(first, len(token_ids))
        seen: list[float] = self._observer.question_attention(token_ids, table, question).tolist()
        return seen

    def attention_by_layer(
        self, token_ids: Sequence[int], table: Sequence[int], chunks: Sequence[range]
    ) -> list[list[float]]:
        """Return the attention of all tokens after the chunks to each chunk, by layer (eq. 15)."""
        question = range(chunks[-1].stop, len(token_ids))
        hook = ChunkAttentionHook(self.cache, table, question, chunks)
        with hook.attached():
            self.recomputer.recompute(token_ids, table, [question])
        return hook.by_layer

    def deviation(
        self, layer: int, table: Sequence[int], other: Sequence[int], end: int
    ) -> list[float]:
        """Return how far the KV of two tables differs in a layer, by position before the end."""
        squares = torch.zeros(end)
        for tokens, others in zip(
            self.cache.layer(layer, table, 0, end),
            self.cache.layer(layer, other, 0, end),
            strict=True,
        ):
            squares += (tokens.float() - others.float()).square().sum((1, 2)).cpu()
        deviation: list[float] = squares.sqrt().tolist()
        return deviation

    def answer(
        self,
        token_ids: Sequence[int],
        table: Sequence[int],
        first: int,
        most: int,
        given: Sequence[int] | None = None,
    ) -> Answer:
        """Compute the prompt from position ``first`` on and decode.

        Args:
            token_ids: The prompt.
            table: Its block table, with the KV of the positions before ``first``.
            first: Position of the first token after the chunks.
            most: Tokens to decode at most.
            given: Tokens of the answer of full computation, whose log probabilities to return.
        """
        ids = [*token_ids, *(given or ())]
        hidden = self.compute(ids, table, [range(first, len(ids))])
        logits = self._compute_logits(hidden[len(token_ids) - first - 1 :]).float()
        log_probs = torch.log_softmax(logits, -1)
        ids, answer = list(token_ids), list[int]()
        token = int(logits[0].argmax())
        while token not in self._end_ids and len(answer) < most:
            answer.append(token)
            ids.append(token)
            hidden = self.compute(ids, table, [range(len(ids) - 1, len(ids))])
            token = int(self._compute_logits(hidden[-1:])[0].argmax())
        return Answer(tuple(answer), log_probs)


def difference(full: Answer, answer: Answer) -> dict[str, float]:
    """Return the KL from full computation in nats: of the first token, and the mean of all."""
    kl = (full.log_probs.exp() * (full.log_probs - answer.log_probs)).sum(-1).clamp_min(0)
    return {"kl": float(kl[0]), "mean_kl": float(kl.mean())}


def key_of(token_ids: Sequence[int]) -> bytes:
    return xxhash.xxh3_128_digest(repr(list(token_ids)).encode())[:KEY_BYTES]


class ChunkAttentionHook(AttentionHook):
    """Adds up the attention that a question pays to each chunk (Cache-Craft eq. 15).

    ``by_layer`` has a list for each layer, in their order: for each chunk the sum over the
    question's tokens and the chunk's, as the mean over heads.
    """

    def __init__(
        self, cache: PagedCache, blocks: Sequence[int], question: range, chunks: Sequence[range]
    ) -> None:
        super().__init__(cache, blocks, question, range(cache.num_layers))
        self.by_layer: list[list[float]] = []
        self._chunks = chunks

    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        by_key = torch.stack([part.sum(2).mean((0, 1)) for part in weights]).sum(0).cpu()
        self.by_layer.append(
            [float(by_key[chunk.start : chunk.stop].sum()) for chunk in self._chunks]
        )
