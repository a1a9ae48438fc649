"""Documents below a folder: a mounted ConfigMap or volume."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ragcache_cli.commands.documents import DocumentFile
from ragcache_cli.sources.reading import Reading, Refused, checked_number, suffix_of
from ragcache_core.errors import InvalidInput


def read_folder(what: str, root: Path, path: str = "") -> Reading:
    """Markdown and text files at and below ``root/path``; hidden ones left aside.

    A mounted ConfigMap's files are links into a hidden folder beside them, so links are followed,
    but none that leads out of root: whoever writes to a volume must not read this machine by it.
    Raises InvalidInput, its field being what, for a folder that is not there or cannot be read.
    """
    inside = root.resolve()
    top = (inside / path).resolve()
    if not top.is_relative_to(inside):
        raise InvalidInput(what, f"path {path!r} leads out of the volume", "name a folder in it")
    if not top.is_dir():
        where = f"holds no folder {path!r}" if path else "is not there"
        raise InvalidInput(what, where, "correct its name, or create it")
    files: list[DocumentFile] = []
    refused: list[Refused] = []
    for place, folders, names in os.walk(top, onerror=_refuse(what)):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(place, name)
            if name.startswith(".") or suffix_of(name) is None:
                continue
            key = file.relative_to(top).as_posix()
            if not file.resolve().is_relative_to(inside):
                refused.append(Refused(key, "is a link out of its source; put the file itself"))
            elif file.is_file():
                files.append(DocumentFile(key, file))
                checked_number(what, len(files))
    return Reading(tuple(files), tuple(refused))


def _refuse(what: str) -> Callable[[OSError], None]:
    def refuse(error: OSError) -> None:
        raise InvalidInput(
            what, f"cannot be read: {error.strerror}", "check its permissions"
        ) from error

    return refuse
