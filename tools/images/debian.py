"""Debian's side of an image: a base by debootstrap, and what further packages add to it."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ragcache_core.errors import InvalidInput
from tools.images.environment import PYTHON
from tools.images.layer import Entry, held, portable_bytecode

_INCLUDED: Final = ("ca-certificates", "python3")

_LEFT_OUT: Final = (
    "dev",
    "etc/hostname",
    "etc/resolv.conf",
    "proc",
    "run",
    "sys",
    "tmp",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache",
    "var/lib/apt",
    "var/log",
    "var/tmp",
)
"""Folders that images have empty: this machine's own files, and what nobody reads in a pod."""


@dataclass(frozen=True, slots=True)
class Base:
    """Debian's packages as a root file system. root: its folder; inputs: what it follows from."""

    root: Path
    inputs: tuple[str, ...]

    @classmethod
    def make(cls, cache: Path) -> Base:
        """The base, from the mirror that apt uses here; cached in a folder below cache.

        Raises InvalidInput where debootstrap is missing or may not run, or brings another Python
        than the running one, whose packages the images get.
        """
        release = _release()
        mirror = _mirror(release)
        inputs = (platform.machine(), release, mirror, *_INCLUDED)
        root = cache / "debian" / "-".join((platform.machine(), release, *_INCLUDED))
        if not root.exists():
            _debootstrap(release, mirror, root)
        brought = os.readlink(root / "usr/bin/python3")
        if brought != PYTHON:
            problem = f"{release} brings {brought}, but this is {PYTHON}"
            fix = f"make .venv with {brought} (`make setup PYTHON=...`), or use another Debian"
            raise InvalidInput("environment", problem, fix)
        return cls(root, inputs)

    def entries(self, user: str) -> list[Entry]:
        """Its files, with ``user`` (``uid:gid``) as the user ragcache, who owns the folder data."""
        uid, gid = map(int, user.split(":"))
        users = (self.root / "etc/passwd").read_bytes()
        users += f"ragcache:x:{uid}:{gid}::/tmp:/usr/sbin/nologin\n".encode()
        groups = (self.root / "etc/group").read_bytes() + f"ragcache:x:{gid}:\n".encode()
        entries = {entry.path: entry for entry in tree(self.root)}
        for entry in (
            Entry("data", mode=0o755, uid=uid, gid=gid),
            Entry("etc/passwd", users),
            Entry("etc/group", groups),
        ):
            entries[entry.path] = entry
        return list(entries.values())

    def added_by(self, packages: Sequence[str]) -> list[Entry]:
        """What installing packages changes in the base.

        Raises InvalidInput with apt's own words if they cannot be had.
        """
        with tempfile.TemporaryDirectory(dir=self.root.parent) as folder:
            # An overlay's upper folder is the difference; its mount ends with the process.
            script = """
                cd "$1"; lower=$2; shift 2
                mkdir upper work root
                mount -t overlay overlay -o "lowerdir=$lower,upperdir=upper,workdir=work" root
                cp --remove-destination /etc/resolv.conf root/etc/resolv.conf
                chroot root apt-get --quiet=2 update
                DEBIAN_FRONTEND=noninteractive chroot root apt-get --quiet=2 install --yes \
                    --no-install-recommends "$@"
            """
            command = ["unshare", "--mount", "sh", "-euc", script, "sh", folder, str(self.root)]
            _run([*command, *packages], f"installing {', '.join(packages)}")
            return held(tree(Path(folder, "upper")))


def tree(root: Path) -> list[Entry]:
    """The files of a root file system, or of an overlay's upper folder, that an image gets."""
    entries: dict[str, Entry] = {}
    for parent, folders, files in os.walk(root):
        here = Path(parent)
        relative = here.relative_to(root)
        if str(relative) in _LEFT_OUT:
            folders.clear()
            files.clear()
        if here != root:
            entries[str(relative)] = _entry(here, str(relative))
        links = [name for name in folders if (here / name).is_symlink()]
        for name in (*files, *links):
            path = str(relative / name)
            if path not in _LEFT_OUT:
                entries |= {entry.path: entry for entry in _file_entries(here / name, path)}
    return list(entries.values())


def _file_entries(source: Path, path: str) -> list[Entry]:
    """A file as an image has it: modules with bytecode of ours, so what was compiled is dropped."""
    if source.suffix == ".pyc":
        return []
    entries = [_entry(source, path)]
    if source.suffix == ".py" and not source.is_symlink():
        parent = f"{os.path.dirname(path)}/__pycache__"
        name = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        bytecode = portable_bytecode(source, f"/{path}")
        if bytecode is not None:
            entries += [Entry(parent, mode=0o755), Entry(f"{parent}/{name}", bytecode)]
    return entries


def _entry(source: Path, path: str) -> Entry:
    state = source.lstat()
    uid, gid = state.st_uid, state.st_gid
    # No program runs with the rights of another user.
    mode = stat.S_IMODE(state.st_mode) & ~(stat.S_ISUID | stat.S_ISGID)
    if stat.S_ISLNK(state.st_mode):
        return Entry(path, link=os.readlink(source), uid=uid, gid=gid)
    if stat.S_ISDIR(state.st_mode):
        return Entry(path, mode=mode, uid=uid, gid=gid)
    if stat.S_ISREG(state.st_mode):
        return Entry(path, source, mode, uid=uid, gid=gid)
    if stat.S_ISCHR(state.st_mode) and state.st_rdev == 0:
        # An overlay marks what was removed by such a device, a layer by a name.
        return Entry(f"{os.path.dirname(path)}/.wh.{os.path.basename(path)}", b"")
    problem = f"/{path} is neither a file, a folder nor a link"
    raise InvalidInput("packages", problem, "leave out the package that brings it")


def _debootstrap(release: str, mirror: str, root: Path) -> None:
    if shutil.which("debootstrap") is None:
        raise InvalidInput("debootstrap", "is not installed", "apt-get install debootstrap")
    if os.geteuid() != 0:
        raise InvalidInput("debootstrap", "may not run: this is not root", "build images as root")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        made = Path(folder, "root")
        include = f"--include={','.join(_INCLUDED)}"
        # What it mounts ends with the process, also if it fails.
        command = ["unshare", "--mount", "debootstrap", "--variant=minbase", include]
        command += [release, str(made), mirror]
        _run(command, f"debootstrap of {release}")
        made.rename(root)


def _release() -> str:
    """This machine's release, whose packages apt's mirror has."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    if not release:
        raise InvalidInput("debootstrap", "this system has no code name", "build on Debian")
    return release


def _mirror(release: str) -> str:
    """Where apt finds the release's own packages."""
    if shutil.which("apt-get") is None:
        raise InvalidInput("debootstrap", "there is no apt-get here", "build on Debian")
    columns = "$(CODENAME) $(COMPONENT) $(SITE)"
    command = ["apt-get", "indextargets", "--format", columns, "Created-By: Packages"]
    for line in _run(command, "apt-get indextargets").splitlines():
        codename, component, site = line.split(" ", 2)
        if (codename, component) == (release, "main"):
            return site
    problem = f"apt has no source for {release} main"
    raise InvalidInput("debootstrap", problem, "add one to /etc/apt/sources.list")


def _run(command: Sequence[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join([*done.stdout.splitlines(), *done.stderr.splitlines()][-10:])
        raise InvalidInput("debootstrap", f"{what} failed: {said}", "see what apt's mirror lacks")
    return done.stdout
