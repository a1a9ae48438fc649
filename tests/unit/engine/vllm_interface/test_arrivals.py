"""Requests are counted in memory that an engine's processes share."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from ragcache_engine.vllm_interface import arrivals
from ragcache_engine.vllm_interface.arrivals import arrival_counter, count_arrivals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")

CHILD = """
from ragcache_engine.vllm_interface.arrivals import arrival_counter
counter = arrival_counter()
counter.add()
print(counter.count())
"""


@pytest.fixture(autouse=True)
def _new_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arrivals._VARIABLE, "")
    monkeypatch.delenv(arrivals._VARIABLE)


def test_a_child_process_shares_the_number() -> None:
    counter = arrival_counter()
    assert counter is not None
    assert counter.count() == 0
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "1"
    assert counter.count() == 1
    again = arrival_counter()
    assert again is not None
    assert again.count() == 1


def test_each_received_request_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []

    class EngineCore:
        def preprocess_add_request(self, request: Any) -> str:
            received.append(request)
            return "preprocessed"

    module = types.SimpleNamespace(EngineCore=EngineCore)
    monkeypatch.setitem(sys.modules, arrivals._ENGINE_CORE, module)
    count_arrivals()
    count_arrivals()  # vLLM runs a plugin more than once
    counter = arrival_counter()
    assert counter is not None
    assert EngineCore().preprocess_add_request("one") == "preprocessed"
    assert (received, counter.count()) == (["one"], 1)


def test_a_system_without_shared_memory_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    assert arrival_counter() is None
    count_arrivals()
