"""The test cluster is a Kubernetes that real workloads run on."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Collection
from functools import partial
from pathlib import Path

from tests.cluster import oci, workloads
from tests.cluster.cluster import Cluster, KubectlFailed

# Long enough for a busy machine; a test that fails says so late.
LIMIT_S = 100


def ask(cluster: Cluster, command: str) -> str:
    """What a busybox command says in a pod of `web`, be it that it failed."""
    try:
        return cluster.kubectl("exec", "deployment/web", "--", "sh", "-c", f"busybox {command}")
    except KubectlFailed as failure:
        return str(failure)


def apply_web(cluster: Cluster) -> None:
    cluster.apply(
        workloads.deployment("web", replicas=2),
        workloads.service("web", "web"),
        workloads.service("web-pods", "web", clusterIP="None"),
    )
    cluster.wait("deployment/web", "condition=Available", "default", limit_s=LIMIT_S)
    cluster.wait_until(
        lambda: len(addresses(cluster, "web-pods")) == 2, "names of both pods", limit_s=LIMIT_S
    )


def addresses(cluster: Cluster, name: str) -> set[str]:
    """What a name resolves to in a pod, first line (the server's own address) apart."""
    answer = ask(cluster, f"nslookup -type=a {name}.default.svc.cluster.local")
    found = [line.split()[-1] for line in answer.splitlines() if line.startswith("Address: ")]
    return set(found)


def answered_by(cluster: Cluster, pods: Collection[str], url: str) -> bool:
    return ask(cluster, f"wget -qO- {url}").strip() in pods


def test_services_answer_by_name_from_pods_and_by_address_from_the_host(cluster: Cluster) -> None:
    apply_web(cluster)
    pods = {one["metadata"]["name"] for one in cluster.get_all("pods", labels="app=web")}
    for name in ("web", "web.default", "web.default.svc.cluster.local", "web-pods"):
        url = f"http://{name}:{8080 if name == 'web-pods' else 80}/"
        # kube-proxy learns of a ready pod in its own time.
        cluster.wait_until(
            partial(answered_by, cluster, pods, url), f"answer of {url}", limit_s=LIMIT_S
        )
    with urllib.request.urlopen(cluster.service_url("default", "web", "http")) as answer:
        assert answer.read().decode().strip() in pods


def test_a_headless_service_names_every_pod_and_forgets_those_gone(cluster: Cluster) -> None:
    apply_web(cluster)
    ips = {one["status"]["podIP"] for one in cluster.get_all("pods", labels="app=web")}
    assert addresses(cluster, "web-pods") == ips
    cluster.kubectl("scale", "deployment/web", "--replicas=1")
    cluster.wait_until(
        lambda: len(addresses(cluster, "web-pods")) == 1, "name of one pod", limit_s=LIMIT_S
    )


def test_a_name_that_is_not_there_is_not_found_at_once(cluster: Cluster) -> None:
    apply_web(cluster)
    for name in ("nothing.default.svc.cluster.local", "example.com"):
        said = ask(cluster, f"nslookup {name}; true")
        assert "NXDOMAIN" in said, said


def test_a_stateful_pod_has_a_name_before_it_is_ready_and_writes_its_volume_unprivileged(
    cluster: Cluster,
) -> None:
    apply_web(cluster)
    cluster.make_volumes(1, "16Mi")
    cluster.apply(
        workloads.service("db", "db", clusterIP="None", publishNotReadyAddresses=True),
        workloads.stateful_set("db", "db", ready=False),
    )
    cluster.wait_until(
        lambda: answered_by(cluster, {"db-0"}, "http://db-0.db.default.svc:8080/"),
        "answer of a pod that is not ready",
        limit_s=LIMIT_S,
    )
    claim = cluster.get("pvc", "data-db-0")
    name = claim["spec"]["volumeName"]
    written = cluster.volume_folder(name) / "owner"
    assert "uid=10001" in written.read_text()

    cluster.kubectl("delete", "statefulset/db", "pvc/data-db-0")
    cluster.wait_until(
        lambda: cluster.recycle_volumes() == [name], "released volume", limit_s=LIMIT_S
    )
    assert list(cluster.volume_folder(name).iterdir()) == []


def test_images_are_loaded_from_archives(cluster: Cluster, tmp_path: Path) -> None:
    name = "docker.io/ragcache/probe:1"
    archive = oci.write_image(
        tmp_path / "probe.tar", name, {"/bin/sh": Path("/bin/busybox")}, ["/bin/sh", "-c", "exit 7"]
    )
    with archive.open("rb") as stream:
        subprocess.run(cluster.image_import, stdin=stream, check=True, capture_output=True)
    assert name in cluster.load_images([archive])
    cluster.kubectl(
        *("run", "probe", "--image=ragcache/probe:1", "--image-pull-policy=Never"),
        "--restart=Never",
    )

    def exit_code() -> int | None:
        status = cluster.get("pod", "probe")["status"]
        for container in status.get("containerStatuses", []):
            if "terminated" in container["state"]:
                code: int = container["state"]["terminated"]["exitCode"]
                return code
        return None

    cluster.wait_until(lambda: exit_code() == 7, "end of the container", limit_s=LIMIT_S)


def test_diagnostics_have_objects_pod_logs_and_daemon_logs(
    cluster: Cluster, tmp_path: Path
) -> None:
    apply_web(cluster)
    cluster.dump_diagnostics(tmp_path)
    assert "deployment.apps/web" in (tmp_path / "objects.txt").read_text()
    assert list((tmp_path / "pods").glob("default-web-*.log"))
    assert (tmp_path / "daemons" / "kubelet.log").stat().st_size > 0
