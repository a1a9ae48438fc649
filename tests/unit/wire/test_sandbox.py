"""A process drops its rights, with what the machine offers."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ragcache_wire.sandbox import SandboxSupport, bare_environment, sandbox_support

SUPPORT = sandbox_support()
needs_landlock = pytest.mark.skipif(not SUPPORT.landlock, reason="needs Landlock")
needs_seccomp = pytest.mark.skipif(not SUPPORT.seccomp, reason="needs libseccomp")

HELPERS = """
from ragcache_wire import sandbox
from ragcache_wire.sandbox import Sandbox, SandboxSupport
import os, socket, threading

def tried(attempt):
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"

support = sandbox.sandbox_support()
"""


def run(program: str) -> list[str]:
    """Run a program in a process of its own. Return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", HELPERS + textwrap.dedent(program)],
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@needs_seccomp
def test_without_landlock_there_is_still_no_network_and_no_writing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    found = run(f"""
        sandbox.sandbox_support = lambda: SandboxSupport(0, support.seccomp)
        Sandbox().enter({{0, 1, 2}})
        print(tried(lambda: open({str(path)!r}).read()))
        print(tried(lambda: open({str(path)!r}, "a")))
        print(tried(socket.socket))
        print(tried(os.fork))
    """)
    assert found == ["done", "PermissionError", "PermissionError", "PermissionError"]


@needs_landlock
def test_without_seccomp_there_are_still_no_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    found = run(f"""
        sandbox.sandbox_support = lambda: SandboxSupport(support.landlock, False)
        Sandbox().enter({{0, 1, 2}})
        print(tried(lambda: open({str(path)!r}).read()))
        print(tried(lambda: open({str(path)!r}, "a")))
        print(tried(lambda: os.listdir("/proc")))
        print(tried(lambda: os.execv("/bin/true", ["true"])))
    """)
    assert found == ["PermissionError"] * 4


@needs_landlock
@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_older_versions_of_landlock_are_asked_for_what_they_have(version: int) -> None:
    found = run(f"""
        sandbox.sandbox_support = lambda: SandboxSupport({version}, False)
        Sandbox().enter({{0, 1, 2}})
        print(tried(lambda: os.listdir("/proc")))
    """)
    assert found == ["PermissionError"]


def test_without_both_the_process_still_works() -> None:
    found = run("""
        sandbox.sandbox_support = lambda: SandboxSupport(0, False)
        Sandbox().enter({0, 1, 2})
        print("works")
    """)
    assert found == ["works"]


@needs_seccomp
@needs_landlock
def test_threads_start_inside_and_not_before() -> None:
    found = run("""
        box = Sandbox()
        stop = threading.Event()
        early = threading.Thread(target=stop.wait)
        early.start()
        print(tried(lambda: box.enter({0, 1, 2})))
        stop.set()
        early.join()
        while len(os.listdir("/proc/self/task")) > 1:
            pass
        box.enter({0, 1, 2})
        late = threading.Thread(target=lambda: print(tried(socket.socket)))
        late.start()
        late.join()
    """)
    assert found == ["OSError", "PermissionError"]


@needs_seccomp
@needs_landlock
def test_descriptors_that_are_not_named_are_closed() -> None:
    found = run("""
        kept, closed = os.open("/dev/null", os.O_RDONLY), os.open("/dev/null", os.O_RDONLY)
        Sandbox().enter({0, 1, 2, kept})
        print(tried(lambda: os.fstat(kept)), tried(lambda: os.fstat(closed)))
    """)
    assert found == ["done OSError"]


@pytest.mark.parametrize(
    ("support", "missing"),
    [
        (SandboxSupport(7, seccomp=True), []),
        (SandboxSupport(0, seccomp=True), ["without Landlock"]),
        (SandboxSupport(7, seccomp=False), ["without seccomp"]),
        (SandboxSupport(0, seccomp=False), ["without Landlock", "without seccomp"]),
    ],
)
def test_the_log_names_what_is_missing(
    support: SandboxSupport, missing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        support.warn("readers of documents")
    assert len(caplog.messages) == len(missing)
    for message, part in zip(caplog.messages, missing, strict=True):
        assert message.startswith("readers of documents: ")
        assert part in message


def test_the_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    environment = bare_environment()
    assert "PATH" in environment
    assert "SECRET_KEY" not in environment
