"""Conditions, phase, progress and Events of observed states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_operator.status.component import (
    CONDITION_OF,
    DEGRADED,
    NOT_CREATED,
    READY,
    ROLLING_OUT,
    ComponentState,
    WorkloadState,
    component_state,
    component_states,
    workload_state,
)
from ragcache_operator.status.conditions import (
    BLEND_VERIFIED,
    DATA_TYPE_SUPPORTED,
    NOT_TESTED,
    Condition,
    ConditionState,
    Observation,
    SelfTest,
    blend_verification,
    current_test,
    data_type_support,
    events_for,
    find,
    is_test_due,
    make_conditions,
    phase_of,
    progress_of,
    refused_conditions,
    self_test_of,
)
from tests.kit.operator import build, workloads_of

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
PASSED = SelfTest(True, "Answered", "answered", 1)


def component(name: str, reason: str = READY, *, wanted: int = 1, ready: int = 1) -> ComponentState:
    settled = reason != ROLLING_OUT
    available = reason in (READY, ROLLING_OUT, DEGRADED)
    return ComponentState(name, wanted, ready, settled, available, reason, f"{ready} of {wanted}")


def all_ready(**reasons: str) -> list[ComponentState]:
    return [component(name, reasons.get(name, READY)) for name in CONDITION_OF]


def conditions_of(
    components: list[ComponentState],
    test: SelfTest,
    generation: int,
    before: Sequence[Condition],
    now: str,
    **found: Any,
) -> list[Condition]:
    return make_conditions(Observation(generation, components, test, **found), before, now)


def pod(
    name: str = "p",
    *,
    ready: bool = False,
    scheduled: bool = True,
    lacks: str = "",
    **container: Any,
) -> dict[str, Any]:
    message = f"0/2 nodes: 2 Insufficient {lacks}" if lacks else "0/1 nodes: too little cpu"
    conditions = [
        {"type": "Ready", "status": str(ready)},
        {"type": "PodScheduled", "status": str(scheduled), "message": message},
    ]
    status = {"conditions": conditions, "containerStatuses": [container] if container else []}
    return {"metadata": {"name": name}, "status": status}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


STARTING_ONE = [WorkloadState("w", wanted=1, ready=0, settled=False)]


@pytest.mark.parametrize(
    ("found", "reason", "words"),
    [
        (pod(scheduled=False), "Unschedulable", "too little cpu"),
        (pod(scheduled=False, lacks="cpu, 2 Insufficient memory"), "Unschedulable", "memory"),
        (pod(**waiting("ImagePullBackOff", "no such image")), "ImagePullFailed", "no such image"),
        (pod(**waiting("ErrImageNeverPull")), "ImagePullFailed", "ErrImageNeverPull"),
        (
            pod(**waiting("CreateContainerConfigError", 'secret "t" not found')),
            "ConfigError",
            '"t"',
        ),
        (pod(**waiting("ContainerCreating")), "Pulling", "mounting"),
        (pod(state={"running": {}}), "LoadingModel", "loading the model"),
        (
            pod(
                **waiting("CrashLoopBackOff"),
                lastState={"terminated": {"exitCode": 2, "message": "a\nRAGCACHE_MODEL: bad"}},
            ),
            "CrashLooping",
            "code 2: RAGCACHE_MODEL: bad",
        ),
        (
            pod(
                **waiting("CrashLoopBackOff"),
                lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            ),
            "OutOfMemory",
            "memory",
        ),
        (
            pod(
                **waiting("CrashLoopBackOff"),
                lastState={"terminated": {"exitCode": 78, "message": "INFO a\nset weights"}},
            ),
            "InsufficientMemory",
            "set weights",
        ),
    ],
)
def test_a_pod_that_is_not_ready_has_a_reason(found: Any, reason: str, words: str) -> None:
    state = component_state("engine", STARTING_ONE, [found], exists=True, progress={}, waits={})
    assert state.reason == reason
    assert words in state.message
    assert not state.available


def test_the_worst_of_several_pods_is_reported() -> None:
    pods = [pod("a", state={"running": {}}), pod("b", **waiting("ErrImagePull", "denied"))]
    state = component_state("engine", STARTING_ONE, pods, exists=True, progress={}, waits={})
    assert (state.reason, state.message) == ("ImagePullFailed", "b: denied")


def test_the_progress_of_a_pod_is_reported() -> None:
    pods = [pod("r-0", state={"running": {}})]
    state = component_state(
        "retriever",
        STARTING_ONE,
        pods,
        exists=True,
        progress={"r-0": "indexing 12 of 40"},
        waits={},
    )
    assert (state.reason, state.message) == ("Indexing", "r-0: indexing 12 of 40")


def test_a_pod_being_deleted_is_no_problem() -> None:
    leaving = pod("old", **waiting("ErrImagePull"))
    leaving["metadata"]["deletionTimestamp"] = NOW
    workloads = [WorkloadState("w", wanted=1, ready=1, settled=True)]
    state = component_state("gateway", workloads, [leaving], exists=True, progress={}, waits={})
    assert state.reason == READY


def test_rejected_pods_are_reported() -> None:
    workloads = [WorkloadState("w", 1, 0, settled=False, problem="exceeded quota")]
    state = component_state("gateway", workloads, [], exists=True, progress={}, waits={})
    assert (state.reason, state.message) == ("PodsRefused", "exceeded quota")


@given(wanted=st.integers(1, 9), ready=st.integers(0, 9), settled=st.booleans())
def test_a_component_is_available_while_a_replica_of_each_workload_is(
    wanted: int, ready: int, settled: bool
) -> None:
    workloads = [WorkloadState("w", wanted, min(ready, wanted), settled)]
    state = component_state("gateway", workloads, [], exists=True, progress={}, waits={})
    assert state.available == (ready > 0)
    assert (state.reason == READY) == (ready >= wanted and settled)


def test_a_component_without_its_workload_does_not_exist() -> None:
    state = component_state("gateway", STARTING_ONE, [], exists=False, progress={}, waits={})
    assert state.reason == NOT_CREATED


def test_a_component_that_ragcache_does_not_run_is_available() -> None:
    state = component_state("engine", [], [], exists=True, progress={}, waits={})
    assert (state.available, state.settled, state.wanted) == (True, True, 0)
    assert (state.reason, state.message) == (READY, "RagCache runs none")


def live(kind: str, generation: int = 1, replicas: int = 1, **status: Any) -> dict[str, Any]:
    meta = {"name": "w", "generation": generation}
    return {"kind": kind, "metadata": meta, "spec": {"replicas": replicas}, "status": status}


@pytest.mark.parametrize(
    ("obj", "settled"),
    [
        (live("Deployment", observedGeneration=1, replicas_=1), False),
        (live("Deployment", 2, observedGeneration=1, updatedReplicas=1), False),
    ],
)
def test_a_workload_with_an_outdated_status_is_not_settled(
    obj: dict[str, Any], settled: bool
) -> None:
    assert workload_state("w", obj).settled == settled


def test_a_rollout_is_settled_when_only_new_replicas_are_left() -> None:
    obj = live("Deployment", observedGeneration=1, updatedReplicas=1)
    obj["status"]["replicas"] = 2
    assert not workload_state("w", obj).settled
    obj["status"]["replicas"] = 1
    assert workload_state("w", obj).settled


def test_a_stateful_set_is_settled_when_its_revisions_agree() -> None:
    obj = live("StatefulSet", observedGeneration=1, currentRevision="a", updateRevision="b")
    obj["status"].update(replicas=1, currentReplicas=1, updatedReplicas=0)
    assert not workload_state("w", obj).settled
    obj["status"].update(currentRevision="b")
    assert workload_state("w", obj).settled


def test_ready_needs_every_component_and_a_passed_self_test() -> None:
    def ready(components: list[ComponentState], test: SelfTest) -> str:
        condition = find(conditions_of(components, test, 1, [], NOW), "Ready")
        assert condition is not None
        return str(condition["status"])

    assert ready(all_ready(), PASSED) == "True"
    assert ready(all_ready(), NOT_TESTED) == "False"
    assert ready(all_ready(), SelfTest(False, "SelfTestFailed", "HTTP 503", 1)) == "False"
    for name in CONDITION_OF:
        assert ready(all_ready(**{name: "CrashLooping"}), PASSED) == "False"
        assert ready(all_ready(**{name: DEGRADED}), PASSED) == "True"
        assert ready(all_ready(**{name: ROLLING_OUT}), PASSED) == "True"


def test_the_self_test_runs_when_settled_and_again_for_a_new_generation() -> None:
    assert is_test_due(all_ready(), NOT_TESTED, 1)
    assert not is_test_due(all_ready(), PASSED, 1)
    assert is_test_due(all_ready(), PASSED, 2)
    assert not is_test_due(all_ready(engine=ROLLING_OUT), PASSED, 2)
    assert not is_test_due(all_ready(engine="LoadingModel"), NOT_TESTED, 1)


def test_an_answer_is_invalid_after_a_component_was_unavailable() -> None:
    assert current_test(all_ready(engine="CrashLooping"), PASSED, 1) == NOT_TESTED
    assert current_test(all_ready(), PASSED, 1) == PASSED


def test_the_self_test_runs_again_after_a_rollout_of_the_same_spec() -> None:
    held = current_test(all_ready(engine=ROLLING_OUT), PASSED, 1)
    assert held.passed
    assert is_test_due(all_ready(), held, 1)


def test_ready_has_the_generation_of_the_self_test() -> None:
    ready = find(conditions_of(all_ready(), PASSED, 2, [], NOW), "Ready")
    assert ready is not None
    assert (ready["status"], ready["observedGeneration"]) == ("True", 1)


def test_a_rollout_that_cannot_succeed_is_reported() -> None:
    workloads = [WorkloadState("w", wanted=1, ready=1, settled=False)]
    crashed = pod("new", **waiting("CrashLoopBackOff"), lastState={"terminated": {"exitCode": 1}})
    state = component_state("gateway", workloads, [crashed], exists=True, progress={}, waits={})
    assert state.available
    assert state.reason == "CrashLooping"
    components = [*all_ready()[:3], state]
    conditions = conditions_of(components, PASSED, 1, [], NOW)
    assert phase_of(conditions, Observation(1, components, PASSED)) == "Degraded"
    assert any(t.kind == "Warning" for t in events_for([], conditions))


def test_an_evicted_pod_is_no_problem() -> None:
    evicted = pod("old", state={"terminated": {"exitCode": 137}})
    evicted["status"]["phase"] = "Failed"
    loading = pod("new", state={"running": {}})
    state = component_state(
        "engine", STARTING_ONE, [evicted, loading], exists=True, progress={}, waits={}
    )
    assert state.reason == "LoadingModel"


def test_a_restarted_container_that_runs_is_no_problem() -> None:
    again = pod("a", state={"running": {}}, lastState={"terminated": {"exitCode": 1}})
    state = component_state("engine", STARTING_ONE, [again], exists=True, progress={}, waits={})
    assert state.reason == "LoadingModel"


def test_a_partly_applied_spec_is_degraded() -> None:
    refused = ConditionState("False", "ApplyFailed", "exceeded quota")
    conditions = conditions_of(all_ready(), PASSED, 1, [], NOW, accepted=refused)
    assert phase_of(conditions, Observation(1, all_ready(), PASSED, refused)) == "Degraded"
    accepted, ready = find(conditions, "Accepted"), find(conditions, "Ready")
    assert accepted is not None
    assert ready is not None
    assert (accepted["status"], ready["status"]) == ("False", "True")


def test_the_self_test_is_read_from_the_status() -> None:
    for test in (PASSED, SelfTest(False, "SelfTestFailed", "HTTP 503", 3)):
        assert self_test_of(conditions_of(all_ready(), test, 3, [], NOW)) == test
    assert self_test_of(conditions_of(all_ready(), NOT_TESTED, 1, [], NOW)) == NOT_TESTED
    assert self_test_of([]) == NOT_TESTED


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    before = conditions_of(all_ready(), PASSED, 1, [], NOW)
    after = conditions_of(all_ready(engine="CrashLooping"), NOT_TESTED, 1, before, LATER)
    times = {c["type"]: c["lastTransitionTime"] for c in after}
    assert times["EnginesReady"] == times["Ready"] == LATER
    assert times["GatewayReady"] == times["Accepted"] == NOW


def test_equal_observations_give_equal_conditions_at_any_time() -> None:
    before = conditions_of(all_ready(), PASSED, 1, [], NOW)
    assert conditions_of(all_ready(), self_test_of(before), 1, before, LATER) == before


def test_phases() -> None:
    def phase(components: list[ComponentState], test: SelfTest = PASSED) -> str:
        found = Observation(1, components, test)
        return phase_of(make_conditions(found, [], NOW), found)

    nothing = [component(name, NOT_CREATED, ready=0) for name in CONDITION_OF]
    assert phase(nothing, NOT_TESTED) == "Pending"
    assert phase(all_ready(), NOT_TESTED) == "Progressing"
    assert phase(all_ready()) == "Ready"
    assert phase(all_ready(gateway=ROLLING_OUT)) == "Progressing"
    some = [*all_ready()[:3], component("gateway", DEGRADED, wanted=2)]
    assert phase(some) == "Degraded"


def test_progress_names_what_the_operator_waits_for() -> None:
    components = all_ready(engine="LoadingModel")
    assert progress_of(Observation(1, components, NOT_TESTED)) == "engine: 1 of 1"
    assert progress_of(Observation(1, all_ready(), NOT_TESTED)).startswith("self-test: ")
    assert progress_of(Observation(1, all_ready(), PASSED)) == ""


def test_transitions_are_reported_once() -> None:
    start = conditions_of(all_ready(engine="Pulling"), NOT_TESTED, 1, [], NOW)
    assert events_for(start, start) == []
    ready = conditions_of(all_ready(), PASSED, 1, start, NOW)
    told = {(t.kind, t.reason) for t in events_for(start, ready)}
    assert told == {("Normal", "AllReplicasReady"), ("Normal", "Answered"), ("Normal", "Answering")}


def test_a_reason_that_needs_a_user_is_a_warning() -> None:
    ready = conditions_of(all_ready(), PASSED, 1, [], NOW)
    broken = conditions_of(all_ready(engine="CrashLooping"), NOT_TESTED, 1, ready, NOW)
    kinds = {t.reason: t.kind for t in events_for(ready, broken)}
    assert kinds["CrashLooping"] == "Warning"
    loading = conditions_of(all_ready(engine="LoadingModel"), NOT_TESTED, 1, [], NOW)
    assert {t.kind for t in events_for([], loading)} == {"Normal"}


def test_a_rejected_spec_keeps_the_component_conditions() -> None:
    ready = conditions_of(all_ready(), PASSED, 1, [], NOW)
    refused = refused_conditions("Invalid", "spec.engines: is empty", 2, ready, LATER)
    assert {c["type"] for c in refused} == {c["type"] for c in ready}
    for name in ("Ready", "Accepted"):
        condition = find(refused, name)
        assert condition is not None
        assert (condition["status"], condition["reason"]) == ("False", "Invalid")
        assert condition["observedGeneration"] == 2


@pytest.mark.parametrize(
    ("verdict", "status", "reason"),
    [
        ("passed", "True", "MeasurementPassed"),
        ("failed", "False", "MeasurementFailed"),
        ("lossless", "False", "PrecisionNotMeasured"),
        ("unverified", "False", "NotMeasured"),
        (None, "Unknown", "Waiting"),
    ],
)
def test_a_blend_without_a_passing_measurement_warns(
    verdict: str | None, status: str, reason: str
) -> None:
    blend = blend_verification(verdict, (), has_target=False)
    made = conditions_of(all_ready(), PASSED, 1, (), NOW, more={BLEND_VERIFIED: blend})
    found = find(made, BLEND_VERIFIED)
    assert found is not None
    assert (found["status"], found["reason"]) == (status, reason)
    # It does not make the platform unready.
    assert phase_of(made, Observation(1, all_ready(), PASSED)) == "Ready"
    warned = [event.reason for event in events_for((), made) if event.kind == "Warning"]
    assert warned == ([reason] if status == "False" else [])


def test_the_warning_tells_what_happens_to_questions() -> None:
    refused = blend_verification("unverified", (), has_target=True)
    allowed = blend_verification("unverified", (), has_target=False)
    assert "reused exactly" in refused.message
    assert "ragcache quality" in refused.message
    assert "blended all the same" in allowed.message


def test_after_a_restart_of_the_operator_the_last_verdict_stays() -> None:
    blend = blend_verification("passed", (), has_target=True)
    before = conditions_of(all_ready(), PASSED, 1, (), NOW, more={BLEND_VERIFIED: blend})
    assert blend_verification(None, before, has_target=True) == blend


def test_a_slow_data_type_names_the_pods_and_the_field() -> None:
    state = data_type_support(
        {"docs-engine-main-b": "bfloat16", "docs-engine-main-a": "bfloat16"}, ()
    )
    made = conditions_of(all_ready(), PASSED, 1, (), NOW, more={DATA_TYPE_SUPPORTED: state})
    found = find(made, DATA_TYPE_SUPPORTED)
    assert found is not None
    assert (found["status"], found["reason"]) == ("False", "SlowDataType")
    assert (
        "docs-engine-main-a, docs-engine-main-b have no instructions for bfloat16"
        in found["message"]
    )
    assert "spec.model.dtype: float32" in found["message"]
    assert phase_of(made, Observation(1, all_ready(), PASSED)) == "Ready"
    assert [e.reason for e in events_for((), made) if e.kind == "Warning"] == ["SlowDataType"]
    after = data_type_support({}, made)
    assert after is not None
    assert after.status == "True"


def test_fast_engines_need_no_condition() -> None:
    assert data_type_support({}, ()) is None


def test_without_blends_there_is_no_such_condition() -> None:
    assert find(conditions_of(all_ready(), PASSED, 1, (), NOW), BLEND_VERIFIED) is None


def test_colocated_shards_are_counted_by_their_containers() -> None:
    """A model that loads leaves the shard beside it ready."""
    desired = build(cacheStore={"placement": "colocated"}, engines=[{"replicas": 2}])
    live = {
        one["metadata"]["name"]: {
            **one,
            "status": {"readyReplicas": 0, "currentReplicas": 2, "replicas": 2},
        }
        for one in workloads_of(desired)
    }
    engine = live["docs-engine-main"]["spec"]["template"]
    running: dict[str, Any] = {"state": {"running": {}}}

    def engine_pod(index: int, *, shard_ready: bool) -> dict[str, Any]:
        found = pod(f"docs-engine-main-{index}")
        found["metadata"]["labels"] = engine["metadata"]["labels"]
        found["spec"] = engine["spec"]
        found["status"]["containerStatuses"] = [
            {"name": "engine", "ready": False, **running},
            {"name": "cachestore", "ready": shard_ready, **running},
        ]
        return found

    def states(*shards_ready: bool) -> dict[str, ComponentState]:
        pods = [engine_pod(i, shard_ready=one) for i, one in enumerate(shards_ready)]
        found = component_states(desired, lambda obj: live[obj["metadata"]["name"]], pods, {}, {})
        return {one.component: one for one in found}

    both = states(True, True)
    assert (both["cachestore"].ready, both["cachestore"].wanted) == (2, 2)
    assert (both["cachestore"].available, both["cachestore"].reason) == (True, READY)
    assert (both["engine"].ready, both["engine"].reason) == (0, "LoadingModel")
    one = states(True, False)["cachestore"]
    assert (one.ready, one.reason) == (1, DEGRADED)
    assert "docs-engine-main-1" in one.message
    none = states(False, False)["cachestore"]
    assert (none.available, none.reason) == (False, "Starting")
