"""Comparison of desired and live objects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_operator.kube.drift import difference, forbidden_addition, removal_patch

JSON = st.recursive(
    st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(JSON)
def test_an_object_does_not_differ_from_itself(value: Any) -> None:
    assert difference(value, value) is None


@given(
    st.dictionaries(st.text(max_size=4), JSON, max_size=4), st.text(min_size=5, max_size=8), JSON
)
def test_additions_by_others_are_no_difference(
    desired: dict[str, Any], key: str, extra: Any
) -> None:
    assert difference(desired, {**desired, key: extra}) is None


@given(st.dictionaries(st.text(max_size=4), JSON, min_size=1, max_size=4), st.data())
def test_a_missing_field_is_found(desired: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(desired)))
    live = {name: value for name, value in desired.items() if name != key}
    found = difference(desired, live)
    # An empty mapping or list equals a missing one.
    assert (found is None) == (desired[key] in ({}, []) and not isinstance(desired[key], bool))


@pytest.mark.parametrize(
    ("desired", "live", "path"),
    [
        ({"a": 1}, {"a": 2}, "a"),
        ({"a": {"b": "x"}}, {"a": {"b": "y", "c": 1}}, "a.b"),
        ({"a": True}, {"a": 1}, "a"),
        ({"a": "1"}, {"a": 1}, "a"),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, "a"),
        ({"a": {"b": 1}}, {"a": "b"}, "a"),
        ({"a": [1]}, {"a": "1"}, "a"),
        ({"l": [{"name": "x", "v": 1}]}, {"l": [{"name": "y"}, {"name": "x", "v": 2}]}, "l[x].v"),
        ({"l": [{"name": "x", "v": 1}]}, {"l": [{"name": "y", "v": 1}]}, "l[x]"),
        ({"l": [{"op": "x"}]}, {"l": [{"op": "y"}]}, "l[0].op"),
    ],
)
def test_the_first_difference_is_named_by_its_path(desired: Any, live: Any, path: str) -> None:
    assert difference(desired, live) == path


@pytest.mark.parametrize(
    ("desired", "live"),
    [
        ({"emptyDir": {}}, {}),
        ({"l": []}, {}),
        ({"l": [{"name": "x"}]}, {"l": [{"name": "injected"}, {"name": "x", "defaulted": 1}]}),
        (
            {"ports": [{"containerPort": 1}, {"containerPort": 2}]},
            {"ports": [{"containerPort": 2, "protocol": "TCP"}, {"containerPort": 1}]},
        ),
    ],
)
def test_equivalent_values_are_no_difference(desired: Any, live: Any) -> None:
    assert difference(desired, live) is None


def policy(**spec: Any) -> dict[str, Any]:
    return {
        "kind": "NetworkPolicy",
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], **spec},
    }


@pytest.mark.parametrize(
    ("desired", "live"),
    [
        (policy(), policy(ingress=[{}])),
        (policy(ingress=[{"ports": [1]}]), policy(ingress=[{"ports": [1]}, {}])),
        (
            policy(ingress=[{"ports": [{"port": 1}]}]),
            policy(ingress=[{"ports": [{"port": 1, "endPort": 9}]}]),
        ),
    ],
)
def test_an_opened_policy_is_a_forbidden_addition(
    desired: dict[str, Any], live: dict[str, Any]
) -> None:
    assert forbidden_addition(desired, live) == "spec"
    assert merged(live, removal_patch(desired, live))["spec"] == desired["spec"]


def test_an_extended_selector_is_a_forbidden_addition() -> None:
    desired = {"kind": "Service", "spec": {"selector": {"app": "x"}, "ports": []}}
    live = {
        "kind": "Service",
        "spec": {"selector": {"app": "x", "b": "c"}, "clusterIP": "10.0.0.1"},
    }
    assert forbidden_addition(desired, live) == "spec.selector"
    restored = merged(live, removal_patch(desired, live))["spec"]
    assert restored == {"selector": {"app": "x"}, "clusterIP": "10.0.0.1"}


def test_server_defaults_elsewhere_are_no_forbidden_addition() -> None:
    assert forbidden_addition(policy(egress=[]), policy()) is None
    assert (
        forbidden_addition(
            {"kind": "Deployment", "spec": {}}, {"kind": "Deployment", "spec": {"x": 1}}
        )
        is None
    )


def merged(obj: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(obj) if isinstance(obj, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result
