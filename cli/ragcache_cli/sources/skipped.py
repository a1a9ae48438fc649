"""Files of a folder that are not ingested, grouped by the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Final

_MAX_NAMES: Final = 5
_MAX_KINDS: Final = 4


class SkipReason(StrEnum):
    """Why a file was skipped. The value is its name in counts."""

    OTHER_KIND = "other_kind"
    HIDDEN = "hidden"
    NO_FILE = "no_file"

    @property
    def words(self) -> str:
        """The reason in a sentence."""
        return {
            SkipReason.OTHER_KIND: "of another kind",
            SkipReason.HIDDEN: "hidden",
            SkipReason.NO_FILE: "no regular files or folders",
        }[self]


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file, or a folder with all that it has."""

    name: str
    reason: SkipReason


def counts_of(skipped: Iterable[SkippedFile]) -> dict[str, int]:
    """Return how many were skipped for each reason."""
    found = Counter(one.reason for one in skipped)
    return {reason.value: found[reason] for reason in SkipReason if found[reason]}


def summary_of(skipped: Iterable[SkippedFile]) -> Iterator[str]:
    """Yield a line for each reason: the number of files, their kinds and the first names."""
    names: dict[SkipReason, list[str]] = {}
    for one in skipped:
        names.setdefault(one.reason, []).append(one.name)
    for reason in SkipReason:
        found = names.get(reason, [])
        if not found:
            continue
        kinds = _kinds(found) if reason is SkipReason.OTHER_KIND else ""
        more = len(found) - _MAX_NAMES
        ending = f" and {more:,} more" if more > 0 else ""
        yield f"{len(found):,} {reason.words}{kinds}: {', '.join(found[:_MAX_NAMES])}{ending}"


def _kinds(names: list[str]) -> str:
    """Return the most frequent suffixes if not all names are shown."""
    if len(names) <= _MAX_NAMES:
        return ""
    suffixes = Counter(PurePath(name).suffix.lower() or "no suffix" for name in names)
    shown = [f"{count:,} {suffix}" for suffix, count in suffixes.most_common(_MAX_KINDS)]
    return f" ({', '.join(shown)}{', ...' if len(suffixes) > _MAX_KINDS else ''})"
