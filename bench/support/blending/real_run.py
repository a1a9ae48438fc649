"""Asks a real model questions over real paragraphs, inside a worker of vLLM."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from transformers import AutoTokenizer

from bench.support.blending.lab import Answer, Captured, Lab, difference
from bench.support.blending.real_text import (
    AheadSequences,
    RealQuestion,
    ahead_sequences,
    read_real_texts,
)
from bench.support.blending.scores import Figures, answer_f1
from bench.support.blending.trial import Choose, PromptParts, Trial
from models.tinyrag.prompt import chunk_ids, frame
from ragcache_core.blend.token_selection import share_to_tokens
from ragcache_core.quality.similarity import rouge_l, words

MAX_ANSWER_TOKENS = 24
MAX_PARAGRAPH_TOKENS = 220
NEIGHBOURS = (2, 5)
"""Smallest and largest number of chunks before a captured one."""
NOISE_PASS_TOKENS = 173
"""Tokens of a pass of the full computation that is compared with full computation in one pass."""

FIRST, AHEAD = "alone", "ahead"
SHARE = 0.2
CURVE = (0.05, 0.1, 0.15, 0.2, 0.3)

METHODS: Mapping[str, Choose] = {
    "ours without influence": Trial.unobserved,
    "random": Trial.random,
    "Cache-Craft": Trial.cache_craft,
    "EPIC": Trial.epic,
    "CacheBlend": Trial.cache_blend,
}


@dataclass(frozen=True, slots=True)
class RealRun:
    """Settings of a run. model: its folder. quick: fewer figures for each question."""

    model: Path
    data: Path
    count: int
    seed: int
    quick: bool


def work_on_real_text(worker: Any, run: RealRun) -> dict[str, Any]:
    """Answer all questions with all methods; return the figures by method."""
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    rng = Random(run.seed)
    texts = read_real_texts(run.data, run.count, rng)
    ids_of = partial(_chunk, tokenizer)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    lab = Lab(worker, run.model, [end for end in ends if isinstance(end, int)])
    documents = rng.sample(texts.documents, len(texts.documents))
    sequences = ahead_sequences([ids_of(one) for document in documents for one in document])
    figures: defaultdict[str, Figures] = defaultdict(Figures)
    began = time.monotonic()
    for number, question in enumerate(texts.questions, start=1):
        head, tail = frame(tokenizer, question.text)
        parts = PromptParts(head, [ids_of(one) for one in question.paragraphs], tail)
        others = rng.sample(texts.others(question), NEIGHBOURS[1] * len(parts.chunks))
        asked = _Asked(lab, parts, question, rng, run.quick, tokenizer.decode)
        asked.measure(figures, [ids_of(one) for one in others], sequences)
        print(f"question {number}: {time.monotonic() - began:.0f} s", flush=True)
    rows = {name: one.row() for name, one in figures.items()}
    return {"rows": rows, "source": texts.source, "questions": len(texts.questions)}


def _chunk(tokenizer: Any, text: str) -> list[int]:
    cut = tokenizer.encode(text, add_special_tokens=False)[:MAX_PARAGRAPH_TOKENS]
    return [*cut, *chunk_ids(tokenizer, "")]


@dataclass(slots=True)
class _Asked:
    """One question, answered after each way of capture and with each method."""

    lab: Lab
    parts: PromptParts
    question: RealQuestion
    rng: Random
    quick: bool
    decode: Callable[[Sequence[int]], str]

    def measure(
        self,
        figures: defaultdict[str, Figures],
        others: Sequence[list[int]],
        sequences: AheadSequences,
    ) -> None:
        head, chunks = self.parts.head, self.parts.chunks
        left = iter(others)
        captured = [
            self.lab.capture(head, [next(left) for _ in range(self.rng.randint(*NEIGHBOURS))], ids)
            for ids in chunks
        ]
        trial = self._trial(captured)
        full = trial.answer_in_full()
        self._add(figures["full"], full, full, 1.0)
        again = trial.answer_in_full(NOISE_PASS_TOKENS)
        self._add(figures["full in other passes"], full, again, 1.0)
        self._reuse(figures["nothing"], trial, ())
        for share in CURVE if not self.quick else (SHARE,):
            runs = self._chosen(trial, Trial.ours, share)
            self._reuse(figures[f"ours {share:.0%}"], trial, runs, shifts=True)
        runs = self._chosen(trial, Trial.ours, SHARE)
        self._reuse(figures[f"ours, no shift {SHARE:.0%}"], trial, runs, decodes=not self.quick)
        for name, choose in METHODS.items():
            runs = self._chosen(trial, choose, SHARE)
            one, shifts = figures[f"{name} {SHARE:.0%}"], choose is Trial.unobserved
            self._reuse(one, trial, runs, shifts=shifts, decodes=not self.quick)
        # Computed ahead: in sequences, and each chunk alone after the template.
        for way, ahead in (
            (AHEAD, [self._ahead(sequences.prefix_of(ids), ids) for ids in chunks]),
            (FIRST, [self._ahead([], ids) for ids in chunks]),
        ):
            trial = self._trial(ahead, full)
            self._reuse(figures[f"{way}: nothing"], trial, (), decodes=not self.quick)
            for name, choose in {"ours": Trial.ours, "random": Trial.random}.items():
                runs, is_ours = self._chosen(trial, choose, SHARE), name == "ours"
                one = figures[f"{way}: {name} {SHARE:.0%}"]
                self._reuse(one, trial, runs, shifts=is_ours, decodes=is_ours or not self.quick)

    def _trial(self, captured: Sequence[Captured], full: Answer | None = None) -> Trial:
        return Trial(self.lab, self.parts, captured, self.rng, MAX_ANSWER_TOKENS, full)

    def _ahead(self, before: Sequence[list[int]], ids: list[int]) -> Captured:
        return self.lab.capture_unobserved(self.parts.head, before, ids)

    def _chosen(self, trial: Trial, choose: Choose, share: float) -> Sequence[range]:
        return choose(trial, share_to_tokens(share, trial.context_tokens))

    def _reuse(
        self,
        figures: Figures,
        trial: Trial,
        runs: Sequence[range],
        *,
        shifts: bool = False,
        decodes: bool = True,
    ) -> None:
        assert trial.full is not None
        answer = trial.answer_with(runs, shifts=shifts, decodes=decodes)
        self._add(figures, trial.full, answer, trial.share(runs), decodes=decodes)

    def _add(
        self,
        figures: Figures,
        full: Answer,
        answer: Answer,
        share: float,
        *,
        decodes: bool = True,
    ) -> None:
        figures.add(**difference(full, answer), recomputed=share)
        if decodes:
            said = self.decode(answer.token_ids)
            same = float(answer.token_ids == full.token_ids)
            figures.add(rouge=rouge_l(words(said), words(self.decode(full.token_ids))), same=same)
            if self.question.right:
                figures.add(f1=answer_f1(said, self.question.right))
