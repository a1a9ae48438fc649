"""The one node: kubelet and kube-proxy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from harness.cluster.daemons import Daemon
from tests.cluster import cgroups, machine
from tests.cluster.containers import SOCKET
from tests.cluster.machine import Machine

NODE_NAME = "node"


def start_kubelet(host: Machine, program: Path, kubeconfig: Path) -> Daemon:
    """Run the kubelet; the caller stops it."""
    folder = host.folder / "kubelet"
    folder.mkdir()
    names = folder / "resolv.conf"
    names.write_text(f"nameserver {machine.DNS_ADDRESS}\n")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(_config(folder, names)))
    return Daemon(
        "kubelet",
        [
            *host.launch,
            program,
            f"--config={config}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={folder / 'root'}",
            f"--cert-dir={folder / 'certificates'}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={machine.NODE_ADDRESS}",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{SOCKET}",
        ],
        host.folder / "logs" / "kubelet.log",
    )


def start_proxy(host: Machine, program: Path, kubeconfig: Path) -> Daemon:
    """Run kube-proxy, which makes Services' addresses answer; the caller stops it."""
    config = host.folder / "kube-proxy.yaml"
    config.write_text(yaml.safe_dump(_proxy_config(kubeconfig)))
    return Daemon(
        "kube-proxy",
        [*host.launch, program, f"--config={config}"],
        host.folder / "logs" / "kube-proxy.log",
    )


def _config(folder: Path, names: Path) -> Mapping[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        # Only processes of this machine reach it, and the machine belongs to the test.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroups.NAME}",
        "clusterDNS": [machine.DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(names),
        # A developer's disk may be as full as it likes.
        "evictionHard": {
            "imagefs.available": "0%",
            "memory.available": "0%",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        # The node is ready when it says so, which by default it does every ten seconds.
        "nodeStatusUpdateFrequency": "1s",
        # ConfigMaps reach pods at the next sync; a minute is the default.
        "syncFrequency": "10s",
        "volumePluginDir": str(folder / "plugins"),
    }


def _proxy_config(kubeconfig: Path) -> Mapping[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": machine.POD_RANGE,
        "hostnameOverride": NODE_NAME,
        "mode": "iptables",
        # Answers come back the way the questions went even where bridges bypass iptables.
        "iptables": {"masqueradeAll": True, "minSyncPeriod": "0s"},
        # The sizes of the kernel's connection table belong to the host.
        "conntrack": {
            "maxPerCore": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        "oomScoreAdj": 0,
    }
