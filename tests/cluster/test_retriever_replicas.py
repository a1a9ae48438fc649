"""A RagCache with three retrievers on a real Kubernetes keeps answering when the writer is lost."""

from __future__ import annotations

from contextlib import suppress

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
    Platform,
    bring_images,
    collection_of_config_map,
    handbook,
    make_namespace,
    quickstart,
    single_questions,
)

pytestmark = [pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(1800)]

_VOLUMES = 6
_LEASE = f"{NAME}-retriever-writer"
_REPLICAS = {"replicas": 3, "resources": {"cpu": "50m"}}
_KEPT = {
    "collection": "kept",
    "id": "attic.md",
    "text": "# Attic\n\nThe ladder is behind the door.\n",
}


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Platform:
    """The example with three retrievers, ready, with a collection."""
    bring_images(cluster)
    cluster.make_volumes(_VOLUMES, "20Gi")
    platform = Platform(cluster)
    with step("operator installed"):
        platform.install()
    make_namespace(cluster)
    with step("from apply to Ready"):
        cluster.apply(quickstart(retriever=_REPLICAS))
        platform.wait_settled("ready RagCache", 600)
    with step("collection synced"):
        cluster.apply(*collection_of_config_map(handbook()))
        cluster.wait_until(
            lambda: platform.status("ragcollection", COLLECTION).get("documents") == DOCUMENTS,
            "synced collection",
            180,
        )
    return platform


def _writer(platform: Platform) -> str:
    """Return the name of the pod that holds the Lease, or nothing."""
    lease = platform.cluster.get("lease", _LEASE, NAMESPACE)
    if not lease["spec"].get("holderIdentity"):
        return ""
    address: str = lease["metadata"]["annotations"]["ragcache.dev/writer-address"]
    return address.split(".", maxsplit=1)[0]


def _put(platform: Platform, document_id: str) -> int:
    """Return the status of writing a document, or 0 without an answer."""
    with suppress(httpx.HTTPError), platform.admin_client() as client:
        return client.post("/v1/documents", json={**_KEPT, "id": document_id}).status_code
    return 0


def test_a_deleted_writer_is_replaced_and_no_document_is_lost(running: Platform) -> None:
    book: Handbook = handbook()
    with running.admin_client() as client:
        created = client.put("/v1/collections/kept", json={})
    assert created.status_code < 300, created.text
    assert _put(running, "before.md") < 300
    first = _writer(running)
    assert first in running.pods("retriever")
    with step("writer deleted and replaced"):
        running.cluster.kubectl(
            *("delete", "pod", first, f"--namespace={NAMESPACE}", "--grace-period=0", "--force")
        )
        running.cluster.wait_until(
            lambda: _writer(running) not in ("", first), "another writer", 60
        )
        running.cluster.wait_until(lambda: 200 <= _put(running, "after.md") < 300, "a write", 60)
    [question] = single_questions(book, 1)
    assert running.answer(question.text).documents
    with running.admin_client() as client:
        for name in ("before.md", "after.md"):
            found = client.get(f"/v1/documents/{name}", params={"collection": "kept"})
            assert found.status_code == 200, found.text
    with step("all retrievers ready again"):
        running.wait_settled("ready RagCache", 300)
    assert len(running.pods("retriever")) == 3
