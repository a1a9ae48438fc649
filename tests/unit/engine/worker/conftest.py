"""Fixtures of the worker's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.worker import WorkerHarness


@pytest.fixture
def worker() -> Iterator[WorkerHarness]:
    """Return a worker without blending."""
    # Imported here, because a machine without torch skips the tests when it imports them.
    from tests.kit.worker import WorkerHarness

    worker = WorkerHarness()
    yield worker
    worker.connector.close()
