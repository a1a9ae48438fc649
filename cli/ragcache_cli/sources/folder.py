"""Reads documents below a folder, which is a mounted ConfigMap or volume."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ragcache_cli.sources.documents import DocumentFile
from ragcache_cli.sources.reading import RejectedDocument, SourceContents, checked_number
from ragcache_core.documents.formats import suffix_of
from ragcache_core.errors import InvalidInput


def read_folder(what: str, root: Path, path: str = "") -> SourceContents:
    """Read files of known formats at and below ``root/path``, without hidden ones.

    A ConfigMap's files are links into a hidden folder, so links are followed. A link that leads
    out of ``root`` is not: a writer to the volume must not read other files of this machine.

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
    for parent, folders, names in os.walk(top, onerror=_refuse(what)):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            if name.startswith(".") or suffix_of(name) is None:
                continue
            key = file.relative_to(top).as_posix()
            if not file.resolve().is_relative_to(inside):
                refused.append(
                    RejectedDocument(key, "is a link out of its source; put the file itself")
                )
            elif file.is_file():
                files.append(DocumentFile(key, file))
                checked_number(what, len(files))
    return SourceContents(tuple(files), tuple(refused))


def _refuse(what: str) -> Callable[[OSError], None]:
    def refuse(error: OSError) -> None:
        raise InvalidInput(
            what, f"cannot be read: {error.strerror}", "check its permissions"
        ) from error

    return refuse
