"""Takes rights from a process that reads what strangers wrote: no network, no keys, no programs.

Landlock limits which files the process may open: those of the interpreter, its packages and the
system's libraries and fonts, to read only. A seccomp filter limits its system calls to those that
reading, computing and answering need. Neither takes privileges, and neither can be undone, so both
work in a pod of the ``restricted`` profile.

Source: Landlock, ``Documentation/userspace-api/landlock.rst`` of Linux; libseccomp 2.5,
``seccomp_rule_add(3)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import stat
import sys
import sysconfig
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_LOG = logging.getLogger(__name__)

_KEPT_VARIABLES: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG")
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Further threads would take address space, which is limited, and would be outside the sandbox."""

_SYSTEM_PATHS: Final = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share"),
    *("/usr/local/share", "/etc/ld.so.cache", "/etc/mime.types", "/dev/null", "/dev/urandom"),
)

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls, which have these numbers on every architecture."""
_VERSION_FLAG: Final = 1
_PATH_BENEATH: Final = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights on files that a version of Landlock has first."""
_TCP_VERSION, _TCP_RIGHTS = 4, 0b11
_SCOPE_VERSION, _SCOPES = 6, 0b11
_SET_NO_NEW_PRIVS: Final = 38

_ALLOW: Final = 0x7FFF0000
_FAIL: Final = 0x00050000
_MASKED_EQUAL: Final = 7
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD: Final = 0x00010000
_CALLS: Final = (
    *("read", "readv", "pread64", "preadv", "write", "writev", "pwrite64", "lseek", "close"),
    *("dup", "ftruncate", "poll", "ppoll", "select", "pselect6", "getcwd", "getdents64"),
    *("stat", "lstat", "fstat", "newfstatat", "fstatat64", "statx", "access", "faccessat"),
    *("faccessat2", "readlink", "readlinkat", "mmap", "munmap", "mremap", "mprotect", "madvise"),
    *("brk", "membarrier", "futex", "set_robust_list", "rseq", "sched_yield", "sched_getaffinity"),
    *("getpid", "gettid", "getppid", "getuid", "geteuid", "getgid", "getegid", "getrandom"),
    *("clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "time"),
    *("times", "getrusage", "getrlimit", "sysinfo", "uname", "rt_sigaction", "rt_sigprocmask"),
    *("rt_sigreturn", "sigaltstack", "restart_syscall", "exit", "exit_group"),
)
_INT: Final = 0xFFFFFFFF
_FILE_COMMANDS: Final = (
    *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL),
)
"""Others would have the system signal another process (F_SETOWN, F_SETSIG), or change a file that
the parent has open, too (F_SETFL)."""
_LIMITED_CALLS: Final = (
    ("openat", 2, _WRITES, 0),
    ("open", 1, _WRITES, 0),
    ("clone", 0, _CLONE_THREAD, _CLONE_THREAD),
    ("prlimit64", 0, _INT, 0),
    *(("fcntl", 1, _INT, command) for command in _FILE_COMMANDS),
)
"""Calls that are allowed if an argument has given bits: its index, the bits that count, their
value. Files open to read only, only threads start, and only own limits change."""


@dataclass(frozen=True, slots=True)
class SandboxSupport:
    """What this machine can take from a process.

    Attributes:
        landlock: Version of the kernel's interface; 0: there is none.
        seccomp: Whether the library that builds filters is there, and the kernel takes them.
    """

    landlock: int
    seccomp: bool

    @property
    def protections(self) -> dict[str, bool]:
        """Whether there is each part, by its name in metrics."""
        return {"landlock": self.landlock > 0, "seccomp": self.seccomp}

    def warn(self, what: str) -> None:
        """Write a log line about each part that is missing.

        Args:
            what: Names the processes that should be in the sandbox.
        """
        if not self.landlock:
            _LOG.warning(
                "%s: a sandbox without Landlock, so they can read the files of this user; "
                "use Linux 5.13 or later, with landlock in its list of security modules",
                what,
            )
        if not self.seccomp:
            _LOG.warning(
                "%s: a sandbox without seccomp, so they can reach the network; "
                "install libseccomp 2 (Debian: libseccomp2)",
                what,
            )


def sandbox_support() -> SandboxSupport:
    """Return what this machine offers."""
    if sys.platform != "linux":
        return SandboxSupport(0, seccomp=False)
    version = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    has_filters = Path("/proc/sys/kernel/seccomp/actions_avail").exists()
    return SandboxSupport(max(0, version), has_filters and _seccomp_library() is not None)


def bare_environment() -> dict[str, str]:
    """Return the variables that an interpreter needs, for a process that is to have no keys."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    if "PYTHONPATH" in kept:
        # An empty part stands for the working folder, which may have keys.
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, kept["PYTHONPATH"].split(os.pathsep)))
    return kept | _ONE_THREAD


class Sandbox:
    """Rights that a process, or its child, drops later.

    It is made before the input is read, since it needs rights that it takes away.
    """

    def __init__(self) -> None:
        support = sandbox_support()
        self._c = ctypes.CDLL(None, use_errno=True) if support.landlock else None
        self._ruleset = None if self._c is None else _ruleset(self._c, support.landlock)
        self._filter = _filter() if support.seccomp else None

    def enter(self, kept: Container[int]) -> None:
        """Drop the rights, for good. Raises OSError if that fails, or if other threads run.

        Args:
            kept: Descriptors of files that stay open.
        """
        if len(os.listdir("/proc/self/task")) > 1:
            raise OSError(errno.EBUSY, "the sandbox would not hold the other threads")
        opened = [int(name) for name in os.listdir("/proc/self/fd")]
        if self._c is not None:
            _check(self._c.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
            _check(self._c.syscall(_RESTRICT_SELF, self._ruleset, 0))
        for descriptor in opened:
            if descriptor not in kept:
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(descriptor)
        if self._filter is not None:
            library, context = self._filter
            _check_library(library.seccomp_load(context))


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathAttributes(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


def _ruleset(c: ctypes.CDLL, version: int) -> int:
    """Return a descriptor of Landlock rules: some files may be read, and nothing else is allowed.

    Args:
        version: Of Landlock. The kernel refuses rights that it does not know.
    """
    num_rights = max(rights for first, rights in _FILE_RIGHTS.items() if first <= version)
    attributes = _RulesetAttributes(
        (1 << num_rights) - 1,
        _TCP_RIGHTS if version >= _TCP_VERSION else 0,
        _SCOPES if version >= _SCOPE_VERSION else 0,
    )
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    ruleset = int(_check(c.syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0)))
    for path in readable_paths():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            _allow_reading(c, ruleset, path)
    return ruleset


def _allow_reading(c: ctypes.CDLL, ruleset: int, path: str) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        is_folder = stat.S_ISDIR(os.fstat(opened).st_mode)
        rule = _PathAttributes(_READ_FILE | _READ_DIR if is_folder else _READ_FILE, opened)
        _check(c.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(opened)


def readable_paths() -> set[str]:
    """Return the files and folders that a process in the sandbox may read."""
    return {*_SYSTEM_PATHS, *filter(None, sys.path), *_package_folders(), *_standard_folders()}


def _standard_folders() -> Iterator[str]:
    yield from (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    yield os.path.join(sys.base_prefix, "lib")


def _package_folders() -> Iterator[str]:
    """Yield the folders of packages that are loaded, which an editable install has elsewhere."""
    for name, module in list(sys.modules.items()):
        if "." not in name:
            yield from getattr(module, "__path__", ())


def _seccomp_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    library.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    library.seccomp_rule_add_array.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    ]
    return library


def _filter() -> tuple[ctypes.CDLL, Any]:
    """Return the library and its filter of system calls. Others fail with EPERM."""
    library = _seccomp_library()
    assert library is not None
    context = library.seccomp_init(_FAIL | errno.EPERM)
    for name in _CALLS:
        _add(library, context, _ALLOW, name)
    for name, argument, mask, value in _LIMITED_CALLS:
        _add(library, context, _ALLOW, name, _Comparison(argument, _MASKED_EQUAL, mask, value))
    # The C library then starts threads by ``clone``, whose flags a filter can read.
    _add(library, context, _FAIL | errno.ENOSYS, "clone3")
    return library, context


def _add(
    library: ctypes.CDLL, context: Any, action: int, name: str, condition: _Comparison | None = None
) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:  # a call of other architectures or of later versions
        return
    given = (0, None) if condition is None else (1, ctypes.byref(condition))
    _check_library(library.seccomp_rule_add_array(context, action, number, *given))


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"the sandbox fails: {os.strerror(ctypes.get_errno())}")
    return result


def _check_library(result: int) -> None:
    if result < 0:
        raise OSError(-result, f"the filter of system calls fails: {os.strerror(-result)}")
