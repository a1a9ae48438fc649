"""containerd on the cluster's machine, and the images in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from harness.availability import Unavailable
from harness.cluster.daemons import Daemon
from harness.packages import command
from tests.cluster import machine, oci
from tests.cluster.machine import Machine

SOCKET = "/run/containerd/containerd.sock"
BUSYBOX_IMAGE = "docker.io/library/busybox:test"
_PAUSE_IMAGE = "docker.io/library/pause:test"
_IMAGES = ("ctr", f"--address={SOCKET}", "--namespace=k8s.io", "images")
_BUSYBOX = Path("/bin/busybox")
_READY_LIMIT_S = 60


def start_containers(host: Machine) -> Daemon:
    """Run containerd with the pods' network and the two images that every cluster has.

    The caller stops it; containers live as long as the machine.
    """
    folder = host.folder / "containerd"
    networks = folder / "networks"
    networks.mkdir(parents=True)
    (networks / "pods.conflist").write_text(json.dumps(_network()))
    config = folder / "config.toml"
    config.write_text(_config(folder / "root", networks))
    daemon = Daemon(
        "containerd",
        [*host.launch, command("containerd"), f"--config={config}"],
        host.folder / "logs" / "containerd.log",
    )

    def answers() -> bool:
        try:
            host.run("ctr", f"--address={SOCKET}", "version")
        except RuntimeError:
            return False
        return True

    daemon.wait_until(answers, "containerd", _READY_LIMIT_S)
    import_images(host, _own_images(folder))
    return daemon


def import_images(host: Machine, archives: Sequence[Path]) -> list[str]:
    """Import OCI archives; the names of all images that are there then."""
    for archive in archives:
        host.run(*_IMAGES, "import", archive)
    return image_names(host)


def import_command(host: Machine) -> tuple[str, ...]:
    """The words of a command that imports the archive on its standard input."""
    return (*host.launch, *_IMAGES, "import", "-")


def image_names(host: Machine) -> list[str]:
    """Names of the images that pods can use."""
    names = host.run(*_IMAGES, "list", "--quiet")
    return [name for name in names.split() if not name.startswith("sha256:")]


def _own_images(folder: Path) -> list[Path]:
    # A program that needs a loader names it.
    if b"/ld-linux" in _BUSYBOX.read_bytes():
        raise Unavailable(
            f"{_BUSYBOX} is not the static one; as root: apt-get install busybox-static"
        )
    files = {"/bin/busybox": _BUSYBOX, "/bin/sh": _BUSYBOX}
    idle = ["/bin/busybox", "sleep", "1000000000"]
    return [
        oci.write_image(folder / "pause.tar", _PAUSE_IMAGE, files, idle),
        oci.write_image(folder / "busybox.tar", BUSYBOX_IMAGE, files, ["/bin/busybox"]),
    ]


def _config(root: Path, networks: Path) -> str:
    # Adjusting a score of the out-of-memory killer downwards takes a right that not every
    # container of a build service has.
    return f"""\
version = 2
root = "{root}"
state = "/run/containerd"
[grpc]
address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{_PAUSE_IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{networks}"
"""


def _network() -> dict[str, object]:
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": machine.BRIDGE,
                "isGateway": True,
                # A pod may ask its own Service.
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": machine.POD_RANGE, "gateway": machine.NODE_ADDRESS}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
