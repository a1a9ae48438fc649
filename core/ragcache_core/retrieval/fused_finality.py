"""The probability that the fused hits of a stage are the final ones, learned from past searches.

The vector index states how likely all hits of its leg are final, a hundred or more. The fused list
needs only the best of them, so that it is final much more often; but the lexical leg or a reranker
may reorder it. So past stages are counted by what was known of them. All stages of the same
progress are the prior of the narrower count, which would else need many searches.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

PRIOR_STAGES: Final = 4.0
"""Stages of its own kind that all stages of the same progress count as."""
FIRST_STAGES: Final = 1.0
"""Stages that a guess counts as before any search: half of what the index is not sure of."""
HALF_LIFE: Final = 2000.0
"""Stages of one kind after which earlier ones count half."""
MAX_FORMS: Final = 1024
"""Pairs of a generation and a form of searches that are counted, the latest ones."""

_NUM_BINS: Final = 5
_MOST_REPEATS: Final = 3
_KEPT: Final = 0.5 ** (1.0 / HALF_LIFE)
_MOST_STAGES: Final = 1.0 / (1.0 - _KEPT)
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SearchForm:
    """What of a search changes its fused hits. Searches of one form are counted together.

    Attributes:
        mode: Which legs rank.
        reranker: Name of the one that orders the hits again, empty without one.
        is_diverse: Whether hits like better ones are moved back.
        top_k_band: Number of bits of the wanted hits: few of them are final earlier than many.
    """

    mode: str
    reranker: str
    is_diverse: bool
    top_k_band: int

    @classmethod
    def of(cls, mode: str, *, reranker: str, diversity: float, top_k: int) -> SearchForm:
        """Return the form of a search for ``top_k`` hits."""
        return cls(mode, reranker, diversity > 0.0, top_k.bit_length())


@dataclass(frozen=True, slots=True)
class FusedStage:
    """A stage as it is before the search ends.

    Attributes:
        rows: The fused hits, best first.
        dense_probability: The index's probability that its own hits are final.
        progress: Finished share of the scan.
        num_repeats: Stages before this one with the same fused hits, without a gap.
    """

    rows: tuple[int, ...]
    dense_probability: float
    progress: float
    num_repeats: int

    @property
    def kind(self) -> tuple[int, int, int]:
        """The kind of stages that this one is counted with."""
        return (
            min(int(self.dense_probability * _NUM_BINS), _NUM_BINS - 1),
            min(int(self.progress * _NUM_BINS), _NUM_BINS - 1),
            min(self.num_repeats, _MOST_REPEATS),
        )


@dataclass(slots=True)
class FusedFinality:
    """Counts of stages by kind: how many there were, and how many had the final hits."""

    _counts: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)

    def probability(self, stage: FusedStage) -> float:
        """Return the probability that the final stage has the same hits in the same order."""
        guess = (1.0 + stage.dense_probability) / 2.0
        _, progress_bin, _ = stage.kind
        alike = [both for kind, both in self._counts.copy().items() if kind[1] == progress_bin]
        alike_stages, alike_final = sum(one for one, _ in alike), sum(one for _, one in alike)
        prior = (FIRST_STAGES * guess + alike_final) / (FIRST_STAGES + alike_stages)
        num_stages, num_final = self._counts.get(stage.kind, (0.0, 0.0))
        return (PRIOR_STAGES * prior + num_final) / (PRIOR_STAGES + num_stages)

    def learn(self, stages: Sequence[FusedStage], final_rows: tuple[int, ...]) -> None:
        """Count the stages of a search that has ended.

        Args:
            stages: Those before the final one.
        """
        for stage in stages:
            num_stages, num_final = self._counts.get(stage.kind, (0.0, 0.0))
            self._counts[stage.kind] = (
                _KEPT * num_stages + 1.0,
                _KEPT * num_final + (stage.rows == final_rows),
            )

    def to_values(self) -> list[list[float]]:
        """Return the kind and the two counts of all stages, to be written as JSON."""
        counts = self._counts.copy()  # searches change it meanwhile
        return [[*kind, *(round(one, 3) for one in both)] for kind, both in counts.items()]

    @classmethod
    def from_values(cls, values: Any) -> FusedFinality:
        """Return the counts of ``to_values``. Raises ValueError or TypeError for others."""
        counts = {}
        for probability_bin, progress_bin, repeats, num_stages, num_final in values:
            kind = (int(probability_bin), int(progress_bin), int(repeats))
            if min(kind) < 0 or max(kind[:2]) >= _NUM_BINS or kind[2] > _MOST_REPEATS:
                raise ValueError(f"there are no stages of the kind {kind}")
            if not 0 <= float(num_final) <= float(num_stages) <= math.ceil(_MOST_STAGES):
                raise ValueError(f"{num_final} of {num_stages} stages cannot be final")
            counts[kind] = (float(num_stages), float(num_final))
        return cls(counts)


class FusedFinalities:
    """What past searches tell of each form, by generation. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_form: dict[tuple[int, SearchForm], FusedFinality] = {}  # the latest one last

    def of(self, generation: int, form: SearchForm) -> FusedFinality:
        """Return the counts of a form of searches in a generation."""
        key = generation, form
        with self._lock:
            found = self._by_form.pop(key, None) or FusedFinality()
            self._by_form[key] = found
            while len(self._by_form) > MAX_FORMS:
                del self._by_form[next(iter(self._by_form))]
        return found

    def to_json(self) -> str:
        """Return all counts as text."""
        with self._lock:
            items = list(self._by_form.items())
        forms = [
            {"generation": generation, "form": asdict(form), "counts": finality.to_values()}
            for (generation, form), finality in items
        ]
        return json.dumps({"version": _VERSION, "forms": forms})

    @classmethod
    def from_json(cls, text: str) -> FusedFinalities:
        """Return the counts of a text. Raises ValueError if it is not one of this version."""
        finalities = cls()
        try:
            values = json.loads(text)
            if values["version"] != _VERSION:
                raise ValueError(f"it has version {values['version']}, not {_VERSION}")
            for one in values["forms"][-MAX_FORMS:]:
                key = int(one["generation"]), SearchForm(**one["form"])
                finalities._by_form[key] = FusedFinality.from_values(one["counts"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"the text has no counts of stages: {error!r}") from error
        return finalities
