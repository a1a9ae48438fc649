"""Reads a document or an archive from a URL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import httpx

from ragcache_cli.sources.archive import read_tar_gz, read_zip
from ragcache_cli.sources.documents import LARGEST_BYTES, DocumentFile
from ragcache_cli.sources.reading import Fetching, Scratch, SourceContents
from ragcache_core.documents.formats import (
    FORMAT_OF_MEDIA_TYPE,
    FORMAT_OF_SUFFIX,
    DocumentFormat,
    format_of_type,
    suffix_of,
)
from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_wire.address_gate import CheckedRoute

MOST_REDIRECTS = 5
_CONNECT_S = 10.0
_SILENCE_S = 30.0
"""Longest wait between two parts of a response."""

_Unpack = Callable[[str, Path, Scratch], SourceContents]
_UNPACK: dict[str, _Unpack] = {".tar.gz": read_tar_gz, ".tgz": read_tar_gz, ".zip": read_zip}
_SUFFIX_OF = {kind: suffix for suffix, kind in reversed(list(FORMAT_OF_SUFFIX.items()))}
_ENDING_OF = {
    **{media_type: _SUFFIX_OF[kind] for media_type, kind in FORMAT_OF_MEDIA_TYPE.items()},
    "application/zip": ".zip",
    "application/gzip": ".tar.gz",
    "application/x-gzip": ".tar.gz",
    "application/x-compressed-tar": ".tar.gz",
}
"""Suffixes by content type, for URLs without one."""


def archive_ending(name: str) -> str | None:
    """Return the archive suffix of a name."""
    return next((ending for ending in _UNPACK if name.lower().endswith(ending)), None)


def name_in(url: str) -> str:
    """Return the last name in a URL's path, or an empty string."""
    return PurePosixPath(unquote(urlsplit(url).path)).name


def read_web(what: str, url: str, token: str | None, here: Fetching) -> SourceContents:
    """Read the document at a URL, or the documents of an archive.

    Args:
        token: Bearer token for the URL's own host; redirect targets do not receive it.

    Raises:
        InvalidInput, TooLarge: The content is invalid; the field is ``what``.
        Unavailable: The host does not answer.
    """
    scratch = here.scratch
    path = scratch.new_path()
    try:
        ending = _fetch(what, url, token, path, here)
        unpack = _UNPACK.get(ending)
        if unpack is None:
            named = path.rename(scratch.new_path(ending))
            name = name_in(url) or urlsplit(url).netloc
            return SourceContents((DocumentFile(name, named),))
        reading = unpack(what, path, scratch)
        scratch.give_back(path.stat().st_size)
        return reading
    finally:
        path.unlink(missing_ok=True)


def _fetch(what: str, url: str, token: str | None, path: Path, here: Fetching) -> str:
    """Download a URL to ``path`` and return the suffix that tells its type."""
    try:
        with _final_reply(what, url, token, here) as reply:
            _check_status(what, reply.status_code)
            ending = _ending(what, url, reply)
            _write(what, reply, ending not in _UNPACK, path, here)
            return ending
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise InvalidInput(
            what, "leads to what is no http or https URL", "name where it leads to"
        ) from error
    except httpx.TimeoutException as error:
        raise Unavailable(what, "it did not answer in time") from error
    except httpx.RequestError as error:
        raise Unavailable(what, f"nothing answers ({error})") from error


@contextmanager
def _final_reply(
    what: str, url: str, token: str | None, here: Fetching
) -> Iterator[httpx.Response]:
    """Follow redirects, and check the address and the scheme of each step."""
    target = httpx.URL(url)
    for _ in range(MOST_REDIRECTS + 1):
        here.deadline.left_s(what)
        with _reply(here.gate.route(what, str(target)), target, token) as reply:
            if not reply.has_redirect_location:
                yield reply
                return
            before, target = target, target.join(reply.headers["Location"])
        if target.scheme not in ("http", "https") or not target.host:
            raise httpx.UnsupportedProtocol("a redirect to another protocol")
        if before.scheme == "https" and target.scheme != "https":
            raise InvalidInput(what, "redirects from https to http", "name where it leads to")
        if (before.scheme, before.netloc) != (target.scheme, target.netloc):
            token = None
    raise InvalidInput(
        what, f"redirects more than {MOST_REDIRECTS} times", "name where it leads to"
    )


@contextmanager
def _reply(route: CheckedRoute, url: httpx.URL, token: str | None) -> Iterator[httpx.Response]:
    """Request a URL from the first address that accepts a connection."""
    # An archive must arrive as it is, without transparent decompression.
    headers = {"Accept-Encoding": "identity", "Host": url.netloc.decode("ascii")}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
    transport = httpx.HTTPTransport(proxy=route.proxy)
    # Each step has a client of its own, so no cookie reaches another host at the same address.
    with httpx.Client(timeout=timeout, transport=transport) as client:
        targets = [url] if route.proxy else [url.copy_with(host=a) for a in route.addresses]
        for i, target in enumerate(targets):
            request = client.build_request("GET", target, headers=headers)
            request.extensions["sni_hostname"] = route.host
            try:
                reply = client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if i + 1 == len(targets):
                    raise
                continue
            with closing(reply):
                yield reply
            return


def _write(what: str, reply: httpx.Response, is_document: bool, path: Path, here: Fetching) -> None:
    written = 0
    with path.open("wb") as file:
        for piece in reply.iter_raw():
            here.deadline.left_s(what)
            written += len(piece)
            if is_document and written > LARGEST_BYTES:
                raise TooLarge(what, f"is over {LARGEST_BYTES >> 20} MiB", "split it")
            here.scratch.take(len(piece), what)
            file.write(piece)


def _check_status(what: str, status: int) -> None:
    """Raise for a response without a document."""
    if status in (401, 403):
        raise InvalidInput(what, f"answers {status}", "name a Secret with its token, or renew it")
    if status == 429 or status >= 500:
        raise Unavailable(what, f"answers {status}")
    if status != 200:
        raise InvalidInput(what, f"answers {status}", "correct the URL")


def _ending(what: str, url: str, reply: httpx.Response) -> str:
    name = name_in(url)
    kind = reply.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    ending = archive_ending(name) or suffix_of(name) or _ENDING_OF.get(kind)
    encoding = reply.headers.get("Content-Encoding", "identity")
    if ending is None:
        raise InvalidInput(
            what,
            f"is of another kind ({kind or 'no content type'})",
            f"name one of {', '.join((*FORMAT_OF_SUFFIX, *_UNPACK))}",
        )
    is_page = format_of_type(kind) is DocumentFormat.HTML
    if is_page and FORMAT_OF_SUFFIX.get(ending) is not DocumentFormat.HTML:
        # Behind the name of another file it is a login page or an error.
        raise InvalidInput(what, "is a web page", "name the file itself")
    if ending not in _UNPACK and encoding != "identity":
        raise InvalidInput(what, f"is encoded as {encoding}", "name the file itself")
    return ending
