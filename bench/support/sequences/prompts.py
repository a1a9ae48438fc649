"""A request of an access sequence: named parts of a prompt, and the plan for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ragcache_core.identity.keys import KVSpace, chunk_key
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
    return ReusePlan(name, domain, segments, recompute_share=recompute_share or 0.0)


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
