"""A whole Kubernetes of one node, with real containers, network, names and volumes.

    with start_cluster() as cluster:
        cluster.load_images([Path("gateway.tar")])
        cluster.make_volumes(4, "2Gi")
        cluster.kubectl("apply", "-f", "examples/quickstart.yaml")

It needs root and Debian's packages, and one machine runs one at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import packages
from harness.availability import Unavailable
from harness.cluster import binaries
from harness.cluster.control_plane import ControlPlane, HostNetwork, start_control_plane
from harness.cluster.kubeconfig import ADMIN_GROUP, User
from harness.cluster.timeline import step
from tests.cluster import cgroups, containers, leftovers, machine, node, volumes
from tests.cluster.dns import start_dns
from tests.cluster.machine import Machine, start_machine

# One folder, so that a start finds what an unclean stop left.
FOLDER = Path("/var/tmp/ragcache-test-cluster")
_API_PORT = 6443
_TRANSLATOR_PORT = 6444
_NODE_LIMIT_S = 120


class KubectlFailed(RuntimeError):
    """kubectl ended with an error; the message is what it said."""


class Cluster:
    """A running cluster."""

    def __init__(self, plane: ControlPlane, host: Machine) -> None:
        self.plane = plane
        self._host = host
        self._volumes: dict[str, str] = {}  # size by name

    @property
    def kubeconfig(self) -> Path:
        """The admin's; its addresses answer from this host."""
        return self.plane.kubeconfig

    @property
    def operator_values(self) -> dict[str, Any]:
        """Values of the chart with which the operator's pods connect as other clients do."""
        values: dict[str, Any] = {"watch": {"allNamespaces": True}}
        if not self.plane.is_translated:
            return values
        at = {
            "KUBERNETES_SERVICE_HOST": machine.NODE_ADDRESS,
            "KUBERNETES_SERVICE_PORT": str(_TRANSLATOR_PORT),
        }
        environment = [{"name": name, "value": value} for name, value in at.items()]
        return values | {"extraEnv": environment}

    def kubectl(self, *words: str | Path, stdin: str | None = None) -> str:
        """Standard output of a kubectl command; raises KubectlFailed."""
        argv = [packages.command("kubectl"), f"--kubeconfig={self.plane.server_kubeconfig}"]
        argv += map(str, words)
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise KubectlFailed(f"kubectl {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        """One object."""
        found: dict[str, Any] = json.loads(
            self.kubectl("get", kind, name, f"--namespace={namespace}", "--output=json")
        )
        return found

    def get_all(
        self, kind: str, namespace: str = "default", labels: str = ""
    ) -> list[dict[str, Any]]:
        """Objects of a kind, all or those with the labels."""
        words = ["get", kind, f"--namespace={namespace}", f"--selector={labels}", "--output=json"]
        items: list[dict[str, Any]] = json.loads(self.kubectl(*words))["items"]
        return items

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Make objects, or make them so."""
        bundle = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "--filename=-", stdin=json.dumps(bundle))

    def wait(self, resource: str, condition: str, namespace: str, limit_s: float) -> None:
        """Wait for a condition of a resource such as `deployment/web`."""
        self.kubectl(
            *("wait", resource, f"--for={condition}"),
            *(f"--namespace={namespace}", f"--timeout={limit_s:g}s"),
        )

    def wait_until(self, ready: Callable[[], bool], what: str, limit_s: float) -> None:
        """Wait for anything; raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} in {limit_s:g} s")
            time.sleep(0.3)

    def load_images(self, archives: Sequence[Path]) -> list[str]:
        """Bring images from OCI archives; the names of all images that pods can use then.

        Pods that use them want imagePullPolicy Never or IfNotPresent: no registry is reachable.
        """
        with step(f"{len(archives)} images loaded"):
            return containers.import_images(self._host, archives)

    @property
    def image_import(self) -> tuple[str, ...]:
        """A command that brings the image whose archive is on its standard input."""
        return containers.import_command(self._host)

    def make_volumes(self, number: int, size: str) -> None:
        """Make more volumes of the default storage class, each for one claim of at most size."""
        first = len(self._volumes)
        for name in (f"volume-{first + index}" for index in range(number)):
            self._volumes[name] = size
            self._make_volume(name)

    def recycle_volumes(self) -> list[str]:
        """Empty the volumes whose claims are gone and offer them again; their names.

        This is the administrator's part: who deletes a claim has given its data up.
        """
        released = [
            one["metadata"]["name"]
            for one in self.get_all("persistentvolumes")
            if one.get("status", {}).get("phase") == "Released"
        ]
        for name in released:
            self.kubectl("delete", "persistentvolume", name)
            self._make_volume(name)
        return released

    def volume_folder(self, name: str) -> Path:
        """Where a PersistentVolume's files are on this host."""
        return self._host.folder / "volumes" / name

    def service_url(self, namespace: str, name: str, port: str | int | None = None) -> str:
        """A Service's URL for this host; port by name or number, else the first."""
        spec = self.get("service", name, namespace)["spec"]
        numbers = [
            one["port"] for one in spec["ports"] if port in (None, one["port"], one.get("name"))
        ]
        return f"http://{spec['clusterIP']}:{numbers[0]}"

    def dump_diagnostics(self, folder: Path) -> None:
        """Write what explains a failure: objects, events, logs of pods and daemons."""
        folder.mkdir(parents=True, exist_ok=True)
        kinds = self._said("api-resources", "--verbs=list", "--output=name").split()
        told = ",".join(kind for kind in kinds if kind not in ("secrets", "events"))
        commands = {
            "objects.txt": f"get {told} -A --ignore-not-found -o wide",
            "objects.yaml": f"get {told} -A --ignore-not-found -o yaml",
            "events.txt": "get events -A --sort-by=.lastTimestamp",
            "pods.txt": "describe pods -A",
            "node.txt": "describe node",
        }
        for name, words in commands.items():
            (folder / name).write_text(self._said(*words.split()))
        for pod in json.loads(self.kubectl("get", "pods", "-A", "-o=json"))["items"]:
            namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            logs = ["logs", name, f"--namespace={namespace}", "--all-containers", "--prefix"]
            path = folder / "pods" / f"{namespace}-{name}.log"
            path.parent.mkdir(exist_ok=True)
            path.write_text(self._said(*logs) + self._said(*logs, "--previous"))
        for log in (*self.plane.folder.glob("logs/*"), *self._host.folder.glob("logs/*")):
            path = folder / "daemons" / log.name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(log.read_bytes())

    def _said(self, *words: str) -> str:
        """What a command says, an error being as telling as an answer."""
        try:
            return self.kubectl(*words)
        except KubectlFailed as failure:
            return f"{failure}\n"

    def _make_volume(self, name: str) -> None:
        folder = volumes.make_folder(self.volume_folder(name))
        self.apply(volumes.persistent_volume(name, folder, self._volumes[name]))


@contextmanager
def start_cluster(folder: Path = FOLDER) -> Iterator[Cluster]:
    """Run a cluster until the block ends; nothing of it is left then.

    folder: for all of its data; short, as sockets' paths are limited. Everything in it is removed
        first, with what else an unclean stop left.

    Raises Unavailable if this machine cannot run one, or runs one now.
    """
    if os.geteuid() != 0:
        raise Unavailable("a cluster's node makes namespaces, mounts and a bridge: that takes root")
    packages.require(packages.NODE)
    programs = binaries.kubernetes_programs(binaries.NODE)
    folder.mkdir(parents=True, exist_ok=True)
    users = {name: User(name, (ADMIN_GROUP,)) for name in ("kubelet", "kube-proxy")}
    with ExitStack() as stack:
        stack.enter_context(_only_one(folder))
        with step("cluster ready"):
            with step("earlier cluster cleared"):
                leftovers.clear(folder)
            stack.callback(_clear, folder)
            cgroups.make_tree()
            host = stack.enter_context(start_machine(folder))
            with step("containerd ready"):
                stack.callback(containers.start_containers(host).stop)
            plane = stack.enter_context(
                start_control_plane(
                    folder / "control-plane",
                    audit=True,
                    controllers=True,
                    users=list(users.values()),
                    host=HostNetwork(
                        listen_address="0.0.0.0",
                        advertise_address=machine.NODE_ADDRESS,
                        api_port=_API_PORT,
                        translator_port=_TRANSLATOR_PORT,
                        service_range=machine.SERVICE_RANGE,
                        service_address=machine.API_SERVICE_ADDRESS,
                        launch=host.launch,
                    ),
                )
            )
            cluster = Cluster(plane, host)
            with step("node ready"):
                kubelet, proxy = (
                    start(host, programs[name], plane.server_kubeconfig_for(users[name]))
                    for start, name in (
                        (node.start_kubelet, "kubelet"),
                        (node.start_proxy, "kube-proxy"),
                    )
                )
                stack.callback(proxy.stop)
                stack.callback(kubelet.stop)
                kubelet.wait_until(lambda: _is_ready(cluster), "ready node", _NODE_LIMIT_S)
            stack.enter_context(start_dns(host, plane))
            cluster.apply(volumes.storage_class())
        yield cluster


def _clear(folder: Path) -> None:
    with step("cluster cleared"):
        leftovers.clear(folder)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of the machine's one cluster."""
    with folder.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise Unavailable(f"another test runs the cluster of {folder} now") from problem
        yield


def _is_ready(cluster: Cluster) -> bool:
    try:
        conditions = cluster.get("node", node.NODE_NAME)["status"].get("conditions", [])
    except KubectlFailed:
        return False
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
