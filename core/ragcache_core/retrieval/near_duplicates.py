"""Finds hits whose text a better hit repeats almost word for word.

Versioned documentation has the same page several times. Each copy in a prompt costs tokens and adds
nothing. A text is a near duplicate of another if most of its shingles (runs of words) are in the
other, too. The rule has a direction: a longer text is no duplicate of the part that it extends.

Source: Broder, On the resemblance and containment of documents (1997).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHINGLE_WORDS = 3
MIN_CONTAINED_SHARE = 0.8
"""Share of a text's shingles in another one from which it repeats that one. With 200 words, about
13 changed words are allowed."""
EQUAL_SCORE_SHARE = 0.05
"""Scores that differ by less than this share count as equal: the newest version is then kept."""

Shingles = frozenset[tuple[str, ...]]
"""The distinct runs of words of a text. Sets of them are faster to make and to compare than arrays
of hashes."""

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class DuplicateCandidate:
    """A hit, as far as duplicates are concerned. A larger ``version`` is newer."""

    shingles: Shingles
    score: float
    version: int


@dataclass(frozen=True, slots=True)
class KeptHit:
    """A hit that is kept, and the hits that it represents, as indexes of the candidates."""

    index: int
    duplicates: tuple[int, ...]


def shingles_of(text: str) -> Shingles:
    """Return the shingles of a text. Case and punctuation do not count.

    A text of fewer words than a shingle has one. A text without words has none.
    """
    words = _WORD.findall(text.lower())
    if len(words) < SHINGLE_WORDS:
        return frozenset([tuple(words)] if words else [])
    return frozenset(zip(*(words[i:] for i in range(SHINGLE_WORDS)), strict=False))


def contained_share(part: Shingles, whole: Shingles) -> float:
    """Return the share of a text's shingles that another text has. 0 for a text without words."""
    return len(part & whole) / len(part) if part else 0.0


def without_duplicates(
    candidates: Iterable[DuplicateCandidate],
    limit: int | None = None,
    num_spare: int | None = None,
) -> list[KeptHit]:
    """Return the kept hits, in the order of the candidates.

    A hit represents all later ones that repeat it. Among versions of one text with equal scores the
    newest is kept, at the position of the best.

    Args:
        candidates: Best first.
        limit: Most hits to keep. Later candidates are compared with these only.
        num_spare: Candidates that are compared with the kept hits after ``limit`` of them were
            found. The rest is not asked for. None: all are compared.
    """
    groups: list[list[int]] = []
    compared: list[DuplicateCandidate] = []
    num_left = num_spare
    for i, candidate in enumerate(candidates):
        compared.append(candidate)
        if limit == len(groups) and num_left is not None:
            num_left -= 1
        group = _group_of(candidate, groups, compared)
        if group is not None:
            group.append(i)
            if _replaces(candidate, compared[group[0]]):
                group[0], group[-1] = i, group[0]
        elif limit is None or len(groups) < limit:
            groups.append([i])
        if limit == len(groups) and num_left == 0:
            break
    return [KeptHit(kept, tuple(sorted(others))) for kept, *others in groups]


def _group_of(
    candidate: DuplicateCandidate,
    groups: Sequence[list[int]],
    candidates: Sequence[DuplicateCandidate],
) -> list[int] | None:
    for group in groups:
        kept = candidates[group[0]]
        if contained_share(candidate.shingles, kept.shingles) >= MIN_CONTAINED_SHARE:
            return group
    return None


def _replaces(candidate: DuplicateCandidate, kept: DuplicateCandidate) -> bool:
    """Whether a duplicate of a kept hit is to be kept in its place."""
    return (
        candidate.version > kept.version
        and candidate.score >= kept.score - EQUAL_SCORE_SHARE * abs(kept.score)
        and contained_share(kept.shingles, candidate.shingles) >= MIN_CONTAINED_SHARE
    )
