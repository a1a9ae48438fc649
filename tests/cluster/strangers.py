"""What a pod of another namespace gets from the ports of a platform's pods."""

from __future__ import annotations

import base64
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import httpx

from ragcache_wire.channel import OPTIONS
from ragcache_wire.peers.certificates import (
    AUTHORITIES_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    Certificates,
)
from tests.cluster.cluster import Cluster
from tests.kit.certificates import issue, write
from tests.kit.strangers import TIMEOUT_S, channels, greeting, status

METHODS: Final = {
    "cachestore": "/ragcache.v1.CacheStore/Stats",
    "engine": "/ragcache.v1.Engine/GetCosts",
    "retriever": "/ragcache.v1.Retriever/ListCollections",
}
"""One method of each component's gRPC port."""


@dataclass(frozen=True, slots=True)
class Stranger:
    """A caller that reaches every port, and has only what is public.

    Attributes:
        own: Folder of the platform's certificate, to show that its port is one that answers.
        theirs: Folder of a certificate of another authority.
        name: In the platform's certificate.
    """

    own: Path
    theirs: Path
    name: str

    @classmethod
    def of(cls, cluster: Cluster, folder: Path, cache: str, namespace: str) -> Stranger:
        """Read the certificate of a RagCache, and make another one."""
        labels = f"app.kubernetes.io/instance={cache}"
        [key] = [
            base64.b64decode(secret["data"][KEY_FILE])
            for secret in cluster.get_all("secrets", namespace, labels)
            if KEY_FILE in secret.get("data", {})
        ]
        public = cluster.get("configmap", f"{cache}-tls", namespace)["data"]
        own = folder / "own"
        own.mkdir()
        (own / KEY_FILE).write_bytes(key)
        for file in (AUTHORITIES_FILE, CERTIFICATE_FILE):
            (own / file).write_text(public[file])
        theirs = write(folder / "theirs", issue("theirs"), public[AUTHORITIES_FILE])
        return cls(own, theirs, f"{cache}.{namespace}.ragcache.internal")

    def served_by(self, part: str, port: str, address: str) -> list[str]:
        """Return what a port serves without credentials; nothing if it is closed."""
        match part, port:
            case _, "health" | "metrics":
                return []  # open, and tell numbers alone
            case _, "grpc" | "store":  # store is that of a shard beside an engine
                return self._by_grpc(address, METHODS["cachestore" if port == "store" else part])
            case _, "data":
                return self._by_data_port(address)
            case "engine", "http":
                return self._by_engine(address)
            case "gateway", "http" | "admin":
                return self._by_gateway(address)
        return [f"unknown port {port} of {part}"]

    def _by_grpc(self, address: str, method: str) -> list[str]:
        found = []
        for number, channel in enumerate(channels(self.own, self.theirs, address, self.name)):
            with channel:
                if (got := status(channel, method)) is not grpc.StatusCode.UNAVAILABLE:
                    found.append(f"{method} by channel {number}: {got}")
        options = [("grpc.ssl_target_name_override", self.name), *OPTIONS]
        right = Certificates(self.own).current().channel_credentials()
        with grpc.secure_channel(address, right, options=options) as channel:
            if (got := status(channel, method)) is not grpc.StatusCode.UNAUTHENTICATED:
                found.append(f"{method} with the certificate and no token: {got}")
        return found

    def _by_data_port(self, address: str) -> list[str]:
        host, port = address.rsplit(":", 1)
        theirs, right = (Certificates(one).current().client for one in (self.theirs, self.own))

        def dial() -> socket.socket:
            return socket.create_connection((host, int(port)), TIMEOUT_S)

        found = []
        if greeting(dial(), theirs, self.name):
            found.append("a challenge for a foreign certificate")
        if not greeting(dial(), right, self.name):
            found.append("no challenge for the platform's own certificate")
        return found

    def _by_engine(self, address: str) -> list[str]:
        found = [f"plain HTTP {got}" for got in _get(f"http://{address}", {}) if got]
        found += [
            f"HTTPS without a token {got}" for got in _get(f"https://{address}", {}) if got != 401
        ]
        return found

    def _by_gateway(self, address: str) -> list[str]:
        wrong = {"Authorization": "Bearer of-another-tenant"}
        url = f"http://{address}"
        return [
            f"{got} with {headers}"
            for headers in ({}, wrong)
            for got in _get(url, headers)
            if got != 401
        ]


def _get(url: str, headers: dict[str, Any]) -> list[int | None]:
    """Return the status of a listing of models; None if the port speaks another protocol."""
    with httpx.Client(verify=False, timeout=TIMEOUT_S, trust_env=False) as client:
        try:
            return [client.get(f"{url}/v1/models", headers=headers).status_code]
        except httpx.HTTPError:
            return [None]
