"""The chart, rendered by Helm: objects, validation of values, and permissions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, HelmError

from ragcache_core.errors import InvalidInput
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.keys import ComponentKeys
from ragcache_operator.builders.metadata import OPERATOR_POD_LABELS
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.config import Installation, OperatorConfig, own_tag
from ragcache_operator.kube import resources
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_wire.telemetry.catalogue import gateway
from tests.kit.chart import CHART, NAMESPACE, RELEASE, Object, of, render
from tools.dashboards.check import all_queries
from tools.dashboards.content import DASHBOARDS
from tools.dashboards.files import RULES
from tools.dashboards.rules import FIRST_TOKEN_OBJECTIVE_S

ROOT = Path(__file__).parents[3]

EVERYTHING: Object = {
    "fullnameOverride": "rag",
    "commonLabels": {"team": "search"},
    "replicas": 3,
    "image": {
        "registry": "registry.example:5000",
        "repository": "mirror/ragcache",
        "tag": "1.2.3",
        "digest": f"sha256:{'0' * 64}",
        "digests": {
            "engine": f"sha256:{'1' * 64}",
            "engine-cuda": f"sha256:{'3' * 64}",
            "retriever-cuda": f"sha256:{'4' * 64}",
            "tools": f"sha256:{'2' * 64}",
        },
        "pullPolicy": "Always",
    },
    "imagePullSecrets": [{"name": "pull"}],
    "watch": {"namespaces": ["team-a", "team-b"]},
    "sources": {"allowedNetworks": ["10.1.0.0/16", "fd12::/16"]},
    "issuers": {"allowedNetworks": ["10.2.0.0/16"]},
    "serviceAccount": {"name": "robot", "annotations": {"a": "b"}},
    "lease": {"name": "one"},
    "logLevel": "debug",
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
    "metrics": {
        "service": {"annotations": {"scrape": "true"}},
        "serviceMonitor": {"enabled": True, "interval": "1m", "labels": {"prometheus": "main"}},
        "dashboards": {"labels": {"grafana": "yes"}, "annotations": {"folder": "RagCache"}},
        "rules": {"enabled": True, "labels": {"prometheus": "main"}},
    },
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
    "resources": {"requests": {"cpu": 1}, "limits": {"memory": "1Gi"}},
    "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
                ]
            }
        }
    },
    "podAnnotations": {"note": "yes"},
    "podLabels": {"team": "other", "tier": "control"},
}

EVERYWHERE: Object = {"watch": {"allNamespaces": True}}

VALUE_SETS: dict[str, Object] = {
    "default": {},
    "namespaced": {"watch": {"namespaces": ["team-a", "team-b"]}},
    "everywhere": EVERYWHERE,
    "own namespace": {"watch": {"namespaces": [NAMESPACE]}},
    "monitored": {"metrics": {"serviceMonitor": {"enabled": True}}},
    "bare": {
        "replicas": 1,
        "crds": {"install": False},
        "rbac": {"create": False, "userRoles": False},
        "serviceAccount": {"create": False, "name": "given"},
        "metrics": {"service": {"enabled": False}},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
    "everything": EVERYTHING,
}

every_set = pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS.keys())


def pod(objects: list[Object]) -> Object:
    spec = of(objects, "Deployment")["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def env(objects: list[Object]) -> Object:
    """Return the value or the valueFrom of every variable."""
    [container] = pod(objects)["containers"]
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in container["env"]}


def rules(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Yield every rule of the operator's roles, with its role."""
    bound = {b["roleRef"]["name"] for b in objects if b["kind"].endswith("RoleBinding")}
    for role in objects:
        if role["kind"] in {"Role", "ClusterRole"} and role["metadata"]["name"] in bound:
            for rule in role["rules"]:
                yield role, rule


@every_set
@pytest.mark.parametrize("kube_version", ["v1.29.0", "v1.37.0"])
def test_helm_lint_passes(values: Object, kube_version: str) -> None:
    report = helm_python.lint(
        CHART, values, strict=True, namespace=NAMESPACE, kube_version=kube_version
    )
    assert report["errors"] == []
    assert [m["error"] for m in report["messages"]] == ["icon is recommended"]


@every_set
def test_objects_are_valid_in_current_kubernetes(values: Object) -> None:
    foreign = {"CustomResourceDefinition", "PrometheusRule", "ServiceMonitor"}
    for obj in render(values):
        for version in ("1.29", "1.31", "1.37"):
            # The chart leaves its policies out before 1.30, and Helm renders it for a newer one.
            is_newer = version == "1.29" and obj["kind"].startswith("ValidatingAdmissionPolicy")
            if obj["kind"] not in foreign and not is_newer:
                kubernetes_validate.validate(obj, version, strict=True)


@every_set
def test_objects_have_unique_names_and_labels(values: Object) -> None:
    objects = render(values)
    names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names)
    for obj in objects:
        labels = obj["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == RELEASE
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/part-of"] == "ragcache"
        assert all(
            re.fullmatch(r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", v) for v in labels.values()
        )


@every_set
def test_every_selector_matches_the_operators_pods(values: Object) -> None:
    objects = render(values)
    labels = of(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    # The policies of a RagCache's components allow these pods.
    assert OPERATOR_POD_LABELS.items() <= labels.items()
    ports = {port["name"] for port in pod(objects)["containers"][0]["ports"]}
    for obj in objects:
        spec = obj.get("spec", {})
        if obj["kind"] == "Service":
            assert spec["selector"].items() <= labels.items()
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        if obj["kind"] in {"Deployment", "PodDisruptionBudget"}:
            assert spec["selector"]["matchLabels"].items() <= labels.items()
        if obj["kind"] == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"].items() <= labels.items()
            assert {p["port"] for rule in spec["ingress"] for p in rule["ports"]} == ports
        if obj["kind"] == "ServiceMonitor":
            service = of(objects, "Service", f"{obj['metadata']['name']}-metrics")
            assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            assert {e["port"] for e in spec["endpoints"]} == {
                port["name"] for port in service["spec"]["ports"]
            }


def test_dashboards_and_rules_are_those_of_the_files() -> None:
    objects = render(EVERYTHING)
    name = EVERYTHING.get("fullnameOverride", RELEASE)
    rule = of(objects, "PrometheusRule", name)
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    assert rule["metadata"]["labels"]["prometheus"] == "main"
    for dashboard in DASHBOARDS:
        found = of(objects, "ConfigMap", f"{name}-dashboard-{dashboard.name}")
        assert found["metadata"]["labels"]["grafana"] == "yes"
        assert found["metadata"]["annotations"] == {"folder": "RagCache"}
        assert json.loads(found["data"][f"ragcache-{dashboard.name}.json"]) == dashboard.json()


@pytest.mark.parametrize(("seconds", "bound"), [(0.5, "0.5"), (5, "5.0"), (30.0, "30.0")])
def test_the_objective_of_the_first_token_is_a_value(seconds: float, bound: str) -> None:
    values: Object = {"metrics": {"rules": {"enabled": True, "firstTokenSeconds": seconds}}}
    found = of(render(values), "PrometheusRule", RELEASE)["spec"]
    kept = re.sub(r"\b2\.5 s:", f"{seconds:g} s:", RULES.read_text())
    expected = yaml.safe_load(kept.replace('le="2.5"', f'le="{bound}"'))
    assert found == expected
    assert found != yaml.safe_load(RULES.read_text())


def test_every_objective_of_the_first_token_is_a_bucket() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    rules = schema["properties"]["metrics"]["properties"]["rules"]["properties"]
    choices = rules["firstTokenSeconds"]["enum"]
    assert rules["firstTokenSeconds"]["default"] == FIRST_TOKEN_OBJECTIVE_S
    assert set(choices) <= set(gateway.TIME_TO_FIRST_TOKEN.buckets)
    with pytest.raises(HelmError):
        render({"metrics": {"rules": {"firstTokenSeconds": 3}}})


def test_the_monitor_sets_the_label_that_dashboards_select_the_operator_by() -> None:
    objects = render({"metrics": {"serviceMonitor": {"enabled": True}}})
    [endpoint] = of(objects, "ServiceMonitor", RELEASE)["spec"]["endpoints"]
    [relabeling] = endpoint["relabelings"]
    selected = f'{relabeling["targetLabel"]}="{relabeling["replacement"]}"'
    queries = [query.expression for query in all_queries() if query.needs_operator]
    assert [one for one in queries if "component=" in one and selected not in one] == []
    assert any(selected in one for one in queries)


def test_two_releases_of_one_name_share_only_the_kinds() -> None:
    without_kinds: Object = {"crds": {"install": False}}
    here, there = (render(without_kinds, namespace=n) for n in ("team-a", "team-b"))
    names = [
        {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects}
        for objects in (here, there)
    ]
    assert not names[0] & names[1]


def test_objects_have_the_name_of_the_release() -> None:
    assert of(render(release="docs"), "Deployment")["metadata"]["name"] == "docs-ragcache-operator"
    longest = "a" * 53
    for obj in render(release=longest):
        assert len(obj["metadata"]["name"]) <= 63 or obj["kind"] not in {"Service", "Deployment"}


@every_set
def test_the_operators_pod_is_restricted(values: Object) -> None:
    spec = pod(render(values))
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert [list(volume) for volume in spec["volumes"]] == [["name", "emptyDir"]]
    [container] = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert all(port["containerPort"] >= 1024 for port in container["ports"])


def test_every_setting_is_in_the_environment() -> None:
    assert env(render()) == {
        "RAGCACHE_NAMESPACES": NAMESPACE,
        "RAGCACHE_IMAGES": "ragcache",
        "RAGCACHE_IMAGE_TAG": own_tag(),
        "RAGCACHE_IMAGE_DIGESTS": "",
        "RAGCACHE_OPERATOR_NAMESPACE": {"fieldRef": {"fieldPath": "metadata.namespace"}},
        "POD_NAME": {"fieldRef": {"fieldPath": "metadata.name"}},
        "RAGCACHE_LEASE": "ragcache-operator",
        "RAGCACHE_ROOT_KEY_SECRET": "ragcache-operator-root-key",
        "RAGCACHE_SOURCE_NETWORKS": "",
        "RAGCACHE_ISSUER_NETWORKS": "",
        "RAGCACHE_LOG_LEVEL": "info",
    }
    told = env(render(EVERYTHING))
    assert told["RAGCACHE_NAMESPACES"] == "team-a,team-b"
    assert told["RAGCACHE_IMAGES"] == "registry.example:5000/mirror/ragcache"
    assert told["RAGCACHE_IMAGE_TAG"] == "1.2.3"
    assert told["RAGCACHE_LEASE"] == "one"
    assert told["RAGCACHE_SOURCE_NETWORKS"] == "10.1.0.0/16,fd12::/16"
    assert told["RAGCACHE_ISSUER_NETWORKS"] == "10.2.0.0/16"
    assert told["HTTPS_PROXY"] == "http://proxy.example:3128"


@every_set
def test_the_operator_accepts_its_environment(values: Object) -> None:
    told = {name: value for name, value in env(render(values)).items() if isinstance(value, str)}
    told["RAGCACHE_OPERATOR_NAMESPACE"] = NAMESPACE
    config = OperatorConfig.from_environment(told)
    watch = values.get("watch", {})
    served = () if "allNamespaces" in watch else tuple(watch.get("namespaces", [NAMESPACE]))
    assert config.namespaces == served
    assert config.lease
    assert config.tag == values.get("image", {}).get("tag", told["RAGCACHE_IMAGE_TAG"])


def test_all_images_have_the_same_registry() -> None:
    cache = parse_manifest(
        {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCache",
            "metadata": {"name": "docs"},
        }
    )
    [container] = pod(render())["containers"]
    version = Chart.load(CHART).metadata["appVersion"]
    assert container["image"] == ClusterPlacement(cache, tag=version).image("operator")
    [container] = pod(render(EVERYTHING))["containers"]
    assert container["image"] == (
        f"registry.example:5000/mirror/ragcache/operator@sha256:{'0' * 64}"
    )
    [container] = pod(render({"image": {"tag": "7"}}))["containers"]
    assert container["image"] == "ragcache/operator:7"


def test_a_digest_of_the_chart_pins_the_image_of_a_component() -> None:
    told = {name: one for name, one in env(render(EVERYTHING)).items() if isinstance(one, str)}
    config = OperatorConfig.from_environment(told)
    keys = ComponentKeys(bytes(range(32)))
    cache = parse_manifest(
        {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCache",
            "metadata": {"name": "docs"},
        }
    )
    placement = Installation(config, Capabilities.latest(), keys).placement(cache, "uid")
    images = "registry.example:5000/mirror/ragcache"
    assert placement.image("engine") == f"{images}/engine@sha256:{'1' * 64}"
    assert placement.image("engine-cuda") == f"{images}/engine-cuda@sha256:{'3' * 64}"
    assert placement.image("retriever-cuda") == f"{images}/retriever-cuda@sha256:{'4' * 64}"
    assert placement.image("tools") == f"{images}/tools@sha256:{'2' * 64}"
    assert placement.image("gateway") == f"{images}/gateway:1.2.3"
    assert placement.issuer_networks == ("10.2.0.0/16",)


@pytest.mark.parametrize("text", ["engine", "engine=1", "motor=sha256:" + "0" * 64])
def test_a_digest_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is no digest of an image"):
        OperatorConfig.from_environment({"RAGCACHE_IMAGE_DIGESTS": text})


def test_no_permission_is_a_wildcard() -> None:
    for values in VALUE_SETS.values():
        for _, rule in rules(render(values)):
            assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert not {"escalate", "bind", "impersonate", "deletecollection"} & {*rule["verbs"]}
            assert rule["apiGroups"] != ["rbac.authorization.k8s.io"]
            assert not {"pods/exec", "pods/attach", "serviceaccounts/token"} & {*rule["resources"]}


@every_set
def test_the_operator_reads_only_its_root_key(values: Object) -> None:
    objects = render(values)
    about_secrets = [
        (role, rule) for role, rule in rules(objects) if "secrets" in rule["resources"]
    ]
    named = [(role, rule) for role, rule in about_secrets if "resourceNames" in rule]
    for role, rule in about_secrets:
        assert rule["resources"] == ["secrets"]
        # It can create other Secrets, but not read or change them.
        assert (role, rule) in named or rule["verbs"] == ["create"]
    for role, _ in named:
        assert (role["kind"], role["metadata"]["namespace"]) == ("Role", NAMESPACE)
    if not about_secrets:
        assert not values["rbac"]["create"], "the operator may not read its Secrets"
        return
    wanted = {env(objects)["RAGCACHE_ROOT_KEY_SECRET"]: ["get"]}
    assert {name: rule["verbs"] for _, rule in named for name in rule["resourceNames"]} == wanted


def test_by_default_the_operator_has_permissions_in_its_namespace_alone() -> None:
    objects = render()
    assert {(r["kind"], r["metadata"]["namespace"]) for r, _ in rules(objects)} == {
        ("Role", NAMESPACE)
    }
    assert not [o for o in objects if o["kind"] == "ClusterRoleBinding"]


def test_with_given_namespaces_nothing_else_can_be_written() -> None:
    objects = render({"watch": {"namespaces": ["team-a", "team-b"]}})
    roles = [role for role in objects if role["kind"] == "Role"]
    assert {role["metadata"]["namespace"] for role in roles} == {"team-a", "team-b", NAMESPACE}
    assert {role["kind"] for role, _ in rules(objects)} == {"Role"}
    assert not [o for o in objects if o["kind"] == "ClusterRoleBinding"]
    everywhere = {
        _without_name(rule)
        for role, rule in rules(render(EVERYWHERE))
        if role["kind"] == "ClusterRole"
    }
    for namespace in ("team-a", "team-b"):
        named = {
            _without_name(rule)
            for role, rule in rules(objects)
            if role["metadata"].get("namespace") == namespace
        }
        assert named == everywhere


def test_the_operator_may_list_nodes_where_the_values_say_so() -> None:
    objects = render({"rbac": {"readNodes": True}})
    found = [rule for role, rule in rules(objects) if role["kind"] == "ClusterRole"]
    assert found == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]


def _without_name(rule: Object) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(rule[key]) for key in ("apiGroups", "resources", "verbs"))


def test_every_kind_of_child_can_be_applied_and_deleted() -> None:
    allowed = {
        (group, resource): {*rule["verbs"]}
        for role, rule in rules(render(EVERYWHERE))
        if role["kind"] == "ClusterRole"
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    children = (
        *(resources.SERVICES, resources.CONFIG_MAPS, resources.SERVICE_ACCOUNTS),
        *(resources.DEPLOYMENTS, resources.STATEFUL_SETS, resources.JOBS),
        *(resources.NETWORK_POLICIES, resources.INGRESSES, resources.HTTP_ROUTES),
        *(resources.DISRUPTION_BUDGETS, resources.AUTOSCALERS),
    )
    for child in children:
        needed = {"get", "list", "watch", "create", "patch", "delete"}
        assert allowed[child.group, child.plural] == needed
    assert allowed["", "persistentvolumeclaims"] == {"get", "list", "watch", "patch", "delete"}
    assert allowed["", "pods"] == {"get", "list", "watch", "delete"}


def test_user_roles_cover_both_kinds_and_nothing_else() -> None:
    objects = render()
    view, edit = (
        of(objects, "ClusterRole", f"{RELEASE}.{NAMESPACE}.{name}") for name in ("view", "edit")
    )
    for role in (view, edit):
        assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {"ragcache.dev"}
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]


def test_the_kinds_are_up_to_date_and_stay_after_an_uninstall() -> None:
    files = sorted((CHART / "files" / "crds").glob("*.yaml"))
    given = {d["metadata"]["name"]: d for f in files for d in yaml.safe_load_all(f.read_text())}
    assert {*given} == {"ragcaches.ragcache.dev", "ragcollections.ragcache.dev"}
    rendered = [o for o in render() if o["kind"] == "CustomResourceDefinition"]
    assert {o["metadata"]["name"] for o in rendered} == {*given}
    for crd in rendered:
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert crd["spec"] == given[crd["metadata"]["name"]]["spec"]
    assert not [
        o for o in render({"crds": {"install": False}}) if o["kind"] == "CustomResourceDefinition"
    ]


def test_its_versions_equal_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == project["version"]
        assert project["version"].startswith(chart.version)


BAD_VALUES: list[tuple[Object, str]] = [
    ({"replica": 3}, "additional properties 'replica' not allowed"),
    ({"replicas": 0}, "at '/replicas': minimum: got 0, want 1"),
    ({"replicas": "two"}, "at '/replicas': got string, want integer"),
    ({"image": {"name": "x"}}, "at '/image': additional properties 'name' not allowed"),
    ({"image": {"tag": "a b"}}, "at '/image/tag': 'a b' does not match pattern"),
    ({"image": {"registry": "host/path"}}, "at '/image/registry'"),
    ({"image": {"digest": "sha256:1"}}, "at '/image/digest'"),
    ({"image": {"digests": {"engine": "1.2"}}}, "at '/image/digests/engine'"),
    ({"image": {"digests": {"motor": ""}}}, "properties 'motor' not allowed"),
    ({"image": {"pullPolicy": "Sometimes"}}, "'Always', 'IfNotPresent', 'Never'"),
    ({"imagePullSecrets": ["pull"]}, "at '/imagePullSecrets/0': got string, want object"),
    ({"watch": {"namespaces": ["Team"]}}, "at '/watch/namespaces/0': 'Team' does not match"),
    ({"watch": {"allNamespaces": True, "namespaces": ["a"]}}, "watch.namespaces: watch.allNames"),
    ({"watch": {"namespaces": "team"}}, "at '/watch/namespaces': got string, want array"),
    ({"watch": {"namespaces": ["a", "a"]}}, "at '/watch/namespaces': items at 0 and 1 are equal"),
    (
        {"sources": {"allowedNetworks": ["inside"]}},
        "at '/sources/allowedNetworks/0': 'inside' does",
    ),
    ({"logLevel": "loud"}, "at '/logLevel': value must be one of 'debug', 'info'"),
    ({"lease": {"name": "A"}}, "at '/lease/name'"),
    ({"extraEnv": [{"value": "1"}]}, "at '/extraEnv/0': missing property 'name'"),
    ({"extraEnv": [{"name": "RAGCACHE_LEASE"}]}, "extraEnv: RAGCACHE_LEASE is set by the chart"),
    ({"resources": {"requests": {"cpu": "much"}}}, "at '/resources/requests/cpu'"),
    ({"tolerations": [{"effect": "Never"}]}, "at '/tolerations/0/effect': value must be one of"),
    ({"affinity": {"node": {}}}, "at '/affinity': additional properties 'node' not allowed"),
    ({"nodeSelector": {"a": 1}}, "at '/nodeSelector/a': got number, want string"),
    (
        {"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}},
        "metrics.serviceMonitor.enabled: a ServiceMonitor reads a Service",
    ),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=[m for _, m in BAD_VALUES])
def test_unknown_values_are_rejected(values: Object, message: str) -> None:
    with pytest.raises(HelmError) as refusal:
        render(values)
    assert message in str(refusal.value)


def test_it_works_as_a_subchart() -> None:
    render({"global": {"shared": "with all of them"}})


def test_every_value_is_described() -> None:
    def undescribed(schema: Object, path: str) -> Iterator[str]:
        for name, value in schema.get("properties", {}).items():
            if not value.get("description", "").endswith("."):
                yield f"{path}.{name}"
            yield from undescribed(value, f"{path}.{name}")

    def loose(schema: Any, path: str) -> Iterator[str]:
        if isinstance(schema, dict):
            if "properties" in schema and schema.get("additionalProperties") is not False:
                yield path
            for name, value in schema.items():
                yield from loose(value, f"{path}.{name}")

    with Chart.load(CHART) as chart:
        schema = chart.schema
        assert schema is not None
        assert list(undescribed(schema, "")) == []
        assert list(loose(schema["properties"], "")) == []
        chart.validate_schema({})


def test_defaults_and_their_table_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_chart.py"), "--check"]
    subprocess.run(command, check=True)
