"""``ragcache install``, ``status`` and ``logs`` against a real API server.

Nothing runs pods there, so a stand-in for the kubelet has their logs; the API server asks it as it
asks any.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml
from typer.testing import CliRunner, Result

from harness import availability
from harness.cluster.control_plane import ControlPlane, start_control_plane
from harness.cluster.kubeconfig import User
from ragcache_cli.kubernetes.pod_logs import follow_pods
from ragcache_cli.main import app
from ragcache_operator.kube.api import Api, ApiError
from ragcache_operator.kube.resources import NAMESPACES, PODS, RAG_CACHES, Resource
from tests.kit.wait import wait_until

NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
STRANGER = User("stranger")
NUMBERS = itertools.count()
T = TypeVar("T")


class Kubelet(ThreadingHTTPServer):
    """Has logs of containers: what it is asked, it answers with the next of its pieces."""

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
        self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.pieces: dict[str, list[str]] = {}
        """By pod, one answer after the other; the last one is given again and again."""
        self.whole: dict[str, str] = {}
        """By pod, what is answered to who asks for everything."""
        self.asked: list[dict[str, str]] = []
        self.namespace = ""

    @property
    def port(self) -> int:
        port: int = self.server_address[1]
        return port


class _Handler(BaseHTTPRequestHandler):
    server: Kubelet

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, _, namespace, pod, container = url.path.split("/")
        assert (namespace, container) == (self.server.namespace, "main")
        query = dict(parse_qsl(url.query))
        self.server.asked.append(query)
        pieces = self.server.pieces[pod]
        if not {"tailLines", "sinceTime"} & query.keys():
            pieces = [self.server.whole[pod]]
        self.send_response(200)
        self.end_headers()
        self.wfile.write((pieces.pop(0) if len(pieces) > 1 else pieces[0]).encode())


class Cluster:
    """The control plane, its node's kubelet, and the command."""

    def __init__(self, plane: ControlPlane, kubelet: Kubelet) -> None:
        self.plane = plane
        self.kubelet = kubelet
        self.namespace = ""

    def run(self, *words: object, kubeconfig: Path | None = None) -> Result:
        """The command, with this cluster's kubeconfig."""
        cluster = ("--kubeconfig", kubeconfig or self.plane.kubeconfig)
        return CliRunner().invoke(app, [str(word) for word in (*words, *cluster)])

    def ask(self, question: Callable[[Api], Awaitable[T]]) -> T:
        """The answer to a call of the API."""

        async def asked() -> T:
            async with await Api.connect(self.plane.kubeconfig) as api:
                return await question(api)

        return asyncio.run(asked())

    def put_pod(self, name: str, component: str, restarts: int | None = 0) -> None:
        """A pod of the RagCache docs; restarts: of its container, None if it has not started."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": {
                    "app.kubernetes.io/name": "ragcache",
                    "app.kubernetes.io/instance": "docs",
                    "app.kubernetes.io/component": component,
                },
            },
            "spec": {
                "nodeName": "node",
                "containers": [{"name": "main", "image": "none"}],
            },
        }
        running = {
            "name": "main",
            "image": "none",
            "imageID": "",
            "ready": True,
            "restartCount": restarts,
            "state": {"running": {}},
        }

        async def put(api: Api) -> None:
            if await api.get(PODS, name, self.namespace) is None:
                await api.create(PODS, pod)
            if restarts is not None:
                status = {"status": {"phase": "Running", "containerStatuses": [running]}}
                await api.merge(PODS, name, self.namespace, status, "status")

        self.ask(put)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("plane")
    try:
        starting = start_control_plane(folder, users=[STRANGER])
        plane = starting.__enter__()
    except availability.Unavailable as reason:
        availability.skip(reason)
    try:
        yield plane
    finally:
        starting.__exit__(None, None, None)


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane) -> Iterator[Cluster]:
    """With a namespace, a node and nothing installed."""
    keys = plane.certificates
    with Kubelet(keys.server_certificate, keys.server_key) as kubelet:
        thread = threading.Thread(target=kubelet.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        cluster = Cluster(plane, kubelet)

        async def prepare(api: Api) -> None:
            await api.create(NODES, {"metadata": {"name": "node"}})
            status = {
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet.port}},
            }
            await api.merge(NODES, "node", None, {"status": status}, "status")

        cluster.ask(prepare)
        yield cluster
        kubelet.shutdown()
        thread.join()


@pytest.fixture
def docs(cluster: Cluster) -> Cluster:
    """The cluster with the operator's kinds and one RagCache, in a namespace of the test's own."""
    result = cluster.run("install")
    assert result.exit_code == 0, result.output
    cluster.namespace = cluster.kubelet.namespace = f"team-{next(NUMBERS)}"
    cluster.kubelet.asked.clear()
    cluster.ask(lambda api: api.create(NAMESPACES, {"metadata": {"name": cluster.namespace}}))
    cache = {
        "apiVersion": "ragcache.dev/v1alpha1",
        "kind": "RagCache",
        "metadata": {"name": "docs", "namespace": cluster.namespace},
        "spec": {},
    }

    def is_created() -> bool:
        try:
            cluster.ask(lambda api: api.create(RAG_CACHES, cache))
        except ApiError:
            return False
        return True

    wait_until(is_created, "a kind, shortly after its definition exists")
    return cluster


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_without_the_kinds_it_says_to_install_them(cluster: Cluster) -> None:
    bare = cluster.run("status", "-n", "default")
    assert bare.exit_code == 2
    assert bare.stderr == (
        "ragcache: cluster: it does not know the kind RagCache; run `ragcache install` first\n"
    )


def test_install_prints_or_makes_the_objects(cluster: Cluster, tmp_path: Path) -> None:
    printed = cluster.run("install", "--dry-run", "--set", "replicas=3", "-n", "here")
    assert printed.exit_code == 0
    objects = [obj for obj in yaml.safe_load_all(printed.stdout) if obj]
    [deployment] = [obj for obj in objects if obj["kind"] == "Deployment"]
    assert deployment["metadata"]["namespace"] == "here"
    assert deployment["spec"]["replicas"] == 3
    assert cluster.ask(lambda api: api.get(NAMESPACES, "here")) is None

    words = ("install", "--dry-run", "--set", "replicas=3", "-n", "here", "--output", "json")
    as_json = json.loads(cluster.run(*words).stdout)
    assert as_json.keys() == {"name", "namespace", "revision", "manifest", "notes", "was_there"}
    assert (as_json["name"], as_json["namespace"]) == ("ragcache-operator", "here")
    assert (as_json["revision"], as_json["was_there"]) == (1, False)
    assert [obj for obj in yaml.safe_load_all(as_json["manifest"]) if obj] == objects

    values = tmp_path / "values.yaml"
    values.write_text("replicas: 1\n")
    made = cluster.run("install", "--values", values)
    assert (made.exit_code, made.stderr) == (0, "")
    assert lines(made.stdout)[0] == (
        "installed ragcache-operator in namespace ragcache-system (revision 1)"
    )
    again = cluster.run("install")
    assert lines(again.stdout)[0] == (
        "upgraded ragcache-operator in namespace ragcache-system (revision 2)"
    )
    refused = cluster.run("install", "--set", "replica=3")
    assert refused.exit_code == 2
    assert refused.stderr.startswith(
        "ragcache: values: additional properties 'replica' not allowed; see "
    )
    unready = cluster.run("install", "--wait", "--timeout", 1)
    assert unready.exit_code == 1
    assert unready.stderr.startswith("ragcache: the operator is unavailable: not ready after 1 s")


def test_status_shows_what_the_object_says(docs: Cluster) -> None:
    unseen = docs.run("status", "-n", docs.namespace)
    assert unseen.exit_code == 1
    as_json = docs.run("status", "-n", docs.namespace, "--output", "json")
    found = json.loads(as_json.stdout)
    assert (as_json.exit_code, found["ready"], found["status"]) == (1, False, {})
    assert unseen.stdout.startswith(
        f"docs in namespace {docs.namespace}: no operator has looked at it yet"
    )
    status = {
        "observedGeneration": 1,
        "phase": "Ready",
        "model": "tinyrag",
        "endpoints": {"gateway": "http://docs-gateway.team.svc:8080"},
        "gateway": {"replicas": 1, "readyReplicas": 1, "selector": "a=b"},
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Answering",
                "message": "the gateway answers questions",
                "lastTransitionTime": "2026-05-01T12:00:00Z",
                "observedGeneration": 1,
            }
        ],
        "retriever": {
            "replicas": 2,
            "readyReplicas": 1,
            "remakeProgress": "12 of 40",
            "remakes": [
                {"collection": "faq", "documentsDone": 12, "documents": 40, "reason": "embedder"}
            ],
        },
        "cache": {"bytes": 1_000_000, "hitRate": "0.50"},
    }
    patch = {"status": status}
    docs.ask(lambda api: api.merge(RAG_CACHES, "docs", docs.namespace, patch, "status"))
    as_json = docs.run("status", "docs", "-n", docs.namespace, "--output", "json")
    assert json.loads(as_json.stdout) == {
        "name": "docs",
        "namespace": docs.namespace,
        "ready": True,
        "status": status,
    }
    ready = docs.run("status", "docs", "-n", docs.namespace)
    assert (ready.exit_code, ready.stderr) == (0, "")
    shown = lines(ready.stdout)
    assert shown[0] == (
        f"docs in namespace {docs.namespace}: Ready; tinyrag at http://docs-gateway.team.svc:8080"
    )
    assert "gateway 1/1" in shown
    assert any(line.startswith("Ready True ") for line in shown)
    assert shown[-2:] == [
        "cache: 1.0 MB; 50% of reads hit",
        "remake of faq: 12 of 40 documents (embedder)",
    ]
    as_json = docs.run("status", "docs", "-n", docs.namespace, "--output", "json")
    assert json.loads(as_json.stdout)["status"]["retriever"] == status["retriever"]


def test_status_says_what_is_missing(docs: Cluster) -> None:
    elsewhere = docs.run("status")
    assert elsewhere.exit_code == 2
    assert elsewhere.stderr == (
        "ragcache: NAME: there is no RagCache in namespace default; -n names another namespace\n"
    )
    unknown = docs.run("status", "wiki", "-n", docs.namespace)
    assert unknown.exit_code == 2
    assert unknown.stderr == (
        "ragcache: RagCache 'wiki' does not exist; "
        f"there is docs in namespace {docs.namespace}; -n names another\n"
    )
    denied = docs.run(
        "status", "-n", docs.namespace, kubeconfig=docs.plane.kubeconfig_for(STRANGER)
    )
    assert denied.exit_code == 1
    assert "ragcaches.ragcache.dev is forbidden" in denied.stderr
    nowhere = docs.run("status", "--context", "nowhere")
    assert nowhere.exit_code == 2
    assert nowhere.stderr.startswith("ragcache: kubeconfig: names no cluster: ")


def test_the_contexts_namespace_is_meant(docs: Cluster, tmp_path: Path) -> None:
    config = yaml.safe_load(docs.plane.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = docs.namespace
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    assert docs.run("status", kubeconfig=kubeconfig).stdout.startswith(
        f"docs in namespace {docs.namespace}"
    )


def test_logs_of_every_pod_come_behind_its_name(docs: Cluster) -> None:
    none = docs.run("logs", "-n", docs.namespace)
    assert none.exit_code == 2
    assert none.stderr.startswith("ragcache: pod of 'docs' does not exist; `ragcache status`")
    docs.kubelet.pieces = {"docs-gateway-a": ["one\ntwo\n"], "docs-retriever-0": ["three\n"]}
    docs.put_pod("docs-gateway-a", "gateway")
    docs.put_pod("docs-retriever-0", "retriever")
    docs.put_pod("docs-engine-main-b", "engine", restarts=None)
    every = docs.run("logs", "docs", "-n", docs.namespace, "--tail", 7)
    assert (every.exit_code, every.stderr) == (0, "")
    assert every.stdout.splitlines() == [
        "docs-engine-main-b | (Pending)",
        "docs-gateway-a | one",
        "docs-gateway-a | two",
        "docs-retriever-0 | three",
    ]
    assert [query["tailLines"] for query in docs.kubelet.asked] == ["7", "7"]
    one = docs.run("logs", "retriever", "-n", docs.namespace)
    assert one.stdout == "docs-retriever-0 | three\n"


def test_following_goes_on_after_a_cut_and_with_the_next_run(docs: Cluster) -> None:
    start = "2026-05-01T12:00:00"
    docs.kubelet.pieces = {
        "docs-gateway-a": [
            f"{start}.5Z one\n{start}.75Z two\n",
            # From the second on, because the API knows no parts of one.
            f"{start}.75Z two\n{start}.8Z three\n",
            f"{start}.8Z three\n",
        ]
    }
    docs.kubelet.whole = {"docs-gateway-a": f"{start}.9Z four\n"}
    docs.put_pod("docs-gateway-a", "gateway")
    seen: list[str] = []

    async def follow(api: Api) -> None:
        arrived = {text: asyncio.Event() for text in ("one", "two", "three", "four")}

        def show(pod: str, text: str) -> None:
            seen.append(text)
            arrived[text].set()

        following = asyncio.create_task(
            follow_pods(api, docs.namespace, "docs", None, 5, show),
        )
        async with asyncio.timeout(60):
            await arrived["three"].wait()
            await asyncio.to_thread(docs.put_pod, "docs-gateway-a", "gateway", restarts=1)
            await arrived["four"].wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    docs.ask(follow)
    assert seen == ["one", "two", "three", "four"]
    queries = docs.kubelet.asked
    assert queries[0]["tailLines"] == "5"
    assert queries[1]["sinceTime"] == f"{start}Z"


def test_who_may_not_read_logs_is_told(docs: Cluster) -> None:
    stranger = docs.plane.kubeconfig_for(STRANGER)
    for words in (("logs",), ("logs", "--follow")):
        denied = docs.run(*words, "-n", docs.namespace, kubeconfig=stranger)
        assert denied.exit_code == 1
        assert "forbidden" in denied.stderr
