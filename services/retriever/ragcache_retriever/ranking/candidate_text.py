"""The text of a candidate of a search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CandidateText:
    """The text of a candidate. ``heading``: its title and headings."""

    heading: str
    text: str
