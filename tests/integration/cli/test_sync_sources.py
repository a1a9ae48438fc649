"""Sources read from real servers: the web and git."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragcache_cli.sources.documents import LARGEST_BYTES
from ragcache_cli.sources.git import read_git
from ragcache_cli.sources.read import Surroundings, origin_of, prefix_of, read_source
from ragcache_cli.sources.reading import Deadline, Fetching, Scratch, SourceContents
from ragcache_cli.sources.web import read_web
from ragcache_core.access.networks import AddressRules, parse_networks
from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_operator.spec.collection import (
    GitSource,
    SourceSpec,
    hosts_variable,
    token_variable,
)
from ragcache_wire.address_gate import AddressGate
from tests.kit.sources import Page, Repository, Web, serving_web, tar_gz

MIB = 1 << 20
LOOPBACK = AddressRules(parse_networks("test", ["127.0.0.0/8"]))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    with serving_web(tmp_path / "repositories") as serving:
        yield serving


@pytest.fixture
def repository(web: Web) -> Repository:
    return Repository(web.repositories / "handbook")


@pytest.fixture
def here(tmp_path: Path) -> Surroundings:
    (tmp_path / "scratch").mkdir()
    return Surroundings(tmp_path / "mounts", {}, Scratch(tmp_path / "scratch", 64 * MIB), LOOPBACK)


def fetching(here: Surroundings, deadline: Deadline) -> Fetching:
    return Fetching(AddressGate(here.rules), here.scratch, deadline)


def token_of(web: Web, index: int, token: str) -> dict[str, str]:
    """Return the variables of a Secret that may go to a web server."""
    host = web.url.removeprefix("http://")
    return {token_variable(index): token, hosts_variable(index): f"example.com, {host}"}


def source(**given: Any) -> SourceSpec:
    return SourceSpec.model_validate(given)


def http(url: str) -> SourceSpec:
    return source(http={"url": url})


def texts(found: SourceContents) -> dict[str, str]:
    return {file.id: file.path.read_text() for file in found.files}


def left(here: Surroundings, tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "scratch").iterdir())


# The web


def test_a_file_is_named_as_its_url_ends(web: Web, here: Surroundings) -> None:
    web.pages["/docs/guide.md"] = Page(b"# Guide")
    found = read_source(0, http(f"{web.url}/docs/guide.md"), here)
    assert texts(found) == {"guide.md": "# Guide"}
    assert found.files[0].kind.media_type == "text/markdown"


def test_a_type_tells_what_an_ending_does_not(web: Web, here: Surroundings) -> None:
    headers = {"Content-Type": "text/markdown; charset=utf-8"}
    web.pages["/guide"] = Page(b"# Guide", headers=headers)
    web.pages["/all"] = Page(tar_gz({"a.md": b"A"}), headers={"Content-Type": "application/gzip"})
    found = read_source(0, http(f"{web.url}/guide"), here)
    assert found.files[0].kind.media_type == "text/markdown"
    assert texts(read_source(0, http(f"{web.url}/all"), here)) == {"a.md": "A"}


def test_an_archive_gives_what_is_in_it_and_is_gone(
    web: Web, here: Surroundings, tmp_path: Path
) -> None:
    web.pages["/v1/handbook.tar.gz"] = Page(tar_gz({"handbook/a.md": b"A", "handbook/b": b""}))
    found = read_source(0, http(f"{web.url}/v1/handbook.tar.gz"), here)
    assert texts(found) == {"a.md": "A"}
    assert left(here, tmp_path) == [found.files[0].path.name]
    assert here.scratch.free_bytes == 64 * MIB - 1


def test_an_archive_that_is_said_to_be_encoded_arrives_as_it_is(
    web: Web, here: Surroundings
) -> None:
    web.pages["/a.tgz"] = Page(tar_gz({"a.md": b"A"}), headers={"Content-Encoding": "gzip"})
    assert texts(read_source(0, http(f"{web.url}/a.tgz"), here)) == {"a.md": "A"}


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (Page(status=404), "answers 404"),
        (Page(status=401), "answers 401; name a Secret"),
        (Page(b"<html>", headers={"Content-Type": "text/html"}), "is a web page"),
        (Page(b"x", headers={"Content-Encoding": "br"}), "is encoded as br"),
        (Page(b"x" * (LARGEST_BYTES + 1)), "is over 8 MiB"),
        (Page(status=302, headers={"Location": "ftp://127.0.0.1/a.md"}), "no http or https URL"),
        (Page(status=302, headers={"Location": "/a.md"}), "redirects more than 5 times"),
    ],
)
def test_what_is_no_document_names_the_source(
    web: Web, here: Surroundings, tmp_path: Path, page: Page, problem: str
) -> None:
    web.pages["/a.md"] = page
    with pytest.raises(InvalidInput, match=problem) as raised:
        read_source(0, http(f"{web.url}/a.md"), here)
    assert raised.value.field == f"http {web.url}/a.md"
    assert left(here, tmp_path) == []


def test_another_kind_is_refused(web: Web, here: Surroundings) -> None:
    web.pages["/a.png"] = Page(b"PNG", headers={"Content-Type": "image/png"})
    with pytest.raises(InvalidInput, match=r"is of another kind \(image/png\)"):
        read_source(0, http(f"{web.url}/a.png"), here)


def test_a_web_page_is_a_document(web: Web, here: Surroundings) -> None:
    web.pages["/guide"] = Page(b"<p>x</p>", headers={"Content-Type": "text/html; charset=utf-8"})
    (found,) = read_source(0, http(f"{web.url}/guide"), here).files
    assert (found.id, found.kind) == ("guide", DocumentFormat.HTML)


def test_each_line_of_json_is_a_document(web: Web, here: Surroundings) -> None:
    lines = b'{"id": "a", "text": "A"}\n\n{"id": "b", "text": "B"}'
    web.pages["/all.jsonl"] = Page(lines)
    found = read_source(0, http(f"{web.url}/all.jsonl"), here).files
    assert [(one.id, one.line and one.line.number) for one in found] == [("a", 1), ("b", 3)]
    web.pages["/all.jsonl"] = Page(lines + b"\n[]")
    with pytest.raises(InvalidInput, match=r"line 4 of all\.jsonl has no id"):
        read_source(0, http(f"{web.url}/all.jsonl"), here)


def test_a_download_past_the_scratch_folder_ends(web: Web, tmp_path: Path) -> None:
    web.pages["/a.zip"] = Page(bytes(2 * MIB))
    scratch = Scratch(tmp_path, MIB)
    with pytest.raises(TooLarge, match="more than 1 MiB"):
        read_source(0, http(f"{web.url}/a.zip"), Surroundings(tmp_path, {}, scratch, LOOPBACK))


def test_who_does_not_answer_is_unavailable(web: Web, here: Surroundings) -> None:
    web.pages["/a.md"] = Page(status=503)
    with pytest.raises(Unavailable, match="answers 503"):
        read_source(0, http(f"{web.url}/a.md"), here)
    with pytest.raises(Unavailable, match="nothing answers"):
        read_source(0, http("http://127.0.0.1:9/a.md"), here)


def test_a_download_has_a_deadline(web: Web, here: Surroundings) -> None:
    web.pages["/a.md"] = Page(b"A")
    now = iter((0.0, 11.0))
    with pytest.raises(Unavailable, match="longer than 10 s"):
        read_web("here", f"{web.url}/a.md", None, fetching(here, Deadline(10, lambda: next(now))))


def test_a_token_goes_to_its_host_and_to_no_other(
    web: Web, here: Surroundings, tmp_path: Path
) -> None:
    with serving_web(tmp_path) as elsewhere:
        web.pages["/a.md"] = Page(status=302, headers={"Location": f"{elsewhere.url}/b.md"})
        elsewhere.pages["/b.md"] = Page(b"B")
        asked = source(http={"url": f"{web.url}/a.md", "bearerSecret": {"name": "s"}})
        with_token = replace(here, environ=token_of(web, 3, "secret\n"))
        assert texts(read_source(3, asked, with_token)) == {"a.md": "B"}
        assert web.seen["/a.md"] == "Bearer secret"
        assert elsewhere.seen["/b.md"] is None


def test_a_missing_token_names_its_secret(web: Web, here: Surroundings) -> None:
    asked = source(http={"url": f"{web.url}/a.md", "bearerSecret": {"name": "s", "key": "k"}})
    without = replace(here, environ=token_of(web, 0, ""))
    with pytest.raises(InvalidInput, match="no token under 'k' in the Secret 's'"):
        read_source(0, asked, without)
    assert web.seen == {}


# Git


def git(web: Web, **given: str) -> SourceSpec:
    return source(git={"url": f"{web.url}/git/handbook/.git", **given})


def test_a_repository_gives_its_documents_at_a_ref(
    web: Web, repository: Repository, here: Surroundings, tmp_path: Path
) -> None:
    first = repository.commit({"README.md": b"old", "docs/a.txt": b"A", "x.py": b"", ".h.md": b""})
    repository.run("tag", "v1")
    second = repository.commit({"README.md": b"new"})
    found = read_source(0, git(web), here)
    assert (texts(found), found.revision) == ({"README.md": "new", "docs/a.txt": "A"}, second)
    for ref in ("v1", first):
        old = read_source(0, git(web, ref=ref), here)
        assert (texts(old)["README.md"], old.revision) == ("old", first)
    assert texts(read_source(0, git(web, ref="main", path="docs/"), here)) == {"a.txt": "A"}
    assert all(path.is_file() for path in (tmp_path / "scratch").iterdir())


def test_links_of_a_repository_lead_nowhere(
    web: Web, repository: Repository, here: Surroundings
) -> None:
    repository.folder.joinpath("leak.md").symlink_to("/proc/self/environ")
    repository.folder.joinpath("same.md").symlink_to("a.md")
    repository.commit({"a.md": b"A"})
    assert texts(read_source(0, git(web), here)) == {"a.md": "A"}


def test_nothing_of_a_repository_is_run(
    web: Web, repository: Repository, here: Surroundings, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    repository.commit(
        {
            "a.md": b"A",
            ".gitattributes": b"*.md filter=evil\n",
            ".gitmodules": b'[submodule "x"]\n\tpath = x\n\turl = --upload-pack=touch\n',
            ".gitconfig": f'[filter "evil"]\n\tsmudge = touch {ran}\n'.encode(),
        }
    )
    assert texts(read_source(0, git(web), here)) == {"a.md": "A"}
    assert not ran.exists()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"ref": "nowhere"}, "has no such ref"),
        ({"ref": "0123456789" * 4}, "has no such commit"),
        ({"path": "nowhere"}, "has no folder 'nowhere'"),
        ({"path": "README.md"}, "has no folder 'README.md'"),
        ({"path": "empty"}, "holds no file of .txt, .md"),
    ],
)
def test_what_a_repository_lacks_is_said(
    web: Web, repository: Repository, here: Surroundings, given: dict[str, str], problem: str
) -> None:
    repository.commit({"README.md": b"R", "empty/x.py": b""})
    with pytest.raises(InvalidInput, match=problem):
        read_source(0, git(web, **given), here)


def test_a_url_without_a_repository_is_a_mistake(web: Web, here: Surroundings) -> None:
    with pytest.raises(InvalidInput, match="correct the URL"):
        read_source(0, source(git={"url": f"{web.url}/nothing"}), here)
    with pytest.raises(Unavailable, match="Failed to connect"):
        read_source(0, source(git={"url": "http://127.0.0.1:9/x"}), here)


def test_a_private_repository_takes_the_token(
    web: Web, repository: Repository, here: Surroundings
) -> None:
    repository.commit({"a.md": b"A"})
    secret = base64.b64encode(b"x-access-token:secret").decode()
    web.git_authorization = f"Basic {secret}"
    with pytest.raises(InvalidInput, match="asks for a token"):
        read_source(0, git(web), here)
    asked = source(
        git={"url": f"{web.url}/git/handbook/.git", "bearerSecret": {"name": "s", "key": "k"}}
    )
    for token, works in (("wrong", False), ("secret", True)):
        given = replace(here, environ=token_of(web, 0, token))
        if works:
            assert texts(read_source(0, asked, given)) == {"a.md": "A"}
        else:
            with pytest.raises(InvalidInput, match="or refuses this one"):
                read_source(0, asked, given)


def test_other_ways_than_http_are_closed(repository: Repository, here: Surroundings) -> None:
    repository.commit({"a.md": b"A"})
    for url in (f"file://{repository.folder}", str(repository.folder), "ext::sh -c 'touch x'"):
        source = GitSource.model_construct(url=url, ref="main")
        with pytest.raises(InvalidInput, match="another way than http"):
            read_git("here", source, None, fetching(here, Deadline(60)))


def test_a_repository_past_the_scratch_folder_ends(
    web: Web, repository: Repository, tmp_path: Path
) -> None:
    repository.commit({"a.bin": os.urandom(2 * MIB), "a.md": b"A"})
    folder = tmp_path / "small"
    folder.mkdir()
    with pytest.raises(TooLarge, match="more than 1 MiB"):
        read_source(0, git(web), Surroundings(tmp_path, {}, Scratch(folder, MIB), LOOPBACK))
    assert list(folder.iterdir()) == []


def test_git_has_a_deadline(web: Web, repository: Repository, here: Surroundings) -> None:
    repository.commit({"a.md": b"A"})
    now = iter((0.0, 0.0, 11.0))
    deadline = Deadline(10, lambda: next(now))
    source = GitSource(url=f"{web.url}/git/handbook/.git", ref="main")
    with pytest.raises(Unavailable, match="longer than 10 s"):
        read_git("here", source, None, fetching(here, deadline))


# What they are called


def test_sources_are_called_by_what_they_are() -> None:
    named = [
        (source(configMap={"name": "faq"}), "configMap faq", "faq"),
        (source(volume={"claimName": "c", "path": "a/b/"}), "volume c a/b", "c/a/b"),
        (http("https://h/x/guide-1.tar.gz"), "http https://h/x/guide-1.tar.gz", "guide-1"),
        (http("https://h/x/guide.md"), "http https://h/x/guide.md", "h"),
        (source(git={"url": "https://h/o/r.git"}), "git https://h/o/r.git HEAD", "r"),
        (
            source(git={"url": "https://h/o/r", "ref": "v1", "path": "docs"}),
            "git https://h/o/r v1 docs",
            "r/docs",
        ),
    ]
    for given, origin, prefix in named:
        assert (origin_of(given), prefix_of(given)) == (origin, prefix)
