"""The whole product on a real Kubernetes: chart, object, pods, vLLM, volumes, answers.

The tests are one story in their order, on one cluster; each names the step it is.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

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
_ENGINES = (f"{NAME}-engine-main-0", f"{NAME}-engine-main-1")
"""Pods of the engines with a shard beside each."""
_SMALL = {"kvMemory": "1Gi", "resources": {"cpu": "300m"}}
"""A third of a core, so that two engines with their shards find room on two."""
_TRANSPORTS = ("shared", "socket")
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
    tried = _try_ports(running, tmp_path, "gateway", "retriever", "engine", "cachestore")
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
    engine = {"name": "main", "replicas": 2, **_SMALL}
    with step("from apply to Ready on kept volumes, with shards beside the engines"):
        running.cluster.apply(
            quickstart(engines=[engine], cacheStore={"placement": "colocated"}, dataPolicy="Delete")
        )
        running.wait_settled("ready RagCache")
    assert _kept_text(running) == _KEPT["text"]
    assert running.status()["cacheStore"] == {"shards": 2, "readyShards": 2}


def test_no_port_of_a_shard_beside_an_engine_serves_a_stranger(
    running: Platform, tmp_path: Path
) -> None:
    assert {("engine", "store"), ("engine", "data")} <= _try_ports(running, tmp_path, "engine")


def test_an_engine_loads_what_another_has_put_into_the_shards_beside_both(
    running: Platform, book: Handbook
) -> None:
    with running.admin_client() as client:
        for document in book.documents:
            written = {**_KEPT, "id": f"{document.id}.md", "text": document.text}
            reply = client.post("/v1/documents", json=written)
            assert reply.status_code == 200, reply.text
    questions = [question.text for question in single_questions(book, 6)]
    before = {name: _prompt_tokens(running, name) for name in _ENGINES}
    with step("six questions answered"):
        for question in questions:
            _ask_kept(running, question)
    computed = {name: _prompt_tokens(running, name) - before[name] for name in _ENGINES}
    # The engine that computed most is the one that ends.
    first, second = sorted(_ENGINES, key=lambda name: computed[name], reverse=True)

    def stored() -> bool:
        puts = [_counts(running, name, "puts") for name in _ENGINES]
        return all(sum(one[transport] for one in puts) > 0 for transport in _TRANSPORTS)

    running.cluster.wait_until(stored, "values put into the shards of both pods", 60)
    hits = {name: _counts(running, name, "hits") for name in _ENGINES}
    with step("the other engine loads"):
        # Its shard runs on in the same pod.
        running.cluster.kubectl(
            *("exec", first, f"--namespace={NAMESPACE}", "--container=engine", "--"),
            *("python", "-c", "import os, signal; os.kill(1, signal.SIGTERM)"),
        )
        running.cluster.wait_until(
            lambda: not _is_container_ready(running, first, "engine"), "engine that ended", 60
        )
        loaded = [
            _ask_kept(running, question)["ragcache"]["cache"]["loaded_tokens"]
            for question in questions
        ]
    assert sum(loaded) > 0, loaded
    after = {name: _counts(running, name, "hits") for name in _ENGINES}
    assert after[second]["shared"] > hits[second]["shared"], (hits, after)
    assert after[first]["socket"] > hits[first]["socket"], (hits, after)
    with step("both engines ready"):
        running.wait_settled("engine back")


def test_an_engine_that_goes_takes_its_share_of_the_variants_alone(
    running: Platform, book: Handbook
) -> None:
    kept, _ = _ENGINES
    shares = {name: _variants(running, name) for name in _ENGINES}
    assert min(shares.values()) > 0
    with step("scaled to one engine"):
        running.patch({"engines": [{"name": "main", "replicas": 1, **_SMALL}]})
        running.wait_settled("one engine")

    def shards() -> list[dict[str, object]]:
        with running.admin_client() as client:
            found: list[dict[str, object]] = client.get("/v1/cache").json()["shards"]
            return found

    with step("gateways know the remaining shard"):
        running.cluster.wait_until(lambda: len(shards()) == 1, "gateway with one shard", 120)
    assert set(running.pods("engine")) == {kept}
    # None is lost. Saves that were under way may have added some.
    assert _variants(running, kept) >= shares[kept]
    [question] = single_questions(book, 1)
    assert _ask_kept(running, question.text)["choices"][0]["message"]["content"].strip()


def test_with_the_policy_delete_the_data_goes_too(
    running: Platform, untouched: frozenset[str]
) -> None:
    cluster = running.cluster
    with step("RagCache deleted with its data"):
        cluster.kubectl("delete", "ragcache", NAME, f"--namespace={NAMESPACE}", "--timeout=180s")
        _wait_for_contents(cluster, untouched)


def _try_ports(platform: Platform, folder: Path, *parts: str) -> set[tuple[str, str]]:
    """Try every port of components as a stranger. Return them by component and name."""
    stranger = Stranger.of(platform.cluster, folder, NAME, NAMESPACE)
    tried, served = set(), {}
    for part in parts:
        for pod in platform.running_pods(part):
            for port in (one for each in pod["spec"]["containers"] for one in each["ports"]):
                address = f"{pod['status']['podIP']}:{port['containerPort']}"
                tried.add((part, port["name"]))
                if found := stranger.served_by(part, port["name"], address):
                    served[part, port["name"]] = found
    assert served == {}
    return tried


def _ask_kept(platform: Platform, question: str) -> dict[str, Any]:
    reply = platform.ask(question, collection=_KEPT["collection"])
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def _metric(platform: Platform, pod: str, port: int, name: str) -> list[Sample]:
    """Return the samples of one metric of a pod's container."""
    address = platform.cluster.get("pod", pod, NAMESPACE)["status"]["podIP"]
    text = httpx.get(f"http://{address}:{port}/metrics", timeout=10, trust_env=False).text
    families = text_string_to_metric_families(text)
    return [one for family in families for one in family.samples if one.name == name]


def _prompt_tokens(platform: Platform, pod: str) -> float:
    """Return the tokens of all prompts of an engine."""
    return sum(one.value for one in _metric(platform, pod, 9464, "vllm:prompt_tokens_total"))


def _counts(platform: Platform, pod: str, what: str) -> Counter[str]:
    """Return the hits or puts of the shard in a pod, by the transport."""
    found: Counter[str] = Counter()
    for one in _metric(platform, pod, 8081, f"ragcache_store_{what}_total"):
        found[one.labels["transport"]] += int(one.value)
    return found


def _variants(platform: Platform, pod: str) -> int:
    [sample] = _metric(platform, pod, 8081, "ragcache_store_variants")
    return int(sample.value)


def _is_container_ready(platform: Platform, pod: str, container: str) -> bool:
    statuses = platform.cluster.get("pod", pod, NAMESPACE)["status"]["containerStatuses"]
    return any(one["name"] == container and one["ready"] for one in statuses)


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
