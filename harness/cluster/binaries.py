"""Where Kubernetes' own programs come from: a folder that the user names, or a build of our own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from harness import packages
from harness.availability import Unavailable

VERSION = "1.20.2"
API_SERVER = ("kube-apiserver",)
CONTROLLERS = ("kube-controller-manager", "kube-scheduler")
NODE = ("kubelet", "kube-proxy")

_BUILD_SCRIPT = Path(__file__).with_name("build_kubernetes.sh")
_PATCH = Path(__file__).with_name("reflect2.patch")
_BUILD_LIMIT_S = 1800


def kubernetes_programs(names: Sequence[str]) -> Mapping[str, Path]:
    """Paths of Kubernetes programs, all of one version, by name.

    An API server alone is taken from the folder KUBEBUILDER_ASSETS where that is set; the rest of
    Kubernetes never comes in such a folder, and versions do not mix. All else is a build of
    Debian's source package, which the first call on a machine makes (minutes).

    Raises Unavailable if this machine cannot build them.
    """
    named = os.environ.get("KUBEBUILDER_ASSETS")
    if named and tuple(names) == API_SERVER and (found := _programs_in(Path(named), names)):
        return found
    folder = _build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # Test processes that start together build once.
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # A build that outlives a killed test keeps the lock until it ends.
        os.set_inheritable(lock.fileno(), True)
        found = _programs_in(folder, names)
        if not found:
            if problem := _build(folder):
                raise Unavailable(problem)
            found = _programs_in(folder, names)
    if not found:
        raise Unavailable(f"{_BUILD_SCRIPT} ended well, but {folder} lacks some of {list(names)}")
    return found


def etcd_program() -> Path:
    """Path of etcd: that of KUBEBUILDER_ASSETS, else the Debian package's."""
    named = os.environ.get("KUBEBUILDER_ASSETS")
    if named and (Path(named) / "etcd").is_file():
        return Path(named) / "etcd"
    packages.require(packages.CONTROL_PLANE)
    return Path(packages.command("etcd"))


def _build_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # Another patch is another program.
    patch = hashlib.sha256(_PATCH.read_bytes()).hexdigest()[:8]
    return Path(cache) / "ragcache" / f"kubernetes-{VERSION}-{patch}"


def _programs_in(folder: Path, names: Sequence[str]) -> Mapping[str, Path]:
    """All of the programs by name, or nothing."""
    paths = {name: folder / name for name in names}
    return paths if all(os.access(path, os.X_OK) for path in paths.values()) else {}


# A build that failed would fail again, after minutes, for every test.
@cache
def _build(folder: Path) -> str:
    """Build everything; why that failed, or nothing."""
    packages.require(packages.BUILD)
    print(f"building Kubernetes {VERSION} into {folder}, once per machine (minutes)", flush=True)
    run = subprocess.run(
        [str(_BUILD_SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=_BUILD_LIMIT_S,
        close_fds=False,
    )
    if run.returncode == 0:
        return ""
    said = (run.stderr or run.stdout).strip()[-1500:]
    return f"Kubernetes {VERSION} cannot be built here ({_BUILD_SCRIPT.name}): {said}"


def main() -> None:
    """Build ahead of tests, whose time is limited; say why not where that is not possible."""
    try:
        programs = kubernetes_programs(API_SERVER + CONTROLLERS + NODE)
    except Unavailable as reason:
        print(f"no Kubernetes here: {reason}")
    else:
        print(f"Kubernetes {VERSION}: {next(iter(programs.values())).parent}")


if __name__ == "__main__":
    main()
