"""The whole product on a real Kubernetes: chart, object, pods, vLLM, volumes, answers.

The tests are one story in their order, on one cluster; each names the step it is.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from harness.cluster.timeline import step
from models.tinyrag.handbook import Handbook
from tests.cluster.cluster import Cluster
from tests.cluster.platform import (
    COLLECTION,
    DOCUMENTS,
    NAME,
    NAMESPACE,
    SYSTEM,
    Platform,
    bring_images,
    collection_of_config_map,
    handbook,
    is_furnished,
    make_namespace,
    namespace_contents,
    quickstart,
    single_questions,
)
from tests.cluster.strangers import METHODS, Stranger

pytestmark = [pytest.mark.images, pytest.mark.timeout(1200)]

_VOLUMES = 6
_KEPT = {
    "collection": "kept",
    "id": "attic.md",
    "text": "# Attic\n\nThe ladder to the attic hangs behind the door.\n",
}
"""A document that no RagCollection would bring again."""


@pytest.fixture(scope="module")
def book() -> Handbook:
    return handbook()


@pytest.fixture(scope="module")
def platform(cluster: Cluster) -> Platform:
    """A cluster with this checkout's images, volumes for claims, and the operator installed."""
    bring_images(cluster)
    cluster.make_volumes(_VOLUMES, "20Gi")
    platform = Platform(cluster)
    with step("operator installed"):
        platform.install()
    make_namespace(cluster)
    return platform


@pytest.fixture(scope="module")
def untouched(platform: Platform) -> frozenset[str]:
    """What the namespace holds before anything is applied to it."""
    cluster = platform.cluster
    cluster.wait_until(lambda: is_furnished(namespace_contents(cluster)), "furnished namespace", 60)
    return namespace_contents(cluster)


@pytest.fixture(scope="module")
def running(platform: Platform, untouched: frozenset[str], book: Handbook) -> Platform:
    """The example applied, ready, with a collection of a ConfigMap in it."""
    with step("from apply to Ready"):
        platform.cluster.apply(quickstart())
        platform.wait_settled("ready RagCache")
    with step("collection synced"):
        platform.cluster.apply(*collection_of_config_map(book))
        platform.cluster.wait_until(
            lambda: platform.status("ragcollection", COLLECTION).get("documents") == DOCUMENTS,
            "synced collection",
            120,
        )
    return platform


def test_the_object_tells_the_truth_once_it_is_ready(running: Platform) -> None:
    status = running.status()
    assert {c["type"]: c["status"] for c in status["conditions"]} == dict.fromkeys(
        (
            *("Accepted", "CacheStoreReady", "RetrieverReady", "EnginesReady", "GatewayReady"),
            *("SelfTestPassed", "Ready"),
        ),
        "True",
    )
    assert status["enginesReady"] == "1/1"
    printed = running.cluster.kubectl("get", "ragcaches", f"--namespace={NAMESPACE}")
    assert NAME in printed
    assert "1/1" in printed
    assert "EnginesReady" in running.ragcache("status", NAME, "-n", NAMESPACE)
    assert running.events("Answering")


def test_questions_are_answered_with_citations(running: Platform, book: Handbook) -> None:
    questions = single_questions(book, 6)
    with step("six questions answered"):
        right = [running.answer(question.text).is_right(question) for question in questions]
    # The model copies a word wrongly now and then; models/tinyrag/evaluate.py measures how often.
    assert sum(right) >= 5, right


def test_kv_of_chunks_comes_out_of_the_store_when_the_engine_has_lost_it(
    running: Platform, book: Handbook
) -> None:
    [question] = single_questions(book, 1)
    running.answer(question.text)
    with running.admin_client() as client:
        running.cluster.wait_until(
            lambda: client.get("/v1/cache").json()["variants"] > 0, "stored variants", 30
        )
    with step("engine killed and back"):
        _kill(running, "engine")
        running.wait_settled("engine back")
    reply = running.ask(question.text).json()
    assert reply["ragcache"]["cache"]["loaded_tokens"] > 0


def test_the_collection_follows_its_config_map(running: Platform, book: Handbook) -> None:
    gone = book.documents[0].id
    with step("a removed page is gone from the collection"):
        running.cluster.kubectl(
            *("patch", "configmap", COLLECTION, f"--namespace={NAMESPACE}", "--type=json"),
            f'--patch=[{{"op": "remove", "path": "/data/{gone}.md"}}]',
        )
        running.cluster.wait_until(
            lambda: running.status("ragcollection", COLLECTION)["documents"] == DOCUMENTS - 1,
            "collection that follows",
            180,
        )
    with running.admin_client() as client:
        listed = client.get(
            "/v1/documents", params={"collection": COLLECTION, "limit": 1000}
        ).json()["data"]
    assert f"{gone}.md" not in {document["id"] for document in listed}


def test_gateway_and_store_scale_and_nothing_else_rolls(running: Platform) -> None:
    before = {part: running.pods(part) for part in ("engine", "retriever", "gateway", "cachestore")}
    with step("gateway and store scaled to two"):
        # The scale subresource, as an autoscaler uses it.
        running.cluster.kubectl(
            "scale", "ragcache", NAME, f"--namespace={NAMESPACE}", "--replicas=2"
        )
        running.patch({"cacheStore": {"shards": 2}})
        running.wait_settled("scaled platform")
    assert len(running.pods("gateway")) == len(running.pods("cachestore")) == 2
    for part, pods in before.items():
        assert pods.items() <= running.pods(part).items(), f"{part} rolled"

    def both_known() -> bool:
        with running.admin_client() as client:
            said = client.get("/v1/cache").json()
        return [shard["up"] for shard in said["shards"]] == [True, True]

    with step("gateways know both shards"):
        running.cluster.wait_until(both_known, "gateway that knows both shards", 120)


def test_a_changed_part_rolls_alone(running: Platform) -> None:
    before = {part: running.pods(part) for part in ("engine", "retriever", "gateway", "cachestore")}
    with step("store rolled for its memory"):
        running.patch({"cacheStore": {"memory": "640Mi"}})
        running.wait_settled("rolled store")
    for part in ("engine", "retriever", "gateway"):
        assert running.pods(part) == before[part], f"{part} rolled"
    assert not set(running.pods("cachestore").values()) & set(before["cachestore"].values())


@pytest.mark.parametrize("part", ["gateway", "retriever", "cachestore"])
def test_killed_pods_come_back(running: Platform, book: Handbook, part: str) -> None:
    with step(f"{part} killed and back"):
        _kill(running, part)
        running.wait_settled(f"{part} back")
    [question] = single_questions(book, 1)
    assert running.answer(question.text).documents


def test_a_killed_operator_is_followed_by_the_other_and_drift_is_corrected(
    running: Platform,
) -> None:
    cluster = running.cluster
    lease = cluster.get_all("leases", SYSTEM)[0]
    leader = lease["spec"]["holderIdentity"].rpartition("_")[0]
    with step("operator killed, drift corrected by the other"):
        cluster.kubectl(
            "delete", "pod", leader, f"--namespace={SYSTEM}", "--grace-period=0", "--force"
        )
        service = f"{NAME}-gateway"
        cluster.kubectl("delete", "service", service, f"--namespace={NAMESPACE}")
        cluster.wait_until(
            lambda: (
                service in [s["metadata"]["name"] for s in cluster.get_all("services", NAMESPACE)]
            ),
            "Service restored",
            120,
        )
    holder = cluster.get_all("leases", SYSTEM)[0]["spec"]["holderIdentity"]
    assert not holder.startswith(f"{leader}_")
    running.wait_settled("settled platform")
    # The new Service has another address, which the node's proxy learns a moment later.
    with step("Service answers at its new address"):
        cluster.wait_until(lambda: _answers(running), "Service that answers", 60)


def test_requests_without_a_key_and_documents_on_the_first_port_are_refused(
    running: Platform,
) -> None:
    with httpx.Client(base_url=running.url, timeout=60, trust_env=False) as client:
        assert client.get("/v1/models").status_code == 401
    with running.admin_client() as client:
        client.base_url = running.url
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/documents").status_code == 404


def test_no_port_of_a_pod_serves_a_stranger(running: Platform, tmp_path: Path) -> None:
    """A network without policies lets each pod reach all of them."""
    stranger = Stranger.of(running.cluster, tmp_path, NAME, NAMESPACE)
    tried, served = set(), {}
    for part in ("gateway", "retriever", "engine", "cachestore"):
        for pod in running.running_pods(part):
            for port in (one for each in pod["spec"]["containers"] for one in each["ports"]):
                address = f"{pod['status']['podIP']}:{port['containerPort']}"
                tried.add((part, port["name"]))
                if found := stranger.served_by(part, port["name"], address):
                    served[part, port["name"]] = found
    assert served == {}
    assert {(part, "grpc") for part in METHODS} <= tried
    assert {
        ("cachestore", "data"),
        ("engine", "http"),
        ("gateway", "http"),
        ("gateway", "admin"),
    } <= tried


def test_a_document_comes_over_rest_too(running: Platform) -> None:
    with running.admin_client() as client:
        made = client.put(f"/v1/collections/{_KEPT['collection']}", json={})
        assert made.status_code == 200, made.text
        written = client.post("/v1/documents", json=_KEPT)
        assert written.status_code == 200, written.text
    assert _kept_text(running) == _KEPT["text"]


def test_nothing_is_left_of_a_deleted_object_but_what_its_policy_keeps(
    running: Platform, untouched: frozenset[str]
) -> None:
    cluster = running.cluster
    with step("collection deleted"):
        cluster.kubectl(
            *("delete", f"ragcollection/{COLLECTION}", f"configmap/{COLLECTION}"),
            f"--namespace={NAMESPACE}",
        )
    with step("RagCache deleted"):
        cluster.kubectl("delete", "ragcache", NAME, f"--namespace={NAMESPACE}", "--timeout=180s")

    # The documents, and two shards of the store.
    kept = {
        f"persistentvolumeclaim/data-{NAME}-{pod}"
        for pod in ("retriever-0", "cachestore-0", "cachestore-1")
    }
    _wait_for_contents(cluster, untouched | kept)


def test_a_new_object_of_the_name_finds_its_documents_again(running: Platform) -> None:
    with step("from apply to Ready on kept volumes"):
        running.cluster.apply(quickstart())
        running.patch({"dataPolicy": "Delete"})
        running.wait_settled("ready RagCache")
    assert _kept_text(running) == _KEPT["text"]


def test_with_the_policy_delete_the_data_goes_too(
    running: Platform, untouched: frozenset[str]
) -> None:
    cluster = running.cluster
    with step("RagCache deleted with its data"):
        cluster.kubectl("delete", "ragcache", NAME, f"--namespace={NAMESPACE}", "--timeout=180s")
        _wait_for_contents(cluster, untouched)


def _answers(platform: Platform) -> bool:
    """Whether the gateway's Service leads to a ready gateway."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{platform.url}/readyz", timeout=5, trust_env=False).status_code == 200
    return False


def _kept_text(platform: Platform) -> str:
    with platform.admin_client() as client:
        reply = client.get(
            f"/v1/documents/{_KEPT['id']}", params={"collection": _KEPT["collection"]}
        )
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["text"]
    return text


def _wait_for_contents(cluster: Cluster, wanted: frozenset[str]) -> None:
    """Wait until the namespace holds this and nothing else."""
    # Endpoints and the like are collected by their own controllers a moment later.
    with suppress(TimeoutError):
        cluster.wait_until(lambda: namespace_contents(cluster) == wanted, "clean namespace", 60)
    assert namespace_contents(cluster) == wanted


def _kill(platform: Platform, component: str) -> None:
    """Delete a pod of a component without grace, as a lost node would."""
    before = platform.pods(component)
    name = sorted(before)[0]
    platform.cluster.kubectl(
        "delete", "pod", name, f"--namespace={NAMESPACE}", "--grace-period=0", "--force"
    )
    platform.cluster.wait_until(
        lambda: platform.is_replaced(component, before), "pod replaced and ready", 300
    )
    # By then the object has said so, or need not any more.
    time.sleep(1)
