"""The Debian packages that tests need: those of a cluster, of a browser and of a database."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.availability import Unavailable, is_ci

# An ordinary user's PATH lacks the sbin folders.
SEARCH_PATH = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"]
)


@dataclass(frozen=True, slots=True)
class Package:
    """A package and one thing in it whose presence proves it: a command, or a file."""

    name: str
    proof: str

    @property
    def is_installed(self) -> bool:
        if self.proof.startswith("/"):
            return Path(self.proof).exists()
        return shutil.which(self.proof, path=SEARCH_PATH) is not None


CONTROL_PLANE = (
    Package("etcd-server", "etcd"),
    Package("util-linux", "setpriv"),
)
KUBECTL = (Package("kubernetes-client", "kubectl"),)
BUILD = (
    Package("golang-go", "go"),
    Package("dpkg-dev", "dpkg-source"),
    Package("gcc", "gcc"),
    Package("make", "make"),
    Package("jq", "jq"),
    Package("rsync", "rsync"),
)
IMAGES = (Package("debootstrap", "debootstrap"),)
NODE = (
    *KUBECTL,
    Package("containerd", "containerd"),
    Package("runc", "runc"),
    Package("containernetworking-plugins", "/usr/lib/cni/bridge"),
    Package("iproute2", "ip"),
    Package("iptables", "iptables"),
    Package("conntrack", "conntrack"),
    Package("ethtool", "ethtool"),
    Package("socat", "socat"),
    Package("dnsmasq-base", "dnsmasq"),
    Package("busybox-static", "/bin/busybox"),
)


def command(name: str) -> str:
    """Full path of an installed command."""
    found = shutil.which(name, path=SEARCH_PATH)
    if found is None:
        raise Unavailable(f"there is no command {name!r} on this machine")
    return found


def require(packages: Sequence[Package]) -> None:
    """See that packages are installed; install what is missing where CI=true and root allow it.

    Raises Unavailable naming what is missing and how to get it.
    """
    missing = _missing(packages)
    if not missing:
        return
    if shutil.which("apt-get", path=SEARCH_PATH) is None:
        raise Unavailable(f"Debian's packages {missing} are missing; this is no Debian")
    advice = f"install them as root: apt-get install {' '.join(missing)}"
    if not (is_ci() and os.geteuid() == 0):
        raise Unavailable(f"missing Debian packages; {advice}")
    with _only_installer():
        if missing := _missing(packages):
            _install(missing, advice)
    if still := _missing(packages):
        raise Unavailable(f"apt-get installed {missing}, and yet {still} cannot be found")


def _install(missing: Sequence[str], advice: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing],
    ):
        run = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise Unavailable(f"{' '.join(words)} failed: {run.stderr.strip()[-800:]}; {advice}")


@contextmanager
def _only_installer() -> Iterator[None]:
    """Wait for other test processes that install: apt-get would fail beside them."""
    with Path(tempfile.gettempdir(), "ragcache-apt-get.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _missing(packages: Sequence[Package]) -> list[str]:
    return list(dict.fromkeys(one.name for one in packages if not one.is_installed))
