"""Names of Services and their pods, answered by dnsmasq from a hosts file that follows the API."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.cluster.control_plane import ControlPlane
from harness.cluster.daemons import Daemon
from harness.packages import command
from tests.cluster import machine
from tests.cluster.machine import Machine

DOMAIN = "svc.cluster.local"
_PERIOD_S = 0.5
_READY_LIMIT_S = 60

Record = tuple[str, str]  # address, name


def records(
    services: Sequence[Mapping[str, Any]], endpoints: Sequence[Mapping[str, Any]]
) -> frozenset[Record]:
    """What the cluster's DNS must answer, by the Kubernetes DNS specification.

    A Service's name stands for its address; a headless one's for the addresses of its pods, each
    of which that has a host name in it is a name below. Pods that are not ready are among the
    endpoints' `addresses` if the Service publishes them, so nothing here asks about that.
    """
    found: set[Record] = set()
    by_name = {_key(one): one for one in endpoints}
    for service in services:
        name, namespace = _key(service)
        full = f"{name}.{namespace}.{DOMAIN}"
        cluster_address = service["spec"].get("clusterIP")
        if cluster_address and cluster_address != "None":
            found.add((cluster_address, full))
            continue
        for subset in by_name.get((name, namespace), {}).get("subsets") or []:
            for address in subset.get("addresses") or []:
                host = address.get("hostname") or address["ip"].replace(".", "-")
                found.add((address["ip"], full))
                found.add((address["ip"], f"{host}.{full}"))
    return frozenset(found)


@contextmanager
def start_dns(host: Machine, plane: ControlPlane) -> Iterator[None]:
    """Answer names until the block ends; a change is seen within about a second."""
    folder = host.folder / "dns"
    folder.mkdir()
    hosts = folder / "hosts"
    hosts.touch()
    server = Daemon(
        "dnsmasq",
        [
            *host.launch,
            *(command("dnsmasq"), "--keep-in-foreground", "--conf-file=/dev/null", "--user=root"),
            *("--no-resolv", "--no-hosts", f"--addn-hosts={hosts}", "--pid-file=/run/dns.pid"),
            *(f"--listen-address={machine.DNS_ADDRESS}", "--bind-interfaces", "--no-poll"),
            # Nothing is asked elsewhere: what is not in the file does not exist.
            "--address=/#/",
        ],
        host.folder / "logs" / "dnsmasq.log",
    )
    follower = _Follower(host, plane, hosts)
    follower.start()
    try:
        server.wait_until(lambda: follower.current, "records", _READY_LIMIT_S)
        yield
    finally:
        follower.stop()
        server.stop()


class _Follower(threading.Thread):
    """Asks for Services and Endpoints again and again and writes what follows from them."""

    def __init__(self, host: Machine, plane: ControlPlane, hosts: Path) -> None:
        super().__init__(name="cluster-dns")
        self.current = False
        self._host = host
        self._plane = plane
        self._hosts = hosts
        self._over = threading.Event()
        self._trust = ssl.create_default_context(cafile=str(plane.certificates.authority))

    def stop(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        written: frozenset[Record] | None = None
        while not self._over.wait(_PERIOD_S):
            try:
                wanted = records(self._list("services"), self._list("endpoints"))
                if wanted != written:
                    self._write(wanted)
                    written = wanted
                self.current = True
            except (OSError, http.client.HTTPException, RuntimeError, ValueError):
                with (self._host.folder / "logs" / "dns-follower.log").open("a") as log:
                    log.write(f"{time.strftime('%X')} {traceback.format_exc()}\n")

    def _write(self, wanted: frozenset[Record]) -> None:
        self._hosts.write_text("".join(f"{address} {name}\n" for address, name in sorted(wanted)))
        self._host.run("sh", "-c", "kill -HUP $(cat /run/dns.pid)")

    def _list(self, plural: str) -> Sequence[Mapping[str, Any]]:
        host = self._plane.url.removeprefix("https://")
        connection = http.client.HTTPSConnection(host, context=self._trust, timeout=10)
        try:
            headers = {"Authorization": f"Bearer {self._plane.token}"}
            connection.request("GET", f"/api/v1/{plural}", headers=headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"{plural}: {answer.status} {answer.read()!r}")
            items: Sequence[Mapping[str, Any]] = json.load(answer)["items"]
            return items
        finally:
            connection.close()


def _key(thing: Mapping[str, Any]) -> tuple[str, str]:
    return thing["metadata"]["name"], thing["metadata"]["namespace"]
