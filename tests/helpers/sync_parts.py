"""Real sources of documents: a web server and Git repositories."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

AUTHOR = {
    "GIT_AUTHOR_NAME": "Test",
    "GIT_AUTHOR_EMAIL": "test@example.com",
    "GIT_COMMITTER_NAME": "Test",
    "GIT_COMMITTER_EMAIL": "test@example.com",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


@dataclass
class Page:
    """A response of the web server."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Web(ThreadingHTTPServer):
    """Serves pages by path, and Git repositories below /git/.

    git_authorization: what /git/ wants to be told, if anything. seen: Authorization by path.
    """

    daemon_threads = True

    def __init__(self, repositories: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.pages: dict[str, Page] = {}
        self.seen: dict[str, str | None] = {}
        self.git_authorization: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Web
    protocol_version = "HTTP/1.0"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.seen[self.path] = self.headers.get("Authorization")
        if self.path.startswith("/git/"):
            self._git()
            return
        page = self.server.pages.get(urlsplit(self.path).path, Page(status=404))
        self.send_response(page.status)
        for name, value in page.headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(page.body)

    def do_POST(self) -> None:
        self._git()

    def _git(self) -> None:
        """Run git http-backend as a CGI program."""
        asked = self.server.git_authorization
        if asked is not None and self.headers.get("Authorization") != asked:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.end_headers()
            return
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        done = subprocess.run(
            ["git", "http-backend"],
            input=body,
            capture_output=True,
            # It also fails for an unknown commit.
            check=False,
            env={
                **os.environ,
                "GIT_PROJECT_ROOT": str(self.server.repositories),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": parts.path.removeprefix("/git"),
                "QUERY_STRING": parts.query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            },
        )
        head, _, answer = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)


@contextlib.contextmanager
def serving_web(repositories: Path) -> Iterator[Web]:
    """Run a web server on loopback."""
    web = Web(repositories)
    thread = threading.Thread(target=web.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield web
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


class Repository:
    """A Git repository that is served under the name of its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.run("init", "--quiet", "--initial-branch=main")
        self.run("config", "uploadpack.allowAnySHA1InWant", "true")

    def commit(self, files: dict[str, bytes | None]) -> str:
        """Write or delete (None) files, commit everything and return the hash of the commit."""
        for name, data in files.items():
            path = self.folder / name
            if data is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        self.run("add", "--all")
        self.run("commit", "--quiet", "--allow-empty", "--message", "Change")
        return self.run("rev-parse", "HEAD")

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.folder,
            check=True,
            capture_output=True,
            env={**os.environ, **AUTHOR},
        )
        return done.stdout.decode().strip()


def tar_gz(files: dict[str, bytes]) -> bytes:
    """Return a compressed archive."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return whole.getvalue()
