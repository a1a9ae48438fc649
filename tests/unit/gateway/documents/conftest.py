"""The tests of this folder run in simulated time."""

from __future__ import annotations

from tests.kit.clock import SimulatedLoop


def pytest_asyncio_loop_factories() -> dict[str, type[SimulatedLoop]]:
    return {"simulated": SimulatedLoop}
