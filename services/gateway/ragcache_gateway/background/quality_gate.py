"""Decides whether questions may be blended: only as far as a measurement says that answers hold.

``ragcache quality`` measures it and puts a report here. The retriever stores the report, because
all gateways reach it and its data survives restarts.

With a quality target (``spec.reuse.quality``), questions are reused exactly until a report of this
model passes, or until this gateway's trials have found a share that does (``QualityTrials``).
Without a target, blends are allowed and say that nothing has verified them.

Values that a store has re-encoded with a loss are used only if a report has measured each of their
precisions with this model. Trials measure none of them.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass, replace
from typing import Any

from ragcache_core.errors import InvalidInput, NotFound
from ragcache_core.identity.variant import Precision, PrecisionUse
from ragcache_core.quality.calibration import Calibration
from ragcache_core.quality.controller import QualityDecision
from ragcache_core.quality.report import DEFAULT_WANTED_QUALITY, QualityReport, Verdict
from ragcache_gateway.background.quality_trials import QualityTrials
from ragcache_gateway.prompts.reuse_mode import ReuseMode, ServedModel
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_wire.clients.retriever_client import RetrieverClient

log = logging.getLogger(__name__)

REPORT_NAME = "quality-report"
TRIALS_NAME = "quality-trials"

REFRESH_S = 15.0
"""Time after which a gateway knows of a report that another one got."""


@dataclass(frozen=True, slots=True)
class GatedReuse:
    """How a question reuses KV, and what the gate says of it.

    Args:
        verdict: None: the question did not ask for a blend.
        refused: Whether the question asked for a blend and is reused exactly.
    """

    reuse: ReuseMode
    verdict: Verdict | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class GateTarget:
    """What blends are held to.

    Attributes:
        wanted_quality: The quality target; None: there is none.
        max_recompute_share: Share that questions recompute if they do not say it.
        lossy: The lossy precisions that the store gives to values.
    """

    wanted_quality: float | None
    max_recompute_share: float
    lossy: tuple[Precision, ...] = ()


class QualityGate(BackgroundTasks):
    """Knows the report of the served model. For one event loop.

    Args:
        template: Hex digest of the template before the documents.
        target: What blends have to keep, and the lossy precisions that they have to keep it in.
        trials: Measure while serving; None: no quality target is set.
    """

    def __init__(
        self,
        model: ServedModel,
        template: str,
        *,
        target: GateTarget,
        retriever: RetrieverClient,
        trials: QualityTrials | None,
    ) -> None:
        super().__init__()
        self._model = model
        self._space = model.space.digest().hex()
        # Models share the retriever.
        self._report_name = f"{REPORT_NAME}-{self._space}"
        self._trials_name = f"{TRIALS_NAME}-{self._space}"
        self._template = template
        self._wanted_quality = target.wanted_quality
        self._max_recompute_share = target.max_recompute_share
        self._retriever = retriever
        self._trials = trials
        self._lossy = target.lossy
        self._saved_decision = QualityDecision()
        self.report: QualityReport | None = None
        self._unusable: object = None

    def start(self) -> None:
        """Start to read what other gateways store, and to store what the trials find."""
        self._spawn(self._repeat(self._refresh, REFRESH_S, "quality gate: not refreshed"))

    def describe(self) -> dict[str, Any]:
        """Return what a report is measured for, and the state of the gate, as JSON."""
        return {
            **self._conditions(),
            "model": self._model.name,
            "verdict": self.verdict(self._max_recompute_share).value,
            "lossy_precisions": [str(one) for one in self._lossy],
            "lossy_verdict": None if not self._lossy else self._lossy_verdict().value,
            "report": None if self.report is None else self.report.to_json(),
        }

    def verdict(self, recompute_share: float) -> Verdict:
        """Judge blends that may recompute a share."""
        decision = QualityDecision() if self._trials is None else self._trials.decision
        if decision.decided:
            return Verdict.FAILED if decision.computes_all else Verdict.PASSED
        if self.report is None:
            return Verdict.UNVERIFIED
        return self.report.verdict(self._wanted(self.report), recompute_share)

    def _lossy_verdict(self) -> Verdict:
        if self.report is None:
            return Verdict.UNVERIFIED
        wanted = self._wanted(self.report)
        return self.report.verdict(wanted, self._max_recompute_share, self._lossy)

    def _lossy_share(self, max_share: float) -> float | None:
        """Return the share to recompute of values in any precision; None: lossless ones only."""
        if self.report is None or not self._lossy:
            return None
        return self.report.least_share(self._wanted(self.report), max_share, self._lossy)

    def apply(
        self, reuse: ReuseMode, *, is_trial: bool = False, rounding: Precision | None = None
    ) -> GatedReuse:
        """Return how a question that wants this mode is reused; call it once per question.

        Args:
            reuse: What the question wants.
            is_trial: The question measures quality, so nothing is refused.
            rounding: The precision that it measures; None: that of lossless values.
        """
        if is_trial:
            return GatedReuse(replace(reuse, trial=True, precision=PrecisionUse(rounding=rounding)))
        if reuse.mode != "blend":
            return GatedReuse(reuse)
        verdict = self.verdict(reuse.max_recompute_share)
        if self._trials is None:
            return GatedReuse(reuse, verdict)
        has_passed = verdict is Verdict.PASSED
        lossy_share = self._lossy_share(reuse.max_recompute_share)
        if has_passed and lossy_share is not None:
            # An alpha of the trials was found with lossless values, so the report's share counts.
            reuse = replace(
                reuse, max_recompute_share=lossy_share, precision=PrecisionUse(lossy=True)
            )
            return GatedReuse(reuse, verdict)
        if has_passed and self.report is not None and not self._trials.decision.decided:
            wanted = self._wanted(self.report)
            share = self.report.least_share(wanted, reuse.max_recompute_share)
            reuse = replace(reuse, max_recompute_share=share or 0.0)
        gated = self._trials.apply_decision(reuse, may_blend=has_passed)
        return GatedReuse(gated, verdict, gated.mode != "blend")

    async def put_report(self, value: object) -> QualityReport:
        """Check and store a report of this model.

        Raises:
            InvalidInput: It is no report, or that of another model.
            Unavailable: The retriever does not answer.
        """
        report = QualityReport.from_json(value)
        if not report.is_of(self._space, self._template):
            raise InvalidInput(
                "report.space",
                "or its template is not that of the served model",
                "measure again with `ragcache quality`",
            )
        await self._retriever.put_report(self._report_name, json.dumps(report.to_json()).encode())
        self.report = report
        return report

    def _wanted(self, report: QualityReport) -> float:
        if self._wanted_quality is not None:
            return self._wanted_quality
        return report.wanted_quality or DEFAULT_WANTED_QUALITY

    async def _refresh(self) -> None:
        value = await self._read(self._report_name)
        if value is not None:
            self.report = self._parse_report(value)
        if self._trials is None:
            return
        decision = self._trials.decision
        if decision.decided and decision != self._saved_decision:
            saved = self._decision_json(decision)
            await self._retriever.put_report(self._trials_name, json.dumps(saved).encode())
            self._saved_decision = decision
        else:
            found = self._parse_decision(await self._read(self._trials_name))
            if found is not None:
                self._trials.adopt(found)
                self._saved_decision = self._trials.decision

    def _parse_report(self, value: object) -> QualityReport | None:
        """Return a stored report; None if it is of another release, model or template."""
        try:
            report = QualityReport.from_json(value)
        except InvalidInput as error:
            if value != self._unusable:
                log.warning("quality: stored report is not used, measure again error=%s", error)
            self._unusable = value
            return None
        return report if report.is_of(self._space, self._template) else None

    async def _read(self, name: str) -> object | None:
        try:
            stored = await self._retriever.get_report(name)
        except NotFound:
            return None
        value: object = json.loads(stored.body)
        return value

    def _conditions(self) -> dict[str, Any]:
        """Return what a decision of trials is valid for."""
        return {
            "space": self._space,
            "template": self._template,
            "wanted_quality": self._wanted_quality,
            "max_recompute_share": self._max_recompute_share,
        }

    def _decision_json(self, decision: QualityDecision) -> dict[str, Any]:
        found = decision.calibration
        calibration = None if found is None else [found.alpha, found.fix_overhead, found.quality]
        decided_at_ms = time.time_ns() // 1_000_000
        return {**self._conditions(), "calibration": calibration, "decided_at_ms": decided_at_ms}

    def _parse_decision(self, value: object) -> QualityDecision | None:
        """Return a stored decision; None if it is invalid or for other conditions."""
        if not isinstance(value, dict):
            return None
        conditions = self._conditions()
        if {name: value.get(name) for name in conditions} != conditions:
            return None
        calibration = value.get("calibration")
        if calibration is None:
            return QualityDecision(True)
        try:
            alpha, fix_overhead, quality = map(float, calibration)
        except (TypeError, ValueError):
            return None
        if not all(map(math.isfinite, (alpha, fix_overhead, quality))) or alpha < 0:
            return None
        return QualityDecision(True, Calibration(alpha, fix_overhead, quality))
