"""Measures loading time and TTFT with mixed precision and placement by access frequency.

The baseline is HA-RAG's (section III-A): TurboRAG, which stores every chunk's KV in bf16 on disk
and loads what a prompt needs. All arms use the same values, queries and buffers:

``ha_rag``    mixed precision (Algorithm 1) and placement (Algorithm 2), thresholds of §III-B2
``mp_only``   mixed precision alone, all on disk
``dp_only``   placement alone, in bf16
``score``     our assignment: no more error, as readers meet it, than HA-RAG's mixture, and no more
              memory than HA-RAG's placement takes; bytes saved by error added, placed by score

The first half of the queries ranks the chunks; the second half is measured in steady state. Reads
bypass the page cache (O_DIRECT), or it is emptied before each read. Caches of a virtual disk's host
remain. Checksums are verified on the host, and each delivered value is compared with what its
precision decodes to.

A gain is a ratio of mean times over the queries; a query's time is the median of its rounds. In
each round all arms take their turn, in random order. These influences are kept constant:

- Target memory: huge pages if there are any (``bench.support.host_tier.aligned``).
- Idle memory, which a virtual machine's host may reclaim: before its turn an arm's memory is
  touched, and its last results are overwritten. Neither is timed.
- Other programs: a load during which this thread waited for the CPU is measured again. ``loads``
  counts such loads, and the turns in which no try was undisturbed.
- The disk: a faster disk leaves less to gain. ``disk_gb_per_s`` is what the baseline got.

TTFT = loading + decoding + prefill of the question over the loaded KV. A Llama with random weights
(``transformers``, as many key heads as query heads) computes the prefill on one core in all arms.

Everything is in host memory: no bus is crossed, and prefill takes far longer than on a GPU, so TTFT
gains less.

Errors are of attention's output, on the bundled model's KV (``bench/codecs.py``).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bench.codecs import errors, real_samples, to_bfloat16
from bench.support.host_tier import Encoded, Loader, ValueRegion
from bench.support.program import options, print_figures
from ragcache_core.identity.variant import Precision, ValueShape
from ragcache_core.tiering.precision_assignment import (
    AccessObservation,
    DecayedCounts,
    HaRagAssignment,
    Placement,
)
from ragcache_core.tiering.score_assignment import Grade, MemoryBudget, ScoreAssignment, read_error
from ragcache_kv.codecs import (
    decode_part,
    encode_part,
    encoded_part_bytes,
    native_part_bytes,
    warm_up,
)
from ragcache_kv.values.layout import checksum

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
RETRIEVED = DATA / "psirag_retrieved" / "multihoprag_summary.json"
CHUNKS_PER_QUERY = 5
SHAPE = ValueShape(num_layers=8, num_kv_heads=8, head_dim=64, dtype="bfloat16")
CHUNK_TOKENS = 256  # 4 MiB of bf16
READERS = 2
QUESTION_TOKENS = 24
BASES = 6
ROUNDS = 5  # of every query
QUERIES = 100
SEED = 20
QUICK_QUERIES = 10
DISTURBED_S = 0.001  # an undisturbed load waits less for the CPU, a disturbed one 3 ms or more
TRIES = 8  # beside as many busy programs as cores, one load in three was undisturbed
HALF_LIFE_QUERIES = 1000.0
BASELINE = "bf16_disk"
QUICKLY_MEASURED = tuple(
    map(Precision.parse, ("int8", "e4m3", "e5m2", "gse8", "int8/int4", "int4"))
)
MEASURED = (
    *QUICKLY_MEASURED,
    *map(Precision.parse, ("gse8-125", "gse8-134", "e4m3/int4", "gse8/int4")),
)


@dataclass(frozen=True, slots=True)
class Arm:
    """Precision and memory of each chunk."""

    name: str
    precision: Mapping[int, Precision]
    placement: Mapping[int, Placement]

    def in_memory(self, chunk: int) -> bool:
        return self.placement[chunk] is not Placement.DISK


def access_sequence(seed: int) -> tuple[str, list[list[int]]]:
    """Return chunks of 1,000 queries: a real retriever's results, or an equally skewed sequence."""
    if RETRIEVED.exists():
        retrieved = json.loads(RETRIEVED.read_text())["retrieved_docs"]
        names: dict[str, int] = {}
        queries = [[names.setdefault(text, len(names)) for text in query] for query in retrieved]
        return "psirag multihoprag", queries
    rng = random.Random(seed)
    num_chunks = 2400
    weights = [1 / (rank + 1) ** 0.8 for rank in range(num_chunks)]
    queries = []
    for _ in range(1000):
        drawn = dict.fromkeys(rng.choices(range(num_chunks), weights, k=4 * CHUNKS_PER_QUERY))
        queries.append(list(drawn)[:CHUNKS_PER_QUERY])
    return "seeded zipf 0.8", queries


def observe(
    queries: list[list[int]], until: int, native_bytes: int
) -> list[AccessObservation[int]]:
    """Return what a store would know after these queries, one per second."""
    counts: DecayedCounts[int] = DecayedCounts(HALF_LIFE_QUERIES)
    for second, query in enumerate(queries[:until]):
        for chunk in query:
            counts.add(chunk, float(second))
    chunks = sorted({chunk for query in queries for chunk in query})
    return [
        AccessObservation(chunk, accesses, native_bytes, score=accesses / native_bytes)
        for chunk in chunks
        for accesses in [counts.count(chunk, float(until))]
    ]


def measured_grades(precisions: Sequence[Precision]) -> tuple[Grade, ...]:
    """Measure errors on real KV; the sizes are those of the values used here."""
    samples = real_samples(1, 512)
    native = native_part_bytes(SHAPE, 1)
    return tuple(
        Grade(
            precision,
            encoded_part_bytes(SHAPE, 1, precision) / native,
            errors(precision, samples)["attention_share"],
        )
        for precision in precisions
    )


def make_arms(observed: list[AccessObservation[int]], grades: tuple[Grade, ...]) -> list[Arm]:
    """Make all arms; ours gets the error and the memory of HA-RAG's."""
    ha_rag = HaRagAssignment()
    precision, placement = ha_rag.assign_precisions(observed), ha_rag.assign_placements(observed)
    sizes = {grade.precision: grade.size for grade in grades}
    taken = dict.fromkeys(Placement, 0)
    for one in observed:
        taken[placement[one.key]] += round(one.native_bytes * sizes[precision[one.key]])
    memory = MemoryBudget(taken[Placement.GPU], taken[Placement.PINNED], taken[Placement.PAGEABLE])
    native, on_disk = HaRagAssignment((Precision(),), ()), dict.fromkeys(placement, Placement.DISK)
    native_precision = native.assign_precisions(observed)
    score = ScoreAssignment(grades, read_error(observed, precision, grades), memory)
    return [
        Arm(BASELINE, native_precision, on_disk),
        Arm("ha_rag", precision, placement),
        Arm("mp_only", precision, on_disk),
        Arm("dp_only", native_precision, native.assign_placements(observed)),
        Arm("score", score.assign_precisions(observed), score.assign_placements(observed)),
    ]


class Values:
    """The KV of chunks: each chunk has one of a few heavy-tailed random values."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        layers = (SHAPE.num_layers, 2, CHUNK_TOKENS, SHAPE.num_kv_heads, SHAPE.head_dim)
        self._native = []
        for _ in range(BASES):
            wide = rng.standard_normal(layers, np.float32)
            wide *= np.exp(rng.standard_normal(layers[-2:])).astype(np.float32)
            self._native.append(to_bfloat16(wide).reshape(SHAPE.num_layers, -1))
        self._encoded: dict[tuple[int, Precision], Encoded] = {}
        self._decoded: dict[tuple[int, Precision], int] = {}

    @property
    def native_bytes(self) -> int:
        return int(self._native[0].nbytes)

    def encoded(self, chunk: int, precision: Precision) -> Encoded:
        name = chunk % BASES, precision
        if name not in self._encoded:
            layers, form = self._native[name[0]], (SHAPE, CHUNK_TOKENS, precision)
            parts = [encode_part(layer, *form) for layer in layers]
            self._encoded[name] = Encoded.of(precision, parts)
            decoded = np.concatenate([decode_part(part, *form) for part in parts])
            self._decoded[name] = checksum(decoded.data)
        return self._encoded[name]

    def decoded(self, chunk: int, precision: Precision) -> int:
        """Return the checksum that a reader must get."""
        return self._decoded[chunk % BASES, precision]


class Question:
    """A Llama of random weights with as many heads as the KV has, and a question to it."""

    def __init__(self) -> None:
        width = SHAPE.num_kv_heads * SHAPE.head_dim
        config = LlamaConfig(
            vocab_size=8192,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=SHAPE.num_layers,
            num_attention_heads=SHAPE.num_kv_heads,
            num_key_value_heads=SHAPE.num_kv_heads,
            max_position_embeddings=32768,
        )
        self._model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        self._ids = torch.arange(QUESTION_TOKENS)[None]

    def first_token(self, values: Sequence[NDArray[np.uint8]]) -> int:
        """Prefill over native values, in order."""
        layout = (SHAPE.num_layers, 2, CHUNK_TOKENS, SHAPE.num_kv_heads, SHAPE.head_dim)
        native = [torch.from_numpy(value).view(torch.bfloat16).view(layout) for value in values]
        with torch.inference_mode():
            cache = DynamicCache()
            for layer in range(SHAPE.num_layers):
                # [tokens, heads, dim] of all chunks to [1, heads, tokens, dim]
                keys, rest = (
                    torch.cat([value[layer, half] for value in native]).transpose(0, 1)[None]
                    for half in (0, 1)
                )
                cache.update(keys, rest, layer)
            logits = self._model(self._ids, past_key_values=cache, logits_to_keep=1).logits
            return int(logits[0, -1].argmax())


@dataclass(slots=True)
class Times:
    """Seconds of each round of a query, or of each query."""

    loading: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)

    def add_median(self, rounds: Times) -> None:
        self.loading.append(statistics.median(rounds.loading))
        self.ttft.append(statistics.median(rounds.ttft))


@dataclass(slots=True)
class Loads:
    """Counts of turns, of loads measured again, and of turns without an undisturbed try."""

    turns: int = 0
    repeated: int = 0
    taken_disturbed: int = 0


def waited_for_cpu() -> float:
    """Return the seconds that this thread waited for a CPU; 0 on other systems than Linux."""
    schedstat = Path("/proc/thread-self/schedstat")
    return int(schedstat.read_text().split()[1]) / 1e9 if schedstat.exists() else 0.0


class ArmTiers:
    """The values of every arm, on one disk and in memory, and the shared target buffers.

    ``rates`` are bytes per second of the disk for the baseline, load by load.
    """

    def __init__(
        self, queries: list[list[int]], arms: list[Arm], values: Values, folder: Path
    ) -> None:
        chunks = sorted({chunk for query in queries for chunk in query})
        self.rates: list[float] = []
        self.loads = Loads()
        self._values = values
        self._loader = Loader(SHAPE, CHUNK_TOKENS, max(map(len, queries)), READERS)
        self._question = Question()
        self._regions: dict[tuple[Precision, ...], ValueRegion] = {}
        self._region_of: dict[str, ValueRegion] = {}
        self._held: dict[str, dict[int, Encoded]] = {}
        for arm in arms:
            encoded = {chunk: values.encoded(chunk, arm.precision[chunk]) for chunk in chunks}
            alike = tuple(arm.precision[chunk] for chunk in chunks)
            if alike not in self._regions:
                self._regions[alike] = ValueRegion(folder / f"{arm.name}.values", encoded)
            self._region_of[arm.name] = self._regions[alike]
            # Each chunk has its own copy, so that memory use is realistic.
            self._held[arm.name] = {chunk: replace(one) for chunk, one in encoded.items()}
            for chunk, one in self._held[arm.name].items():
                if arm.in_memory(chunk):
                    self._loader.keep(one)

    def answer(self, arm: Arm, query: list[int], rounds: Times) -> None:
        """Load the chunks and compute the first token."""
        loading = self._load(arm, query)
        begun = time.perf_counter()
        self._question.first_token(self._loader.outs[: len(query)])
        rounds.ttft.append(loading + time.perf_counter() - begun)
        rounds.loading.append(loading)
        for out, chunk in zip(self._loader.outs, query, strict=False):
            if checksum(out.data) != self._values.decoded(chunk, arm.precision[chunk]):
                raise AssertionError(f"{arm.name} delivered something else")

    def page_cache(self) -> str:
        """Return how reads bypassed the page cache, and whether they did."""
        direct = all(region.direct for region in self._regions.values())
        how = "bypassed (O_DIRECT)" if direct else "emptied before each read (posix_fadvise)"
        resident = max(region.resident_share() for region in self._regions.values())
        return f"{how}; share of the files in it afterwards (mincore): {resident:.3f}"

    def close(self) -> None:
        self._loader.close()
        for region in self._regions.values():
            region.close()

    def _load(self, arm: Arm, query: list[int]) -> float:
        """Time a load; repeat it if another program used the CPU meanwhile."""
        held, region = self._held[arm.name], self._region_of[arm.name]
        self.loads.turns += 1
        for tries_left in reversed(range(TRIES)):
            self._loader.make_ready(query, held)
            if not region.direct:
                region.drop()
            waited = waited_for_cpu()
            begun = time.perf_counter()
            self._loader.load(query, held, region)
            taken = time.perf_counter() - begun
            disturbed = waited_for_cpu() - waited > DISTURBED_S
            rate = self._loader.take_rate()
            if not disturbed:
                break
            if tries_left:
                self.loads.repeated += 1
            else:
                self.loads.taken_disturbed += 1
        if arm.name == BASELINE and rate is not None:
            self.rates.append(rate)
        return taken


def measure(
    queries: list[list[int]], arms: list[Arm], tiers: ArmTiers, rounds: int, rng: random.Random
) -> dict[str, Times]:
    times = {arm.name: Times() for arm in arms}
    for number, query in enumerate([queries[0], *queries]):
        taken = {arm.name: Times() for arm in arms}
        for _ in range(rounds):
            for arm in rng.sample(arms, len(arms)):
                tiers.answer(arm, query, taken[arm.name])
        if number > 0:  # the first round warms up
            for name, of_query in taken.items():
                times[name].add_median(of_query)
    return times


def report(
    times: Mapping[str, Times], arms: list[Arm], queries: list[list[int]], grades: tuple[Grade, ...]
) -> dict[str, dict[str, object]]:
    reads = [chunk for query in queries for chunk in query]
    known = {grade.precision: grade for grade in (Grade(Precision(), 1.0, 0.0), *grades)}
    base = times[BASELINE]
    base_s, base_ttft_s = statistics.mean(base.loading), statistics.mean(base.ttft)
    figures: dict[str, dict[str, object]] = {}
    for arm in arms:
        held = [arm.precision[chunk] for chunk in reads]
        loading = times[arm.name].loading
        loading_s, ttft_s = statistics.mean(loading), statistics.mean(times[arm.name].ttft)
        query_gains = [one / own for one, own in zip(base.loading, loading, strict=True)]
        from_disk = [known[arm.precision[one]].size for one in reads if not arm.in_memory(one)]
        figures[arm.name] = {
            "loading_ms": round(1e3 * loading_s, 2),
            "ttft_ms": round(1e3 * ttft_s, 2),
            "loading_gain": round(base_s / loading_s, 3),
            "ttft_gain": round(base_ttft_s / ttft_s, 3),
            "mean_of_query_gains": round(statistics.mean(query_gains), 3),
            "bytes_from_disk": round(sum(from_disk) / len(reads), 3),
            "reads_from_memory": round(statistics.mean(map(arm.in_memory, reads)), 3),
            "read_error": round(statistics.mean(known[one].error for one in held), 5),
            "precisions_read": {
                str(one): round(held.count(one) / len(held), 3)
                for one in sorted(set(held), key=str)
            },
        }
    return figures


def run(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # threads that wait for each other would measure other programs
    grades = measured_grades(QUICKLY_MEASURED if args.quick else MEASURED)
    source, queries = access_sequence(SEED)
    half = len(queries) // 2
    values = Values(SEED)
    observed = observe(queries, half, values.native_bytes)
    arms = make_arms(observed, grades)
    for precision in {one for arm in arms for one in arm.precision.values()}:
        warm_up(precision, SHAPE)
    queries = queries[half : half + (QUICK_QUERIES if args.quick else QUERIES)]
    tiers = ArmTiers(queries, arms, values, folder)
    times = measure(queries, arms, tiers, ROUNDS, random.Random(SEED))
    page_cache = tiers.page_cache()
    tiers.close()
    figures = report(times, arms, queries, grades)
    by_name = {arm.name: arm for arm in arms}
    tenths = statistics.quantiles(tiers.rates, n=10)
    spread = zip(("p10", "median", "p90"), tenths[::4], strict=True)
    return {
        "bench": "hotness",
        "mean_gain_over_bf16_disk": figures["ha_rag"]["loading_gain"],
        "ttft_gain_over_bf16_disk": figures["ha_rag"]["ttft_gain"],
        "mp_only_gain": figures["mp_only"]["loading_gain"],
        "dp_only_gain": figures["dp_only"]["loading_gain"],
        "score_gain_over_bf16_disk": figures["score"]["loading_gain"],
        "score_ttft_gain_over_bf16_disk": figures["score"]["ttft_gain"],
        "disk_gb_per_s": {name: round(rate / 1e9, 3) for name, rate in spread},
        "ha_rag_error": read_error(observed, by_name["ha_rag"].precision, grades),
        "score_error": read_error(observed, by_name["score"].precision, grades),
        "page_cache": page_cache,
        "loads": asdict(tiers.loads),
        "accesses": source,
        "queries": len(queries),
        "chunk_bytes": values.native_bytes,
        "arms": figures,
        "grades": {str(g.precision): [round(g.size, 4), round(g.error, 5)] for g in grades},
    }


def main() -> None:
    args = options(__doc__, "few queries: under a minute").parse_args()
    print_figures(lambda folder: run(args, folder))


if __name__ == "__main__":
    main()
