"""Requests of access sequences, and where they are from: generated, or recorded data sets."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ragcache_core.access.reader import EVERYONE
from ragcache_core.identity.keys import KVSpace, chunk_key
from ragcache_core.plan.prompt import CHUNK_SEPARATOR, CHUNKS_PLACEHOLDER, DEFAULT_SYSTEM_PROMPT
from ragcache_core.plan.reuse_plan import Action, ReusePlan, Segment


class Part(StrEnum):
    """The role of a part in its prompt. Parts of a prompt come in this order."""

    STABLE = "stable"  # the template's head, as most requests have it
    CHANGING = "changing"  # the rest of the head: date, user, session
    PASSAGE = "passage"
    TAIL = "tail"  # history, web search, question


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of a prompt. Parts of equal name have equal tokens."""

    name: str
    part: Part
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One request. Its parts are in prompt order."""

    parts: tuple[PromptPart, ...]

    def __post_init__(self) -> None:
        order = [list(Part).index(part.part) for part in self.parts]
        if order != sorted(order):
            raise ValueError("parts are in another order than Part has them")

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(part.token_ids for part in self.parts))

    @property
    def num_tokens(self) -> int:
        return sum(len(part.token_ids) for part in self.parts)

    @property
    def passages(self) -> tuple[PromptPart, ...]:
        return tuple(part for part in self.parts if part.part is Part.PASSAGE)


def plan_request(
    request: SequenceRequest,
    space: KVSpace,
    domain: str,
    name: str,
    recompute_share: float | None,
) -> ReusePlan:
    """Plan a request: one segment for each part of the head, then one for each passage.

    Args:
        request: The request.
        space: KV space of the engine.
        domain: Access domain.
        name: Id of the request in the plan.
        recompute_share: Share to recompute under ``blend``. None: plan ``exact``.
    """
    token_ids = request.token_ids
    passage = Action.EXACT if recompute_share is None else Action.BLEND
    segments = tuple(
        Segment(
            chunk_key(space, domain, token_ids[start:end]),
            start,
            end,
            passage if part is Part.PASSAGE else Action.EXACT,
        )
        for part, start, end in _segment_bounds(request.parts)
    )
    share = recompute_share or 0.0
    return ReusePlan(name, domain, segments, recompute_share=share, reader=EVERYONE)


def _segment_bounds(parts: Sequence[PromptPart]) -> Iterator[tuple[Part, int, int]]:
    """Yield role and bounds of each segment. Parts of the head with the same role are one."""
    start = 0
    for role, group in itertools.groupby(parts, key=lambda part: part.part):
        if role is Part.TAIL:
            return
        lengths = [len(part.token_ids) for part in group]
        for length in lengths if role is Part.PASSAGE else [sum(lengths)]:
            if length:
                yield role, start, start + length
            start += length


class Vocabulary:
    """Draws token ids. Equal names and seeds give equal ids.

    Args:
        size: Number of token ids of the model. Special tokens are at its ends, so none is drawn
            from the first and last 1 %.
        seed: Seed of all draws.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._first, self._end = size // 100, size - size // 100
        self._seed = seed

    def draw(self, name: str, num_tokens: int) -> tuple[int, ...]:
        """Return token ids for a name. A shorter draw is a prefix of a longer one."""
        rng = np.random.default_rng([self._seed, *name.encode()])
        # The generator's own integers() may depend on the size of the draw.
        drawn = rng.random(num_tokens) * (self._end - self._first)
        return tuple(int(number) + self._first for number in drawn)


CAPTURE_TOKENS = 2048
"""Most passage tokens of a prompt that computes passages ahead, without its context."""

CONTEXT_PASSAGES = 2
CAPTURES_WITH_ONE_CONTEXT = 8


def ahead_prompts(
    requests: Sequence[SequenceRequest],
    topics: Sequence[str],
    max_tokens: int = CAPTURE_TOKENS,
) -> list[SequenceRequest]:
    """Return prompts that compute every passage of a sequence ahead of its requests.

    As in the gateway, a prompt has the stable head, two passages as context, and passages of
    neighbouring topics. Several prompts in a row have the same context. It is the beginning of the
    first of them, which repeats it at its end.

    Args:
        requests: The sequence.
        topics: Names of passages in an order that does not depend on the requests. Passages of
            one document or topic are neighbours. Names that no request has are ignored.
        max_tokens: Most tokens of a prompt's new passages, unless a single one is longer.
    """
    passages = {part.name: part for request in requests for part in request.passages}
    heads = [
        tuple(part for part in request.parts if part.part is Part.STABLE)
        for request in requests
        if request.passages
    ]
    if not heads:
        return []
    head = max(heads, key=heads.count)
    groups = _groups([passages[name] for name in topics if name in passages], max_tokens)
    prompts = []
    context: list[PromptPart] = []
    for number, group in enumerate(groups):
        if number % CAPTURES_WITH_ONE_CONTEXT:
            prompts.append(SequenceRequest((*head, *context, *group)))
        else:
            context = group[:CONTEXT_PASSAGES]
            repeated = context if len(group) > CONTEXT_PASSAGES else []
            prompts.append(SequenceRequest((*head, *group, *repeated)))
    return prompts


def _groups(passages: Sequence[PromptPart], max_tokens: int) -> list[list[PromptPart]]:
    """Cut a list of passages where one more would make a group too long."""
    groups: list[list[PromptPart]] = []
    room = 0
    for passage in passages:
        length = len(passage.token_ids)
        if length > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(passage)
        room -= length
    return groups


STABLE_TOKENS, CHANGING_TOKENS, QUESTION_TOKENS = 160, 40, 20
"""Of a generated request: the head that all share, what follows it (date, user), the question."""

PASSAGES = 5
PASSAGE_TOKENS = (90, 180)
"""Shortest and longest."""

DOCUMENTS = 60
"""A document of rank r is chosen with weight 1 / r."""

PASSAGES_PER_DOCUMENT = 4


def generate(num_requests: int, vocabulary: Vocabulary, seed: int) -> list[SequenceRequest]:
    """Generate a sequence. Equal arguments give equal sequences.

    A request has passages of one to three documents. From most it takes several neighbours, as a
    search does that finds a section.
    """
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(DOCUMENTS)]
    lengths = {name: rng.randint(*PASSAGE_TOKENS) for name in topics()}

    def part(role: Part, name: str, num_tokens: int) -> PromptPart:
        return PromptPart(name, role, vocabulary.draw(name, num_tokens))

    requests = []
    for index in range(num_requests):
        names: list[str] = []
        while len(names) < PASSAGES:
            [document] = rng.choices(range(DOCUMENTS), weights)
            first = rng.randrange(PASSAGES_PER_DOCUMENT)
            for number in range(first, min(first + 2, PASSAGES_PER_DOCUMENT)):
                name = _passage(document, number)
                if name not in names and len(names) < PASSAGES:
                    names.append(name)
        requests.append(
            SequenceRequest(
                (
                    part(Part.STABLE, "system prompt", STABLE_TOKENS),
                    part(Part.CHANGING, f"session {index}", CHANGING_TOKENS),
                    *(part(Part.PASSAGE, name, lengths[name]) for name in names),
                    part(Part.TAIL, f"question {index}", QUESTION_TOKENS),
                )
            )
        )
    return requests


def topics() -> list[str]:
    """Return the names of all passages, by document."""
    return [
        _passage(document, number)
        for document in range(DOCUMENTS)
        for number in range(PASSAGES_PER_DOCUMENT)
    ]


def _passage(document: int, number: int) -> str:
    return f"passage {document}.{number}"


_LENGTHS = (
    "1_sys_prompt.jsonl",
    "2_passages.jsonl",
    "3_history.jsonl",
    "4_user_input.jsonl",
    "5_web_search.jsonl",
)
_TAIL = ("history", "web_search", "user_input")
STABLE_SHARE = 0.01
"""A part of the system prompt that fewer of all requests have is one that changes."""


class RagPulse:
    """The trace of a production RAG service in a folder. It has ids and lengths, no text.

    Args:
        folder: Has the files of the data set.
        vocabulary: Draws the tokens of a component by its id.
        scale: Factor of all lengths.
        max_tokens: Longest prompt. Longer ones lose what follows their passages, except the end.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, scale: float, max_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._scale = scale
        self._max_tokens = max_tokens
        self._lengths: dict[int, int] = {}
        for name in _LENGTHS:
            for record in _records(folder / name):
                length = record.pop("token_length")
                [component] = record.values()
                self._lengths[component] = length
        self._trace = [record["hash_ids"] for record in _records(folder / "0_trace.jsonl")]
        uses = Counter(component for ids in self._trace for component in ids["sys_prompt"])
        least = STABLE_SHARE * len(self._trace)
        self._stable = {component for component, count in uses.items() if count >= least}

    def requests(self, first: int, count: int) -> list[SequenceRequest]:
        return [self._request(ids) for ids in self._trace[first : first + count]]

    def topics(self) -> list[str]:
        """Return the names of all passages by id: passages of one document have close ids."""
        passages = {component for ids in self._trace for component in ids["passages_ids"]}
        return [_name(component) for component in sorted(passages)]

    def _request(self, ids: dict[str, list[int]]) -> SequenceRequest:
        role = Part.STABLE
        head = []
        for component in ids["sys_prompt"]:
            if component not in self._stable:
                role = Part.CHANGING
            head.append(self._part(role, component))
        passages = [self._part(Part.PASSAGE, component) for component in ids["passages_ids"]]
        tail = [self._part(Part.TAIL, component) for kind in _TAIL for component in ids[kind]]
        excess = sum(len(p.token_ids) for p in (*head, *passages, *tail)) - self._max_tokens
        while excess > 0 and len(tail) > 1:
            excess -= len(tail.pop(0).token_ids)
        return SequenceRequest((*head, *passages, *tail))

    def _part(self, role: Part, component: int) -> PromptPart:
        name = _name(component)
        length = max(1, math.ceil(self._lengths[component] * self._scale))
        return PromptPart(name, role, self._vocabulary.draw(name, length))


def _name(component: int) -> str:
    return f"component {component}"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


_FILES = {
    "multihoprag": "multihoprag_summary.json",
    "2wiki": "2wikimultihopqa_summary.json",
}


class RetrievedPassages:
    """Passages that a retriever returned for real questions (PSI-RAG), with a model's template.

    The head is the same in all prompts. The data has no questions, so a prompt asks for the
    passages that name the recorded answer.

    Args:
        path: A file of the data set.
        model: Folder of the model, for its tokenizer and chat template.
    """

    def __init__(self, path: Path, model: Path) -> None:
        data = json.loads(path.read_text())
        self._passages: list[list[str]] = data["retrieved_docs"]
        self._answers: list[str] = data["answers"]
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._head, self._end = template_parts(model)

    def requests(self, first: int, count: int) -> list[SequenceRequest]:
        return [
            self._request(index) for index in range(first, min(first + count, len(self._passages)))
        ]

    def topics(self) -> list[str]:
        """Return the names of all passages in the order of their texts, which begin with titles."""
        return sorted({text for texts in self._passages for text in texts})

    def _request(self, index: int) -> SequenceRequest:
        question = f"Question {index + 1}: which documents mention {self._answers[index]}?"
        separator = self._ids(CHUNK_SEPARATOR)
        return SequenceRequest(
            (
                PromptPart("head", Part.STABLE, self._ids(self._head)),
                *(
                    PromptPart(text, Part.PASSAGE, self._ids(text) + separator)
                    for text in dict.fromkeys(self._passages[index])
                ),
                PromptPart(f"question {index}", Part.TAIL, self._ids(question + self._end)),
            )
        )

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def template_parts(model: Path) -> tuple[str, str]:
    """Return what a model's chat template puts before the passages, and after the question."""
    from transformers import AutoTokenizer  # noqa: PLC0415  slow to import

    messages = [
        {"role": "system", "content": DEFAULT_SYSTEM_PROMPT},
        {"role": "user", "content": CHUNKS_PLACEHOLDER},
    ]
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, _, end = str(text).partition(CHUNKS_PLACEHOLDER)
    return head, end


RAGPULSE = "ragpulse"
RECORDED = (RAGPULSE, *_FILES)


def load_recorded(
    name: str, data: Path, model: Path, vocabulary: Vocabulary, *, scale: float, max_tokens: int
) -> RagPulse | RetrievedPassages:
    """Load a recorded sequence.

    Args:
        name: One of ``RECORDED``.
        data: Folder with a folder for each data set.
        model: Folder of the model that is asked.
        vocabulary: Draws the tokens of RAGPulse, which has no text.
        scale: Factor of RAGPulse's lengths.
        max_tokens: Longest prompt of RAGPulse. Longer ones lose what follows their passages.
    """
    if name == RAGPULSE:
        return RagPulse(data / RAGPULSE, vocabulary, scale, max_tokens)
    return RetrievedPassages(data / "psirag_retrieved" / _FILES[name], model)
