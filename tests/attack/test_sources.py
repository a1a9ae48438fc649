"""An author of a RagCollection tries to reach inside addresses, and to get tokens of others."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.certificates import make_certificates
from ragcache_cli.sources.git import read_git
from ragcache_cli.sources.reading import Deadline, Fetching, Scratch
from ragcache_cli.sources.web import read_web
from ragcache_core.access.networks import AddressRules, parse_networks
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_operator.spec.collection import GitSource
from ragcache_wire.address_gate import AddressGate, Resolve
from tests.kit.sources import Page, Repository, Web, serving_web

LOOPBACK = AddressRules(parse_networks("test", ["127.0.0.1"]))
MIB = 1 << 20


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    with serving_web(tmp_path / "repositories") as serving:
        yield serving


class Names:
    """A name server of an attacker: its answers follow each other, and the last one stays."""

    def __init__(self, **answers: tuple[str, ...]) -> None:
        self._answers = {name.replace("_", "."): list(given) for name, given in answers.items()}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self._answers:
            return [host]
        answers = self._answers[host]
        return [answers.pop(0) if len(answers) > 1 else answers[0]]


def fetching(tmp_path: Path, rules: AddressRules, names: Resolve) -> Fetching:
    folder = tmp_path / "scratch"
    folder.mkdir(exist_ok=True)
    return Fetching(AddressGate(rules, names), Scratch(folder, MIB), Deadline(30))


def port_of(web: Web) -> int:
    return int(web.server_address[1])


@contextlib.contextmanager
def serving_gateway() -> Iterator[tuple[str, list[str]]]:
    """Run what a sync takes for a gateway; it notes what it is asked to write."""
    written: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            body = b'{"object": "list", "data": [], "has_more": false}'
            status = 404 if "/collections/" in self.path else 200
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body if status == 200 else b'{"error": {"message": "no"}}')

        def do_PATCH(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            written.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(500)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", written
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sync(url: str, *options: str, **environment: str) -> dict[str, Any]:
    """Run `ragcache sync` for a source with a Secret, as a Job does; return its result."""
    manifest = {
        "apiVersion": "ragcache.dev/v1alpha1",
        "kind": "RagCollection",
        "metadata": {"name": "evil", "namespace": "team-x"},
        "spec": {
            "cacheRef": {"name": "docs"},
            "collection": "default",
            "sources": [{"http": {"url": url, "bearerSecret": {"name": "s", "key": "password"}}}],
        },
    }
    with serving_gateway() as (gateway, written):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ragcache_cli", "sync", "--object", json.dumps(manifest)),
                *("--gateway", gateway, "--patience", "0", *options),
            ],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert written == []
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def problem(result: dict[str, Any]) -> str:
    [failure] = result["failures"]
    return str(failure["problem"])


def test_a_secret_goes_to_hosts_that_it_names_only(web: Web) -> None:
    web.pages["/handbook.txt"] = Page(b"text")
    url, allow = f"{web.url}/handbook.txt", ("--allow-network", "127.0.0.1")
    given = {"RAGCACHE_SOURCE_0_TOKEN": "password-of-the-database"}
    for hosts in ({}, {"RAGCACHE_SOURCE_0_HOSTS": "git.example.com, 127.0.0.1"}):
        assert "add the host to the entry 'ragcache-hosts'" in problem(
            sync(url, *allow, **given, **hosts)
        )
    assert web.seen == {}


def test_a_source_reaches_no_inside_address_by_default(web: Web) -> None:
    web.pages["/latest/meta-data"] = Page(b"{}", headers={"Content-Type": "text/plain"})
    secret = {"RAGCACHE_SOURCE_0_TOKEN": "t"}
    for host in ("127.0.0.1", "localhost", "0x7f.1", "[::ffff:127.0.0.1]"):
        there = f"{host}:{port_of(web)}"
        hosts = {"RAGCACHE_SOURCE_0_HOSTS": there}
        result = sync(f"http://{there}/latest/meta-data", **secret, **hosts)
        assert "a closed address" in problem(result)
    assert web.seen == {}


def test_a_redirect_reaches_no_inside_address(web: Web) -> None:
    with socket.socket() as inside:
        inside.bind(("127.0.0.2", 0))
        inside.listen()
        inside.settimeout(0.2)
        target = f"http://127.0.0.2:{inside.getsockname()[1]}/latest"
        web.pages["/handbook.txt"] = Page(status=302, headers={"Location": target})
        host = web.url.removeprefix("http://")
        result = sync(
            f"{web.url}/handbook.txt",
            *("--allow-network", "127.0.0.1"),
            RAGCACHE_SOURCE_0_TOKEN="t",
            RAGCACHE_SOURCE_0_HOSTS=host,
        )
        assert "leads to 127.0.0.2" in problem(result)
        with pytest.raises(TimeoutError):
            inside.accept()


def test_a_wide_network_opens_no_metadata_service() -> None:
    for address in ("169.254.169.254", "[fd00:ec2::254]"):
        result = sync(
            f"http://{address}/latest/meta-data/a.txt",
            *("--allow-network", "0.0.0.0/0", "--allow-network", "::/0"),
            RAGCACHE_SOURCE_0_TOKEN="t",
            RAGCACHE_SOURCE_0_HOSTS=address,
        )
        assert "a closed address" in problem(result)


def test_a_name_that_changes_its_address_changes_nothing(web: Web, tmp_path: Path) -> None:
    web.pages["/a.md"] = Page(b"A")
    names = Names(rebinding_example=("127.0.0.1", "169.254.169.254"))
    here = fetching(tmp_path, LOOPBACK, names)
    url = f"http://rebinding.example:{port_of(web)}/a.md"
    # One request resolves once, and connects to what was checked.
    assert read_web("source", url, None, here).files[0].path.read_bytes() == b"A"
    assert names.asked == ["rebinding.example"]
    with pytest.raises(InvalidInput, match=r"rebinding\.example at 169\.254\.169\.254"):
        read_web("source", url, None, here)


def test_each_redirect_is_resolved_and_checked(web: Web, tmp_path: Path) -> None:
    names = Names(rebinding_example=("127.0.0.1", "10.0.0.1"))
    web.pages["/a.md"] = Page(status=302, headers={"Location": "/b.md"})
    web.pages["/b.md"] = Page(b"B")
    here = fetching(tmp_path, LOOPBACK, names)
    with pytest.raises(InvalidInput, match=r"at 10\.0\.0\.1"):
        read_web("source", f"http://rebinding.example:{port_of(web)}/a.md", None, here)
    assert "/b.md" not in web.seen


def test_a_token_stays_away_after_a_redirect_there_and_back(web: Web, tmp_path: Path) -> None:
    names = Names(a_example=("127.0.0.1",), b_example=("127.0.0.1",))
    port = port_of(web)
    web.pages["/1.md"] = Page(status=302, headers={"Location": f"http://b.example:{port}/2.md"})
    web.pages["/2.md"] = Page(status=302, headers={"Location": f"http://a.example:{port}/3.md"})
    web.pages["/3.md"] = Page(b"3")
    here = fetching(tmp_path, LOOPBACK, names)
    read_web("source", f"http://a.example:{port}/1.md", "secret", here)
    assert web.seen == {"/1.md": "Bearer secret", "/2.md": None, "/3.md": None}


def test_https_never_becomes_http(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_certificates(tmp_path / "tls", ["secure.example"], [])
    monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
    with serving_web(tmp_path) as secure:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made.server_certificate, made.server_key)
        secure.socket = context.wrap_socket(secure.socket, server_side=True)
        start = f"https://secure.example:{port_of(secure)}"
        names = Names(secure_example=("127.0.0.1",), plain_example=("127.0.0.1",))
        here = fetching(tmp_path, LOOPBACK, names)
        secure.pages["/a.md"] = Page(b"A")
        assert read_web("source", f"{start}/a.md", None, here).files[0].path.read_bytes() == b"A"
        plain = f"http://plain.example:{port_of(web)}/c.md"
        secure.pages["/b.md"] = Page(status=302, headers={"Location": plain})
        web.pages["/c.md"] = Page(status=302, headers={"Location": f"{start}/a.md"})
        with pytest.raises(InvalidInput, match="from https to http"):
            read_web("source", f"{start}/b.md", None, here)
        assert web.seen == {}


# Git


def git(url: str, here: Fetching) -> list[str]:
    found = read_git("source", GitSource(url=url, ref="main"), None, here)
    return [file.id for file in found.files]


def test_git_connects_to_the_checked_address(web: Web, tmp_path: Path) -> None:
    Repository(web.repositories / "handbook").commit({"a.md": b"A"})
    # Only the gate knows the name: git itself could not resolve it.
    names = Names(git_example=("127.0.0.1", "10.0.0.1"))
    url = f"http://git.example:{port_of(web)}/git/handbook/.git"
    assert git(url, fetching(tmp_path, LOOPBACK, names)) == ["a.md"]
    assert names.asked == ["git.example"]
    with pytest.raises(InvalidInput, match=r"at 10\.0\.0\.1"):
        git(url, fetching(tmp_path, LOOPBACK, names))


def test_git_follows_no_redirect(web: Web, tmp_path: Path) -> None:
    Repository(web.repositories / "handbook").commit({"a.md": b"A"})
    target = f"{web.url}/git/handbook/.git/info/refs?service=git-upload-pack"
    web.pages["/other/info/refs"] = Page(status=302, headers={"Location": target})
    with pytest.raises(InvalidInput, match="redirects to another address"):
        git(f"{web.url}/other", fetching(tmp_path, LOOPBACK, Names()))


def test_git_reads_no_alternates_of_another_host(web: Web, tmp_path: Path) -> None:
    with serving_web(tmp_path) as inside:
        commit = "0123456789" * 4
        web.pages["/dumb/info/refs"] = Page(f"{commit}\trefs/heads/main\n".encode())
        web.pages["/dumb/HEAD"] = Page(b"ref: refs/heads/main\n")
        alternates = Page(f"{inside.url}/objects\n".encode())
        web.pages["/dumb/objects/info/http-alternates"] = alternates
        with pytest.raises(RagCacheError):
            git(f"{web.url}/dumb", fetching(tmp_path, LOOPBACK, Names()))
        assert inside.seen == {}


@pytest.mark.parametrize("host", ["exa%6dple.com", "example.com.", "a\\b", "-o.example"])
def test_spellings_that_readers_disagree_about_are_refused(host: str, tmp_path: Path) -> None:
    for url in (f"http://{host}/a.md", f"https://{host}/a.md"):
        with pytest.raises((InvalidInput, Unavailable)):
            git(url, fetching(tmp_path, LOOPBACK, Names()))


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_git_uses_the_proxy_that_the_gate_saw(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    Repository(web.repositories / "handbook").commit({"a.md": b"A"})
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv(variable, f"http://127.0.0.1:{closed.getsockname()[1]}")

        def unknown(host: str, port: int) -> list[str]:
            raise OSError("only the proxy knows the host")

        here = fetching(tmp_path, AddressRules(), unknown)
        # The proxy answers nothing. Without it, git would reach loopback.
        with pytest.raises(Unavailable):
            git(f"http://localhost:{port_of(web)}/git/handbook/.git", here)


def test_git_uses_no_proxy_that_the_gate_did_not_see(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Repository(web.repositories / "handbook").commit({"a.md": b"A"})
    names = Names(git_example=("127.0.0.1",))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "git.example")
    url = f"http://git.example:{port_of(web)}/git/handbook/.git"
    assert git(url, fetching(tmp_path, LOOPBACK, names)) == ["a.md"]
