"""What vLLM tells the worker half around a forward pass, and when."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(300)

# In a process of its own, because importing vLLM is slow, logs warnings and cannot be undone.
_RUN = """
import json
from types import SimpleNamespace
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin
from ragcache_engine.connector import RagCacheConnector, _StepMetadata
from ragcache_engine.protocol.messages import StepJobs

ended, order = [], []
nothing = lambda *args, **kwargs: None
worker = SimpleNamespace(
    begin_step=lambda jobs: order.append("begin"), take_report=nothing,
    start_loads=lambda jobs: order.append("load"),
    advance=lambda finished, *, busy: order.append("write"),
    end_pass=lambda jobs, *, failed: ended.append(failed),
    take_released=set, take_received=set, take_bad_blocks=set, take_counts=dict,
)
connector = object.__new__(RagCacheConnector)
connector._worker, connector._scheduler, connector._outer_exception = worker, None, None
connector.get_kv_connector_stats = nothing
mixin.get_kv_transfer_group = lambda: connector
mixin.get_forward_context = nothing
scheduled = SimpleNamespace(
    kv_connector_metadata=_StepMetadata(StepJobs()), finished_req_ids=set(),
    has_sync_kv_loads=False,
)


def run(error):
    with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(scheduled):
        order.append("pass")
        if error is not None:
            raise error


for error in (None, RuntimeError("out of memory"), None):
    try:
        run(error)
    except RuntimeError:
        run(None)  # by a caller that handles another exception
print(json.dumps([ended, order[:4], connector.reset_cache()]))
"""


def test_the_worker_is_told_of_each_pass_and_whether_it_failed() -> None:
    argv = [sys.executable, "-c", _RUN]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ended, order, is_reset = json.loads(done.stdout.splitlines()[-1])
    assert ended == [False, True, False, False]
    assert order == ["begin", "load", "pass", "write"], "loads start before the pass"
    assert is_reset is False, "the store belongs to other engines, too"
