"""The connector's device side without vLLM: loads by layer, turned keys, repairs in plain torch.

A Llama of random weights in plain torch over a paged cache in vLLM's layout; no vLLM, but the
plugin's own code on the way: ``paged_cache``, ``writing``, ``layering`` and the rotation of keys.
On a GPU it has the shape of a Llama of 1 B parameters, and values come from pinned memory; without
one it is small, and what it prints says nothing of GPUs (``gpu`` is null).

A prompt of chunks and a question; interleaved, medians, seconds until the last token's logits:
``full``, all of it computed; ``copy``, the chunks' bytes to the device and nothing else;
``exact``, all chunks written and then the question computed; ``layerwise``, the same with the first
L_p layers written and the others beside the pass (eq. 16); ``moved``, chunks that stand elsewhere
than they were computed, keys turned on the device; ``blend15``, the same with 15 % of their tokens,
in runs, computed anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

import torch
from torch.nn import functional

from ragcache_core.keys import VariantKey
from ragcache_engine.arriving import Arrival, Native
from ragcache_engine.layering import Layering
from ragcache_engine.paged_cache import PagedCache
from ragcache_engine.transfer import LoadJob, Repair, Span
from ragcache_engine.writing import Writer
from ragcache_kv.rotation import KeyRotation, Pairing, Rope

DTYPE = torch.bfloat16
THETA = 500_000.0
BLOCK_TOKENS = 64
QUESTION_TOKENS = 64
SHARE = 0.15
RUN_TOKENS = 8
"""Of a run of tokens that are computed anew, about as ``core/blend/need`` leaves them."""

MOVED_BY = 100
WARM_UP = 5
"""Rounds until kernels are compiled and it is known what writing takes."""


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    chunks: int
    chunk_tokens: int


LLAMA_1B = Shape(16, 2048, 32, 8, 64, 8192, chunks=16, chunk_tokens=256)
SMALL = Shape(4, 256, 4, 2, 64, 1024, chunks=4, chunk_tokens=128)


class Attention:
    """What ``PagedCache`` knows of an attention layer: its cache, and how tokens are written."""

    def __init__(self, shape: Shape, num_blocks: int, device: torch.device) -> None:
        size = (num_blocks, shape.kv_heads, BLOCK_TOKENS, 2 * shape.head_dim)
        self.kv_cache = torch.zeros(size, dtype=DTYPE, device=device)
        self.impl = self

    def do_kv_cache_update(
        self,
        layer: object,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        both = torch.cat((keys, values), dim=-1)
        kv_cache[slots // BLOCK_TOKENS, :, slots % BLOCK_TOKENS] = both


class Llama:
    """Grouped attention over the paged cache, rotated keys, a gated MLP. Weights are random."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        rng = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=rng) * columns**-0.5
            return drawn.to(device, DTYPE)

        heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.vocabulary = weight(4096, shape.hidden)
        self.layers = [
            {
                "qkv": weight(heads + 2 * kv, shape.hidden),
                "out": weight(shape.hidden, heads),
                "up": weight(2 * shape.inner, shape.hidden),
                "down": weight(shape.hidden, shape.inner),
            }
            for _ in range(shape.layers)
        ]
        pairs = torch.arange(shape.head_dim // 2, dtype=torch.float32)
        self.frequencies = tuple(THETA ** (-2 * float(p) / shape.head_dim) for p in pairs)
        self._turns = torch.tensor(self.frequencies, device=device)
        num_blocks = -(-shape.chunks * shape.chunk_tokens // BLOCK_TOKENS) + 8
        self.blocks = tuple(range(num_blocks))
        self.attention = [Attention(shape, num_blocks, device) for _ in range(shape.layers)]
        self.cache = PagedCache({str(n): a for n, a in enumerate(self.attention)}, device)

    def run(
        self,
        ids: torch.Tensor,
        positions: Sequence[int],
        needed: Callable[[int], None] = lambda layer: None,
    ) -> torch.Tensor:
        """Compute tokens at positions (ascending) over what is in the cache; the last one's logits.

        needed: told of each layer between its own KV write and its attention, as by vLLM.
        """
        shape, end = self.shape, positions[-1] + 1
        where = torch.tensor(positions, device=self.device)
        hidden = self.vocabulary[ids[where]]
        slots = torch.tensor(self.blocks, device=self.device)[where // BLOCK_TOKENS]
        slots = slots * BLOCK_TOKENS + where % BLOCK_TOKENS
        mask = torch.arange(end, device=self.device)[None] <= where[:, None]
        whole = len(positions) == end
        heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for number, (weights, layer) in enumerate(zip(self.layers, self.attention, strict=True)):
            normed = functional.rms_norm(hidden, (shape.hidden,))
            query, keys, values = (normed @ weights["qkv"].T).split((heads, kv, kv), dim=-1)
            query = self._rotated(query.view(-1, shape.heads, shape.head_dim), where)
            keys = self._rotated(keys.view(-1, shape.kv_heads, shape.head_dim), where)
            values = values.view(-1, shape.kv_heads, shape.head_dim)
            layer.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
            needed(number)
            if not whole:
                keys, values = self.cache.layer(number, self.blocks, 0, end)
            mixed = functional.scaled_dot_product_attention(
                *(part.transpose(0, 1)[None] for part in (query, keys, values)),
                attn_mask=None if whole else mask,
                is_causal=whole,
                enable_gqa=True,
            )
            hidden = hidden + mixed[0].transpose(0, 1).reshape(-1, heads) @ weights["out"].T
            normed = functional.rms_norm(hidden, (shape.hidden,))
            gate, up = (normed @ weights["up"].T).chunk(2, dim=-1)
            hidden = hidden + (functional.silu(gate) * up) @ weights["down"].T
        return hidden[-1] @ self.vocabulary.T

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, None].float() * self._turns
        first, second = heads.float().chunk(2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat(turned, dim=-1).to(heads.dtype)


class Bench:
    """One prompt, its chunks' KV as it was computed, and the ways to its answer."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.model = Llama(shape, device)
        self.context = shape.chunks * shape.chunk_tokens
        length = self.context + QUESTION_TOKENS
        rng = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 4096, (length,), generator=rng).to(device)
        self.question = range(self.context, length)
        rope = Rope(shape.head_dim, shape.head_dim, Pairing.HALVES, self.model.frequencies)
        rotation = KeyRotation(rope, "bfloat16")
        self.writer = Writer(self.model.cache, rotation)
        self.layering = Layering(self.model.cache, self.writer)
        self.compute_s: float | None = None
        self.model.run(self.ids, range(length))
        values = [self._value(start) for start in self._starts()]
        self.values = [self._pinned(value) for value in values]
        elsewhere = [rotation.rotate_part(value.clone(), -MOVED_BY) for value in values]
        self.elsewhere = [self._pinned(value) for value in elsewhere]

    def _starts(self) -> range:
        return range(0, self.context, self.shape.chunk_tokens)

    def _value(self, start: int) -> torch.Tensor:
        return self.model.cache.read(self.model.blocks, start, start + self.shape.chunk_tokens)

    def _pinned(self, value: torch.Tensor) -> torch.Tensor:
        return value.pin_memory() if self.device.type == "cuda" else value

    def full(self) -> torch.Tensor:
        return self.model.run(self.ids, range(len(self.ids)))

    def copy(self) -> None:
        for value in self.values:
            value.to(self.device, non_blocking=True)

    def exact(self) -> torch.Tensor:
        """As the connector does it by default."""
        for job, arrival in self._arrivals():
            self.writer.write(job, arrival, arrival.span.start, arrival.span.end)
        return self.model.run(self.ids, self.question)

    def layerwise(self) -> torch.Tensor:
        for job, arrival in self._arrivals():
            self.layering.write(job, arrival, arrival.span.start, arrival.span.end)
        self.layering.begin_pass()
        logits = self.model.run(self.ids, self.question, self.layering.layer_needed)
        assert not self.layering.end_pass()
        return logits

    def moved(self) -> torch.Tensor:
        self._move()
        return self.model.run(self.ids, self.question)

    def blend15(self) -> torch.Tensor:
        self._move()
        every = round(RUN_TOKENS / SHARE)
        chosen = [p for p in range(self.context) if p % every < RUN_TOKENS]
        self.model.run(self.ids, chosen)
        return self.model.run(self.ids, self.question)

    def _move(self) -> None:
        for job, arrival in self._arrivals(moved_by=MOVED_BY):
            self.writer.write(job, arrival, arrival.span.start, arrival.span.end)

    def _arrivals(self, moved_by: int = 0) -> list[tuple[LoadJob, Arrival]]:
        """Everything has come from where it is held, and is to be written."""
        size = self.shape.chunk_tokens
        spans = tuple(
            Span(VariantKey(bytes([n]) * 16, bytes(16)), start, start + size, start - moved_by)
            for n, start in enumerate(self._starts())
        )
        repair = Repair(0, (), (), (), 0, ()) if moved_by else None
        job = LoadJob(
            *("r", spans, 0, self.context, self.model.blocks, "public", repair),
            compute_s=self.compute_s,
        )
        values = self.elsewhere if moved_by else self.values
        # Keys are turned in place, which on a GPU is a copy by then.
        if moved_by and self.device.type == "cpu":
            values = [value.clone() for value in values]
        return [
            (job, Arrival(span, Native(value), turn=moved_by))
            for span, value in zip(spans, values, strict=True)
        ]


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, in each round."""
    ways: dict[str, Callable[[], Any]] = {
        "full": bench.full,
        "copy": bench.copy,
        "exact": bench.exact,
        "layerwise": bench.layerwise,
        "moved": bench.moved,
        "blend15": bench.blend15,
    }
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(WARM_UP + rounds):
        for name, way in ways.items():
            began = _now(bench.device)
            way()
            seconds = _now(bench.device) - began
            if number >= WARM_UP:
                taken[name].append(seconds)
        began = _now(bench.device)
        bench.model.run(bench.ids, bench.question)
        bench.compute_s = _now(bench.device) - began
    return taken


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def differences(bench: Bench) -> dict[str, bool | float]:
    """Of the logits: bit by bit between ways to load, and by share from a full computation's."""

    def wiped(way: Callable[[], torch.Tensor]) -> torch.Tensor:
        for attention in bench.model.attention:
            attention.kv_cache.zero_()
        return way()

    def apart(one: torch.Tensor, other: torch.Tensor) -> float:
        return round(float((one - other).float().norm() / other.float().norm()), 4)

    exact, full = wiped(bench.exact), wiped(bench.full)
    return {
        "layerwise_equals_exact": torch.equal(wiped(bench.layerwise), exact),
        # A question computed alone takes other kernels than one in a whole prompt.
        "exact_differs_from_full": apart(exact, full),
        "moved_differs_from_full": apart(wiped(bench.moved), full),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 40
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    bench = Bench(LLAMA_1B if has_gpu else SMALL, device)
    taken = measure(bench, rounds)
    same = differences(bench)
    medians = {name: statistics.median(some) for name, some in taken.items()}
    num_bytes = sum(value.nbytes for value in bench.values)
    for name, seconds in medians.items():
        print(f"{name:10s} {1e3 * seconds:9.2f} ms, least {1e3 * min(taken[name]):9.2f}")

    def over(slow: str, fast: str) -> float:
        ratios = [a / b for a, b in zip(taken[slow], taken[fast], strict=True)]
        return round(statistics.median(ratios), 3)

    result = {
        "full_over_exact": over("full", "exact"),
        "full_over_blend15": over("full", "blend15"),
        "exact_over_layerwise": over("exact", "layerwise"),
        "moved_over_exact": over("moved", "exact"),
        "exact_over_copy": over("exact", "copy"),
        "copy_gb_s": round(num_bytes / medians["copy"] / 1e9, 2),
        "context_tokens": bench.context,
        **same,
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
