"""A captured plan is worth nothing later: real stores, and the connector of simulated engines."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from harness.processes import running_cachestore
from ragcache_core.errors import NotFound
from tests.kit.engine import is_stored
from tests.kit.simulated_engines import Simulated
from tests.kit.wait import until


async def test_an_old_plan_loads_and_saves_nothing(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "keys").write_text("a1" * 32 + "\n")
    env = {"RAGCACHE_SIGNING_KEY_FILE": str(tmp_path / "keys")}
    with running_cachestore(tmp_path / "store", env=env) as store, contextlib.ExitStack() as stack:
        engines = Simulated(tmp_path, tiny_model, store, tmp_path / "keys")
        stack.callback(engines.service.stop)
        engines.wait_until_ready()
        variants = [named.variant for named in engines.segments]
        replayed = [("old", engines.params("old", 91)), ("future", engines.params("future", -3600))]
        old, new = (engines.params("swapped", age) for age in (91, 0))
        expiry = new["ragcache_signature"].partition(".")[0]
        digest = old["ragcache_signature"].partition(".")[2]
        replayed.append(("swapped", {**old, "ragcache_signature": f"{expiry}.{digest}"}))
        for name, params in replayed:
            await engines.send(0, params)
            with pytest.raises(NotFound):  # it has no record either
                await engines.record(0, name)
        saved = await engines.ask(0)
        assert (saved.local_tokens, saved.loaded_tokens) == (0, 0)
        await until(lambda: is_stored(store.address, variants, engines.credentials), "saves")
        # Now that all of it is stored, an old plan still loads nothing.
        for name, params in replayed:
            await engines.send(1, params)
            with pytest.raises(NotFound):
                await engines.record(1, name)
        # A plan may come more than once in its time, as for a request with several answers.
        params = engines.params("twice")
        for _ in range(2):
            await engines.send(1, params)
            loaded = await engines.record(1, "twice")
            assert loaded.loaded_tokens == engines.segments[-1].segment.end
