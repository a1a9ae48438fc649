"""Fixtures of the operator's tests. A module may have another API server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.cluster.control_plane import ControlPlane
from tests.integration.operator.operator_pass import plane_or_skip, plane_with_our_kinds


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("plane")
    with plane_or_skip(lambda: plane_with_our_kinds(folder)) as plane:
        yield plane
