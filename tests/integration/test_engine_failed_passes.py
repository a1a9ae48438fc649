"""What a forward pass leaves that ends by an exception, where vLLM ends it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(300)

# In a process of its own: importing vLLM takes long, warns, and stays.
_RUN = """
import json
from types import SimpleNamespace
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin
from ragcache_engine.connector import RagCacheConnector, _StepMetadata
from ragcache_engine.transfer import StepJobs

ended = []
nothing = lambda *args, **kwargs: None
worker = SimpleNamespace(
    begin_step=nothing, start_loads=nothing, advance=nothing, take_report=nothing,
    end_pass=lambda jobs, *, failed: ended.append(failed),
    take_released=set, take_received=set, take_bad_blocks=set, take_counts=dict,
)
connector = object.__new__(RagCacheConnector)
connector._worker, connector._scheduler, connector._handled = worker, None, None
connector.get_kv_connector_stats = nothing
mixin.get_kv_transfer_group = lambda: connector
mixin.get_forward_context = nothing
scheduled = SimpleNamespace(
    kv_connector_metadata=_StepMetadata(StepJobs()), finished_req_ids=set(),
    has_sync_kv_loads=False,
)


def run(error):
    with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(scheduled):
        if error is not None:
            raise error


for error in (None, RuntimeError("out of memory"), None):
    try:
        run(error)
    except RuntimeError:
        run(None)  # by somebody who has caught another one
print(json.dumps(ended))
"""


def test_the_worker_is_told_of_a_pass_that_failed() -> None:
    argv = [sys.executable, "-c", _RUN]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [False, True, False, False]
