"""The test cluster's DNS answers what the Kubernetes DNS specification says."""

from __future__ import annotations

from typing import Any

from tests.cluster.dns import records


def service(name: str, address: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "team"}, "spec": {"clusterIP": address}}


def endpoints(name: str, *addresses: dict[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "team"},
        "subsets": [{"addresses": list(addresses)}],
    }


def test_a_service_is_its_address_whatever_its_pods_are() -> None:
    found = records([service("web", "198.19.3.4")], [endpoints("web", {"ip": "198.18.0.9"})])
    assert found == {("198.19.3.4", "web.team.svc.cluster.local")}


def test_a_headless_service_is_its_pods_and_each_by_host_name() -> None:
    pods = endpoints("db", {"ip": "198.18.0.9", "hostname": "db-0"}, {"ip": "198.18.0.10"})
    assert records([service("db", "None")], [pods]) == {
        ("198.18.0.9", "db.team.svc.cluster.local"),
        ("198.18.0.9", "db-0.db.team.svc.cluster.local"),
        ("198.18.0.10", "db.team.svc.cluster.local"),
        ("198.18.0.10", "198-18-0-10.db.team.svc.cluster.local"),
    }


def test_a_headless_service_without_pods_has_no_name() -> None:
    assert records([service("db", "None")], []) == frozenset()
    without = {"metadata": {"name": "db", "namespace": "team"}}
    assert records([service("db", "None")], [without]) == frozenset()
