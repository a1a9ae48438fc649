"""Measures the connector's device side without vLLM: loads, codecs, key rotation, recomputation.

A Llama with random weights in plain torch (``bench/support/plain_llama.py``) runs over a paged
cache in vLLM's layout. The plugin's own code does the work: writer, layer-wise loading, local tiers
over the chunk pool, incoming values, attention, recomputation and key rotation. On a GPU the model
has the shape of a 1B Llama. Without one it is small, all memories are host memory, and the figures
say nothing about GPUs (``gpu`` is null, ``ran_on`` is cpu).

The prompt is a number of chunks and a question. Rounds are interleaved; figures are medians.
Measured until the last token's logits:

- ``full``: everything is computed.
- ``exact``: all chunks are written from pinned memory, then the question is computed.
- ``layerwise``: the first L_p layers are written before the pass, the others beside it (eq. 16).
- ``host_tier``, ``device_pool``: exact, from the engine's own tiers; also with ``layerwise_``.
- ``moved``: chunks at new positions, with keys rotated on the device.
- ``blend15``: the same, then 15 % of the tokens are recomputed by the engine's RecomputationQueue
  after the question's attention pass. ``blend15_device_pool`` loads from the device pool.

The observed influence of chunks is random, like the weights. It decides which tokens are
recomputed; ``bench/blend_quality.py`` measures the effect on answers.

Without computing:

- ``copy``: the chunks' bytes to the device and nothing else.
- ``load_SOURCE``: written into the blocks from one of these memories.
- ``load_CODEC``: lossy values from memory that is not pinned, as they arrive from a store.
- ``decode_CODEC``: decoding alone, of bytes in their final memory.

Rates are of native bytes. Decoded values are compared bit by bit with those that the CPU decodes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from bench.support.coded_values import encode_value
from bench.support.plain_llama import (
    LLAMA_1B,
    SMALL,
    SPARE_BLOCKS,
    VOCABULARY,
    Llama,
    Passes,
    Shape,
)
from bench.support.program import is_quick
from ragcache_core.blend.token_selection import InfluencedChunk, share_to_tokens
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import (
    Codec,
    Precision,
    Provenance,
    Tier,
    ValuePart,
    VariantInfo,
)
from ragcache_core.tiering.precision_assignment import Placement
from ragcache_engine.blend.attention import AttentionObserver
from ragcache_engine.blend.components import BlendComponents
from ragcache_engine.blend.recomputation_queue import RecomputationQueue
from ragcache_engine.handoff.layerwise_loading import LayerwiseLoader
from ragcache_engine.kv_cache.block_writer import BlockWriter, PlacedValue
from ragcache_engine.kv_cache.chunk_pool import ChunkPool
from ragcache_engine.kv_cache.incoming_value import (
    EncodedValue,
    IncomingValue,
    NativeValue,
    OfferedValue,
    ValueSource,
)
from ragcache_engine.kv_cache.value_tensors import decode, value_shape
from ragcache_engine.protocol.messages import LoadJob, LoadOutcome, RecomputeJob, VariantSpan
from ragcache_engine.tiers.local_tiers import QUEUE_SHARE, LocalTiers
from ragcache_kv.rotation import KeyRotation, Pairing, Rope
from ragcache_kv.values.layout import FORMAT, checksum
from ragcache_kv.values.stored_value import StoredValue
from ragcache_wire.settings.engine import RECOMPUTE_SLICE_TOKENS

QUESTION_TOKENS = 64
SHARE = 0.15
MOVED_BY = 100
DOMAIN = "public"
CODECS = (Codec.INT8, Codec.E4M3, Codec.GSE8, Codec.INT4)
WARM_UP = 5
"""Warm-up rounds, which compile kernels and measure the time of writing."""

FILLED_S = 60.0
PINNED, HOST_TIER, DEVICE_POOL = "pinned", "host_tier", "device_pool"
SOURCES = (PINNED, HOST_TIER, DEVICE_POOL)

Write = Callable[[LoadJob, Sequence[PlacedValue]], None]


class ChunkCopies:
    """A prompt's chunks in all memories that they can be loaded from.

    ``values`` are native, pinned if there is a GPU. ``elsewhere`` were computed MOVED_BY positions
    before. ``stored`` are encoded values by codec.
    """

    def __init__(self, shape: Shape, device: torch.device, values: list[torch.Tensor]) -> None:
        self.shape, self.device = shape, device
        self.keys = [VariantKey(bytes([n]) * 16, bytes(16)) for n in range(len(values))]
        self.values = [self._pinned(value) for value in values]
        self.num_bytes = sum(value.nbytes for value in values)
        self.stored = {codec: [_stored(shape, v, codec) for v in values] for codec in CODECS}
        self._tiers = {
            HOST_TIER: self._tier(Placement.PINNED, torch.device("cpu")),
            DEVICE_POOL: self._tier(Placement.GPU, device),
        }

    def turned(self, rotation: KeyRotation) -> ChunkCopies:
        """Return the same chunks as if computed MOVED_BY positions before."""
        values = [rotation.rotate_part(value.clone(), -MOVED_BY) for value in self.values]
        return ChunkCopies(self.shape, self.device, values)

    def source(self, name: str, number: int) -> ValueSource:
        """Return a chunk that can be read once."""
        if name == PINNED:
            return NativeValue(self.values[number])
        size = self.shape.chunk_tokens
        reading = self._tiers[name].read(self.keys[number], size, 0, DOMAIN, exact=True)
        if reading is None:
            raise RuntimeError(f"a chunk is not in the {name}")
        return reading

    def encoded(self, codec: Codec, number: int) -> ValueSource:
        """Return a lossy chunk as an engine receives it: decoded on the GPU, or before."""
        stored = self.stored[codec][number]
        if self.device.type == "cuda":
            return EncodedValue(stored, self.shape.space, self.device)
        return NativeValue(self.decoded_here(codec, number))

    def decoded_here(self, codec: Codec, number: int) -> torch.Tensor:
        stored = self.stored[codec][number]
        value = decode(stored, self.shape.chunk_tokens, self.shape.space)
        assert value is not None
        return value

    def _pinned(self, value: torch.Tensor) -> torch.Tensor:
        return value.pin_memory() if self.device.type == "cuda" else value

    def _tier(self, memory: Placement, device: torch.device) -> LocalTiers:
        """Return a tier with all chunks, filled as an engine fills it."""
        limit = int(2 * self.num_bytes / QUEUE_SHARE)  # room for all of them in the queue
        pool = ChunkPool(self.shape.space, limit, device)
        tiers = LocalTiers({memory: pool}, "score")
        tiers.offer(self._offer(number) for number in range(len(self.keys)))
        tiers.start_rebalance()
        wanted = sum(pool.bytes_for(self.shape.chunk_tokens) for _ in self.keys)
        deadline = time.monotonic() + FILLED_S
        while tiers.take_counts().held_bytes.get(_NAMES[memory]) != wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the {_NAMES[memory]} tier was not filled")
            time.sleep(0.01)
        return tiers

    def _offer(self, number: int) -> OfferedValue:
        value = self.values[number]
        info = VariantInfo(value.shape[2], value.nbytes, 0, Provenance(exact=True))
        return OfferedValue(self.keys[number], info, value.nbytes, DOMAIN, lambda: value)


_NAMES = {Placement.GPU: "device", Placement.PINNED: "host"}


def _stored(shape: Shape, value: torch.Tensor, codec: Codec) -> StoredValue:
    space = value_shape(shape.space)
    native = value.contiguous().view(torch.uint8).numpy().reshape(-1)
    precision = Precision(codec, codec)
    parts = encode_value(native, space, shape.chunk_tokens, precision)
    raw = bytearray(b"".join(part.tobytes() for part in parts))
    described = tuple(ValuePart(part.nbytes, checksum(part.data)) for part in parts)
    info = VariantInfo(shape.chunk_tokens, len(raw), 0, Provenance(exact=True), precision)
    return StoredValue(info, described, space, FORMAT, memoryview(raw), Tier.MEMORY)


class Bench:
    """One prompt, its chunks' computed KV, and the measured ways to its answer."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.model = Llama(shape, device)
        self.context = shape.chunks * shape.chunk_tokens
        length = self.context + QUESTION_TOKENS
        rng = torch.Generator().manual_seed(1)
        drawn = torch.randint(0, VOCABULARY, (length,), generator=rng)
        self.token_ids: list[int] = drawn.tolist()
        self.ids = drawn.to(device)
        self.influence: list[list[float]] = torch.rand(
            shape.chunks, shape.chunk_tokens, generator=rng
        ).tolist()
        self.question = range(self.context, length)
        rope = Rope(shape.head_dim, shape.head_dim, Pairing.HALVES, self.model.frequencies)
        rotation = KeyRotation(rope, "bfloat16")
        cache = self.model.cache
        self.writer = BlockWriter(cache, rotation)
        # Each one learns the time of writing from one memory.
        self.layerings = {source: LayerwiseLoader(cache, self.writer) for source in SOURCES}
        self.passes = Passes(self.model)
        recomputer = cast("Any", self.passes)
        self.queue = RecomputationQueue(
            cache,
            BlendComponents(rotation, recomputer, AttentionObserver(cache, recomputer)),
            RECOMPUTE_SLICE_TOKENS,
            QUESTION_TOKENS,
        )
        self.compute_s: float | None = None
        self.put_off: defaultdict[str, list[bool]] = defaultdict(list)
        self.recomputed: list[int] = []
        self.model.run(self.ids, range(length))
        own = [cache.read(self.model.blocks, s, s + shape.chunk_tokens) for s in self._starts()]
        self.here = ChunkCopies(shape, device, own)
        self.elsewhere = self.here.turned(rotation)

    def _starts(self) -> range:
        return range(0, self.context, self.shape.chunk_tokens)

    def forget(self) -> None:
        self.put_off.clear()
        self.recomputed.clear()

    def shares_put_off(self) -> dict[str, float]:
        """Return the share of passes beside which layers were written."""
        return {source: round(statistics.fmean(put), 2) for source, put in self.put_off.items()}

    def full(self) -> torch.Tensor:
        return self.model.run(self.ids, range(len(self.ids)))

    def copy(self) -> None:
        for value in self.here.values:
            value.to(self.device, non_blocking=True, copy=True)

    def exact(self, source: str = PINNED) -> torch.Tensor:
        """Load and answer as the connector does by default."""
        self.load(source)
        return self.answer()

    def layerwise(self, source: str = PINNED) -> torch.Tensor:
        """Load and answer, with some layers written beside the pass."""
        layering = self.layerings[source]
        self._write(layering.write, partial(self.here.source, source))
        self.put_off[source].append(layering.begin_pass())
        logits = self.model.run(self.ids, self.question, layering.wait_for_layer)
        assert not layering.end_pass()
        self.writer.release_read_values()
        return logits

    def moved(self, source: str = PINNED) -> torch.Tensor:
        """Load with rotated keys, recompute nothing, and answer."""
        self._move(source)
        return self.answer()

    def blend15(self, source: str = PINNED) -> torch.Tensor:
        """Load with rotated keys, recompute 15 %, and answer."""
        job = replace(self._move(source), recompute=self._recompute(SHARE))
        self.queue.start(job, LoadOutcome("r", self.context, 0, 0.0, None, ""))
        ended: list[tuple[LoadJob, LoadOutcome]] = []
        while not ended:
            ended = self.queue.advance(busy=False)
        if ended[0][1].reason:
            raise RuntimeError(ended[0][1].reason)
        self.recomputed.append(ended[0][1].recomputed_tokens)
        return self.answer()

    def answer(self) -> torch.Tensor:
        """Compute the question alone."""
        return self.model.run(self.ids, self.question)

    def load(self, source: str) -> None:
        self._write(self.writer.write, partial(self.here.source, source))
        self.writer.release_read_values()

    def load_encoded(self, codec: Codec) -> None:
        """Decode and write all chunks."""
        self._write(self.writer.write, partial(self.here.encoded, codec))

    def _move(self, source: str) -> LoadJob:
        job = self._write(self.writer.write, partial(self._elsewhere, source), MOVED_BY)
        self.writer.release_read_values()
        return job

    def _elsewhere(self, source: str, number: int) -> ValueSource:
        found = self.elsewhere.source(source, number)
        # Keys are rotated in the writer's own copy; a copy that belongs to no tier is rotated in
        # place.
        if isinstance(found, NativeValue) and self.device.type == "cpu":
            return NativeValue(found.value.clone())
        return found

    def _write(
        self, write: Write, source_of: Callable[[int], ValueSource], position_shift: int = 0
    ) -> LoadJob:
        size = self.shape.chunk_tokens
        spans = tuple(
            VariantSpan(
                key, start, start + size, start - position_shift if position_shift else None
            )
            for key, start in zip(self.here.keys, self._starts(), strict=True)
        )
        job = LoadJob(
            *("r", spans, 0, self.context, self.model.blocks[:-SPARE_BLOCKS], DOMAIN),
            recompute=self._recompute(0.0) if position_shift else None,
            compute_s=self.compute_s,
        )
        values = [
            IncomingValue(span, source_of(number), rotate_by=position_shift)
            for number, span in enumerate(spans)
        ]
        write(job, [PlacedValue(value, value.span.start, value.span.end) for value in values])
        return job

    def _recompute(self, share: float) -> RecomputeJob:
        chunks = tuple(
            InfluencedChunk(start, influence)
            for start, influence in zip(self._starts(), self.influence, strict=True)
        )
        budget = share_to_tokens(share, self.context)
        scratch = self.model.blocks[-SPARE_BLOCKS:]
        return RecomputeJob(0, self.token_ids, chunks, (), budget, scratch)


class Decoders:
    """Decodes bytes in their final memory."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._is_gpu = bench.device.type == "cuda"
        self._near = {
            codec: [self._moved_near(stored) for stored in values]
            for codec, values in bench.here.stored.items()
        }

    def decode(self, codec: Codec) -> None:
        held = self._bench.here
        for number, stored in enumerate(held.stored[codec]):
            if self._is_gpu:
                self._on_device(stored, self._near[codec][number])
            else:
                held.decoded_here(codec, number)

    def equals_processor(self, codec: Codec) -> bool | None:
        """Return whether GPU and CPU decode alike; None without a GPU."""
        if not self._is_gpu:
            return None
        held, size = self._bench.here, self._bench.shape.chunk_tokens
        return all(
            torch.equal(
                held.encoded(codec, number).pieces(0, size)[0].cpu(),
                held.decoded_here(codec, number),
            )
            for number in range(len(held.keys))
        )

    def _moved_near(self, stored: StoredValue) -> torch.Tensor:
        return torch.frombuffer(stored.value, dtype=torch.uint8).to(self._bench.device)

    def _on_device(self, stored: StoredValue, raw: torch.Tensor) -> None:
        # Triton is certain only on a machine with a GPU.
        from ragcache_kv.codecs.device import decode_part  # noqa: PLC0415

        space, begin = value_shape(self._bench.shape.space), 0
        for part in stored.parts:
            encoded = raw[begin : begin + part.num_bytes]
            decode_part(encoded, space, stored.info.num_tokens, stored.info.precision)
            begin += part.num_bytes


def ways_of(bench: Bench) -> dict[str, Callable[[], Any]]:
    """Return the timed functions by name."""
    decoders = Decoders(bench)
    tiers = (HOST_TIER, DEVICE_POOL)
    return {
        "full": bench.full,
        "copy": bench.copy,
        "exact": bench.exact,
        "layerwise": bench.layerwise,
        "moved": bench.moved,
        "blend15": bench.blend15,
        **{tier: partial(bench.exact, tier) for tier in tiers},
        **{f"layerwise_{tier}": partial(bench.layerwise, tier) for tier in tiers},
        f"blend15_{DEVICE_POOL}": partial(bench.blend15, DEVICE_POOL),
        **{f"load_{source}": partial(bench.load, source) for source in SOURCES},
        **{f"load_{codec}": partial(bench.load_encoded, codec) for codec in CODECS},
        **{f"decode_{codec}": partial(decoders.decode, codec) for codec in CODECS},
    }


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    ways = ways_of(bench)
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(WARM_UP + rounds):
        for name, way in ways.items():
            began = _now(bench.device)
            way()
            seconds = _now(bench.device) - began
            if number >= WARM_UP:
                taken[name].append(seconds)
        began = _now(bench.device)
        bench.answer()
        bench.compute_s = _now(bench.device) - began
        if number < WARM_UP:
            bench.forget()
    return taken


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def differences(bench: Bench) -> dict[str, object]:
    """Compare logits: bit by bit between ways to load, and relative to full computation."""

    def wiped(way: Callable[[], torch.Tensor]) -> torch.Tensor:
        for attention in bench.model.attention:
            attention.kv_cache.zero_()
        return way()

    def apart(one: torch.Tensor, other: torch.Tensor) -> float:
        return round(float((one - other).float().norm() / other.float().norm()), 4)

    exact, full = wiped(bench.exact), wiped(bench.full)
    tiers = [partial(way, tier) for way in (bench.exact, bench.layerwise) for tier in SOURCES]
    decoders = Decoders(bench)
    return {
        "layerwise_equals_exact": torch.equal(wiped(bench.layerwise), exact),
        "tiers_equal_exact": all(torch.equal(wiped(way), exact) for way in tiers),
        "decoded_equals_processor": {
            str(codec): decoders.equals_processor(codec) for codec in CODECS
        },
        # A question computed alone uses other kernels than one in a whole prompt.
        "exact_differs_from_full": apart(exact, full),
        "moved_differs_from_full": apart(wiped(bench.moved), full),
        "blend15_differs_from_full": apart(wiped(bench.blend15), full),
    }


def figures(bench: Bench, taken: dict[str, list[float]]) -> dict[str, object]:
    """Return the times of the JSON line."""
    medians = {name: statistics.median(some) for name, some in taken.items()}

    def over(slow: str, fast: str) -> float:
        ratios = [a / b for a, b in zip(taken[slow], taken[fast], strict=True)]
        return round(statistics.median(ratios), 3)

    def gb_s(name: str) -> float:
        return round(bench.here.num_bytes / medians[name] / 1e9, 2)

    return {
        "full_over_exact": over("full", "exact"),
        "full_over_blend15": over("full", "blend15"),
        "full_over_blend15_device_pool": over("full", f"blend15_{DEVICE_POOL}"),
        "exact_over_layerwise": over("exact", "layerwise"),
        "exact_over_host_tier": over("exact", HOST_TIER),
        "exact_over_device_pool": over("exact", DEVICE_POOL),
        "host_tier_over_layerwise": over(HOST_TIER, f"layerwise_{HOST_TIER}"),
        "device_pool_over_layerwise": over(DEVICE_POOL, f"layerwise_{DEVICE_POOL}"),
        "layers_put_off": bench.shares_put_off(),
        "moved_over_exact": over("moved", "exact"),
        "exact_over_copy": over("exact", "copy"),
        "copy_gb_s": gb_s("copy"),
        "load_gb_s": {str(one): gb_s(f"load_{one}") for one in (*SOURCES, *CODECS)},
        "decode_gb_s": {str(codec): gb_s(f"decode_{codec}") for codec in CODECS},
        "ms": {name: round(1e3 * seconds, 3) for name, seconds in medians.items()},
        "repaired_share": round(statistics.mean(bench.recomputed) / bench.context, 4),
        "context_tokens": bench.context,
    }


@torch.no_grad()  # not inference_mode: another thread fills the tiers
def main() -> None:
    rounds = 5 if is_quick(__doc__, "fewer rounds") else 40
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    if not has_gpu:
        torch.set_num_threads(1)  # two busy cores would wait for each other at every layer
    bench = Bench(LLAMA_1B if has_gpu else SMALL, device)
    result = figures(bench, measure(bench, rounds)) | differences(bench)
    result |= {
        "ran_on": device.type,
        "decoded_by": "triton on the GPU" if has_gpu else "the processor: there is no GPU",
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
