"""Asks the bundled model questions with a known answer, inside a worker of vLLM."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from transformers import AutoTokenizer

from bench.support.blending.lab import Lab, difference
from bench.support.blending.scores import Figures
from bench.support.blending.trial import Choose, PromptParts, Trial
from models.tinyrag.examples import ask, stage_scene
from models.tinyrag.handbook import Question
from models.tinyrag.prompt import chunk_ids, frame
from ragcache_core.blend.token_selection import share_to_tokens
from ragcache_core.quality.similarity import rouge_l

DOCUMENTS = 8
BUDGETS = (0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 1.0)
KINDS = ("single", "two_step")
"""Kinds of questions with an answer; a poor model also says "no answer"."""

NEIGHBOURS = (2, 5)
"""Smallest and largest number of chunks before a captured one."""

SHARE = 0.2
MAX_ANSWER_TOKENS = 32

METHODS: Mapping[str, Choose] = {
    "ours": Trial.ours,
    "influence": Trial.influenced,
    "Cache-Craft": Trial.cache_craft,
    "random": Trial.random,
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
    """Answer all questions with all methods; return figures by "method budget"."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = Random(seed)
    cases, others = draw(rng, tokenizer, count)
    lab = Lab(worker, model, [tokenizer.eos_token_id])
    figures: defaultdict[str, Figures] = defaultdict(Figures)
    for case in cases:
        head = case.parts.head
        captured = [
            lab.capture(head, rng.sample(others, rng.randint(*NEIGHBOURS)), ids)
            for ids in case.parts.chunks
        ]
        trial = Trial(lab, case.parts, captured, rng, MAX_ANSWER_TOKENS)
        trial.answer_in_full()
        notes = _Notes(case.question, tokenizer, figures)
        notes.add("full", trial, None)
        notes.add("naive", trial, ())
        for name, choose in METHODS.items():
            for share in BUDGETS if name == "ours" else BUDGETS[:-1]:  # all tokens are all tokens
                budget = share_to_tokens(share, trial.context_tokens)
                notes.add(
                    f"{name} {share:.0%}", trial, choose(trial, budget), shifts=name == "ours"
                )
        budget = share_to_tokens(SHARE, trial.context_tokens)
        notes.add(f"focused {SHARE:.0%}", trial, trial.focused(budget))
        # Of chunks that were captured first in their prompts, right after the template.
        alone = [lab.capture(head, (), ids) for ids in case.parts.chunks]
        first = Trial(lab, case.parts, alone, rng, trial.most, trial.full)
        budget = share_to_tokens(SHARE, first.context_tokens)
        notes.add("first, naive", first, ())
        notes.add(f"first, ours {SHARE:.0%}", first, first.ours(budget), shifts=True)
        notes.add(f"first, random {SHARE:.0%}", first, first.random(budget))
    return {name: one.row() for name, one in figures.items()}


@dataclass(slots=True)
class _Notes:
    question: Question
    tokenizer: Any
    figures: defaultdict[str, Figures]

    def add(
        self, name: str, trial: Trial, runs: Sequence[range] | None, *, shifts: bool = False
    ) -> None:
        """Answer and note the figures. runs: None means full computation."""
        full = trial.full
        assert full is not None
        answer = full if runs is None else trial.answer_with(runs, shifts=shifts)
        said = self.tokenizer.decode(answer.token_ids)
        wanted = self.tokenizer.decode(full.token_ids)
        self.figures[name].add(
            **difference(full, answer),
            right=float(said == self.question.answer),
            rouge=rouge_l(said.split(), wanted.split()),
            recomputed=1.0 if runs is None else trial.share(runs),
            same=float(answer.token_ids == full.token_ids),
        )
