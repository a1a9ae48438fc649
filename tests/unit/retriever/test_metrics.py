"""Metrics that a retriever has from its start."""

from __future__ import annotations

import pytest

from ragcache_retriever import metrics
from ragcache_wire.sandbox import SandboxSupport
from ragcache_wire.telemetry.catalogue.retriever import SPLITTER_PROTECTIONS
from ragcache_wire.telemetry.metric_registry import exposition
from tools.dashboards.metric_names import series_names
from tools.dashboards.rules import ALERTS


@pytest.mark.parametrize(("landlock", "seccomp"), [(0, True), (3, False), (3, True)])
def test_a_missing_protection_of_splitters_is_zero_and_has_an_alert(
    monkeypatch: pytest.MonkeyPatch, landlock: int, seccomp: bool
) -> None:
    support = SandboxSupport(landlock, seccomp=seccomp)
    monkeypatch.setattr(metrics, "sandbox_support", lambda: support)
    [name] = series_names(SPLITTER_PROTECTIONS)
    lines = exposition(metrics.Metrics().collectors, "")[1].decode().splitlines()
    found = {line for line in lines if line.startswith(name)}
    assert found == {
        f'{name}{{protection="landlock"}} {float(landlock > 0)}',
        f'{name}{{protection="seccomp"}} {float(seccomp)}',
    }
    [alert] = [one for one in ALERTS if one.name == "RagCacheReadersUnprotected"]
    for metric in (name, "ragcache_gateway_reader_protections"):
        assert f"min by (namespace, ragcache, pod, protection) ({metric})" in alert.expression
    assert alert.expression.endswith(" < 1")
