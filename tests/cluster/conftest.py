"""Fixtures of the tests that need a real Kubernetes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from harness import packages
from harness.availability import Unavailable, skip
from harness.cluster import binaries
from harness.cluster.control_plane import ControlPlane, start_control_plane
from tests.cluster.cluster import Cluster, start_cluster


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build Kubernetes before the first test's clock runs: it takes longer than a test may."""
    needing = {"control_plane", "cluster"}
    if any(needing.intersection(getattr(item, "fixturenames", ())) for item in session.items):
        binaries.main()


@pytest.fixture(scope="session", autouse=True)
def layers_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make images' layers beside the tests that need none; who needs some waits for the rest."""
    items = request.session.items
    needed = any(item.get_closest_marker("images") for item in items)
    previous = any(item.get_closest_marker("slow") for item in items)
    with ExitStack() as stack:
        with suppress(Unavailable):  # the tests that need them say so
            if needed:
                packages.require(packages.IMAGES)  # here, as one process at a time may install
                words = [sys.executable, "-m", "tests.cluster.layers"]
                words += ["--previous"] if previous else []
                making = stack.enter_context(subprocess.Popen(words))
                stack.callback(making.terminate)
        yield


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server with controllers; nothing runs pods. Use a namespace of your own."""
    folder = tmp_path_factory.mktemp("control-plane")
    with ExitStack() as stack:
        try:
            plane = stack.enter_context(start_control_plane(folder, audit=True, controllers=True))
        except Unavailable as reason:
            skip(reason)
        yield plane


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A whole cluster; a module's own, as a machine has one at a time."""
    failed_before = request.session.testsfailed
    with ExitStack() as stack:
        try:
            running = stack.enter_context(start_cluster())
        except Unavailable as reason:
            skip(reason)
        yield running
        if request.session.testsfailed > failed_before:
            folder = tmp_path_factory.mktemp("diagnostics")
            running.dump_diagnostics(folder)
            print(f"[cluster] what explains the failure is in {folder}")
