"""PodMonitors: which pods and ports Prometheus scrapes, and the labels of their series."""

from __future__ import annotations

from dataclasses import replace

from ragcache_operator.builders import build_children
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.builders.pod_monitor import PORTS
from tests.kit.operator import build, kinds_of, make_cache, workloads_of


def test_every_container_has_exactly_one_port_that_the_monitor_scrapes() -> None:
    children = [*build(), *build(cacheStore={"placement": "colocated"})]
    monitor, _ = kinds_of(children, "PodMonitor")
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == list(PORTS)
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    workloads = workloads_of(children)
    assert {one["spec"]["template"]["spec"]["containers"][0]["name"] for one in workloads} == {
        *("gateway", "retriever", "engine", "cachestore"),
    }
    for workload in workloads:
        template = workload["spec"]["template"]
        assert wanted <= template["metadata"]["labels"].items()
        for container in template["spec"]["containers"]:
            assert sum(port["name"] in PORTS for port in container["ports"]) == 1


def test_no_monitor_is_made_where_it_is_disabled_or_unknown() -> None:
    assert not kinds_of(build(telemetry={"podMonitor": {"enabled": False}}), "PodMonitor")
    cache = make_cache()
    plain = replace(Capabilities.latest(), pod_monitors=False)
    children = build_children(cache, ClusterPlacement(cache, tag="1", capabilities=plain))
    assert not kinds_of(children, "PodMonitor")
