"""Static checks of the children of every RagCache on every cluster."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_operator.builders.capabilities import OLDEST_MINOR, Capabilities
from ragcache_operator.builders.keys import (
    api_key_secret_name,
    disk_key_secret_name,
    signing_secret_name,
    store_key_secret_name,
)
from ragcache_operator.builders.metadata import (
    SPEC_HASH,
    component_of,
    component_selectors,
    instance_selector,
    selector_text,
)
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.spec.quantity import canonical, parse_millis, parse_quantity
from ragcache_operator.spec.ragcache import COMPONENTS
from tests.kit.operator import (
    NAMESPACE,
    UID,
    Object,
    build,
    capabilities,
    children_of,
    container_of,
    kinds_of,
    make_cache,
    names,
    secrets_of,
    selects,
    specs,
    specs_of_today,
    workloads_of,
)

_VOLUMES = frozenset(
    {
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image"),
        *("persistentVolumeClaim", "projected", "secret"),
    }
)
_SAFE_SYSCTLS = frozenset(
    {
        *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies"),
        *("net.ipv4.ping_group_range", "net.ipv4.ip_unprivileged_port_start"),
    }
)
_SECCOMP = ("RuntimeDefault", "Localhost")
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")


def find_problems(pod: Object, annotations: Object | None = None) -> list[str]:
    """Return the violations of the ``restricted`` standard in a pod spec."""
    return [*_of_pod(pod), *_of_annotations(annotations or {}), *_of_containers(pod)]


def _of_pod(pod: Object) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{field} is set"
    for volume in pod.get("volumes", ()):
        [source] = [field for field in volume if field != "name"]
        if source not in _VOLUMES:
            yield f"volume {volume['name']} is of type {source}"
    security = pod.get("securityContext", {})
    for sysctl in security.get("sysctls", ()):
        if sysctl["name"] not in _SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']} is unsafe"
    yield from _of_context(security, "the pod")


def _of_annotations(annotations: Object) -> Iterator[str]:
    for name, value in annotations.items():
        ours = name.startswith("container.apparmor.security.beta.kubernetes.io/")
        if ours and value != "runtime/default" and not value.startswith("localhost/"):
            yield f"annotation {name} is {value}"


def _of_containers(pod: Object) -> Iterator[str]:
    above = pod.get("securityContext", {})
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in pod.get(kind, ()):
            name, own = container["name"], container.get("securityContext", {})
            yield from _of_container(container, name, own)
            if own.get("runAsNonRoot", above.get("runAsNonRoot")) is not True:
                yield f"{name} may run as root"
            seccomp = own.get("seccompProfile", above.get("seccompProfile", {}))
            if seccomp.get("type") not in _SECCOMP:
                yield f"{name} has no seccomp profile"


def _of_container(container: Object, name: str, own: Object) -> Iterator[str]:
    yield from _of_context(own, name)
    if own.get("privileged"):
        yield f"{name} is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name} may escalate its privileges"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield f"{name} does not drop all capabilities"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield f"{name} adds capabilities"
    if own.get("procMount", "Default") != "Default":
        yield f"{name} sees more of /proc"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield f"{name} takes a port of its node"
    yield from _of_handlers(container, name)


def _of_handlers(container: Object, name: str) -> Iterator[str]:
    """Check that probes and hooks connect to no other host."""
    handlers = [container.get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness")]
    handlers += container.get("lifecycle", {}).values()
    for handler in handlers:
        for kind in ("httpGet", "tcpSocket"):
            if handler.get(kind, {}).get("host"):
                yield f"{name} probes another host"


def _of_context(security: Object, whose: str) -> Iterator[str]:
    if security.get("runAsUser") == 0:
        yield f"{whose} runs as root"
    if security.get("runAsNonRoot") is False:
        yield f"{whose} may run as root"
    selinux = security.get("seLinuxOptions", {})
    if selinux.get("type", "") not in _SELINUX_TYPES or selinux.keys() & {"user", "role"}:
        yield f"{whose} has SELinux options of its own"
    if security.get("seccompProfile", {}).get("type", "RuntimeDefault") not in _SECCOMP:
        yield f"{whose} is without seccomp"
    if security.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in _SECCOMP:
        yield f"{whose} is without AppArmor"
    if security.get("windowsOptions", {}).get("hostProcess"):
        yield f"{whose} is a host process"


OLDEST = Capabilities(OLDEST_MINOR, custom_metrics=True)

SCHEMALESS = ("HTTPRoute", "PodMonitor", "Certificate")


@settings(max_examples=15)
@given(specs_of_today)
def test_current_schemas_know_every_field(spec: Object) -> None:
    for child in build(**spec):
        if child["kind"] not in SCHEMALESS:
            kubernetes_validate.validate(child, "1.37", strict=True)


@settings(max_examples=15)
@given(specs)
def test_the_oldest_schemas_know_every_field(spec: Object) -> None:
    for child in children_of(make_cache(**spec), OLDEST):
        kubernetes_validate.validate(child, f"1.{OLDEST_MINOR}", strict=True)


@given(specs_of_today)
def test_every_pod_is_restricted(spec: Object) -> None:
    for workload in workloads_of(build(**spec)):
        template = workload["spec"]["template"]
        annotations = template["metadata"].get("annotations", {})
        assert find_problems(template["spec"], annotations) == []
        assert template["spec"]["automountServiceAccountToken"] is False
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert all(port["containerPort"] >= 1024 for port in container["ports"])


@given(specs, names, capabilities)
def test_every_object_is_named_labelled_and_owned(
    spec: Object, name: str, served: Capabilities
) -> None:
    children = children_of(make_cache(name, **spec), served)
    identities = Counter((c["kind"], c["metadata"]["name"]) for c in children)
    assert max(identities.values()) == 1
    for child in children:
        meta = child["metadata"]
        assert len(meta["name"]) <= 63
        assert meta["name"].startswith(f"{name}-")
        assert meta["namespace"] == NAMESPACE
        assert (
            meta["labels"].items()
            >= {
                "app.kubernetes.io/name": "ragcache",
                "app.kubernetes.io/instance": name,
                "app.kubernetes.io/part-of": "ragcache",
                "app.kubernetes.io/managed-by": "ragcache-operator",
            }.items()
        )
        [owner] = meta["ownerReferences"]
        assert owner == {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCache",
            "name": name,
            "uid": UID,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def test_without_a_live_object_nothing_is_owned() -> None:
    for child in children_of(make_cache(), owner=""):
        assert "ownerReferences" not in child["metadata"]


@given(specs)
def test_volume_claims_are_found_by_label_and_have_no_owner(spec: Object) -> None:
    cache = make_cache(**spec)
    claims = [
        claim
        for stateful_set in kinds_of(children_of(cache), "StatefulSet")
        for claim in stateful_set["spec"]["volumeClaimTemplates"]
    ]
    assert len(claims) == 2
    wanted = instance_selector(cache.metadata.name)
    for claim in claims:
        assert "ownerReferences" not in claim["metadata"]
        assert wanted.items() <= claim["metadata"]["labels"].items()


@given(specs)
def test_services_budgets_and_workloads_select_the_pods_of_exactly_one_workload(
    spec: Object,
) -> None:
    children = build(**spec)
    workloads = workloads_of(children)

    def selected(selector: Object) -> list[str]:
        return [
            w["metadata"]["name"]
            for w in workloads
            if selects(selector, w["spec"]["template"]["metadata"]["labels"])
        ]

    for workload in workloads:
        assert selected(workload["spec"]["selector"]) == [workload["metadata"]["name"]]
        for constraint in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert selected(constraint["labelSelector"]) == [workload["metadata"]["name"]]
    for service in kinds_of(children, "Service"):
        [target] = selected({"matchLabels": service["spec"]["selector"]})
        assert service["metadata"]["name"].startswith(target)
    for budget in kinds_of(children, "PodDisruptionBudget"):
        assert selected(budget["spec"]["selector"]) == [budget["metadata"]["name"]]


@given(specs)
def test_components_are_found_by_selector_and_by_label(spec: Object) -> None:
    cache = make_cache(**spec)
    children = children_of(cache)
    for component, text in component_selectors(cache).items():
        terms = dict(term.split("=") for term in text.split(","))
        assert selector_text(terms) == text
        found = [
            w
            for w in workloads_of(children)
            if terms.items() <= w["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert found == [w for w in workloads_of(children) if component_of(w) == component]
        assert len(found) == (len(cache.spec.engines) if component == "engine" else 1)
    assert set(component_selectors(cache)) == set(COMPONENTS)


@given(specs_of_today)
def test_every_referenced_object_exists_or_belongs_to_the_user(spec: Object) -> None:
    cache = make_cache(**spec)
    children = children_of(cache)
    made = {(c["kind"], c["metadata"]["name"]) for c in children}
    for workload in workloads_of(children):
        pod = workload["spec"]["template"]["spec"]
        assert ("ServiceAccount", pod["serviceAccountName"]) in made
        for volume in pod["volumes"]:
            if "configMap" in volume:
                users = spec.get("trustedCA", {}).get("configMap")
                name = volume["configMap"]["name"]
                assert ("ConfigMap", name) in made or name == users
            if "secret" in volume:
                # The operator creates this Secret, because builders have no key.
                site = ClusterPlacement(cache, tag="1", owner=UID)
                assert volume["secret"]["secretName"] in {
                    signing_secret_name(cache, site),
                    store_key_secret_name(cache, site),
                    api_key_secret_name(cache, site),
                    disk_key_secret_name(cache, site),
                }
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim == cache.spec.model.parsed_source.claim
        claimed = {c["metadata"]["name"] for c in workload["spec"].get("volumeClaimTemplates", ())}
        available = {volume["name"] for volume in pod["volumes"]} | claimed
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == available
        if workload["kind"] == "StatefulSet":
            assert ("Service", workload["spec"]["serviceName"]) in made
        for _, secret, _ in secrets_of(container):
            assert secret in _users_secrets(spec)
    for autoscaler in kinds_of(children, "HorizontalPodAutoscaler"):
        target = autoscaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in made
        assert target["apiVersion"] == "apps/v1"
    for ingress in kinds_of(children, "Ingress"):
        [rule] = ingress["spec"]["rules"]
        [path] = rule["http"]["paths"]
        backend = path["backend"]["service"]
        [service] = [
            c
            for c in children
            if (c["kind"], c["metadata"]["name"]) == ("Service", backend["name"])
        ]
        assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}


def _users_secrets(spec: Object) -> set[str]:
    embedder = spec.get("retriever", {}).get("embedder", {})
    given = (spec.get("model", {}).get("tokenSecret"), embedder.get("keySecret"))
    database = spec.get("retriever", {}).get("backend", {}).get("postgres", {}).get("urlSecret")
    team = ({"name": "team"},) if "env" in spec else ()
    return {reference["name"] for reference in (*given, database, *team) if reference}


@given(specs)
def test_addresses_have_ports_that_pods_listen_on(spec: Object) -> None:
    children = build(**spec)
    served = {}
    for service in kinds_of(children, "Service"):
        host = f"{service['metadata']['name']}.{NAMESPACE}.svc"
        [workload] = [
            w
            for w in workloads_of(children)
            if selects(
                {"matchLabels": service["spec"]["selector"]},
                w["spec"]["template"]["metadata"]["labels"],
            )
        ]
        [container] = workload["spec"]["template"]["spec"]["containers"]
        listening = {port["name"]: port["containerPort"] for port in container["ports"]}
        for port in service["spec"]["ports"]:
            number = listening[port["targetPort"]]
            if service["spec"].get("clusterIP") == "None":
                # Clients of a headless Service connect to the pods' own ports.
                assert port["port"] == number
            served[f"{host}:{port['port']}"] = workload
    for workload in workloads_of(children):
        [container] = workload["spec"]["template"]["spec"]["containers"]
        env = {v["name"]: v["value"] for v in container["env"] if "value" in v}
        asked = [*filter(None, [env.get("RAGCACHE_RETRIEVER")])]
        if "RAGCACHE_ENGINES" in env:
            for engine in env["RAGCACHE_ENGINES"].split(","):
                http, records_port = engine.removeprefix("https://").split(";records=")
                asked += [http, f"{http.split(':')[0]}:{records_port}"]
        assert set(asked) <= served.keys()


@given(specs)
def test_members_are_the_pods_of_the_store(spec: Object) -> None:
    children = build(**spec)
    config = next(c for c in kinds_of(children, "ConfigMap") if "cachestore.json" in c["data"])
    [store] = [w for w in workloads_of(children) if component_of(w) == "cachestore"]
    name, service = store["metadata"]["name"], store["spec"]["serviceName"]
    [container] = store["spec"]["template"]["spec"]["containers"]
    [port] = [p["containerPort"] for p in container["ports"] if p["name"] == "grpc"]
    pods = [
        f"{name}-{i}.{service}.{NAMESPACE}.svc:{port}" for i in range(store["spec"]["replicas"])
    ]
    assert json.loads(config["data"]["cachestore.json"]) == {"members": pods}
    for workload in workloads_of(children):
        if component_of(workload) in ("gateway", "engine"):
            pod = workload["spec"]["template"]["spec"]
            [container] = pod["containers"]
            env = {v["name"]: v.get("value") for v in container["env"]}
            [mount] = [m for m in container["volumeMounts"] if m["name"] == "members"]
            assert env["RAGCACHE_CACHESTORE"] == f"file:{mount['mountPath']}/cachestore.json"
            # Kubernetes does not update a file that is mounted by its own path.
            assert "subPath" not in mount


@given(specs)
def test_every_probe_uses_http_on_a_port_of_its_container(spec: Object) -> None:
    for workload in workloads_of(build(**spec)):
        [container] = workload["spec"]["template"]["spec"]["containers"]
        ports = {port["containerPort"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[kind]["httpGet"]["port"] in ports
            assert container[kind]["httpGet"]["path"].startswith("/")


@given(specs)
def test_no_request_is_above_its_limit(spec: Object) -> None:
    for workload in workloads_of(build(**spec)):
        [container] = workload["spec"]["template"]["spec"]["containers"]
        requests = container["resources"]["requests"]
        for name, limit in container["resources"].get("limits", {}).items():
            assert parse_millis(requests[name]) <= parse_millis(limit)


def test_memory_of_a_gateway_holds_its_knowledge_tree() -> None:
    container = container_of(build(), "gateway")
    requested_bytes = parse_quantity(container["resources"]["requests"]["memory"])
    assert requested_bytes >= 200_000 * 800 + (512 << 20)


@given(specs)
def test_grace_covers_the_drain(spec: Object) -> None:
    children = build(**spec)
    for workload in workloads_of(children):
        pod = workload["spec"]["template"]["spec"]
        [container] = pod["containers"]
        drains = "lifecycle" in container
        assert drains == (component_of(workload) in ("gateway", "engine"))
        if drains:
            command = container["lifecycle"]["preStop"]["exec"]["command"]
            env = {v["name"]: v.get("value", "") for v in container["env"]}
            busy_s = int(command[-1]) + int(env.get("RAGCACHE_STOP_GRACE_S", "0"))
            assert busy_s < pod["terminationGracePeriodSeconds"]


@given(specs_of_today, capabilities)
def test_values_are_in_the_servers_canonical_form(spec: Object, served: Capabilities) -> None:
    if spec.get("model", {}).get("source", "").startswith("image:"):
        served = Capabilities.latest()
    for child in children_of(make_cache(**spec), served):
        json.dumps(child)
        _check_canonical(child)


_MEANINGFUL = ("emptyDir", "podSelector", "namespaceSelector", "egress[0]")
"""Fields where an empty mapping has a meaning."""


def _check_canonical(value: Any, path: str = "") -> None:
    assert value is not None, path
    if isinstance(value, dict):
        assert value or path.endswith(_MEANINGFUL), path
        for key, item in value.items():
            _check_canonical(item, f"{path}.{key}")
    elif isinstance(value, list):
        assert value, path
        for index, item in enumerate(value):
            _check_canonical(item, f"{path}[{index}]")
    elif path.endswith((".cpu", ".memory", ".storage", ".sizeLimit", ".averageValue")):
        assert canonical(value) == value, path


@given(specs, specs)
def test_a_hash_changes_exactly_when_its_object_does(one: Object, other: Object) -> None:
    def content(child: Object) -> Object:
        meta = child["metadata"]
        others = {k: v for k, v in meta["annotations"].items() if k != SPEC_HASH}
        return {**child, "metadata": {**meta, "annotations": others}}

    mine, theirs = (
        {(c["kind"], c["metadata"]["name"]): c for c in build(**spec)} for spec in (one, other)
    )
    for identity in mine.keys() & theirs.keys():
        hashes = [c[identity]["metadata"]["annotations"][SPEC_HASH] for c in (mine, theirs)]
        assert (hashes[0] == hashes[1]) == (content(mine[identity]) == content(theirs[identity]))


@given(specs)
def test_objects_that_a_pod_needs_come_before_it(spec: Object) -> None:
    order = [(c["kind"], c["metadata"]["name"]) for c in build(**spec)]
    kinds = [kind for kind, _ in order]
    last_policy = max((i for i, k in enumerate(kinds) if k == "NetworkPolicy"), default=-1)
    for index, (kind, name) in enumerate(order):
        if kind in ("Deployment", "StatefulSet"):
            assert index > order.index(("ServiceAccount", name))
            assert index > kinds.index("ConfigMap")
            assert index > last_policy


@pytest.mark.parametrize(
    ("given_", "kept"),
    [
        *(("0.5", "500m"), ("1", "1"), ("1.0", "1"), ("1000m", "1"), ("1500m", "1500m")),
        *(("1024Mi", "1Gi"), ("1.5Gi", "1536Mi"), ("512Mi", "512Mi"), ("0.5Ki", "512")),
        *(("1Ki", "1Ki"), ("1000", "1k"), ("1e9", "1e9"), ("1500000", "1500k"), ("2G", "2G")),
        *(("1000M", "1G"), ("3221225472", "3221225472"), ("1e3", "1e3"), ("1.5e3", "1500")),
        *(
            (".5", "500m"),
            ("2.", "2"),
            ("0.0000000001", "1m"),
            ("7u", "1m"),
            ("1e-3", "1e-3"),
            ("0", "0"),
        ),
    ],
)
def test_quantities_are_in_canonical_form(given_: str, kept: str) -> None:
    assert canonical(given_) == kept
    assert canonical(kept) == kept


@given(st.sampled_from(["nine", "", "1Zi", "1 Gi"]))
def test_text_that_is_not_a_quantity_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        canonical(text)
