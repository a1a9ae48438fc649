"""From the release before to this one, under questions that never stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import helm_python
import httpx
import pytest

from harness.availability import Unavailable, skip
from harness.cluster.timeline import step
from ragcache_cli.kubernetes.install import RELEASE
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
    make_namespace,
    quickstart,
    single_questions,
)
from tests.cluster.releases import previous_release

pytestmark = [pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(1800)]

_PAUSE_S = 4
"""Between two questions. For a second after each, vLLM's worker spins on the core that it is bound
to, and the worker of the next engine is bound to the same one: asked without a pause, the engine
that is to go leaves none of it for the one that is to come."""
_PATIENCE_S = 240
"""How long one question is asked again, when a part says 503 and Retry-After."""


@dataclass
class Asked:
    """What became of questions asked one after the other."""

    answered: int = 0
    asked_again: int = 0
    failed: list[str] = field(default_factory=list)
    longest_s: float = 0.0


def test_a_running_platform_keeps_answering_through_an_upgrade(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        version, checkout = previous_release(tmp_path_factory.mktemp("release"))
    except Unavailable as reason:
        skip(reason)
    bring_images(cluster, checkout)
    cluster.make_volumes(3, "20Gi")
    make_namespace(cluster)
    platform = Platform(cluster)
    book = handbook()
    with step(f"operator {version} installed"):
        _install(checkout / "charts" / RELEASE, platform.kubeconfig)
    # Images of this release are not needed before the upgrade.
    with ThreadPoolExecutor(1) as beside, step("from apply to Ready, and images"):
        bringing = beside.submit(bring_images, cluster)
        # Half a core, so that the next engine finds room beside this one on two.
        engine = {"name": "main", "kvMemory": "1Gi", "resources": {"cpu": "500m"}}
        cluster.apply(quickstart(engines=[engine]))
        platform.wait_settled("ready RagCache")
        bringing.result()
    cluster.apply(*collection_of_config_map(book))
    cluster.wait_until(
        lambda: platform.status("ragcollection", COLLECTION).get("documents") == DOCUMENTS,
        "synced collection",
        120,
    )
    before = platform.pods("gateway")
    question = single_questions(book, 1)[0].text
    with _asking(platform, question) as asked, step("upgraded to this release"):
        platform.install()
        cluster.wait_until(
            lambda: not set(platform.pods("gateway").values()) & set(before.values()),
            "gateway of this release",
            300,
        )
        platform.wait_settled("upgraded platform")
    print(
        f"[cluster] during the upgrade: {asked.answered} questions answered, "
        f"{asked.asked_again} times asked again, longest wait {asked.longest_s:.1f} s"
    )
    assert asked.failed == []
    assert asked.answered >= 5
    images = {
        container["image"]
        for pod in cluster.get_all("pods", NAMESPACE, f"app.kubernetes.io/instance={NAME}")
        for container in pod["spec"]["containers"]
        if pod["status"]["phase"] == "Running"
    }
    assert not {image for image in images if image.endswith(f":{version}")}, images


def _install(chart_folder: Path, kubeconfig: Path) -> None:
    """Install an earlier release's chart; the command of this one carries only its own."""
    with (
        helm_python.Chart.load(chart_folder) as chart,
        helm_python.Config(kubeconfig_path=kubeconfig, namespace=SYSTEM) as config,
    ):
        config.install(chart, RELEASE, {}, create_namespace=True, wait="watcher", timeout=300)


@contextmanager
def _asking(platform: Platform, question: str) -> Iterator[Asked]:
    """Ask all the while, as a client that honours Retry-After."""
    asked = Asked()
    ending = threading.Event()

    def one() -> None:
        begin = time.monotonic()
        last = ""
        while time.monotonic() - begin < _PATIENCE_S:
            try:
                reply = platform.ask(question)
            except httpx.TransportError as error:
                # A connection to a gateway that is just going; a client connects again.
                last = repr(error)
            else:
                if reply.status_code == 200:
                    asked.answered += 1
                    asked.longest_s = max(asked.longest_s, time.monotonic() - begin)
                    return
                last = f"{reply.status_code}: {reply.text}"
                if reply.status_code != 503 or "retry-after" not in reply.headers:
                    break
            asked.asked_again += 1
            time.sleep(1)
        asked.failed.append(last)

    def ask() -> None:
        while not ending.is_set():
            one()
            ending.wait(_PAUSE_S)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield asked
    finally:
        ending.set()
        thread.join()
