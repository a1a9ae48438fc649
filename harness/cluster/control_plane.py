"""A Kubernetes control plane: etcd and the API server, with or without controllers.

It needs no root and no network of its own; objects are real, containers are not: nothing runs pods.
"""

from __future__ import annotations

import json
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from harness.cluster import binaries
from harness.cluster.certificates import Certificates, make_certificates
from harness.cluster.daemons import Daemon
from harness.cluster.kubeconfig import ADMIN_GROUP, User, write_kubeconfig, write_token_file
from harness.cluster.timeline import step
from harness.cluster.translator import MINOR
from harness.processes import free_port

_READY_LIMIT_S = 120
_TRANSLATOR = Path(__file__).with_name("translator.py")

# Every request by who and what, bodies left out: enough to count writes.
_AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """The addresses of a control plane.

    ``launch`` starts a program in the network that the addresses belong to.
    """

    listen_address: str = "127.0.0.1"
    advertise_address: str = "127.0.0.1"
    api_port: int = 0
    translator_port: int = 0
    service_range: str = "198.19.0.0/16"
    service_address: str = "198.19.0.1"
    launch: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A running control plane.

    kubeconfig: for the user `admin`, who may do everything.
    url: where the product's clients connect: to the server, or to `translator` if it is too old.
    server_kubeconfig: for the same user, and always for the server itself.
    audit_log: JSON lines, one per request at its end; None unless asked for.
    """

    url: str
    folder: Path
    kubeconfig: Path
    server_url: str
    server_kubeconfig: Path
    token: str = field(repr=False)
    certificates: Certificates
    audit_log: Path | None

    @property
    def is_translated(self) -> bool:
        """Whether the server is too old for the product."""
        return self.url != self.server_url

    def kubeconfig_for(self, user: User) -> Path:
        """The kubeconfig of one of the users it was started with."""
        path = self.folder / "kubeconfigs" / user.name
        return write_kubeconfig(path, self.url, self.certificates.authority, user)

    def server_kubeconfig_for(self, user: User) -> Path:
        """The user's kubeconfig for the server itself, as its own programs need it."""
        path = self.folder / "server-kubeconfigs" / user.name
        return write_kubeconfig(path, self.server_url, self.certificates.authority, user)


@contextmanager
def start_control_plane(
    folder: Path,
    *,
    audit: bool = False,
    controllers: bool = False,
    users: Sequence[User] = (),
    host: HostNetwork | None = None,
) -> Iterator[ControlPlane]:
    """Run a control plane until the block ends.

    folder: for data, logs, keys; its content is replaced.
    controllers: also run the controller manager and the scheduler. Without them nothing makes
        service accounts, so the admission plugin that asks for those is off too.
    users: tokens to accept beside the admin's; RBAC gives them no rights by itself.

    Raises Unavailable if this machine lacks the programs and cannot get them, NotReady with the
    log's end if one of them does not come up.
    """
    wanted = binaries.API_SERVER + (binaries.CONTROLLERS if controllers else ())
    programs = binaries.kubernetes_programs(wanted)
    etcd = binaries.etcd_program()
    host = host or HostNetwork(api_port=free_port(), translator_port=free_port())
    folder.mkdir(parents=True, exist_ok=True)
    logs = folder / "logs"
    # The users' names tell in the audit log who did what.
    admin, manager, scheduler = (
        User(name, (ADMIN_GROUP,)) for name in ("admin", "controller-manager", "scheduler")
    )
    certificates = make_certificates(
        folder / "keys",
        names=["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"],
        addresses=[host.advertise_address, host.service_address, "127.0.0.1"],
    )
    server_url = f"https://{host.advertise_address}:{host.api_port}"

    with ExitStack() as stack:

        def run(name: str, *argv: str | Path) -> Daemon:
            daemon = Daemon(name, [*host.launch, *argv], logs / f"{name}.log")
            stack.callback(daemon.stop)
            return daemon

        with step("control plane ready"):
            store_url = f"http://127.0.0.1:{free_port()}"
            run("etcd", etcd, *_etcd_flags(folder / "etcd", store_url))
            audit_log = folder / "audit.jsonl" if audit else None
            server = run(
                "kube-apiserver",
                programs["kube-apiserver"],
                *_server_flags(host, certificates, store_url),
                f"--cert-dir={folder / 'keys'}",
                f"--token-auth-file="
                f"{write_token_file(folder / 'tokens.csv', [admin, manager, scheduler, *users])}",
                *(_audit_flags(folder, audit_log) if audit_log else ()),
                *(() if controllers else ("--disable-admission-plugins=ServiceAccount",)),
            )
            ask = partial(_answer, certificates.authority, admin.token)
            for path in ("/readyz", "/api/v1/namespaces/default"):
                server.wait_until(partial(_answers, ask, server_url + path), path, _READY_LIMIT_S)
            url = server_url
            minor = int(json.loads(ask(f"{server_url}/version"))["minor"].rstrip("+"))
            if minor < MINOR:
                url = f"https://{host.advertise_address}:{host.translator_port}"
                translator = run(
                    *("translator", sys.executable, "-P", _TRANSLATOR, f"--upstream={server_url}"),
                    *(f"--listen={host.listen_address}", f"--port={host.translator_port}"),
                    f"--authority={certificates.authority}",
                    f"--certificate={certificates.server_certificate}",
                    f"--key={certificates.server_key}",
                )
                translator.wait_until(
                    partial(_answers, ask, f"{url}/version"), "translator", _READY_LIMIT_S
                )
            own = write_kubeconfig(
                folder / "server-kubeconfig", server_url, certificates.authority, admin
            )
            plane = ControlPlane(
                url=url,
                folder=folder,
                kubeconfig=write_kubeconfig(
                    folder / "kubeconfig", url, certificates.authority, admin
                ),
                server_kubeconfig=own,
                server_url=server_url,
                token=admin.token,
                certificates=certificates,
                audit_log=audit_log,
            )
            if controllers:
                run(
                    "kube-controller-manager",
                    programs["kube-controller-manager"],
                    *_controller_flags(certificates),
                    f"--kubeconfig={plane.server_kubeconfig_for(manager)}",
                    f"--cert-dir={folder / 'controller-manager'}",
                )
                run(
                    "kube-scheduler",
                    programs["kube-scheduler"],
                    f"--kubeconfig={plane.server_kubeconfig_for(scheduler)}",
                    "--leader-elect=false",
                    "--port=0",
                    f"--secure-port={free_port()}",
                    "--bind-address=127.0.0.1",
                    f"--cert-dir={folder / 'scheduler'}",
                )
                path = "/api/v1/namespaces/default/serviceaccounts/default"
                server.wait_until(partial(_answers, ask, server_url + path), path, _READY_LIMIT_S)
        yield plane


def _etcd_flags(data: Path, url: str) -> Sequence[str]:
    peers = f"http://127.0.0.1:{free_port()}"
    return (
        f"--data-dir={data}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        # Nothing here has to survive a power cut.
        "--unsafe-no-fsync",
    )


def _server_flags(host: HostNetwork, certificates: Certificates, store_url: str) -> Sequence[str]:
    return (
        f"--etcd-servers={store_url}",
        f"--bind-address={host.listen_address}",
        f"--advertise-address={host.advertise_address}",
        f"--secure-port={host.api_port}",
        f"--service-cluster-ip-range={host.service_range}",
        f"--tls-cert-file={certificates.server_certificate}",
        f"--tls-private-key-file={certificates.server_key}",
        f"--service-account-key-file={certificates.service_account_key}",
        f"--service-account-signing-key-file={certificates.service_account_key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=RBAC",
        # On where users care (OpenShift): who makes an owner undeletable must be allowed to.
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        "--allow-privileged=true",
        # A node's name is in no DNS.
        "--kubelet-preferred-address-types=InternalIP",
    )


def _audit_flags(folder: Path, log: Path) -> Sequence[str]:
    policy = folder / "audit-policy.yaml"
    policy.write_text(_AUDIT_POLICY)
    return (
        f"--audit-policy-file={policy}",
        f"--audit-log-path={log}",
        # A request is in the log before it is answered, so that who asked can count it at once.
        "--audit-log-mode=blocking-strict",
    )


def _controller_flags(certificates: Certificates) -> Sequence[str]:
    return (
        f"--service-account-private-key-file={certificates.service_account_key}",
        f"--root-ca-file={certificates.authority}",
        # One node has its pods' addresses from the network's own configuration.
        "--allocate-node-cidrs=false",
        "--leader-elect=false",
        "--port=0",
        f"--secure-port={free_port()}",
        "--bind-address=127.0.0.1",
    )


def _answers(ask: Callable[[str], bytes], url: str) -> bool:
    """Whether a GET succeeds."""
    try:
        ask(url)
    except (urllib.error.URLError, OSError):
        return False
    return True


def _answer(authority: Path, token: str, url: str) -> bytes:
    """The answer to a GET."""
    request = urllib.request.Request(url)
    request.add_header("Authorization", f"Bearer {token}")
    trust = ssl.create_default_context(cafile=str(authority))
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
    )
    with opener.open(request, timeout=5) as reply:
        body: bytes = reply.read()
    return body
