"""Reports of a quality measurement on the served model, and the verdict that follows from them.

``ragcache quality`` answers questions in full and as blends with several recompute shares. A report
has what each share kept, of values in each precision that the stores use. It is valid for one
model, tokenizer and chat template: KV of another one says nothing about it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Precision

REPORT_VERSION = 2

DEFAULT_WANTED_QUALITY = 0.9
"""ROUGE-L F1 with full computation that blends should reach where no target is set."""

MIN_QUESTIONS = 8
"""A report of fewer questions proves nothing."""

MAX_BUDGETS = 320

NATIVE: Final = str(Precision())


class Verdict(StrEnum):
    """Whether blends with a recompute share are known to be good enough."""

    UNVERIFIED = "unverified"  # no report of this model
    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BudgetQuality:
    """What blends with one recompute share kept, as means over the questions.

    Attributes:
        recompute_share: The share that was allowed.
        rouge_l: ROUGE-L F1 with the answers of full computation.
        same_answers: Share of answers that are equal to those of full computation.
        first_token_kl: KL divergence of the first token's distribution from that of full
            computation, in nats. None: not measured.
        recomputed_share: The share of blended tokens that was recomputed.
        blended_share: The share of prompt tokens that was blended.
        num_questions: Questions that were blended.
        precision: Of the blended values; "native" stands for all lossless ones.
    """

    recompute_share: float
    rouge_l: float
    same_answers: float
    first_token_kl: float | None
    recomputed_share: float
    blended_share: float
    num_questions: int
    precision: str = NATIVE


@dataclass(frozen=True, slots=True)
class QualityReport:
    """A measurement.

    Attributes:
        model: Name under which the model is served.
        space: Hex digest of its KV space.
        template: Hex digest of the template before the documents.
        created_at: Time in RFC 3339 format.
        capture: How the blended chunks had been stored: "on demand" or "ahead" of questions.
        wanted_quality: ROUGE-L F1 that was wanted when it was measured.
        budgets: Ascending by recompute share.
    """

    model: str
    space: str
    template: str
    created_at: str
    capture: str
    wanted_quality: float
    budgets: tuple[BudgetQuality, ...]

    def is_of(self, space: str, template: str) -> bool:
        """Whether it was measured with this KV space and template."""
        return (self.space, self.template) == (space, template)

    def least_share(
        self, wanted_quality: float, max_share: float, lossy: Sequence[Precision] = ()
    ) -> float | None:
        """Return the least recompute share up to max_share that keeps the wanted quality.

        More recomputation makes answers worse only by chance. So a share counts only if no larger
        measured one up to max_share misses the quality.

        Args:
            wanted_quality: ROUGE-L F1 with full computation.
            max_share: Most that may be recomputed.
            lossy: Precisions that values may have. Each has to keep the quality.
        """
        found = None
        measured = self._measured(max_share, lossy)
        for share in sorted(measured, reverse=True):
            if measured[share] < wanted_quality:
                break
            found = share
        return found

    def verdict(
        self, wanted_quality: float, max_share: float, lossy: Sequence[Precision] = ()
    ) -> Verdict:
        """Judge blends that may recompute up to max_share, of values in these precisions."""
        if not self._measured(max_share, lossy):
            return Verdict.UNVERIFIED
        passed = self.least_share(wanted_quality, max_share, lossy) is not None
        return Verdict.PASSED if passed else Verdict.FAILED

    def _measured(self, max_share: float, lossy: Sequence[Precision]) -> dict[float, float]:
        """Return the worst ROUGE-L of each share that was measured in every precision."""
        found: dict[float, dict[str, float]] = defaultdict(dict)
        for one in self.budgets:
            if one.recompute_share <= max_share and one.num_questions >= MIN_QUESTIONS:
                found[one.recompute_share][one.precision] = one.rouge_l
        wanted = {NATIVE, *map(str, lossy)}
        return {
            share: min(kept[name] for name in wanted)
            for share, kept in found.items()
            if wanted <= kept.keys()
        }

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object, which ``from_json`` reads."""
        return {
            "version": REPORT_VERSION,
            "model": self.model,
            "space": self.space,
            "template": self.template,
            "created_at": self.created_at,
            "capture": self.capture,
            "wanted_quality": self.wanted_quality,
            "budgets": [
                {name: getattr(one, name) for name in BudgetQuality.__slots__}
                for one in self.budgets
            ],
        }

    @classmethod
    def from_json(cls, value: object) -> QualityReport:
        """Parse and check a report.

        Raises:
            InvalidInput: A field is wrong; the error names it.
        """
        report = _mapping("report", value)
        if report.get("version") != REPORT_VERSION:
            raise InvalidInput(
                "report.version",
                f"is {report.get('version')!r}",
                f"measure with a version that writes {REPORT_VERSION}",
            )
        capture = _text("report.capture", report.get("capture"))
        if capture not in ("on demand", "ahead"):
            raise InvalidInput("report.capture", f"is {capture!r}", "send 'on demand' or 'ahead'")
        budgets = report.get("budgets")
        if not isinstance(budgets, Sequence) or isinstance(budgets, str | bytes):
            raise InvalidInput("report.budgets", "is not a list", "send a list of budgets")
        if not 0 < len(budgets) <= MAX_BUDGETS:
            raise InvalidInput(
                "report.budgets", f"has {len(budgets)} entries", f"send 1 to {MAX_BUDGETS}"
            )
        parsed = [_budget(f"report.budgets[{i}]", one) for i, one in enumerate(budgets)]
        return cls(
            model=_text("report.model", report.get("model")),
            space=_text("report.space", report.get("space")),
            template=_text("report.template", report.get("template")),
            created_at=_text("report.created_at", report.get("created_at")),
            capture=capture,
            wanted_quality=_share("report.wanted_quality", report.get("wanted_quality")),
            budgets=tuple(sorted(parsed, key=lambda one: (one.recompute_share, one.precision))),
        )


def _budget(path: str, value: object) -> BudgetQuality:
    budget = _mapping(path, value)
    kl = budget.get("first_token_kl")
    count = budget.get("num_questions")
    if type(count) is not int or count < 0:
        raise InvalidInput(f"{path}.num_questions", f"is {count!r}", "send a whole number")
    return BudgetQuality(
        recompute_share=_share(f"{path}.recompute_share", budget.get("recompute_share")),
        rouge_l=_share(f"{path}.rouge_l", budget.get("rouge_l")),
        same_answers=_share(f"{path}.same_answers", budget.get("same_answers")),
        first_token_kl=None if kl is None else _number(f"{path}.first_token_kl", kl),
        recomputed_share=_share(f"{path}.recomputed_share", budget.get("recomputed_share")),
        blended_share=_share(f"{path}.blended_share", budget.get("blended_share")),
        num_questions=count,
        precision=_precision(f"{path}.precision", budget.get("precision", NATIVE)),
    )


def _precision(path: str, value: object) -> str:
    try:
        return str(Precision.parse(_text(path, value)))
    except ValueError as error:
        raise InvalidInput(path, f"is {value!r}: {error}", "name codecs, like int8") from error


def _mapping(path: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(path, "is not an object", "send a JSON object")
    return value


def _text(path: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise InvalidInput(path, "is not a short text", "send 1 to 256 characters")
    return value


def _share(path: str, value: object) -> float:
    number = _number(path, value)
    if not 0 <= number <= 1:
        raise InvalidInput(path, f"is {value!r}", "send a share from 0 to 1")
    return number


def _number(path: str, value: object) -> float:
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(path, f"is {value!r}", "send a finite number")
    return float(value)
