"""From component states and a self-test to conditions, a phase, and the Events they earn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ragcache_operator.status.component import ComponentState

Condition = dict[str, Any]
Truth = Literal["True", "False", "Unknown"]

READY = "Ready"
ACCEPTED = "Accepted"
SELF_TEST = "SelfTestPassed"
CONDITION_OF = {
    "cachestore": "CacheStoreReady",
    "retriever": "RetrieverReady",
    "engine": "EnginesReady",
    "gateway": "GatewayReady",
}
"""Condition type per component, in the order in which parts depend on each other."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the last question to the gateway brought. passed: None while none was asked.

    generation: of the object it was asked for.
    """

    passed: bool | None
    reason: str
    message: str
    generation: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Whether the spec could be acted on in full."""

    truth: Truth
    reason: str
    message: str


VALID = Acceptance("True", "Valid", "the spec is valid")


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """A change worth an Event."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


def make_conditions(
    components: Sequence[ComponentState],
    test: SelfTest,
    generation: int,
    before: Sequence[Condition],
    now: str,
    accepted: Acceptance = VALID,
) -> list[Condition]:
    """Conditions of a RagCache that is acted on. before: its conditions so far. now: RFC 3339."""
    builder = _ConditionBuilder(generation, before, now)
    made = [builder.make(ACCEPTED, accepted.truth, accepted.reason, accepted.message)]
    for state in components:
        truth: Truth = "True" if state.available else "False"
        made.append(builder.make(CONDITION_OF[state.component], truth, state.reason, state.message))
    tested: Truth = "Unknown" if test.passed is None else "True" if test.passed else "False"
    made.append(
        builder.make(SELF_TEST, tested, test.reason, test.message, generation=test.generation)
    )
    waiting = next((state for state in components if not state.available), None)
    if waiting is not None:
        made.append(builder.make(READY, "False", waiting.reason, _named(waiting)))
    elif test.passed:
        # Of the generation that the question was asked of, which may be the one before.
        words = "the gateway answers questions"
        made.append(builder.make(READY, "True", "Answering", words, generation=test.generation))
    else:
        made.append(builder.make(READY, "False", test.reason, test.message))
    return made


def refused_conditions(
    reason: str, message: str, generation: int, before: Sequence[Condition], now: str
) -> list[Condition]:
    """Conditions of a RagCache that is not acted on; what runs goes on and is judged no further."""
    builder = _ConditionBuilder(generation, before, now)
    kept = [c for c in before if c["type"] not in (ACCEPTED, READY)]
    return [
        builder.make(ACCEPTED, "False", reason, message),
        *kept,
        builder.make(READY, "False", reason, message),
    ]


def self_test_of(before: Sequence[Condition]) -> SelfTest:
    """The self-test as the status remembers it."""
    condition = find(before, SELF_TEST)
    if condition is None or condition["status"] == "Unknown":
        return NOT_TESTED
    return SelfTest(
        condition["status"] == "True",
        condition["reason"],
        condition["message"],
        condition.get("observedGeneration", 0),
    )


NOT_TESTED = SelfTest(None, "Waiting", "asked once every component is ready", 0)


def is_test_due(components: Sequence[ComponentState], test: SelfTest, generation: int) -> bool:
    """Whether the gateway should be asked a question.

    Once everything runs as asked for, if the last good answer was given before that.
    """
    settled = all(state.available and state.settled for state in components)
    return settled and not (test.passed and test.generation == generation)


def current_test(components: Sequence[ComponentState], test: SelfTest, generation: int) -> SelfTest:
    """The self-test as it counts now.

    Forgotten when a component it went through is gone; of the past while one is being changed, so
    that it is asked again when that is done, whether or not the spec has changed.
    """
    if not all(state.available for state in components):
        return NOT_TESTED
    if test.passed and not all(state.settled for state in components):
        return replace(test, generation=min(test.generation, generation - 1))
    return test


def phase_of(
    conditions: Sequence[Condition], components: Sequence[ComponentState], generation: int
) -> str:
    """One word for the printed column."""
    ready, accepted = find(conditions, READY), find(conditions, ACCEPTED)
    if ready is None or ready["status"] != "True":
        return "Progressing" if any(state.ready for state in components) else "Pending"
    in_trouble = any(state.reason in _WARNINGS for state in components)
    if in_trouble or accepted is None or accepted["status"] != "True":
        return "Degraded"
    if any(not state.settled for state in components) or ready["observedGeneration"] != generation:
        return "Progressing"
    whole = all(state.ready >= state.wanted for state in components)
    return "Ready" if whole else "Degraded"


def progress_of(components: Sequence[ComponentState], test: SelfTest) -> str:
    """What is being waited for, in a line; empty when nothing is."""
    waiting = [state for state in components if not state.available or not state.settled]
    if waiting:
        return "; ".join(f"{state.component}: {state.message}" for state in waiting)
    return "" if test.passed else f"self-test: {test.message}"


def events_for(before: Sequence[Condition], after: Sequence[Condition]) -> list[ObjectEvent]:
    """Events that the change of conditions earns."""
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
    """The condition of a type."""
    return next((c for c in conditions if c["type"] == name), None)


_WARNINGS = frozenset(
    {
        *("ImagePullFailed", "ConfigError", "CrashLooping", "OutOfMemory", "Unschedulable"),
        *("PodsRefused", "Invalid", "ApplyFailed", "ObjectTaken", "SelfTestFailed"),
        "NotServed",
    }
)
"""Reasons that somebody has to look at; the others pass by themselves."""


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
