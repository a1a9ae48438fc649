"""Finds hits that are copies of a better hit.

Each copy in a prompt costs tokens and adds nothing. Two contracts of one form are no copies: a name
or a number makes another document. So a copy has the same text under the same headings, in a
document of the same name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

EQUAL_SCORE_SHARE = 0.05
"""Scores that differ by less than this share count as equal: the newest copy is then kept."""


@dataclass(frozen=True, slots=True)
class CopyCandidate:
    """A hit, as far as copies are concerned.

    Attributes:
        passage: Equal for hits with the same text under the same headings.
        version: The larger, the newer.
    """

    passage: Hashable
    score: float
    version: int


@dataclass(frozen=True, slots=True)
class KeptHit:
    """A hit that is kept, and the hits that it represents, as indexes of the candidates."""

    index: int
    duplicates: tuple[int, ...]


def without_copies(
    candidates: Iterable[CopyCandidate],
    document_name: Callable[[int], Hashable],
    limit: int | None = None,
    num_spare: int | None = None,
) -> list[KeptHit]:
    """Return the kept hits, in the order of the candidates.

    A hit represents all later copies of it. Among copies with equal scores the newest is kept, at
    the position of the best.

    Args:
        candidates: Best first.
        document_name: Returns the name of a candidate's document, by index. It is called for
            candidates with equal passages only.
        limit: Most hits to keep. Later candidates are compared with these only.
        num_spare: Candidates that are compared with the kept hits after ``limit`` of them were
            found. The rest is not asked for. None: all are compared.
    """
    groups: list[list[int]] = []
    by_passage: defaultdict[Hashable, list[list[int]]] = defaultdict(list)
    compared: list[CopyCandidate] = []
    num_left = num_spare
    for i, candidate in enumerate(candidates):
        compared.append(candidate)
        if limit == len(groups) and num_left is not None:
            num_left -= 1
        group = _group_of(i, by_passage[candidate.passage], document_name)
        if group is not None:
            group.append(i)
            if _replaces(candidate, compared[group[0]]):
                group[0], group[-1] = i, group[0]
        elif limit is None or len(groups) < limit:
            groups.append([i])
            by_passage[candidate.passage].append(groups[-1])
        if limit == len(groups) and num_left == 0:
            break
    return [KeptHit(kept, tuple(sorted(others))) for kept, *others in groups]


def _group_of(
    i: int, groups: Sequence[list[int]], document_name: Callable[[int], Hashable]
) -> list[int] | None:
    for group in groups:
        if document_name(i) == document_name(group[0]):
            return group
    return None


def _replaces(candidate: CopyCandidate, kept: CopyCandidate) -> bool:
    """Whether a copy of a kept hit is to be kept in its place."""
    return (
        candidate.version > kept.version
        and candidate.score >= kept.score - EQUAL_SCORE_SHARE * abs(kept.score)
    )
