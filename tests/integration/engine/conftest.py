"""An engine that the tests of several modules use. Its start takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import CacheStore, Engine, running_cachestore, running_engine

STEP_TOKENS = 256


@pytest.fixture(scope="session")
def running(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CacheStore, Engine]]:
    """A store, and an engine that computes few requests at a time."""
    folder = tmp_path_factory.mktemp("priority")
    arguments = (
        *("--max-num-seqs", "2"),
        *("--max-num-batched-tokens", str(STEP_TOKENS)),
    )
    with (
        running_cachestore(folder / "store") as store,
        running_engine(folder, tiny_model, store.address, *arguments) as engine,
    ):
        yield store, engine
