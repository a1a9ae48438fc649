"""What a parser tries after a document has taken it over. Its file is copied beside a parser.

It imports nothing of this repository, because it runs in place of a package that the product uses.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PTRACE_ATTACH = 16


def attempts() -> dict[str, str]:
    """Try everything. Return ``done`` or the kind of the failure by the name of each attempt."""
    targets = json.loads(Path(__file__).with_name("targets.json").read_text())
    parent = os.getppid()
    tried: dict[str, Callable[[], Any]] = {
        "read a key": lambda: Path(targets["key"]).read_bytes(),
        "read the parent's environment": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
        "read the parent's memory": lambda: os.open(f"/proc/{parent}/mem", os.O_RDONLY),
        "list the key's folder": lambda: os.listdir(Path(targets["key"]).parent),
        "connect by TCP": lambda: socket.create_connection(("127.0.0.1", targets["port"]), 5),
        "send by UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "connect to a socket file": lambda: socket.socket(socket.AF_UNIX),
        "write a file": lambda: Path(targets["written"]).write_text("x"),
        "write below its own folder": lambda: Path(__file__).with_name("own").write_text("x"),
        "change a key's mode": lambda: os.chmod(targets["key"], 0o777),
        "run a program": lambda: subprocess.run(["/bin/true"], check=True),
        "replace itself": lambda: os.execv("/bin/true", ["true"]),
        "start a process": _fork,
        "signal the parent": lambda: os.kill(parent, 0),
        "have the system signal the parent": lambda: fcntl.fcntl(2, fcntl.F_SETOWN, parent),
        "choose that signal": lambda: fcntl.fcntl(2, fcntl.F_SETSIG, 9),
        "change the parent's open file": lambda: fcntl.fcntl(2, fcntl.F_SETFL, os.O_NONBLOCK),
        "trace the parent": lambda: _call("ptrace", _PTRACE_ATTACH, parent, None, None),
        "map the system's memory": lambda: _call("memfd_create", b"x", 0),
    }
    found = {name: _outcome(attempt) for name, attempt in tried.items()}
    found["secrets"] = ",".join(name for name in os.environ if "SECRET" in name)
    found["descriptors"] = ",".join(map(str, filter(_is_open, range(3, 256))))
    return found


def _outcome(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except Exception as error:
        return type(error).__name__
    return "done"


def _fork() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def _call(name: str, *arguments: Any) -> None:
    c = ctypes.CDLL(None, use_errno=True)
    if getattr(c, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
