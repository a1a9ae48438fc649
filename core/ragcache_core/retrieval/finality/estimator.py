"""Estimates whether the hits of a running search are final, and their recall.

Two logistic regressions over the features of a checkpoint start with weights that were fitted on
generated vectors. They are fitted again to the latest complete searches, and their predictions are
recalibrated by bins. An estimator never changes: learning returns the next one.

Source: RAGCache section 5.3 starts a generation with hits that may change. DARTH
(arXiv 2505.19001) predicts the recall during a search. This one predicts identity as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.finality import prior
from ragcache_core.retrieval.finality.features import (
    NUM_INPUTS,
    Observation,
    StageFeatures,
    model_inputs,
)
from ragcache_core.retrieval.finality.logistic import BinCalibration, fit, logistic, logistic_of
from ragcache_core.retrieval.finality.recall_stopping import NO_CURVE, StoppingCurve, replay

WINDOW_SEARCHES: Final = 256
"""Complete searches that the models are fitted to, the latest ones."""

_FIRST_FITS: Final = 16
_LATER_FITS: Final = 64
"""Searches between two fits, the second once that many were learned. A fit takes milliseconds."""

_MAX_CHECKPOINTS: Final = 64
_PRIOR_STRENGTH: Final = 4.0
_VERSION: Final = 1
_LARGEST_INPUT: Final = 8.0
_MEANS: Final = np.array(prior.MEANS)
_DEVIATIONS: Final = np.array(prior.DEVIATIONS)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Model:
    weights: Floats
    calibration: BinCalibration = field(default_factory=BinCalibration)

    def predict(self, inputs: Floats) -> float:
        """Return the calibrated prediction for inputs of shape (NUM_INPUTS + 1,)."""
        return self.calibration.apply(logistic_of(float(inputs @ self.weights)))

    def predict_all(self, inputs: Floats) -> Floats:
        return self.calibration.apply_all(logistic(inputs @ self.weights))

    def fitted(self, inputs: Floats, targets: Floats) -> _Model:
        """Return this model after observations, inputs of shape (n, NUM_INPUTS + 1)."""
        weights = fit(inputs, targets, self.weights, _PRIOR_STRENGTH)
        return _Model(weights, BinCalibration.of(logistic(inputs @ weights), targets))

    def to_values(self) -> dict[str, list[float]]:
        return {
            "weights": [float(f"{weight:.6g}") for weight in self.weights],
            "corrections": list(self.calibration.corrections),
        }

    @classmethod
    def from_values(cls, values: Any) -> _Model:
        weights = np.array([float(weight) for weight in values["weights"]])
        corrections = tuple(float(one) for one in values["corrections"])
        if len(weights) != NUM_INPUTS + 1 or len(corrections) != len(BinCalibration().corrections):
            raise ValueError("a model has another number of weights or bins")
        if not (np.isfinite(weights).all() and np.isfinite(corrections).all()):
            raise ValueError("a model has a weight that is not a number")
        return cls(weights, BinCalibration(corrections))


@dataclass(frozen=True, slots=True)
class _Search:
    """The checkpoints of a complete search. ``proved``: the hits were provably final."""

    inputs: Floats
    proved: npt.NDArray[np.bool_]
    final: Floats
    recall: Floats


_FINAL_PRIOR: Final = _Model(np.array(prior.FINAL_WEIGHTS))
_RECALL_PRIOR: Final = _Model(np.array(prior.RECALL_WEIGHTS))


@dataclass(frozen=True, slots=True)
class FinalityEstimator:
    """Estimates of one index.

    Attributes:
        curve: At which expected recall a search may stop.
    """

    curve: StoppingCurve = NO_CURVE
    _final_base: _Model = _FINAL_PRIOR
    _recall_base: _Model = _RECALL_PRIOR
    _final: _Model = _FINAL_PRIOR
    _recall: _Model = _RECALL_PRIOR
    _searches: tuple[_Search, ...] = ()
    _num_unfitted: int = 0

    def probability(self, features: StageFeatures) -> float:
        """Return the probability that the hits are the final ones, in the same order."""
        return 1.0 if features.is_provably_final else self._final.predict(_inputs(features))

    def expected_recall(self, features: StageFeatures) -> float:
        """Return the expected share of the final hits that are found."""
        return 1.0 if features.is_provably_final else self._recall.predict(_inputs(features))

    def may_stop_at(self, features: StageFeatures, recall: float) -> bool:
        """Return whether a search with a declared recall may stop at this checkpoint."""
        threshold = self.curve.threshold(recall)
        return threshold is not None and self.expected_recall(features) >= threshold

    def learn(self, observations: Sequence[Observation]) -> FinalityEstimator:
        """Return the estimator after a complete search.

        Args:
            observations: Its checkpoints in order, without the end of the scan.
        """
        if not observations:
            return self
        step = -(-len(observations) // _MAX_CHECKPOINTS)
        kept = observations[::step]
        search = _Search(
            np.stack([_inputs(one.features) for one in kept]),
            np.array([one.features.is_provably_final for one in kept]),
            np.array([float(one.is_final) for one in kept]),
            np.array([one.recall for one in kept]),
        )
        searches = (*self._searches, search)[-WINDOW_SEARCHES:]
        learned = replace(self, _searches=searches, _num_unfitted=self._num_unfitted + 1)
        interval = _FIRST_FITS if len(searches) <= _LATER_FITS else _LATER_FITS
        return learned._fitted() if learned._num_unfitted >= interval else learned

    def _fitted(self) -> FinalityEstimator:
        inputs = np.concatenate([one.inputs for one in self._searches])
        open_ones = ~np.concatenate([one.proved for one in self._searches])
        finals = np.concatenate([one.final for one in self._searches])
        recalls = np.concatenate([one.recall for one in self._searches])
        final = self._final_base.fitted(inputs[open_ones], finals[open_ones])
        recall = self._recall_base.fitted(inputs[open_ones], recalls[open_ones])
        return replace(
            self,
            _final=final,
            _recall=recall,
            curve=self._replayed(recall),
            _num_unfitted=0,
        )

    def _replayed(self, recall: _Model) -> StoppingCurve:
        """Return the curve of the window, or the stored one while that has seen more searches."""
        if len(self._searches) < min(self.curve.num_searches, WINDOW_SEARCHES // 4):
            return self.curve
        return replay(
            [
                (np.where(one.proved, 1.0, recall.predict_all(one.inputs)), one.recall)
                for one in self._searches
            ]
        )

    def to_json(self) -> str:
        """Return what was learned as text. The window of searches is not part of it."""
        return json.dumps(
            {
                "version": _VERSION,
                "final": self._final.to_values(),
                "recall": self._recall.to_values(),
                "lower_means": [round(mean, 5) for mean in self.curve.lower_means],
                "num_searches": self.curve.num_searches,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> FinalityEstimator:
        """Return the estimator of a text. Raises ValueError if it is not one of this version."""
        try:
            values = json.loads(text)
            if values["version"] != _VERSION:
                raise ValueError(f"it has version {values['version']}, not {_VERSION}")
            means = tuple(float(mean) for mean in values["lower_means"])
            if len(means) != len(NO_CURVE.lower_means) or not np.isfinite(means).all():
                raise ValueError("its curve has another number of thresholds")
            curve = StoppingCurve(means, int(values["num_searches"]))
            final = _Model.from_values(values["final"])
            recall = _Model.from_values(values["recall"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the text is no estimator: {error!r}") from error
        return cls(curve, final, recall, final, recall)


def _inputs(features: StageFeatures) -> Floats:
    # A search asks at each stage, so that this avoids the slower functions of numpy.
    values = np.ones(NUM_INPUTS + 1)
    values[1:] = model_inputs(features)
    standard = values[1:]
    standard -= _MEANS
    standard /= _DEVIATIONS
    np.minimum(standard, _LARGEST_INPUT, out=standard)
    np.maximum(standard, -_LARGEST_INPUT, out=standard)
    return values
