"""A machine within the machine: namespaces of its own that the cluster's node lives in.

Mounts, network and processes of the node are in one set of kernel namespaces, held by one process.
When that process dies, however it dies, the kernel takes everything along: containers and their
shims, mounts, bridge, iptables chains. The host keeps nothing but files and cgroups.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.availability import Unavailable
from harness.cluster.daemons import Daemon, NotReady
from harness.packages import command
from tests.cluster import cgroups

# RFC 2544 sets 198.18.0.0/15 apart for tests, so no route of a real network is in the way.
POD_RANGE = "198.18.0.0/17"
NODE_ADDRESS = "198.18.0.1"
BRIDGE = "pods0"
SERVICE_RANGE = "198.19.0.0/16"
API_SERVICE_ADDRESS = "198.19.0.1"
DNS_ADDRESS = NODE_ADDRESS
HOST_LINK = "ragcache-test0"
_HOST_SIDE = "198.18.128.1"
_NODE_SIDE = "198.18.128.2"

_READY_LIMIT_S = 60

# The first process. /run and what programs write under /var/lib and /var/log is the node's own.
# Children without a waiting parent (orphaned shims) are reaped by the kernel
# because their parent ignores SIGCHLD.
_FIRST_PROCESS = """\
set -e
echo 0 > "$4/cgroup.procs"
cd "$1"
mkdir -p lib lib-work log
mount -t tmpfs tmpfs /run
mount --bind log /var/log
mount -t overlay overlay -o lowerdir=/var/lib,upperdir="$1/lib",workdir="$1/lib-work" /var/lib
ip link set lo up
ip link add "$2" type bridge
ip addr add "$3" dev "$2"
ip link set "$2" up
echo 1 > /proc/sys/net/ipv4/ip_forward
trap '' CHLD
touch machine-ready
exec sleep infinity
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The running namespaces."""

    folder: Path
    launch: tuple[str, ...]

    def run(self, *words: str | Path, stdin: str | None = None) -> str:
        """Run a command in it to its end; its standard output.

        Raises RuntimeError with what it said if it fails.
        """
        done = subprocess.run(
            [*self.launch, *map(str, words)],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout


@contextmanager
def start_machine(folder: Path) -> Iterator[Machine]:
    """Have a machine with the pods' bridge, reachable from this one, until the block ends.

    Raises Unavailable if the kernel does not let us.
    """
    _remove_link()
    first = Daemon(
        "machine",
        [
            *(command("unshare"), "--mount", "--pid", "--net", "--propagation=private"),
            *("--fork", "--kill-child", "--mount-proc", "--", command("sh"), "-c", _FIRST_PROCESS),
            *("sh", folder, BRIDGE, f"{NODE_ADDRESS}/{POD_RANGE.split('/')[1]}"),
            cgroups.machine_group(),
        ],
        folder / "logs" / "machine.log",
    )
    try:
        try:
            first.wait_until((folder / "machine-ready").exists, "namespaces", _READY_LIMIT_S)
        except NotReady as problem:
            raise Unavailable(f"no namespaces for a cluster here: {problem}") from problem
        names = Path("/proc") / str(first.pid) / "ns"
        machine = Machine(
            folder=folder,
            launch=(
                *(command("nsenter"), f"--mount={names / 'mnt'}", f"--net={names / 'net'}"),
                *(f"--pid={names / 'pid_for_children'}", "--"),
                # The process in there dies with the one out here that stands for it.
                *(command("setpriv"), "--pdeathsig", "SIGKILL", "--"),
            ),
        )
        _link(first.pid, machine)
        yield machine
    finally:
        first.kill()  # a first process is deaf to politer signals
        _remove_link()


def _link(namespace_pid: int, machine: Machine) -> None:
    """Join the two machines by a cable, with routes to pods and Services."""
    _ip(
        *("link", "add", HOST_LINK, "type", "veth"),
        *("peer", "name", "host0", "netns", str(namespace_pid)),
    )
    _ip("addr", "add", f"{_HOST_SIDE}/30", "dev", HOST_LINK)
    _ip("link", "set", HOST_LINK, "up")
    machine.run("ip", "addr", "add", f"{_NODE_SIDE}/30", "dev", "host0")
    machine.run("ip", "link", "set", "host0", "up")
    for addresses in (POD_RANGE, SERVICE_RANGE):
        _ip("route", "add", addresses, "via", _NODE_SIDE)
    # What the node itself sends to a Service is turned to a pod on
    # its way out, for which it needs a way out.
    machine.run("ip", "route", "add", SERVICE_RANGE, "dev", "host0")


def _remove_link() -> None:
    # The kernel removes it with the namespace, but in its own time.
    if (Path("/sys/class/net") / HOST_LINK).exists():
        subprocess.run(_ip_words(["link", "delete", HOST_LINK]), capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(_ip_words(words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _ip_words(words: Sequence[str]) -> list[str]:
    return [command("ip"), *words]
