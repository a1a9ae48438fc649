"""The control plane that other tests build on does what they count on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from harness import packages
from harness.availability import Unavailable, skip
from harness.cluster.control_plane import ControlPlane, start_control_plane
from harness.cluster.kubeconfig import User
from tests.kit.wait import wait_until

# Long enough for a busy machine; a test that fails says so late.
CUSTOM_RESOURCE_DEFINITION = json.dumps(
    {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "kept.example.com"},
        "spec": {
            "group": "example.com",
            "names": {"plural": "kept", "kind": "Kept"},
            "scope": "Namespaced",
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "properties": {
                                "spec": {
                                    "type": "object",
                                    "properties": {"text": {"type": "string"}},
                                }
                            },
                        }
                    },
                }
            ],
        },
    }
)
CUSTOM_RESOURCE = json.dumps(
    {
        "apiVersion": "example.com/v1",
        "kind": "Kept",
        "metadata": {"name": "one"},
        "spec": {"text": "kept", "dropped": True},
    }
)


def kubectl(
    kubeconfig: Path, *words: str, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    argv = [packages.command("kubectl"), f"--kubeconfig={kubeconfig}", *words]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)


def test_the_admin_may_everything_and_the_audit_log_tells_it_apart(
    control_plane: ControlPlane,
) -> None:
    made = kubectl(control_plane.kubeconfig, "create", "namespace", "audited")
    assert made.returncode == 0, made.stderr
    assert control_plane.audit_log is not None
    entries = [json.loads(line) for line in control_plane.audit_log.read_text().splitlines()]
    writes = [
        entry
        for entry in entries
        if entry["verb"] == "create" and entry["objectRef"]["resource"] == "namespaces"
    ]
    assert ("admin", "audited") in [
        (entry["user"]["username"], entry["objectRef"].get("name")) for entry in writes
    ]


def test_controllers_make_pods_of_a_deployment(control_plane: ControlPlane) -> None:
    kubectl(control_plane.kubeconfig, "create", "deployment", "web", "--image=none")
    words = "get", "pods", "-l=app=web"
    wait_until(lambda: "Pending" in kubectl(control_plane.kubeconfig, *words).stdout)


def test_custom_resources_are_kept(control_plane: ControlPlane) -> None:
    for thing in (CUSTOM_RESOURCE_DEFINITION, CUSTOM_RESOURCE):
        # A kind is served a moment after it is defined.
        apply = partial(kubectl, control_plane.kubeconfig, "apply", "--filename=-", stdin=thing)
        wait_until(lambda apply=apply: apply().returncode == 0, thing)  # type: ignore[misc]
    kept = kubectl(control_plane.kubeconfig, "get", "kept", "one", "--output=jsonpath={.spec}")
    assert json.loads(kept.stdout) == {"text": "kept"}


def test_a_user_may_only_what_rbac_grants(tmp_path: Path) -> None:
    reader = User("reader")
    try:
        with start_control_plane(tmp_path, users=[reader]) as plane:
            config = plane.kubeconfig_for(reader)
            refused = kubectl(config, "get", "configmaps")
            assert "Forbidden" in refused.stderr
            for grant in (
                "clusterrole reads --verb=list --resource=configmaps",
                "clusterrolebinding reads --clusterrole=reads --user=reader",
            ):
                kubectl(plane.kubeconfig, "create", *grant.split())
            wait_until(lambda: kubectl(config, "get", "configmaps").returncode == 0)
    except Unavailable as reason:
        skip(reason)


def test_nothing_outlives_a_killed_test(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from harness.cluster.control_plane import start_control_plane\n"
        "with start_control_plane(pathlib.Path(sys.argv[1])) as plane:\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as test:
        assert test.stdout is not None
        lines = iter(test.stdout.readline, "")
        if "up\n" not in lines:
            pytest.skip("no control plane here; the other tests say why")
        assert _processes_naming(tmp_path)
        test.send_signal(signal.SIGKILL)
    wait_until(lambda: not _processes_naming(tmp_path) - {os.getpid()})


def _processes_naming(folder: Path) -> set[int]:
    """Processes whose command line has the folder in it."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue  # it ended meanwhile
    return found
