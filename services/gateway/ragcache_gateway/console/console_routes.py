"""Routes of the console's page and of its files. They need no key, because they have no data."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from ragcache_core.access.endpoints import CONSOLE_PATH
from ragcache_core.errors import NotFound

router = APIRouter(tags=["console"], include_in_schema=False)

INDEX: Final = "index.html"

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # An upgraded gateway has other files under the same names.
    "Cache-Control": "no-cache",
}
"""The page runs no code but these files, sends requests to this gateway alone, and is shown in no
frame. So an answer or a title that contains markup stays text."""

_MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page."""

    content: bytes
    media_type: str

    def response(self) -> Response:
        """Return a response with this file."""
        return Response(self.content, media_type=self.media_type, headers=HEADERS)


def read_files() -> dict[str, StaticFile]:
    """Return the page's files by their names."""
    folder = files(__package__) / "static"
    return {
        file.name: StaticFile(file.read_bytes(), _MEDIA_TYPES[file.name.rpartition(".")[2]])
        for file in folder.iterdir()
        if file.is_file()
    }


_FILES: Final = read_files()


@router.get(CONSOLE_PATH)
async def console() -> Response:
    """Return the page."""
    return _FILES[INDEX].response()


@router.get(f"{CONSOLE_PATH}/")
async def console_with_slash() -> Response:
    """Lead to the page. The location is relative, because a proxy may serve it below a path."""
    return RedirectResponse("../console", 308, HEADERS)


@router.get(f"{CONSOLE_PATH}/{{name}}")
async def console_file(name: str) -> Response:
    """Return one of the page's files."""
    file = _FILES.get(name)
    if file is None:
        raise NotFound("file of the console", name, "open /console")
    return file.response()
