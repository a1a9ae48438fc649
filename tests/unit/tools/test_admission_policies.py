"""The admission policies of the chart, evaluated over what the operator creates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel
from celpy.celtypes import MapType, StringType

from tests.kit.chart import NAMESPACE, RELEASE, Object, of, render
from tests.kit.operator import build, workloads_of

OPERATOR = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
NAME = f"{RELEASE}.{NAMESPACE}"
KIND = "ValidatingAdmissionPolicy"


def value(expression: str, names: Object, variables: Object | None = None) -> Any:
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    given = {name: json_to_cel(one) for name, one in names.items()}
    found = {StringType(name): one for name, one in (variables or {}).items()}
    return program.evaluate(given | {"variables": MapType(found)})


def refusals(
    policy: str,
    given: Object | None,
    old: Object | None = None,
    user: str = OPERATOR,
    resource: str = "deployments",
    values: Object | None = None,
) -> list[str]:
    """Return the messages of the validations that a request does not pass."""
    spec = of(render(values), KIND, f"{NAME}.{policy}")["spec"]
    request = {"userInfo": {"username": user}, "resource": {"resource": resource}}
    names: Object = {"object": given, "oldObject": old, "request": request}
    if not all(value(one["expression"], names) for one in spec.get("matchConditions", ())):
        return []
    variables: Object = {}
    for one in spec.get("variables", ()):
        variables[one["name"]] = value(one["expression"], names, variables)
    return [
        one["message"]
        for one in spec["validations"]
        if not value(one["expression"], names, variables)
    ]


def test_all_that_the_operator_builds_passes() -> None:
    children = build(retriever={"replicas": 1})
    assert children
    for child in children:
        assert refusals("objects", child) == []
    for workload in workloads_of(children):
        assert refusals("pods", workload) == []


def test_objects_of_others_are_closed_to_the_operator() -> None:
    foreign = {"metadata": {"labels": {"app": "billing"}}, "kind": "ConfigMap"}
    [own, *_] = build()
    assert refusals("objects", foreign)
    assert refusals("objects", {"metadata": {}})
    assert refusals("objects", own, old=foreign)
    assert refusals("objects", None, old=foreign)
    assert refusals("objects", None, old=own) == []
    assert refusals("objects", foreign, user="admin") == []


def test_claims_and_pods_of_others_are_closed_to_the_operator() -> None:
    spec = of(render(), KIND, f"{NAME}.objects")["spec"]
    [rule] = spec["matchConstraints"]["resourceRules"]
    assert {"persistentvolumeclaims", "pods"} <= set(rule["resources"])
    [store, *_] = [one for one in workloads_of(build()) if one["kind"] == "StatefulSet"]
    [claim, *_] = store["spec"]["volumeClaimTemplates"]
    pod = store["spec"]["template"]
    for own, resource in ((claim, "persistentvolumeclaims"), (pod, "pods")):
        assert refusals("objects", None, old=own, resource=resource) == []


def test_the_operator_makes_no_token_of_a_service_account() -> None:
    [own, *_] = build()
    labels = own["metadata"]
    token = {"metadata": labels, "type": "kubernetes.io/service-account-token"}
    assert refusals("objects", token, resource="secrets")
    assert refusals("objects", {"metadata": labels, "type": "Opaque"}, resource="secrets") == []


def security(**changes: Any) -> Callable[[Object], None]:
    def change(pod: Object) -> None:
        pod["containers"][0]["securityContext"] |= changes

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda pod: pod.update(hostNetwork=True),
        lambda pod: pod.update(hostPID=True),
        lambda pod: pod.update(automountServiceAccountToken=True),
        lambda pod: pod["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
        lambda pod: pod["volumes"].append(
            {"name": "x", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
        ),
        lambda pod: pod.update(initContainers=[{"name": "x"}]),
        security(privileged=True),
        security(allowPrivilegeEscalation=True),
        security(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
        security(capabilities={}),
    ],
)
def test_a_pod_with_privileges_is_refused(change: Callable[[Object], None]) -> None:
    workload = copy.deepcopy(workloads_of(build())[0])
    change(workload["spec"]["template"]["spec"])
    assert len(refusals("pods", workload)) == 1


def test_unsafe_arguments_need_the_administrator() -> None:
    unsafe = {"spec": {"engines": [{"name": "a"}, {"name": "b", "unsafeArgs": ["--x"]}]}}
    assert refusals("arguments", unsafe, user="author")
    assert refusals("arguments", unsafe) == []
    assert refusals("arguments", {"spec": {"engines": [{"name": "a"}]}}, user="author") == []
    policies = [
        o for o in render({"admissionPolicy": {"allowUnsafeArgs": True}}) if o["kind"] == KIND
    ]
    assert {one["metadata"]["name"] for one in policies} == {f"{NAME}.objects", f"{NAME}.pods"}


def test_every_policy_is_bound() -> None:
    objects = render()
    bound = {o["spec"]["policyName"]: o["spec"] for o in objects if o["kind"] == f"{KIND}Binding"}
    assert bound.keys() == {o["metadata"]["name"] for o in objects if o["kind"] == KIND}
    assert all(spec["validationActions"] == ["Deny"] for spec in bound.values())
    assert not [
        o
        for o in render({"admissionPolicy": {"enabled": False, "allowUnsafeArgs": True}})
        if KIND in o["kind"]
    ]
