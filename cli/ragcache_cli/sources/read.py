"""Reads one source of a RagCollection and names its documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from ragcache_cli.sources.documents import DocumentFile
from ragcache_cli.sources.git import read_git
from ragcache_cli.sources.reading import (
    Deadline,
    Fetching,
    RejectedDocument,
    Scratch,
    SourceContents,
    checked_number,
    with_lines,
)
from ragcache_cli.sources.web import archive_ending, name_in, read_web
from ragcache_core.access.networks import PUBLIC_ONLY, AddressRules
from ragcache_core.documents.formats import FORMAT_OF_SUFFIX, suffix_of
from ragcache_core.errors import InvalidInput
from ragcache_operator.spec.collection import (
    SECRET_HOSTS,
    GitSource,
    HttpSource,
    SourceSpec,
    hosts_variable,
    mount_name,
    token_variable,
)
from ragcache_wire.address_gate import AddressGate


def read_folder(what: str, root: Path, path: str = "") -> SourceContents:
    """Read files of known formats at and below ``root/path``, without hidden ones.

    A ConfigMap's files are links into a hidden folder, so links are followed. A link that leads
    out of ``root`` is not: a writer to the volume must not read other files of this machine. The
    folders of a ConfigMap begin with two dots, and do not count as skipped.

    Raises:
        InvalidInput: The folder does not exist or cannot be read; the field is ``what``.
    """
    inside = root.resolve()
    top = (inside / path).resolve()
    if not top.is_relative_to(inside):
        raise InvalidInput(what, f"path {path!r} leads out of the volume", "name a folder in it")
    if not top.is_dir():
        where = f"holds no folder {path!r}" if path else "is not there"
        raise InvalidInput(what, where, "correct its name, or create it")
    files: list[DocumentFile] = []
    refused: list[RejectedDocument] = []
    skipped = 0
    for parent, folders, names in os.walk(top, onerror=_refuse(what)):
        shown = sorted(name for name in folders if not name.startswith("."))
        skipped += sum(not name.startswith("..") for name in folders) - len(shown)
        folders[:] = shown
        for name in sorted(names):
            file = Path(parent, name)
            if name.startswith(".") or suffix_of(name) is None:
                skipped += 1
                continue
            key = file.relative_to(top).as_posix()
            if not file.resolve().is_relative_to(inside):
                refused.append(
                    RejectedDocument(key, "is a link out of its source; put the file itself")
                )
            elif file.is_file():
                files.append(DocumentFile(key, file, inside=inside))
                checked_number(what, len(files))
            else:
                skipped += 1
    return SourceContents(tuple(files), tuple(refused), skipped=skipped)


def _refuse(what: str) -> Callable[[OSError], None]:
    def refuse(error: OSError) -> None:
        raise InvalidInput(
            what, f"cannot be read: {error.strerror}", "check its permissions"
        ) from error

    return refuse


TIMEOUT_S = 900.0
"""Time limit of one source."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Folders and tokens that the pod provides, and the addresses that sources may have.

    ``mounts`` holds the mounted sources.
    """

    mounts: Path
    environ: Mapping[str, str]
    scratch: Scratch
    rules: AddressRules = PUBLIC_ONLY


def origin_of(source: SourceSpec) -> str:
    """Return the name of a source, for messages and for its documents' metadata."""
    if source.config_map is not None:
        return f"configMap {source.config_map.name}"
    if source.volume is not None:
        return " ".join(("volume", source.volume.claim_name, *_below(source.volume.path)))
    if source.http is not None:
        return f"http {source.http.url}"
    assert source.git is not None
    return " ".join(("git", source.git.url, source.git.ref, *_below(source.git.path)))


def prefix_of(source: SourceSpec) -> str:
    """Return the prefix of its document ids if there are several sources."""
    if source.config_map is not None:
        return source.config_map.name
    if source.volume is not None:
        return "/".join((source.volume.claim_name, *_below(source.volume.path)))
    if source.http is not None:
        name = name_in(source.http.url)
        ending = archive_ending(name)
        return name[: -len(ending)] if ending else urlsplit(source.http.url).netloc
    assert source.git is not None
    return "/".join((_repository(source.git.url), *_below(source.git.path)))


def read_source(index: int, source: SourceSpec, here: Surroundings) -> SourceContents:
    """Read the documents of a source.

    Args:
        index: Its index in the RagCollection.

    Raises:
        InvalidInput: The source is invalid or has no documents.
        TooLarge: The source exceeds a limit.
        Unavailable: Its host does not answer.
    """
    what = origin_of(source)
    reading = with_lines(what, _read(index, source, what, here))
    if not reading.files and not reading.refused:
        # An empty source is more likely a wrong path, and a sync would delete every document.
        raise InvalidInput(
            what,
            f"holds no file of {', '.join(FORMAT_OF_SUFFIX)}",
            "correct its path, or take the source out",
        )
    return reading


def _read(index: int, source: SourceSpec, what: str, here: Surroundings) -> SourceContents:
    mount = here.mounts / mount_name(index)
    fetching = Fetching(AddressGate(here.rules), here.scratch, Deadline(TIMEOUT_S))
    if source.config_map is not None:
        return read_folder(what, mount)
    if source.volume is not None:
        return read_folder(what, mount, source.volume.path)
    if source.http is not None:
        token = _token(what, index, source.http, here.environ)
        return read_web(what, source.http.url, token, fetching)
    git = source.git
    assert git is not None
    return read_git(what, git, _token(what, index, git, here.environ), fetching)


def _token(
    what: str, index: int, source: HttpSource | GitSource, environ: Mapping[str, str]
) -> str | None:
    """Return the token of a source, if its Secret names the source's host."""
    secret = source.bearer_secret
    if secret is None:
        return None
    host = urlsplit(source.url).netloc.lower()
    hosts = environ.get(hosts_variable(index), "").lower().replace(",", " ").split()
    if host not in hosts:
        problem = f"may not send the Secret {secret.name!r} to {host}"
        fix = f"add the host to the entry {SECRET_HOSTS!r} of the Secret, if it may have the token"
        raise InvalidInput(what, problem, fix)
    token = environ.get(token_variable(index), "").strip()
    if not token or not token.isascii() or not token.isprintable():
        problem = f"finds no token under {secret.key!r} in the Secret {secret.name!r}"
        raise InvalidInput(what, problem, "put it there")
    return token


def _below(path: str) -> tuple[str, ...]:
    clean = PurePosixPath(path).as_posix()
    return () if clean == "." else (clean,)


def _repository(url: str) -> str:
    parts = urlsplit(url)
    return PurePosixPath(parts.path).name.removesuffix(".git") or parts.netloc
