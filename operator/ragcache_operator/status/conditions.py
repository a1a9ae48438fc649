"""From component states and a self-test to conditions, a phase, and the Events they earn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
class Transition:
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
) -> list[Condition]:
    """Conditions of an accepted RagCache. before: its conditions so far. now: RFC 3339."""
    builder = _Builder(generation, before, now)
    made = [builder.make(ACCEPTED, "True", "Valid", "the spec is valid")]
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
        made.append(builder.make(READY, "True", "Answering", "the gateway answers questions"))
    else:
        made.append(builder.make(READY, "False", test.reason, test.message))
    return made


def refused_conditions(
    reason: str, message: str, generation: int, before: Sequence[Condition], now: str
) -> list[Condition]:
    """Conditions of a RagCache that is not acted on; what runs goes on and is judged no further."""
    builder = _Builder(generation, before, now)
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
        return NOT_ASKED
    return SelfTest(
        condition["status"] == "True",
        condition["reason"],
        condition["message"],
        condition.get("observedGeneration", 0),
    )


NOT_ASKED = SelfTest(None, "Waiting", "asked once every component is ready", 0)


def is_test_due(components: Sequence[ComponentState], test: SelfTest, generation: int) -> bool:
    """Whether to ask the gateway a question now.

    Once everything runs as asked for, and the last good answer was given before that.
    """
    settled = all(state.available and state.settled for state in components)
    return settled and not (test.passed and test.generation == generation)


def holding_test(components: Sequence[ComponentState], test: SelfTest) -> SelfTest:
    """The self-test, forgotten when a component it went through is gone."""
    return test if all(state.available for state in components) else NOT_ASKED


def phase_of(conditions: Sequence[Condition], components: Sequence[ComponentState]) -> str:
    """One word for the printed column."""
    ready = find(conditions, READY)
    if ready is not None and ready["status"] == "True":
        whole = all(state.settled and state.ready >= state.wanted for state in components)
        if whole:
            return "Ready"
        return "Progressing" if any(not s.settled for s in components) else "Degraded"
    started = any(state.ready for state in components)
    return "Progressing" if started else "Pending"


def progress_of(components: Sequence[ComponentState], test: SelfTest) -> str:
    """What is being waited for, in a line; empty when nothing is."""
    waiting = [state for state in components if not state.available or not state.settled]
    if waiting:
        return "; ".join(f"{state.component}: {state.message}" for state in waiting)
    return "" if test.passed else f"self-test: {test.message}"


def transitions(before: Sequence[Condition], after: Sequence[Condition]) -> list[Transition]:
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
        bad = condition["status"] == "False" and condition["reason"] in _WARNINGS
        lost = old is not None and old["status"] == "True" and condition["status"] == "False"
        made.append(
            Transition(
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


class _Builder:
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
