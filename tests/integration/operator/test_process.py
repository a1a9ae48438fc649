"""The operator process against a real API server. Controllers create objects, but no pods run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import packages
from harness.availability import Unavailable, skip
from harness.cluster.control_plane import ControlPlane, start_control_plane
from harness.processes import free_port
from tests.kit.manifests import cache
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[3]
NAMESPACE = "default"
OPERATOR_NAMESPACE = "ragcache-system"  # the chart creates it


@dataclass(frozen=True)
class KubectlServer:
    """An API server that tests use through kubectl."""

    plane: ControlPlane

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        argv = [packages.command("kubectl"), f"--kubeconfig={self.plane.kubeconfig}", *words]
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, obj: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(obj))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def knows(self, kind: str) -> bool:
        """Whether the server serves a kind yet."""
        argv = [packages.command("kubectl"), f"--kubeconfig={self.plane.kubeconfig}", "get", kind]
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0

    def names(self, kinds: str, cache: str) -> set[str]:
        labels = f"--selector=app.kubernetes.io/instance={cache}"
        return set(self.kubectl("get", kinds, labels, "-o", "name").split())

    def condition(self, cache: str, name: str) -> dict[str, Any]:
        status = self.get("ragcache", cache).get("status", {})
        return next((c for c in status.get("conditions", []) if c["type"] == name), {})

    def reasons(self, cache: str) -> set[str]:
        events = json.loads(self.kubectl("get", "events", "-o", "json"))["items"]
        return {e["reason"] for e in events if e["involvedObject"]["name"] == cache}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubectlServer]:
    """An API server with our kinds and a running operator."""
    folder = tmp_path_factory.mktemp("plane")
    try:
        running = start_control_plane(folder, controllers=True)
        plane = running.__enter__()
    except Unavailable as reason:
        skip(reason)
    try:
        server = KubectlServer(plane)
        server.kubectl("apply", "-f", str(ROOT / "crds"))
        wait_until(lambda: server.knows("ragcaches"), "the kinds are served")
        server.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        environment = {
            **os.environ,
            "KUBECONFIG": str(plane.kubeconfig),
            "RAGCACHE_LISTEN_PORT": str(free_port()),
        }
        with (folder / "operator.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ragcache_operator"],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        assert "Traceback" not in (folder / "operator.log").read_text()
    finally:
        running.__exit__(None, None, None)


def observed(server: KubectlServer, name: str) -> Callable[[], bool]:
    def is_observed() -> bool:
        found = server.get("ragcache", name)
        seen = found.get("status", {}).get("observedGeneration")
        return bool(seen == found["metadata"]["generation"])

    return is_observed


def test_children_are_created_owned_and_reported(server: KubectlServer) -> None:
    server.apply(cache("docs"))
    wait_until(observed(server, "docs"), "status")
    assert server.condition("docs", "Accepted")["status"] == "True"
    assert server.condition("docs", "Ready")["status"] == "False"
    uid = server.get("ragcache", "docs")["metadata"]["uid"]
    for name in ("docs-gateway", "docs-engine-main"):
        child = server.get("deployment", name)
        assert [o["uid"] for o in child["metadata"]["ownerReferences"]] == [uid]
    # Without a node, condition and Event contain the scheduler's message.
    wait_until(lambda: "Unschedulable" in server.reasons("docs"), "an Event")
    assert "nodes" in server.condition("docs", "Ready")["message"]


def test_changes_by_others_are_corrected_and_reported(server: KubectlServer) -> None:
    server.apply(cache("drift"))
    wait_until(observed(server, "drift"), "status")
    image = server.get("deployment", "drift-gateway")["spec"]["template"]["spec"]["containers"][0]
    server.kubectl("set", "image", "deployment/drift-gateway", "gateway=example.invalid/other:1")
    server.kubectl("delete", "configmap", "drift-members")

    def restored() -> bool:
        now = server.get("deployment", "drift-gateway")["spec"]["template"]["spec"]["containers"]
        return bool(now[0]["image"] == image["image"]) and (
            "configmap/drift-members" in server.names("configmaps", "drift")
        )

    wait_until(restored, "drift corrected")
    wait_until(lambda: "DriftCorrected" in server.reasons("drift"), "an Event")


def test_a_network_policy_that_others_opened_is_closed(server: KubectlServer) -> None:
    server.apply(cache("closed"))
    wait_until(observed(server, "closed"), "status")
    policy, service = "closed-default-deny", "closed-gateway"
    before = server.get("networkpolicy", policy)["spec"]
    selector = server.get("service", service)["spec"]["selector"]
    opened = json.dumps({"spec": {"ingress": [{}], "egress": [{}]}})
    server.kubectl("patch", "networkpolicy", policy, "--type=merge", "-p", opened)
    lost = json.dumps({"spec": {"selector": {"and": "nobody"}}})
    server.kubectl("patch", "service", service, "--type=merge", "-p", lost)
    wait_until(lambda: server.get("networkpolicy", policy)["spec"] == before, "a closed network")
    wait_until(lambda: server.get("service", service)["spec"]["selector"] == selector, "a selector")


def test_objects_that_are_no_longer_desired_are_deleted(server: KubectlServer) -> None:
    gateway = {"ingress": {"host": "docs.example.com"}}
    server.apply(cache("routed", gateway=gateway))
    wait_until(lambda: bool(server.names("ingresses", "routed")), "an Ingress")
    server.kubectl("patch", "ragcache", "routed", "--type=merge", "-p", _spec(ingress=None))
    wait_until(lambda: not server.names("ingresses", "routed"), "no Ingress")


def test_an_object_of_another_owner_stays_and_is_reported(server: KubectlServer) -> None:
    server.kubectl("create", "configmap", "taken-members", "--from-literal=theirs=1")
    server.apply(cache("taken"))
    wait_until(
        lambda: server.condition("taken", "Accepted").get("reason") == "ObjectTaken", "a refusal"
    )
    assert "ConfigMap default/taken-members" in server.condition("taken", "Accepted")["message"]
    assert server.get("configmap", "taken-members")["data"] == {"theirs": "1"}
    server.kubectl("delete", "configmap", "taken-members")
    server.kubectl("annotate", "ragcache", "taken", "retry=now")
    wait_until(lambda: server.condition("taken", "Accepted").get("reason") == "Valid", "acceptance")


def test_an_invalid_spec_is_reported_in_the_status(server: KubectlServer) -> None:
    server.apply(cache("wrong", retriever={"chunking": {"size": 64, "overlap": 40}}))
    wait_until(lambda: server.get("ragcache", "wrong").get("status") is not None, "status")
    condition = server.condition("wrong", "Accepted")
    assert (condition["status"], condition["reason"]) == ("False", "Invalid")
    assert "spec.retriever.chunking.overlap" in condition["message"]
    assert not server.names("deployments,statefulsets", "wrong")
    server.apply(cache("wrong"))
    wait_until(lambda: bool(server.names("deployments", "wrong")), "children")


def test_an_unsupported_feature_is_reported_and_the_others_work(server: KubectlServer) -> None:
    engine = {"name": "main", "autoscaling": {"maxReplicas": 4}}
    server.apply(cache("scaled", engines=[engine]))
    wait_until(lambda: "QueueMetricsNotServed" in server.reasons("scaled"), "an Event")
    wait_until(lambda: bool(server.names("deployments", "scaled")), "children")


@pytest.mark.parametrize("policy", ["Retain", "Delete"])
def test_a_deletion_removes_the_children_and_follows_the_data_policy(
    server: KubectlServer, policy: str
) -> None:
    name = f"gone-{policy.lower()}"
    server.apply(cache(name, dataPolicy=policy))
    wait_until(lambda: len(server.names("persistentvolumeclaims", name)) == 2, "claims")
    keys = server.names("secrets", name)
    assert len(keys) == 4, "those of plans, API keys, TLS and stored KV"
    server.kubectl("delete", "ragcache", name, "--wait=false")
    # No kubelet ends the pods in this test.
    labels = f"--selector=app.kubernetes.io/instance={name}"

    def have_ended() -> bool:
        server.kubectl("delete", "pods", labels, "--grace-period=0", "--force")
        return not server.names("pods", name)

    wait_until(have_ended, "no pods")
    kinds = "deployments,statefulsets,services,configmaps,networkpolicies,serviceaccounts"
    wait_until(lambda: not server.names(kinds, name), "no children")
    wait_until(lambda: name not in server.kubectl("get", "ragcaches"), "no RagCache")
    # Kubernetes deletes the Secrets with their owner, because the operator may not.
    wait_until(lambda: not server.names("secrets", name), f"none of {keys}")
    kept = 2 if policy == "Retain" else 0
    wait_until(lambda: len(server.names("persistentvolumeclaims", name)) == kept, "claims")


def _spec(**gateway: Any) -> str:
    return json.dumps({"spec": {"gateway": gateway}})
