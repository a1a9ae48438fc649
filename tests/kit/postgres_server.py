"""A private PostgreSQL server with pgvector, on a Unix socket in a folder of its own."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import psycopg

from harness import packages
from harness.availability import Unavailable
from harness.packages import Package

_BUILD_SCRIPT = Path(__file__).with_name("build_pgvector.sh")
_BUILD_LIMIT_S = 600
_COMMAND_LIMIT_S = 60
_PACKAGES = (
    Package("postgresql", "/usr/share/postgresql"),
    Package("gcc", "gcc"),
    Package("libc6-dev", "/usr/include/stdio.h"),
    Package("dpkg-dev", "dpkg-source"),
)
_SETTINGS = {
    "listen_addresses": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
}


class PostgresServer:
    """A server of one test session. Each test gets a schema of its own.

    Args:
        is_durable: Whether a commit waits for the disk.

    Raises:
        Unavailable: This machine has no PostgreSQL and cannot get it.
    """

    def __init__(self, *, is_durable: bool = False) -> None:
        self._settings = _SETTINGS | {"fsync": "on" if is_durable else "off"}
        self._programs = postgres_programs()
        # Not pytest's folder, which no other user can read. PostgreSQL refuses to run as root.
        self._folder = Path(tempfile.mkdtemp(prefix="ragcache-postgres-"))
        self._user = "nobody" if os.geteuid() == 0 else None
        if self._user:
            os.chown(self._folder, pwd.getpwnam(self._user).pw_uid, -1)
        self._data = self._folder / "data"
        self._numbers = itertools.count(1)
        self._run("initdb", "--no-sync", "--auth=trust", "--username=ragcache", "--locale=C.UTF-8")
        with psycopg.connect(self._started(), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION vector")

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def start(self) -> None:
        settings = {**self._settings, "unix_socket_directories": str(self._folder)}
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        log = str(self._folder / "log")
        self._run("pg_ctl", "start", "--wait", "--silent", f"--log={log}", f"--options={options}")

    def stop(self, mode: str = "immediate") -> None:
        """Stop the server; "immediate" is a crash."""
        self._run("pg_ctl", "stop", "--wait", "--silent", f"--mode={mode}")

    def new_schema(self) -> str:
        """URL of a schema that no other test uses."""
        name = f"test_{next(self._numbers)}"
        with psycopg.connect(self._url(), autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"{self._url()}&options=-csearch_path%3D{name},public"

    def _started(self) -> str:
        self.start()
        return self._url()

    def _url(self) -> str:
        return f"postgresql:///postgres?host={self._folder}&user=ragcache"

    def _run(self, program: str, *words: str) -> None:
        command = [str(self._programs / program), f"--pgdata={self._data}", *words]
        # The server would keep a pipe open.
        with (self._folder.parent / f"{self._folder.name}.out").open("w+") as output:
            run = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                user=self._user,
                group=pwd.getpwnam(self._user).pw_gid if self._user else None,
                extra_groups=[] if self._user else None,
                cwd="/",
                check=False,
                timeout=_COMMAND_LIMIT_S,
            )
            output.seek(0)
            said = output.read()
        Path(output.name).unlink()
        if run.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {said[-2000:]}")


@cache
def postgres_programs() -> Path:
    """Folder of the programs of PostgreSQL with pgvector, which the first call builds.

    Raises:
        Unavailable: This machine cannot build them.
    """
    folder = _build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # Test processes that start together build once.
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = folder / "ready"
        if not ready.exists():
            _build(folder)
    return Path(ready.read_text().strip())


def _build_folder() -> Path:
    script = hashlib.sha256(_BUILD_SCRIPT.read_bytes()).hexdigest()[:8]
    # Another user has to run root's server.
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path("/var/cache") if os.geteuid() == 0 else Path(cache_folder)
    return root / "ragcache" / f"postgres-{script}"


def _build(folder: Path) -> None:
    packages.require(_PACKAGES)
    run = subprocess.run(
        [str(_BUILD_SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=_BUILD_LIMIT_S,
    )
    if run.returncode != 0:
        said = (run.stderr or run.stdout).strip()[-1500:]
        raise Unavailable(
            f"PostgreSQL with pgvector cannot be built ({_BUILD_SCRIPT.name}): {said}"
        )
