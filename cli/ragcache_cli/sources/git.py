"""Reads documents of a git repository at one commit.

Files come from ``git archive`` without a checkout, so links, hooks, submodules and filters of the
repository have no effect.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from ragcache_cli.sources.archive import read_tar
from ragcache_cli.sources.reading import Deadline, Fetching, Scratch, SourceContents
from ragcache_core.errors import InvalidInput, RagCacheError, TooLarge, Unavailable
from ragcache_operator.spec.collection import GitSource
from ragcache_wire.address_gate import CheckedRoute

_TOKEN_USER = "x-access-token"
"""User name for hosts that accept a token as the password; they ignore it."""
_KEPT_VARIABLES = re.compile(r"PATH|SSL_CERT_(?:FILE|DIR)|GIT_SSL_CAINFO", re.IGNORECASE)
"""Which authorities to trust. Git itself reads only GIT_SSL_CAINFO."""
_BLOCK_BYTES = 512
"""The unit of ``ulimit -f``."""
_MAX_STDERR_CHARS = 200
_STDERR_PROBLEMS = {
    "could not read Username": "asks for a token, or refuses this one; name a Secret, or renew it",
    "couldn't find remote ref": "has no such ref; name a branch, a tag or a whole commit",
    "not our ref": "has no such commit; name a branch, a tag or a whole commit",
    "' not found": "does not exist, or asks for a token; correct the URL",
    "is this a git repository": "is no git repository; correct the URL",
    "returned error: 30": "redirects to another address; name where it leads to",
}
"""Messages of git for a user's mistake, with our wording."""


def read_git(what: str, source: GitSource, token: str | None, here: Fetching) -> SourceContents:
    """Read documents at and below the source's path, of the commit that its ref names.

    Raises:
        InvalidInput, TooLarge: The source is invalid; the field is ``what``.
        Unavailable: The host does not answer.
    """
    if not source.url.startswith(("http://", "https://")):
        raise InvalidInput(what, "is reached by another way than http", "write an https URL")
    route = here.gate.route(what, source.url)
    scratch = here.scratch
    home = scratch.new_path()
    home.mkdir()
    env = _environment(home, source.url, token, route)
    git = _Git(what, home, env, scratch.free_bytes, here.deadline)
    try:
        git.run("init", "--quiet", "--bare", "--template=", ".")
        git.run(
            *("fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules"),
            *("--no-auto-maintenance", "--end-of-options", source.url, source.ref),
        )
        fetched_bytes = _size_bytes(home)
        scratch.take(fetched_bytes, what)
        commit = git.run("rev-parse", "FETCH_HEAD^{commit}").strip()
        reading = git.archive(commit, source.path, scratch)
        scratch.give_back(fetched_bytes)
        return replace(reading, revision=commit)
    finally:
        shutil.rmtree(home, ignore_errors=True)


class _Git:
    """Runs git in one repository. ``most_bytes`` limits each file it writes, so also the pack."""

    def __init__(
        self, what: str, home: Path, env: Mapping[str, str], most_bytes: int, deadline: Deadline
    ) -> None:
        self._what = what
        self._home = home
        self._env = env
        self._most_blocks = most_bytes // _BLOCK_BYTES
        self._deadline = deadline

    def run(self, *arguments: str) -> str:
        """Return the output of git. Raises InvalidInput, TooLarge or Unavailable."""
        with self._started(*arguments) as process:
            try:
                output, stderr = process.communicate(timeout=self._deadline.left_s(self._what))
            except subprocess.TimeoutExpired as error:
                raise self._deadline.missed(self._what) from error
        if process.returncode:
            raise self._error(process.returncode, stderr.decode(errors="replace"))
        return output.decode(errors="replace")

    def archive(self, commit: str, path: str, scratch: Scratch) -> SourceContents:
        """Read the documents of a commit at and below ``path``."""
        tree = commit if path == "." else f"{commit}:{path.rstrip('/')}"
        try:
            kind = self.run("cat-file", "-t", tree).strip()
        except Unavailable:
            kind = "nothing"
        if kind not in ("commit", "tree"):
            raise InvalidInput(self._what, f"has no folder {path!r}", "correct the path or the ref")
        with self._started("archive", "--format=tar", tree) as process:
            assert process.stdout is not None
            return read_tar(self._what, process.stdout, scratch)

    @contextmanager
    def _started(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run git, and end it with all its helpers on exit."""
        # A shell sets the limit before git starts.
        limited = ("sh", "-c", f'ulimit -f {self._most_blocks}; exec git "$@"', "git")
        process = subprocess.Popen(
            (*limited, *arguments),
            cwd=self._home,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with process:
            try:
                yield process
            finally:
                # The process was not waited for, so its id still names the group.
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def _error(self, status: int, stderr: str) -> RagCacheError:
        if "File too large" in stderr or f"died of signal {signal.SIGXFSZ:d}" in stderr:
            return TooLarge(
                self._what,
                f"with the sources before it takes more than {self._most_blocks >> 11} MiB",
                "keep documents in a repository of their own",
            )
        for text, words in _STDERR_PROBLEMS.items():
            if text in stderr:
                problem, _, fix = words.partition("; ")
                return InvalidInput(self._what, problem, fix)
        last = stderr.strip().splitlines()[-1:] or [f"git ended with {status}"]
        return Unavailable(self._what, last[0][:_MAX_STDERR_CHARS])


def _environment(home: Path, url: str, token: str | None, route: CheckedRoute) -> dict[str, str]:
    """Return an environment for git: no user settings, no prompts, http only.

    Git connects to the checked addresses of one host. It follows neither redirects nor the
    alternates of a repository, which may name other hosts.
    """
    kept = {name: value for name, value in os.environ.items() if _KEPT_VARIABLES.fullmatch(name)}
    settings = {
        "http.lowSpeedLimit": "1000",
        "http.lowSpeedTime": "60",
        "http.followRedirects": "false",
        # Git would read the variables of proxies in another way than the gate, and then connect to
        # an unchecked address. An empty value is no proxy.
        "http.proxy": route.proxy or "",
    }
    if route.pin is not None:
        settings["http.curloptResolve"] = route.pin
    if token is not None:
        secret = base64.b64encode(f"{_TOKEN_USER}:{token}".encode()).decode()
        host = urlsplit(url)
        # The token goes to this host alone, not to redirect targets.
        key = f"http.{host.scheme}://{host.netloc}/.extraHeader"
        settings[key] = f"Authorization: Basic {secret}"
    return {
        **kept,
        "HOME": str(home),
        "LC_ALL": "C",
        "GIT_DIR": str(home),
        "GIT_ALLOW_PROTOCOL": "http:https",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_COUNT": str(len(settings)),
        **{f"GIT_CONFIG_KEY_{n}": key for n, key in enumerate(settings)},
        **{f"GIT_CONFIG_VALUE_{n}": value for n, value in enumerate(settings.values())},
    }


def _size_bytes(folder: Path) -> int:
    return sum(
        Path(parent, name).stat().st_size for parent, _, names in os.walk(folder) for name in names
    )
