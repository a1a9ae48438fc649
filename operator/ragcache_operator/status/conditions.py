"""Derives conditions, phase and Events from the component states and the self-test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
DATA_TYPE_SUPPORTED = "DataTypeSupported"


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
class ConditionState:
    """Status, reason and message of one condition."""

    status: Truth
    reason: str
    message: str


VALID = ConditionState("True", "Valid", "the spec is valid")


def blend_verification(
    verdict: str | None, before: Sequence[Condition], *, has_target: bool
) -> ConditionState:
    """Return what a gateway's verdict means for a RagCache that blends.

    Args:
        verdict: unverified, passed, failed or lossless; None if the gateway has not been asked yet.
        before: Its conditions so far.
        has_target: Whether questions are reused exactly until the verdict is passed.
    """
    effect = "questions are reused exactly" if has_target else "answers are blended all the same"
    match verdict:
        case "passed":
            message = "a measurement of this model reached the wanted quality"
            return ConditionState("True", "MeasurementPassed", message)
        case "lossless":
            message = (
                "no measurement passed for the lossy codecs of cacheStore.precision; values in "
                "them are computed again; run `ragcache quality`"
            )
            return ConditionState("False", "PrecisionNotMeasured", message)
        case "failed":
            message = f"a measurement of this model missed the wanted quality; {effect}"
            return ConditionState("False", "MeasurementFailed", message)
        case "unverified":
            message = f"nothing was measured with this model; {effect}; run `ragcache quality`"
            return ConditionState("False", "NotMeasured", message)
    known = find(before, BLEND_VERIFIED)
    if known is not None:
        return ConditionState(known["status"], known["reason"], known["message"])
    return ConditionState("Unknown", "Waiting", "waiting for the gateway")


def data_type_support(
    slow: Mapping[str, str], before: Sequence[Condition]
) -> ConditionState | None:
    """Return whether the processors of the engines compute the model's data type fast.

    Args:
        slow: The data type of each engine that computes it slowly, by name of its pod.
        before: The conditions so far.

    Returns:
        The condition; None if no engine was slow so far.
    """
    if slow:
        types = " and ".join(sorted(set(slow.values())))
        message = (
            f"the processors of {', '.join(sorted(slow))} have no instructions for {types}, and "
            "compute it several times slower than float32; set spec.model.dtype: float32, which "
            "needs more memory, or select nodes with AVX-512 by spec.podTemplate.nodeSelector"
        )
        return ConditionState("False", "SlowDataType", message)
    if find(before, DATA_TYPE_SUPPORTED) is None:
        return None
    message = "the processors of the engines compute the model's data type fast"
    return ConditionState("True", "Supported", message)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the operator has observed of an accepted RagCache.

    Args:
        components: State of each component, in the order of CONDITION_OF.
        accepted: Whether the operator could apply the spec completely.
        more: Further conditions by type; None for one that does not apply.
    """

    generation: int
    components: Sequence[ComponentState]
    test: SelfTest
    accepted: ConditionState = VALID
    more: Mapping[str, ConditionState | None] = field(default_factory=dict)


def make_conditions(found: Observation, before: Sequence[Condition], now: str) -> list[Condition]:
    """Return the conditions of an accepted RagCache.

    Args:
        before: Its conditions so far.
        now: The current time in RFC 3339 format.
    """
    test = found.test
    tested: Truth = "Unknown" if test.passed is None else "True" if test.passed else "False"
    made = {ACCEPTED: found.accepted}
    for state in found.components:
        truth: Truth = "True" if state.available else "False"
        made[CONDITION_OF[state.component]] = ConditionState(truth, state.reason, state.message)
    made[SELF_TEST] = ConditionState(tested, test.reason, test.message)
    made |= {name: state for name, state in found.more.items() if state is not None}
    waiting = next((state for state in found.components if not state.available), None)
    if waiting is not None:
        message = f"{waiting.component}: {waiting.message}"
        made[READY] = ConditionState("False", waiting.reason, message)
    elif test.passed:
        made[READY] = ConditionState("True", "Answering", "the gateway answers questions")
    else:
        made[READY] = ConditionState("False", test.reason, test.message)
    conditions = with_times(made, found.generation, before, now)
    for condition in conditions:
        # The self-test may have run for the generation before this one.
        if condition["type"] == SELF_TEST or condition["reason"] == "Answering":
            condition["observedGeneration"] = test.generation
    return conditions


def with_times(
    states: Mapping[str, ConditionState], generation: int, before: Sequence[Condition], now: str
) -> list[Condition]:
    """Return conditions by type, each with the time since which it has its status."""
    made = []
    for name, state in states.items():
        old = find(before, name)
        since = old["lastTransitionTime"] if old and old["status"] == state.status else now
        made.append(
            {
                "type": name,
                "status": state.status,
                "reason": state.reason,
                "message": state.message,
                "lastTransitionTime": since,
                "observedGeneration": generation,
            }
        )
    return made


def refused_conditions(
    reason: str, message: str, generation: int, before: Sequence[Condition], now: str
) -> list[Condition]:
    """Return the conditions of a rejected RagCache. Conditions of components stay unchanged."""
    state = ConditionState("False", reason, message)
    accepted, ready = with_times({ACCEPTED: state, READY: state}, generation, before, now)
    return [accepted, *(c for c in before if c["type"] not in (ACCEPTED, READY)), ready]


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


def phase_of(conditions: Sequence[Condition], found: Observation) -> str:
    """Return the phase, the summary of the conditions."""
    ready, components = find(conditions, READY), found.components
    if ready is None or ready["status"] != "True":
        return "Progressing" if any(state.ready for state in components) else "Pending"
    has_warning = any(state.reason in _WARNINGS for state in components)
    if has_warning or found.accepted.status != "True":
        return "Degraded"
    is_settled = all(state.settled for state in components)
    if not is_settled or ready["observedGeneration"] != found.generation:
        return "Progressing"
    complete = all(state.ready >= state.wanted for state in components)
    return "Ready" if complete else "Degraded"


def progress_of(found: Observation) -> str:
    """Return what the operator waits for as one line, or an empty string."""
    waiting = [state for state in found.components if not (state.available and state.settled)]
    if waiting:
        return "; ".join(f"{state.component}: {state.message}" for state in waiting)
    return "" if found.test.passed else f"self-test: {found.test.message}"


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
        *("NotServed", "NotMeasured", "PrecisionNotMeasured", "MeasurementFailed"),
        *("InsufficientMemory",),
        *("ExpansionRefused", "SlowDataType", "InsufficientGPUs", "NoDevicePlugin"),
    }
)
"""Reasons that need a user's action. The others resolve without one."""
