"""Asks the bundled model questions with a known answer, inside a worker of vLLM."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from transformers import AutoTokenizer

from bench.support.blending.focused_chunks import Cut, entropy_cut, largest_gap_cut
from bench.support.blending.lab import Captured, Lab, divergence
from bench.support.blending.scores import Figures
from bench.support.blending.trial import Choose, PromptParts, Trial
from models.tinyrag.examples import ask, stage_scene
from models.tinyrag.handbook import Question
from models.tinyrag.prompt import chunk_ids, frame
from ragcache_core.blend.token_selection import share_to_tokens
from ragcache_core.quality.rouge import rouge_l

DOCUMENTS = 8
BUDGETS = (0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 1.0)
KINDS = ("single", "two_step")
"""Kinds of questions with an answer; a poor model also says "no answer"."""

NEIGHBOURS = (2, 5)
"""Smallest and largest number of chunks before a captured one."""

FIRST_BUDGET = 0.2
FOCUS_BUDGET = 0.2
WINDOW = 2
"""Number of layers, of five, over which the cut of focused chunks must stay the same."""

CUTS: Mapping[str, Cut] = {"as printed": entropy_cut, "largest gap": largest_gap_cut}
MAX_ANSWER_TOKENS = 32
FOREIGN_TOKENS = 160
"""Longest paragraph of foreign text."""

METHODS: Mapping[str, Choose] = {
    "ours": Trial.ours,
    "influence": Trial.influenced,
    "Cache-Craft": Trial.cache_craft,
    "random": Trial.random,
    "heavy": Trial.heavy,
}


@dataclass(frozen=True, slots=True)
class HandbookCase:
    """A question about handbooks, with its prompt."""

    question: Question
    parts: PromptParts


def draw(rng: Random, tokenizer: Any, count: int) -> tuple[list[HandbookCase], list[list[int]]]:
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
    cases: list[HandbookCase] = []
    while len(cases) < count:
        scene = stage_scene(rng, "held_out", DOCUMENTS, count_tokens)
        question = ask(rng, scene.documents, "held_out", KINDS[len(cases) % len(KINDS)])  # type: ignore[arg-type]
        if question is not None:
            head, tail = frame(tokenizer, question.text)
            cases.append(HandbookCase(question, PromptParts(head, chunks_of(scene), tail)))
    return cases, others


def work_on_handbooks(
    worker: Any, model: Path, count: int, seed: int
) -> dict[str, dict[str, float]]:
    """Answer all questions with all methods; return figures by "method budget" and kind."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = Random(seed)
    cases, others = draw(rng, tokenizer, count)
    lab = Lab(worker, model, [tokenizer.eos_token_id])
    figures: defaultdict[str, Figures] = defaultdict(Figures)
    for case in cases:
        trial = Trial(
            lab, case.parts, capture(lab, case.parts, others, rng), rng, MAX_ANSWER_TOKENS
        )
        trial.answer_in_full()
        notes = _Notes(case.question, tokenizer, figures)
        notes.add("full", trial, None)
        notes.add("naive", trial, ())
        for name, choose in METHODS.items():
            for share in BUDGETS if name == "ours" else BUDGETS[:-1]:  # all tokens are all tokens
                budget = share_to_tokens(share, trial.context_tokens)
                notes.add(f"{name} {share:.0%}", trial, choose(trial, budget), name == "ours")
        for name, cut in CUTS.items():
            budget = share_to_tokens(FOCUS_BUDGET, trial.context_tokens)
            runs = trial.focused(budget, cut, WINDOW)
            notes.add(f"focused, {name} {FOCUS_BUDGET:.0%}", trial, runs)
        first = captured_first(lab, trial, rng)
        for name, runs in choices_for_first(first).items():
            notes.add(name, first, runs, "ours" in name)
    return {name: one.row() for name, one in figures.items()}


def capture(
    lab: Lab, parts: PromptParts, others: Sequence[list[int]], rng: Random
) -> list[Captured]:
    """Capture each chunk after some others."""
    return [
        lab.capture(parts.head, rng.sample(others, rng.randint(*NEIGHBOURS)), ids)
        for ids in parts.chunks
    ]


def captured_first(lab: Lab, trial: Trial, rng: Random) -> Trial:
    """Return the trial with each chunk captured right after the template."""
    parts = trial.parts
    alone = [lab.capture(parts.head, (), ids) for ids in parts.chunks]
    return Trial(lab, parts, alone, rng, trial.most, trial.full)


def choices_for_first(first: Trial) -> dict[str, Sequence[range]]:
    """Return what is recomputed of chunks that were captured first in their prompts."""
    budget = share_to_tokens(FIRST_BUDGET, first.context_tokens)
    return {
        "first, naive": (),
        f"first, ours {FIRST_BUDGET:.0%}": first.ours(budget),
        f"first, random {FIRST_BUDGET:.0%}": first.random(budget),
    }


@dataclass(slots=True)
class _Notes:
    question: Question
    tokenizer: Any
    figures: defaultdict[str, Figures]

    def add(
        self, name: str, trial: Trial, runs: Sequence[range] | None, shifts: bool = False
    ) -> None:
        """Answer and note the figures. runs: None means full computation."""
        full = trial.full
        assert full is not None
        answer = full if runs is None else trial.answer_with(runs, shifts=shifts)
        said = self.tokenizer.decode(answer.token_ids)
        nats = divergence(full, answer)
        for group in (name, f"{name}, {self.question.kind}"):
            one = self.figures[group]
            one.right.append(float(said == self.question.answer))
            one.rouge.append(rouge_l(said.split(), self.tokenizer.decode(full.token_ids).split()))
            one.kl.append(nats[0])
            one.mean_kl.append(sum(nats) / len(nats))
            one.recomputed.append(1.0 if runs is None else trial.share(runs))
            one.runs.append(1 if runs is None else len(runs))
            one.same.append(float(answer.token_ids == full.token_ids))


def work_on_foreign_text(
    worker: Any, model: Path, texts: Sequence[str], count: int, seed: int
) -> dict[str, float]:
    """Return the mean KL of the first token by "method budget"."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = Random(seed)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found[:FOREIGN_TOKENS]

    lab = Lab(worker, model, ())
    sums: defaultdict[str, float] = defaultdict(float)
    head = ids("Answer the question from the documents.")
    for _ in range(count):
        *drawn, question = rng.sample(texts, DOCUMENTS + 1)
        parts = PromptParts(head, [ids(text) for text in drawn], ids(question)[:40])
        captured = capture(lab, parts, [ids(t) for t in rng.sample(texts, 24)], rng)
        trial = Trial(lab, parts, captured, rng, 0)
        full = trial.answer_in_full()
        sums["naive"] += divergence(full, trial.answer_with(()))[0]
        for name, choose in METHODS.items():
            for share in BUDGETS if name == "ours" else BUDGETS[:-1]:
                runs = choose(trial, share_to_tokens(share, trial.context_tokens))
                sums[f"{name} {share:.0%}"] += divergence(full, trial.answer_with(runs))[0]
        first = captured_first(lab, trial, rng)
        for name, runs in choices_for_first(first).items():
            sums[name] += divergence(full, first.answer_with(runs))[0]
    return {name: round(total / count, 4) for name, total in sums.items()}
