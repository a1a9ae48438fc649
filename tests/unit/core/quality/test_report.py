"""A report passes only if its own model reaches the wanted quality within the allowed share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Precision
from ragcache_core.quality.report import MIN_QUESTIONS, BudgetQuality, QualityReport, Verdict
from ragcache_core.quality.similarity import first_token_kl


def budget(share: float, rouge: float, num_questions: int = MIN_QUESTIONS) -> BudgetQuality:
    return BudgetQuality(share, rouge, 0.5, 0.01, share, 0.8, num_questions)


def report(*budgets: BudgetQuality) -> QualityReport:
    return QualityReport(
        "m", "space", "template", "2026-01-01T00:00:00Z", "on demand", 0.9, budgets
    )


def test_the_least_share_that_keeps_the_quality_is_chosen() -> None:
    measured = report(budget(0.0, 0.6), budget(0.1, 0.91), budget(0.2, 0.95), budget(0.3, 0.99))
    assert measured.least_share(0.9, 0.2) == 0.1
    assert measured.least_share(0.94, 0.3) == 0.2
    assert measured.least_share(0.99, 0.2) is None


INT8, GSE8 = Precision.parse("int8"), Precision.parse("gse8")


def in_precision(one: Precision, share: float, rouge: float) -> BudgetQuality:
    return replace(budget(share, rouge), precision=str(one))


def test_a_share_holds_for_lossy_values_if_each_precision_keeps_the_quality_with_it() -> None:
    measured = report(
        *(budget(0.0, 0.92), budget(0.1, 0.95), budget(0.2, 0.99)),
        *(in_precision(INT8, 0.0, 0.91), in_precision(INT8, 0.1, 0.94)),
        *(in_precision(GSE8, 0.0, 0.7), in_precision(GSE8, 0.1, 0.93)),
    )
    assert measured.least_share(0.9, 0.2) == 0.0
    assert measured.least_share(0.9, 0.2, [INT8]) == 0.0
    assert measured.least_share(0.9, 0.2, [INT8, GSE8]) == 0.1
    assert measured.verdict(0.9, 0.2, [INT8, GSE8]) is Verdict.PASSED
    assert measured.verdict(0.94, 0.2, [INT8, GSE8]) is Verdict.FAILED
    # Of a share that not every precision was measured with, nothing is known.
    assert measured.verdict(0.9, 0.2, [Precision.parse("e5m2")]) is Verdict.UNVERIFIED
    assert QualityReport.from_json(measured.to_json()).least_share(0.9, 0.2, [GSE8]) == 0.1


def test_a_lucky_small_share_does_not_count() -> None:
    assert (
        report(budget(0.1, 0.95), budget(0.2, 0.8), budget(0.3, 0.96)).least_share(0.9, 0.3) == 0.3
    )


def test_verdicts() -> None:
    measured = report(budget(0.1, 0.85), budget(0.3, 0.95))
    assert measured.verdict(0.9, 0.3) is Verdict.PASSED
    assert measured.verdict(0.9, 0.2) is Verdict.FAILED
    assert measured.verdict(0.9, 0.05) is Verdict.UNVERIFIED
    assert report(budget(0.1, 1.0, MIN_QUESTIONS - 1)).verdict(0.5, 1.0) is Verdict.UNVERIFIED


def test_a_report_of_another_model_or_template_is_recognized() -> None:
    assert report(budget(0.1, 1.0)).is_of("space", "template")
    assert not report(budget(0.1, 1.0)).is_of("other", "template")
    assert not report(budget(0.1, 1.0)).is_of("space", "other")


SHARES = st.floats(0, 1)


@given(
    budgets=st.lists(
        st.builds(
            BudgetQuality,
            SHARES,
            SHARES,
            SHARES,
            st.none() | st.floats(0, 10),
            SHARES,
            SHARES,
            st.integers(0, 100),
        ),
        min_size=1,
        max_size=8,
    ),
    wanted=SHARES,
    max_share=SHARES,
)
def test_a_report_survives_json_and_passes_only_with_a_share_that_keeps_the_quality(
    budgets: list[BudgetQuality], wanted: float, max_share: float
) -> None:
    ordered = tuple(sorted(budgets, key=lambda one: one.recompute_share))
    measured = report(*ordered)
    assert QualityReport.from_json(measured.to_json()) == measured
    share = measured.least_share(wanted, max_share)
    assert (measured.verdict(wanted, max_share) is Verdict.PASSED) == (share is not None)
    if share is not None:
        assert share <= max_share
        assert any(
            one.recompute_share == share and one.rouge_l >= wanted for one in measured.budgets
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 1),
        ("model", ""),
        ("space", None),
        ("template", 7),
        ("created_at", "x" * 300),
        ("capture", "never"),
        ("wanted_quality", 1.5),
        ("wanted_quality", True),
        ("budgets", []),
        ("budgets", "0.1"),
        ("budgets", [1]),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"report\.{field}"):
        QualityReport.from_json(report(budget(0.1, 1.0)).to_json() | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rouge_l", math.nan),
        ("recompute_share", -1),
        ("num_questions", 1.5),
        ("first_token_kl", "0"),
    ],
)
def test_a_wrong_field_of_a_budget_is_named(field: str, value: Any) -> None:
    json = replace(report(budget(0.1, 1.0))).to_json()
    json["budgets"][0][field] = value
    with pytest.raises(InvalidInput, match=rf"budgets\[0\]\.{field}"):
        QualityReport.from_json(json)


def test_kl_of_equal_distributions_is_0_and_grows_with_the_difference() -> None:
    full = {"a": math.log(0.9), "b": math.log(0.1)}
    near = {"a": math.log(0.8), "b": math.log(0.2)}
    far = {"a": math.log(0.2), "b": math.log(0.8)}
    assert first_token_kl(full, full) == 0
    assert 0 < first_token_kl(full, near) < first_token_kl(full, far)
    assert first_token_kl(full, {"c": math.log(0.01)}) > 1
