"""Nothing of a test cluster outlives it, and the next one starts on what a killed one left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.availability import Unavailable, skip
from tests.cluster import cgroups, leftovers, machine, workloads
from tests.cluster.cluster import FOLDER, Cluster, start_cluster

LIMIT_S = 120

KILLED_TEST = """
import time
from tests.cluster.cluster import start_cluster
from tests.cluster.test_cluster_end import run_something
with start_cluster() as cluster:
    run_something(cluster)
    print("running", flush=True)
    time.sleep(600)
"""


def run_something(cluster: Cluster) -> None:
    """Have containers, a mounted volume and a Service."""
    cluster.make_volumes(1, "16Mi")
    cluster.apply(
        workloads.service("db", "db"),
        workloads.stateful_set("db", "db", ready=True),
    )
    cluster.wait_until(
        lambda: cluster.get("statefulset", "db")["status"].get("readyReplicas") == 1,
        "running pod",
        limit_s=LIMIT_S,
    )


def what_the_host_shows() -> set[str]:
    """Traces of a cluster outside of its folder, by kind."""
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    traces = {
        "processes": bool(leftovers.processes_of(FOLDER)),
        "control groups": any(Path("/sys/fs/cgroup").glob(f"*/{cgroups.NAME}")),
        "mounts": bool(leftovers.mounts_under(FOLDER)),
        "link": (Path("/sys/class/net") / machine.HOST_LINK).exists(),
        "bridge": (Path("/sys/class/net") / machine.BRIDGE).exists(),
        "iptables chains": "KUBE-" in rules,
    }
    return {kind for kind, present in traces.items() if present}


@pytest.mark.timeout(600)
def test_a_killed_test_leaves_no_processes_and_the_next_cluster_starts_clean() -> None:
    try:
        with start_cluster():
            pass
    except Unavailable as reason:
        skip(reason)
    assert what_the_host_shows() == set()
    assert list(FOLDER.iterdir()) == []

    with subprocess.Popen(
        [sys.executable, "-c", KILLED_TEST], stdout=subprocess.PIPE, text=True
    ) as test:
        assert test.stdout is not None
        assert "running\n" in iter(test.stdout.readline, "")
        assert what_the_host_shows() == {"processes", "control groups", "link"}
        with pytest.raises(Unavailable, match="another test"), start_cluster():
            pass
        os.kill(test.pid, signal.SIGKILL)

    with start_cluster() as cluster:
        assert cluster.get_all("pods") == []
        run_something(cluster)
    assert what_the_host_shows() == set()
    assert list(FOLDER.iterdir()) == []
