"""Derives conditions, phase and Events from the component states and the self-test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ragcache_operator.status.component import CONDITION_OF, ComponentState


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """An Event about the object that is being reconciled."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


PostEvent = Callable[[ObjectEvent], None]
"""Posts an Event about one object."""


Condition = dict[str, Any]
Truth = Literal["True", "False", "Unknown"]

READY = "Ready"
ACCEPTED = "Accepted"
SELF_TEST = "SelfTestPassed"
BLEND_VERIFIED = "BlendVerified"


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Result of the last question to the gateway.

    Args:
        passed: None before the first question.
        generation: ``metadata.generation`` of the RagCache at the time of the question.
    """

    passed: bool | None
    reason: str
    message: str
    generation: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Whether the operator could apply the spec completely."""

    truth: Truth
    reason: str
    message: str


VALID = Acceptance("True", "Valid", "the spec is valid")


@dataclass(frozen=True, slots=True)
class BlendVerification:
    """Whether a measurement says that blended answers are good enough."""

    truth: Truth
    reason: str
    message: str


def blend_verification(
    verdict: str | None, before: Sequence[Condition], *, has_target: bool
) -> BlendVerification:
    """Return what a gateway's verdict means for a RagCache that blends.

    Args:
        verdict: unverified, passed or failed; None if the gateway has not been asked yet.
        before: Its conditions so far.
        has_target: Whether questions are reused exactly until the verdict is passed.
    """
    effect = "questions are reused exactly" if has_target else "answers are blended all the same"
    match verdict:
        case "passed":
            message = "a measurement of this model reached the wanted quality"
            return BlendVerification("True", "MeasurementPassed", message)
        case "failed":
            message = f"a measurement of this model missed the wanted quality; {effect}"
            return BlendVerification("False", "MeasurementFailed", message)
        case "unverified":
            message = f"nothing was measured with this model; {effect}; run `ragcache quality`"
            return BlendVerification("False", "NotMeasured", message)
    known = find(before, BLEND_VERIFIED)
    if known is not None:
        return BlendVerification(known["status"], known["reason"], known["message"])
    return BlendVerification("Unknown", "Waiting", "waiting for the gateway")


def make_conditions(
    components: Sequence[ComponentState],
    test: SelfTest,
    generation: int,
    before: Sequence[Condition],
    now: str,
    accepted: Acceptance = VALID,
    blend: BlendVerification | None = None,
) -> list[Condition]:
    """Return the conditions of an accepted RagCache.

    Args:
        before: Its conditions so far.
        now: The current time in RFC 3339 format.
        blend: What is known of the quality of blends; None if it does not blend.
    """
    builder = _ConditionBuilder(generation, before, now)
    made = [builder.make(ACCEPTED, accepted.truth, accepted.reason, accepted.message)]
    for state in components:
        truth: Truth = "True" if state.available else "False"
        made.append(builder.make(CONDITION_OF[state.component], truth, state.reason, state.message))
    tested: Truth = "Unknown" if test.passed is None else "True" if test.passed else "False"
    made.append(
        builder.make(SELF_TEST, tested, test.reason, test.message, generation=test.generation)
    )
    if blend is not None:
        made.append(builder.make(BLEND_VERIFIED, blend.truth, blend.reason, blend.message))
    waiting = next((state for state in components if not state.available), None)
    if waiting is not None:
        made.append(builder.make(READY, "False", waiting.reason, _named(waiting)))
    elif test.passed:
        # The self-test may have run for the generation before this one.
        message = "the gateway answers questions"
        made.append(builder.make(READY, "True", "Answering", message, generation=test.generation))
    else:
        made.append(builder.make(READY, "False", test.reason, test.message))
    return made


def refused_conditions(
    reason: str, message: str, generation: int, before: Sequence[Condition], now: str
) -> list[Condition]:
    """Return the conditions of a rejected RagCache. Conditions of components stay unchanged."""
    builder = _ConditionBuilder(generation, before, now)
    kept = [c for c in before if c["type"] not in (ACCEPTED, READY)]
    return [
        builder.make(ACCEPTED, "False", reason, message),
        *kept,
        builder.make(READY, "False", reason, message),
    ]


def self_test_of(before: Sequence[Condition]) -> SelfTest:
    """Return the self-test that the conditions of a status record."""
    condition = find(before, SELF_TEST)
    if condition is None or condition["status"] == "Unknown":
        return NOT_TESTED
    return SelfTest(
        condition["status"] == "True",
        condition["reason"],
        condition["message"],
        condition.get("observedGeneration", 0),
    )


NOT_TESTED = SelfTest(None, "Waiting", "waiting until every component is ready", 0)


def is_test_due(components: Sequence[ComponentState], test: SelfTest, generation: int) -> bool:
    """Whether the operator should send a question to the gateway.

    It does so when all components are ready and settled, unless the self-test has already passed
    for this generation.
    """
    settled = all(state.available and state.settled for state in components)
    return settled and not (test.passed and test.generation == generation)


def current_test(components: Sequence[ComponentState], test: SelfTest, generation: int) -> SelfTest:
    """Return the self-test as far as it is still valid.

    It is dropped when a component is unavailable. During a rollout it counts for an earlier
    generation, so that the operator repeats it after the rollout.
    """
    if not all(state.available for state in components):
        return NOT_TESTED
    if test.passed and not all(state.settled for state in components):
        return replace(test, generation=min(test.generation, generation - 1))
    return test


def phase_of(
    conditions: Sequence[Condition], components: Sequence[ComponentState], generation: int
) -> str:
    """Return the phase, the summary of the conditions."""
    ready, accepted = find(conditions, READY), find(conditions, ACCEPTED)
    if ready is None or ready["status"] != "True":
        return "Progressing" if any(state.ready for state in components) else "Pending"
    has_warning = any(state.reason in _WARNINGS for state in components)
    if has_warning or accepted is None or accepted["status"] != "True":
        return "Degraded"
    if any(not state.settled for state in components) or ready["observedGeneration"] != generation:
        return "Progressing"
    complete = all(state.ready >= state.wanted for state in components)
    return "Ready" if complete else "Degraded"


def progress_of(components: Sequence[ComponentState], test: SelfTest) -> str:
    """Return what the operator waits for as one line, or an empty string."""
    waiting = [state for state in components if not state.available or not state.settled]
    if waiting:
        return "; ".join(f"{state.component}: {state.message}" for state in waiting)
    return "" if test.passed else f"self-test: {test.message}"


def events_for(before: Sequence[Condition], after: Sequence[Condition]) -> list[ObjectEvent]:
    """Return the Events for the conditions that changed."""
    made = []
    for condition in after:
        old = find(before, condition["type"])
        if old is not None and (old["status"], old["reason"]) == (
            condition["status"],
            condition["reason"],
        ):
            continue
        if old is None and condition["status"] == "Unknown":
            continue
        bad = condition["reason"] in _WARNINGS
        lost = old is not None and old["status"] == "True" and condition["status"] == "False"
        made.append(
            ObjectEvent(
                "Warning" if bad or lost else "Normal",
                condition["reason"],
                f"{condition['type']}: {condition['message']}",
            )
        )
    return made


def find(conditions: Sequence[Condition], name: str) -> Condition | None:
    """Return the condition of a type, or None."""
    return next((c for c in conditions if c["type"] == name), None)


_WARNINGS = frozenset(
    {
        *("ImagePullFailed", "ConfigError", "CrashLooping", "OutOfMemory", "Unschedulable"),
        *("PodsRefused", "Invalid", "ApplyFailed", "ObjectTaken", "SelfTestFailed"),
        *("NotServed", "NotMeasured", "MeasurementFailed", "InsufficientMemory"),
    }
)
"""Reasons that need a user's action. The others resolve without one."""


def _named(state: ComponentState) -> str:
    return f"{state.component}: {state.message}"


class _ConditionBuilder:
    def __init__(self, generation: int, before: Sequence[Condition], now: str) -> None:
        self._generation = generation
        self._before: Mapping[str, Condition] = {c["type"]: c for c in before}
        self._now = now

    def make(
        self, name: str, status: Truth, reason: str, message: str, generation: int | None = None
    ) -> Condition:
        old = self._before.get(name)
        since = old["lastTransitionTime"] if old and old["status"] == status else self._now
        return {
            "type": name,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": since,
            "observedGeneration": self._generation if generation is None else generation,
        }
