"""Measures answers when chunks' KV is reused after other chunks and partly recomputed.

The bundled model answers held-out handbook questions over eight documents in random order. The KV
of each chunk was captured in another prompt, after chunks of other handbooks. The benchmark writes
it at its new position, rotates its keys, and recomputes a share of its tokens through vLLM's own
model (``ragcache_engine.blend.recomputer``).

Methods to choose the tokens:

- ours: tokens under most influence of other chunks at capture (``ragcache_engine.blend.attention``)
  that the question attends to (``core/blend``);
- by influence alone;
- Cache-Craft: its ranking and its fix overhead;
- random;
- heavy: tokens that received most attention, as in H2O;
- focused: ours without chunks that Cache-Craft's Algorithm 1 leaves out. One variant uses the cut
  as printed, another one the largest gap. The recomputed share shows what that saves.

The baseline is full computation. The question's own pass is not part of the counted tokens.

Printed: exact matches with the right answer, ROUGE-L F1 to the answer of full computation, and KL
of the first token from it. Also the share of recomputed context tokens and the number of runs.

``captured_first``: the same questions, but each chunk was captured right after the template, as a
precomputed chunk is. The influence of other chunks is unknown then, so all its tokens count alike
and ours uses the question's attention alone. The first chunk of the prompt is exact and stays as
it is; shares are of the other chunks' tokens.

A result is ``void`` if recomputation cannot help. That is so if answers without recomputation are
right more than VOID_OVER times as often as those of full computation, or if the latter never are.
A full run that is void says so and fails.

``--foreign`` uses text the model was not trained on, and a model with random weights whose
attention is not uniform. It takes paragraphs of MuSiQue, eight to a prompt, each captured after
others. There is no right answer then, only the KL. It needs the public data in ../shared/data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.support.cache_craft import (
    AttentionRankedChunk,
    rank_by_attention,
    select_by_fix_overhead,
)
from models.tinyrag.examples import ask, stage_scene
from models.tinyrag.handbook import Question
from models.tinyrag.prompt import chunk_ids, frame
from ragcache_core.blend.context_impact import context_impact
from ragcache_core.blend.fix_overhead import VariantFit
from ragcache_core.blend.focused_chunks import Cut, FocusedChunks, entropy_cut, largest_gap_cut
from ragcache_core.blend.prefix_chunks import AttendedChunk, PrefixChunk
from ragcache_core.blend.prefix_overlap import prefix_overlap
from ragcache_core.blend.slices import split_into_passes
from ragcache_core.blend.token_ranking import InfluencedChunk, rank_tokens
from ragcache_core.blend.token_selection import select_tokens, share_to_tokens
from ragcache_core.identity.keys import KEY_BYTES, VariantKey
from ragcache_core.quality.rouge import rouge_l

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = ROOT.parent / "shared" / "data" / "hipporag" / "musique_train.json"
FOREIGN_TOKENS = 160
"""Longest paragraph."""

MODEL = ROOT / "models" / "tinyrag" / "model"
DOCUMENTS = 8
BUDGETS = (0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 1.0)
KINDS = ("single", "two_step")
"""Kinds of questions with an answer; a poor model also says "no answer"."""

NEIGHBOURS = (2, 5)
"""Smallest and largest number of chunks before a captured one."""

FIRST_BUDGET = 0.2
VOID_OVER = 0.8
"""The bundled model has 0.75 over 200 questions."""

FOCUS_BUDGET = 0.2
WINDOW = 2
"""Number of layers, of five, over which the cut of focused chunks must stay the same."""

CUTS: Mapping[str, Cut] = {"as printed": entropy_cut, "largest gap": largest_gap_cut}

MAX_ANSWER_TOKENS = 32
FIRST_BLOCK = 64
"""First block of the tables, after those that the engine may have used."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A chunk's KV, [num_layers, 2, num_tokens, num_kv_heads, head_dim], and its attention.

    ``received`` is the attention that each of its tokens received from later tokens.
    """

    value: torch.Tensor
    position: int
    cci: float
    prefix: tuple[AttendedChunk, ...]
    ranking: tuple[int, ...]
    influence: tuple[float, ...]
    received: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids without the end token, and log probabilities of the first token."""

    token_ids: tuple[int, ...]
    log_probs: torch.Tensor


@dataclass(slots=True)
class Score:
    """Sums over questions."""

    asked: int = 0
    right: int = 0
    rouge: float = 0.0
    kl: float = 0.0
    recomputed: float = 0.0
    runs: int = 0
    same: int = 0

    def row(self) -> dict[str, float]:
        """Return the means."""
        n = max(1, self.asked)
        return {
            "exact_match": round(self.right / n, 4),
            "rouge_l": round(self.rouge / n, 4),
            "kl": round(self.kl / n, 4),
            "recomputed": round(self.recomputed / n, 4),
            "runs": round(self.runs / n, 1),
            "same_tokens": round(self.same / n, 4),
        }


class Lab:
    """The connector's parts inside a worker, and a greedy decoder."""

    def __init__(self, worker: Any, model_folder: Path, end_id: int) -> None:
        import torch  # noqa: PLC0415  after vLLM's variables are set

        from ragcache_engine.blend.attention import AttentionObserver  # noqa: PLC0415
        from ragcache_engine.blend.model_access import access_model  # noqa: PLC0415
        from ragcache_engine.blend.recomputer import Recomputer  # noqa: PLC0415
        from ragcache_engine.kv_cache.paged_cache import PagedCache  # noqa: PLC0415
        from ragcache_kv.rotation import KeyRotation, read_rope  # noqa: PLC0415

        self._torch = torch
        runner = worker.model_runner
        model = access_model(runner, runner.attn_groups[0][0].kv_cache_spec.block_size)
        layers = runner.vllm_config.compilation_config.static_forward_context
        self.cache = PagedCache({name: layers[name] for name in model.layer_names}, model.device)
        self.recomputer = Recomputer(model)
        self._observer = AttentionObserver(self.cache, self.recomputer)
        self._logits = runner.model.compute_logits
        self._end_id = end_id
        self._block_size = model.block_size
        config = json.loads((model_folder / "config.json").read_text())
        dtype = str(self.cache.shape.dtype).removeprefix("torch.")
        self._rotation = KeyRotation(read_rope(config), dtype)

    def table(self, number: int) -> list[int]:
        """Return the block table of a prompt of the longest length."""
        count = -(-4096 // self._block_size)
        return [FIRST_BLOCK + number * count + i for i in range(count)]

    def capture(
        self, head: Sequence[int], before: Sequence[Sequence[int]], chunk: Sequence[int]
    ) -> Captured:
        """Capture a chunk's KV after others."""
        segments, token_ids = [range(len(head))], list(head)
        for ids in (*before, chunk):
            segments.append(range(len(token_ids), len(token_ids) + len(ids)))
            token_ids += ids
        table, positions = self.table(0), segments[-1]
        self.recomputer.recompute(token_ids, table, [range(len(token_ids))])
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
            received=tuple(own.sum(0).tolist()),
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
        """Return the attention of the tokens from position ``first`` on, by position."""
        question = range(first, len(token_ids))
        seen: list[float] = self._observer.question_attention(token_ids, table, question).tolist()
        return seen

    def attention_by_layer(
        self, token_ids: Sequence[int], table: Sequence[int], chunks: Sequence[range]
    ) -> list[list[float]]:
        """Return the attention of all tokens after the chunks to each chunk, by layer (eq. 15)."""
        from bench.support.chunk_attention import ChunkAttentionHook  # noqa: PLC0415

        question = range(chunks[-1].stop, len(token_ids))
        hook = ChunkAttentionHook(self.cache, table, question, chunks)
        with hook.attached():
            self.recomputer.recompute(token_ids, table, [question])
        return hook.by_layer

    def answer(
        self,
        token_ids: Sequence[int],
        table: Sequence[int],
        first: int,
        most: int = MAX_ANSWER_TOKENS,
    ) -> Answer:
        """Compute the prompt from position ``first`` on and decode up to ``most`` tokens."""
        torch, ids = self._torch, list(token_ids)
        answer: list[int] = []
        log_probs = None
        start = first
        while True:
            hidden = self.recomputer.recompute(ids, table, [range(start, len(ids))])
            logits = self._logits(hidden[-1:])[0].float()
            if log_probs is None:
                log_probs = torch.log_softmax(logits, -1)
            token = int(logits.argmax())
            if token == self._end_id or len(answer) == most:
                return Answer(tuple(answer), log_probs)
            answer.append(token)
            start = len(ids)
            ids.append(token)


def key_of(token_ids: Sequence[int]) -> bytes:
    """Return a key for a chunk, from its tokens."""
    import xxhash  # noqa: PLC0415

    return xxhash.xxh3_128_digest(repr(list(token_ids)).encode())[:KEY_BYTES]


@dataclass(frozen=True, slots=True)
class Case:
    """One question: the prompt's parts, and the prompts that its chunks are captured in.

    ``question`` is None if there is no right answer.
    """

    question: Question | None
    head: list[int]
    chunks: list[list[int]]
    tail: list[int]


@dataclass(slots=True)
class Trial:
    """One prompt with its chunks' captured KV, answered with several methods.

    ``exact_end`` is the position up to which all KV is exact.
    """

    lab: Lab
    case: Case
    captured: list[Captured]
    rng: Random
    most: int = MAX_ANSWER_TOKENS
    exact_end: int = 0
    starts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    question_attention: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.case.head)
        self.exact_end = len(self.token_ids)
        for captured, ids in zip(self.captured, self.case.chunks, strict=True):
            start = len(self.token_ids)
            self.starts.append(start)
            self.token_ids += ids
            if start == self.exact_end == captured.position and not captured.prefix:
                self.exact_end = len(self.token_ids)
        self.end = len(self.token_ids)
        self.token_ids += self.case.tail
        self.question_attention = self.lab.question_attention(
            self.token_ids, self._placed(), self.end
        )

    end: int = 0

    @property
    def context_tokens(self) -> int:
        """Return the tokens of all chunks that are not exact."""
        return self.end - self.exact_end

    @property
    def table(self) -> list[int]:
        """Return the block table of the chunks."""
        return self.lab.table(2)

    def share(self, runs: Sequence[range]) -> float:
        """Return a share of all chunks' tokens."""
        return sum(len(run) for run in runs) / self.context_tokens

    def full(self) -> Answer:
        """Compute the whole prompt."""
        table = self.lab.table(1)
        self.lab.recomputer.recompute(self.token_ids, table, [range(self.end)])
        return self.lab.answer(self.token_ids, table, self.end, self.most)

    def reuse(self, runs: Sequence[range]) -> Answer:
        """Compute the head, write the chunks, recompute the runs."""
        table = self._placed()
        passes = self.lab.recomputer
        for one in split_into_passes(runs, max_tokens=passes.max_tokens, max_runs=passes.max_runs):
            passes.recompute(self.token_ids, table, one)
        return self.lab.answer(self.token_ids, table, self.end, self.most)

    def _placed(self) -> list[int]:
        """Compute the head and write the chunks."""
        table = self.table
        self.lab.recomputer.recompute(self.token_ids, table, [range(len(self.case.head))])
        for captured, start in zip(self.captured, self.starts, strict=True):
            self.lab.write(table, captured, start)
        return table

    def ours(self, budget: int) -> tuple[range, ...]:
        """Select tokens by influence and by the attention of the question."""
        order = rank_tokens(self._influenced, self.question_attention)
        return select_tokens(order, budget).runs

    def influence(self, budget: int) -> tuple[range, ...]:
        """Select tokens by influence."""
        return select_tokens(rank_tokens(self._influenced), budget).runs

    @property
    def _influenced(self) -> list[InfluencedChunk]:
        return [
            InfluencedChunk(start, captured.influence)
            for captured, start in zip(self.captured, self.starts, strict=True)
            if start >= self.exact_end
        ]

    def focused(self, budget: int, cut: Cut) -> tuple[range, ...]:
        """Select those of ours in the chunks that Algorithm 1 keeps."""
        spans = [
            range(start, start + len(ids))
            for start, ids in zip(self.starts, self.case.chunks, strict=True)
        ]
        state = FocusedChunks.at_start(len(spans), window=WINDOW, cut=cut)
        for layer in self.lab.attention_by_layer(self.token_ids, self._placed(), spans):
            state = state.after_layer(layer)
        order = select_tokens(
            rank_tokens(self._influenced, self.question_attention), budget
        ).positions()
        kept = [p for p in order if any(p in spans[chunk] for chunk in state.focused)]
        return select_tokens(kept, budget).runs

    def cache_craft(self, budget: int) -> tuple[range, ...]:
        """Select the highest inter-attention of each chunk, as many as its fix overhead wants."""
        chunks: list[AttentionRankedChunk] = []
        before: list[PrefixChunk] = []
        for captured, start, ids in zip(self.captured, self.starts, self.case.chunks, strict=True):
            overlap = prefix_overlap(captured.prefix, before).adjusted
            fit = VariantFit(VariantKey(key_of(ids), bytes(KEY_BYTES)), captured.cci, overlap)
            limit = len(captured.ranking)
            chunks.append(
                AttentionRankedChunk(start, captured.ranking, fit.fix_overhead(1.0), limit)
            )
            before.append(PrefixChunk(key_of(ids), len(ids)))
        return select_by_fix_overhead(chunks, budget).runs

    def random(self, budget: int) -> tuple[range, ...]:
        """Select random positions."""
        order = list(range(self.exact_end, self.end))
        self.rng.shuffle(order)
        return select_tokens(order, budget).runs

    def heavy(self, budget: int) -> tuple[range, ...]:
        """Select tokens that received most attention from their own chunk."""
        paid = {
            start + i: weight
            for captured, start in zip(self.captured, self.starts, strict=True)
            for i, weight in enumerate(captured.received)
        }
        return select_tokens(sorted(paid, key=lambda p: -paid[p]), budget).runs


def draw(rng: Random, tokenizer: Any, count: int) -> tuple[list[Case], list[list[int]]]:
    """Draw questions of every kind in turn, and chunks of other handbooks."""

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    def chunks_of(scene: Any) -> list[list[int]]:
        return [chunk_ids(tokenizer, c.text) for chunks in scene.chunks for c in chunks]

    others = [
        ids
        for _ in range(12)
        for ids in chunks_of(stage_scene(rng, "held_out", DOCUMENTS, count_tokens))
    ]
    cases: list[Case] = []
    while len(cases) < count:
        scene = stage_scene(rng, "held_out", DOCUMENTS, count_tokens)
        question = ask(rng, scene.documents, "held_out", KINDS[len(cases) % len(KINDS)])  # type: ignore[arg-type]
        if question is not None:
            head, tail = frame(tokenizer, question.text)
            cases.append(Case(question, head, chunks_of(scene), tail))
    return cases, others


Choose = Callable[[Trial, int], Sequence[range]]

METHODS: Mapping[str, Choose] = {
    "ours": Trial.ours,
    "influence": Trial.influence,
    "Cache-Craft": Trial.cache_craft,
    "random": Trial.random,
    "heavy": Trial.heavy,
}


FIRST_METHODS: Mapping[str, Choose] = {
    "first, naive": lambda trial, budget: (),
    f"first, ours {FIRST_BUDGET:.0%}": Trial.ours,
    f"first, random {FIRST_BUDGET:.0%}": Trial.random,
}
"""Methods for chunks that were captured first in their prompts."""


def captured_first(lab: Lab, case: Case, rng: Random) -> Trial:
    """Return the case with each chunk captured right after the template."""
    alone = [lab.capture(case.head, (), ids) for ids in case.chunks]
    # As in the engine: without observed influence all tokens of a chunk count alike.
    alike = [replace(captured, influence=(1.0,) * len(captured.influence)) for captured in alone]
    return Trial(lab, case, alike, rng, most=0 if case.question is None else MAX_ANSWER_TOKENS)


def work(worker: Any, count: int, seed: int) -> dict[str, dict[str, float]]:
    """Answer all questions with all methods; return scores by "method budget" and kind."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rng = Random(seed)
    cases, others = draw(rng, tokenizer, count)
    end_id = tokenizer.eos_token_id
    lab = Lab(worker, MODEL, end_id)
    scores: defaultdict[str, Score] = defaultdict(Score)
    for case in cases:
        captured = [
            lab.capture(case.head, rng.sample(others, rng.randint(*NEIGHBOURS)), ids)
            for ids in case.chunks
        ]
        trial = Trial(lab, case, captured, rng)
        full = trial.full()
        answers: dict[str, tuple[Answer, Sequence[range]]] = {
            "full": (full, [range(trial.exact_end, trial.end)]),
            "naive": (trial.reuse(()), ()),
        }
        for name, choose in METHODS.items():
            for share in BUDGETS if name == "ours" else BUDGETS[:-1]:  # all tokens are all tokens
                runs = choose(trial, share_to_tokens(share, trial.context_tokens))
                answers[f"{name} {share:.0%}"] = trial.reuse(runs), runs
        for name, cut in CUTS.items():
            runs = trial.focused(share_to_tokens(FOCUS_BUDGET, trial.context_tokens), cut)
            answers[f"focused, {name} {FOCUS_BUDGET:.0%}"] = trial.reuse(runs), runs
        shares = {name: trial.share(runs) for name, (_, runs) in answers.items()}
        first = captured_first(lab, case, rng)
        for name, choose in FIRST_METHODS.items():
            runs = choose(first, share_to_tokens(FIRST_BUDGET, first.context_tokens))
            answers[name] = first.reuse(runs), runs
            shares[name] = first.share(runs)
        for name, (answer, runs) in answers.items():
            assert case.question is not None
            for group in (name, f"{name}, {case.question.kind}"):
                _note(scores[group], case.question, full, answer, tokenizer.decode)
                scores[group].recomputed += shares[name]
                scores[group].runs += len(runs)
    return {name: score.row() for name, score in scores.items()}


def _note(
    score: Score, question: Question, full: Answer, answer: Answer, decode: Callable[[Any], str]
) -> None:
    said = decode(answer.token_ids)
    score.asked += 1
    score.right += said == question.answer
    score.rouge += rouge_l(said.split(), decode(full.token_ids).split())
    score.kl += divergence(full, answer)
    score.same += answer.token_ids == full.token_ids


def divergence(full: Answer, answer: Answer) -> float:
    """Return the KL of the first token's distributions, in nats."""
    return max(0.0, float((full.log_probs.exp() * (full.log_probs - answer.log_probs)).sum()))


def work_on_foreign_text(
    worker: Any, model: Path, texts: Sequence[str], count: int, seed: int
) -> dict[str, float]:
    """Return the mean KL by "method budget"."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = Random(seed)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found[:FOREIGN_TOKENS]

    lab = Lab(worker, model, -1)
    sums: defaultdict[str, float] = defaultdict(float)
    head = ids("Answer the question from the documents.")
    for _ in range(count):
        *drawn, question = rng.sample(texts, DOCUMENTS + 1)
        case = Case(None, head, [ids(text) for text in drawn], ids(question)[:40])
        captured = [
            lab.capture(head, [ids(t) for t in rng.sample(texts, rng.randint(*NEIGHBOURS))], chunk)
            for chunk in case.chunks
        ]
        trial = Trial(lab, case, captured, rng, most=0)
        full = trial.full()
        sums["naive"] += divergence(full, trial.reuse(()))
        for name, choose in METHODS.items():
            for share in BUDGETS if name == "ours" else BUDGETS[:-1]:
                runs = choose(trial, share_to_tokens(share, trial.context_tokens))
                sums[f"{name} {share:.0%}"] += divergence(full, trial.reuse(runs))
        first = captured_first(lab, case, rng)
        for name, choose in FIRST_METHODS.items():
            runs = choose(first, share_to_tokens(FIRST_BUDGET, first.context_tokens))
            sums[name] += divergence(full, first.reuse(runs))
    return {name: round(total / count, 4) for name, total in sums.items()}


def make_engine(model: Path) -> Any:
    """Start vLLM in this process."""
    from vllm import LLM  # noqa: PLC0415  reads variables that are set before

    return LLM(str(model), enforce_eager=True, max_num_batched_tokens=4096, disable_log_stats=True)


def foreign(count: int, seed: int) -> dict[str, object]:
    """Run ``--foreign``; return the mean KL by method and budget."""
    if not FOREIGN.is_file():
        return {"skipped": f"there is no {FOREIGN.name}"}
    from tests.helpers.tiny_model import make_tiny_model  # noqa: PLC0415

    asked = json.loads(FOREIGN.read_text())
    texts = sorted({p["paragraph_text"] for one in asked for p in one["paragraphs"]})
    with TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "m", layers=6, hidden=256, heads=8, kv_heads=2)
        engine = make_engine(model)
        [kl] = engine.collective_rpc(work_on_foreign_text, args=(model, texts, count, seed))
    return {"kl": kl, "prompts": count, "seed": seed}


def why_void(naive_over_full: float | None) -> str:
    """Return why a run's figures prove nothing, or an empty string."""
    if naive_over_full is None:
        return "no answer of full recomputation is right"
    if naive_over_full > VOID_OVER:
        return (
            f"with nothing recomputed {naive_over_full} as many answers are right as of full"
            f" recomputation, more than {VOID_OVER}: there is too little to mend"
        )
    return ""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer questions")
    parser.add_argument("--questions", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--foreign", action="store_true", help="KL on text of other sources")
    given = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if given.foreign:
        print(json.dumps(foreign(given.questions or (6 if given.quick else 40), given.seed)))
        return
    engine = make_engine(MODEL)
    count = given.questions or (16 if given.quick else 200)
    [rows] = engine.collective_rpc(work, args=(count, given.seed))
    for name, row in rows.items():
        print(f"{name:36}" + "".join(f"{key} {value:<9}" for key, value in row.items()))

    def share(name: str, other: str = "full") -> float | None:
        below = rows[other]["exact_match"]
        return round(rows[name]["exact_match"] / below, 4) if below else None

    naive = share("naive")
    void = why_void(naive)
    found = {
        "void": bool(void),
        "quality_at_20pct_over_full": share("ours 20%"),
        "rouge_l_at_20pct": rows["ours 20%"]["rouge_l"],
        "naive_over_full": naive,
        "naive_rouge_l": rows["naive"]["rouge_l"],
        "ours_minus_random_at_20pct": round(
            rows["ours 20%"]["exact_match"] - rows["random 20%"]["exact_match"], 4
        ),
        "influence_alone_at_20pct_over_full": share("influence 20%"),
        "focused_at_20pct_over_full": share("focused, largest gap 20%"),
        "focused_recomputed_at_20pct": rows["focused, largest gap 20%"]["recomputed"],
        "cache_craft_minus_random_at_20pct": round(
            rows["Cache-Craft 20%"]["exact_match"] - rows["random 20%"]["exact_match"], 4
        ),
        "captured_first": {
            "quality_at_20pct_over_full": share(f"first, ours {FIRST_BUDGET:.0%}"),
            "rouge_l_at_20pct": rows[f"first, ours {FIRST_BUDGET:.0%}"]["rouge_l"],
            "random_at_20pct_over_full": share(f"first, random {FIRST_BUDGET:.0%}"),
            "naive_over_full": share("first, naive"),
            "naive_rouge_l": rows["first, naive"]["rouge_l"],
        },
        "tokens_equal_at_100pct": math.isclose(rows["ours 100%"]["same_tokens"], 1.0),
        "full_exact_match": rows["full"]["exact_match"],
        "questions": count,
        "seed": given.seed,
    }
    if void:
        print(f"void: {void}", file=sys.stderr)
    print(json.dumps(found))
    if void and not given.quick:
        sys.exit(1)


if __name__ == "__main__":
    main()
