"""Evaluates NetworkPolicies as Kubernetes defines them: which pods may connect to which.

For clusters whose network plugin enforces nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.children_parts import selects

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod. ``namespace_labels`` are further labels of its namespace, next to the name."""

    name: str
    namespace: str
    labels: Object = field(default_factory=dict)
    namespace_labels: Object = field(default_factory=dict)

    @property
    def labels_of_namespace(self) -> Object:
        return {"kubernetes.io/metadata.name": self.namespace, **self.namespace_labels}


@dataclass(frozen=True)
class Outside:
    """A machine outside the cluster."""

    name: str
    address: str


Peer = Pod | Outside


def may_talk(
    policies: Sequence[Object], source: Peer, target: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether a source may connect to a target's port."""
    leaves = not isinstance(source, Pod) or _lets(
        policies, source, "Egress", target, port, protocol
    )
    enters = not isinstance(target, Pod) or _lets(
        policies, target, "Ingress", source, port, protocol
    )
    return leaves and enters


def _lets(
    policies: Sequence[Object],
    pod: Pod,
    direction: str,
    other: Peer,
    port: int,
    protocol: str,
) -> bool:
    applying = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == pod.namespace
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], pod.labels)
    ]
    if not applying:
        return True
    rules, peers = {"Ingress": ("ingress", "from"), "Egress": ("egress", "to")}[direction]
    return any(
        _rule_matches(rule, peers, pod.namespace, other, port, protocol)
        for policy in applying
        for rule in policy["spec"].get(rules, ())
    )


def _rule_matches(
    rule: Object, peers: str, namespace: str, other: Peer, port: int, protocol: str
) -> bool:
    ports = rule.get("ports")
    if ports and not any(p["port"] == port and p["protocol"] == protocol for p in ports):
        return False
    named = rule.get(peers)
    return not named or any(_peer_matches(peer, namespace, other) for peer in named)


def _peer_matches(peer: Object, namespace: str, other: Peer) -> bool:
    if "ipBlock" in peer:
        if not isinstance(other, Outside):
            return False
        network = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return ipaddress.ip_address(other.address) in network
    if not isinstance(other, Pod):
        return False
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], other.labels_of_namespace):
            return False
    elif other.namespace != namespace:
        return False
    return selects(peer.get("podSelector", {}), other.labels)
