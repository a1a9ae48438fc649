"""Fixtures of the operator's tests. A module may have another API server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.availability import Unavailable, skip
from harness.cluster.control_plane import ControlPlane
from tests.integration.operator.operator_pass import plane_with_our_kinds


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    try:
        starting = plane_with_our_kinds(tmp_path_factory.mktemp("plane"))
        plane = starting.__enter__()
    except Unavailable as reason:
        skip(reason)
    try:
        yield plane
    finally:
        starting.__exit__(None, None, None)
