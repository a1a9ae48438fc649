"""The CRDs on a real API server: validation, defaults, subresources and kubectl output."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.availability import Unavailable, skip
from harness.cluster.control_plane import ControlPlane, start_control_plane
from ragcache_operator.spec.crd import KINDS, ResourceKind
from ragcache_operator.spec.manifest import parse
from tests.kit.manifests import (
    BAD,
    Bad,
    Object,
    RejectedBy,
    cache,
    collection,
    examples,
    golden_specs,
    source,
)

ROOT = Path(__file__).parents[3]
PLURALS = {kind.name: kind.plural for kind in KINDS}
_PUBLISHING_LIMIT_S = 60


class CrdServer:
    """An API server with the definitions installed."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        trust = ssl.create_default_context(cafile=str(plane.certificates.authority))
        self.http = httpx.Client(
            base_url=plane.url,
            headers={"Authorization": f"Bearer {plane.token}"},
            verify=trust,
            trust_env=False,
            timeout=60,
        )

    def path(self, manifest: Object, *more: str) -> str:
        plural = PLURALS[manifest["kind"]]
        return "/".join(("/apis", manifest["apiVersion"], "namespaces", "default", plural, *more))

    def create(self, manifest: Object, *, keep: bool = False) -> httpx.Response:
        query = {} if keep else {"dryRun": "All"}
        return self.http.post(self.path(manifest), params=query, json=manifest)

    def delete(self, manifest: Object) -> None:
        self.http.delete(self.path(manifest, manifest["metadata"]["name"])).raise_for_status()

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        done = subprocess.run(
            [
                *("kubectl", "--kubeconfig", str(self.plane.kubeconfig)),
                *("--cache-dir", str(self.plane.folder / "discovered"), *arguments),
            ],
            check=False,
            capture_output=True,
            text=True,
            input=given,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrdServer]:
    try:
        stack = start_control_plane(tmp_path_factory.mktemp("definitions"))
        plane = stack.__enter__()
    except Unavailable as reason:
        skip(reason)
    server = CrdServer(plane)
    try:
        install(server)
        yield server
    finally:
        server.http.close()
        stack.__exit__(None, None, None)


def install(server: CrdServer) -> None:
    server.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    # `kubectl explain` data is published shortly after the kinds are served. (`kubectl wait` ends
    # with an error where a definition is so new that it has no conditions.)
    for _ in range(_PUBLISHING_LIMIT_S):
        published = server.http.get("/openapi/v2").text
        named = all(f'"{kind.name}"' in published for kind in KINDS)
        if named and all(conditions(server, kind).get("Established") == "True" for kind in KINDS):
            # kubectl caches the discovery of the server.
            shutil.rmtree(server.plane.folder / "discovered")
            return
        time.sleep(1)
    raise AssertionError("the server does not publish the definitions' schemas")


def conditions(server: CrdServer, kind: ResourceKind) -> dict[str, str]:
    """Return the status of each condition of a definition. A new definition has none."""
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind.definition_name}"
    reply = server.http.get(path).raise_for_status().json()
    return {c["type"]: c["status"] for c in reply.get("status", {}).get("conditions") or ()}


def test_definitions_are_served_as_written(server: CrdServer) -> None:
    for kind in KINDS:
        found = conditions(server, kind)
        assert found["Established"] == "True"
        # The server sets this condition for a definition that is not structural.
        assert "NonStructuralSchema" not in found


def refusal(reply: httpx.Response) -> str:
    assert reply.status_code == 422, reply.text
    return str(reply.json()["message"])


@pytest.mark.parametrize(
    "bad", [bad for bad in BAD if bad.rejected_by is RejectedBy.SCHEMA], ids=lambda bad: bad.name
)
def test_the_schema_rejects_with_a_path(server: CrdServer, bad: Bad) -> None:
    message = refusal(server.create(bad.manifest))
    field = bad.server or bad.field
    # Older servers omit list indexes.
    without_positions = re.sub(r"\[[0-9]+\]", "", field)
    assert f"{field}:" in message or f"{without_positions}:" in message


@pytest.mark.parametrize(
    "bad", [bad for bad in BAD if bad.rejected_by is RejectedBy.CEL], ids=lambda bad: bad.name
)
def test_cel_rejects_with_a_path(server: CrdServer, bad: Bad) -> None:
    if bad.old is None:
        reply = server.create(bad.manifest)
    else:
        made = server.create(bad.old, keep=True)
        made.raise_for_status()
        version = made.json()["metadata"]["resourceVersion"]
        metadata = {**bad.manifest["metadata"], "resourceVersion": version}
        name = metadata["name"]
        reply = server.http.put(
            server.path(bad.manifest, name),
            params={"dryRun": "All"},
            json={**bad.manifest, "metadata": metadata},
        )
        server.delete(bad.old)
    if server.plane.is_translated:
        # The older server behind the translator has no CEL.
        assert reply.is_success, reply.text
    else:
        assert bad.field.removesuffix("[0]") in refusal(reply)


@pytest.mark.parametrize(
    "bad",
    [bad for bad in BAD if bad.rejected_by in (RejectedBy.OPERATOR, RejectedBy.PARSER)],
    ids=lambda b: b.name,
)
def test_the_server_accepts_what_only_the_operator_or_the_parser_rejects(
    server: CrdServer, bad: Bad
) -> None:
    assert server.create(bad.manifest).is_success


FULL = [
    *(cache(**spec) for spec in golden_specs().values()),
    collection(
        collection="manual",
        chunking={"size": 96, "overlap": 16, "window": 2},
        prune=False,
        sync={"interval": "1h30m"},
        sources=[
            {"configMap": {"name": "pages"}},
            {"volume": {"claimName": "docs", "path": "handbook"}},
            {"http": {"url": "https://e.com/a.zip?v=1", "bearerSecret": {"name": "s"}}},
            {"git": {"url": "https://e.com/a.git", "ref": "v1.2", "path": "docs"}},
        ],
    ),
    source(http={"url": "http://files/handbook.md"}),
    *examples(),
]


@pytest.mark.parametrize("manifest", FULL, ids=range(len(FULL)))
def test_all_fields_are_stored_and_defaults_equal_the_parsers(
    server: CrdServer, manifest: Object
) -> None:
    reply = server.create(manifest)
    assert reply.status_code == 201, reply.text
    stored = reply.json()
    assert covers(stored["spec"], manifest["spec"])
    manifest = {**manifest, "metadata": {"name": manifest["metadata"]["name"]}}
    assert parse(stored).spec == parse(manifest).spec


def covers(stored: Any, given: Any) -> bool:
    """Whether the stored value contains everything that was given."""
    if isinstance(given, dict):
        return all(key in stored and covers(stored[key], item) for key, item in given.items())
    if isinstance(given, list):
        return len(stored) == len(given) and all(map(covers, stored, given))
    return bool(stored == given)


def test_status_and_scale_are_subresources(server: CrdServer) -> None:
    manifest = cache("scaled")
    server.create(manifest, keep=True).raise_for_status()
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Answering",
        "message": "the gateway answers questions",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }
    status = {
        "observedGeneration": 1,
        "phase": "Ready",
        "conditions": [condition],
        "progress": "gateway: 0 of 1 replicas are ready",
        "model": "tinyrag",
        "endpoints": {"gateway": "http://scaled-gateway.default.svc:8080"},
        "gateway": {"replicas": 1, "readyReplicas": 1, "selector": "app=gateway"},
        "engines": [{"name": "main", "replicas": 1, "readyReplicas": 1}],
        "enginesReady": "1/1",
        "retriever": {
            "replicas": 2,
            "readyReplicas": 1,
            "remakeProgress": "12 of 40",
            "remakes": [
                {"collection": "faq", "documentsDone": 12, "documents": 40, "reason": "embedder"}
            ],
        },
        "cacheStore": {"shards": 1, "readyShards": 1},
        "cache": {"hitRate": "0.83", "bytes": 1 << 40},
    }
    path = server.path(manifest, "scaled")
    merge = {"Content-Type": "application/merge-patch+json"}
    content = json.dumps({"status": status})
    kept = server.http.patch(f"{path}/status", content=content, headers=merge)
    assert kept.is_success, kept.text
    assert kept.json()["status"] == status
    assert kept.json()["metadata"]["generation"] == 1
    server.kubectl("scale", "ragcaches/scaled", "--replicas=3")
    scaled = server.http.get(path).json()
    assert scaled["spec"]["gateway"]["replicas"] == 3
    scale = server.http.get(f"{path}/scale").json()
    assert scale["status"] == {"replicas": 1, "selector": "app=gateway"}
    printed = server.kubectl("get", "rgc", "scaled").splitlines()
    assert printed[0].split() == ["NAME", "READY", "PHASE", "ENGINES", "HIT", "RATE", "AGE"]
    assert printed[1].split()[:5] == ["scaled", "True", "Ready", "1/1", "0.83"]
    wide = server.kubectl("get", "rgc", "scaled", "-o", "wide")
    assert "tinyrag" in wide
    assert "http://scaled-gateway.default.svc:8080" in wide
    assert "12 of 40" in wide
    server.delete(manifest)


def test_names_and_categories_find_both_kinds(server: CrdServer) -> None:
    made = [cache("listed"), collection("listed")]
    for manifest in made:
        server.create(manifest, keep=True).raise_for_status()
    names = {"ragcache.ragcache.dev/listed", "ragcollection.ragcache.dev/listed"}
    for category in ("rag", "all"):
        assert names <= set(server.kubectl("get", category, "-o", "name").split())
    assert "listed" in server.kubectl("get", "rgcol")
    for manifest in made:
        server.delete(manifest)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("ragcaches", "RagCache is a platform that answers questions"),
        ("ragcaches.spec.engines", "Groups of vLLM engines"),
        ("ragcaches.spec.engines.kvMemory", "paged KV cache, rounded up to whole GiB"),
        ("ragcaches.status.cache.hitRate", "Share of reads that found a variant"),
        ("ragcollections.spec.sources", "The sources of the documents"),
        ("ragcollections.spec.sources.git.ref", "Branch, tag or commit to read"),
    ],
)
def test_explain_reads_well(server: CrdServer, path: str, words: str) -> None:
    said = " ".join(server.kubectl("explain", path).split())
    assert words in said
    assert "<no description>" not in said


def test_explain_lists_every_field_with_its_description(server: CrdServer) -> None:
    said = " ".join(server.kubectl("explain", "ragcaches.spec.engines").split())
    for name in (
        "args",
        "autoscaling",
        "device",
        "hostTier",
        "kvMemory",
        "name",
        "replicas",
        "resources",
        "role",
        "unsafeArgs",
    ):
        assert re.search(rf"{name} <[^>]*>", said), name
    assert "Further arguments of vLLM's server" in said
