"""Finds and follows the log files of a local platform."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from ragcache_cli.local.state_file import ROOT, recorded
from ragcache_cli.output.logs import is_of
from ragcache_core.errors import InvalidInput, NotFound

_POLL_S = 0.2
_BLOCK_BYTES = 64 << 10
_PREVIOUS = ".previous"

Show = Callable[[str, str], None]
"""A callback for a part and a line of its log."""


def find_logs(name: str | None, data: Path | None, root: Path = ROOT) -> dict[str, Path]:
    """Return log files by part: of the named folder or RagCache, else of the only one in root.

    A running platform is preferred to a stopped one. Raises InvalidInput or NotFound.
    """
    folders = {data.name: data} if data else _running(root) or _with_logs(root)
    if not folders:
        raise InvalidInput("--data", f"nothing has run in {root}", "start it with `ragcache up`")
    if name is None and len(folders) > 1:
        raise InvalidInput("NAME", f"could be any of {', '.join(folders)}", "say which")
    if name is not None and name not in folders:
        raise NotFound("RagCache", name, f"what ran here is {', '.join(folders)}")
    folder = folders[name] if name else next(iter(folders.values()))
    files = {
        path.stem: path
        for path in sorted((folder / "logs").glob("*.log"))
        if not path.stem.endswith(_PREVIOUS)
    }
    if not files:
        raise InvalidInput("--data", f"{folder} holds no logs", "start it with `ragcache up`")
    return files


def choose(files: Mapping[str, Path], part: str | None) -> dict[str, Path]:
    """Select the logs of the named part or component. Raises NotFound if none match."""
    chosen = {name: path for name, path in files.items() if is_of(name, part)}
    if not chosen:
        raise NotFound("part", str(part), f"the parts here are {', '.join(files)}")
    return chosen


async def show_files(files: Mapping[str, Path], tail: int, show: Show, *, follow: bool) -> int:
    """Show the last lines of each log. Return 0, or follow until cancelled.

    A replaced file is read from its first line; each start of a platform replaces the files.
    """
    logs = {part: _Log(path, tail) for part, path in files.items()}
    try:
        while True:
            for part, log in logs.items():
                for line in log.new_lines():
                    show(part, line)
            if not follow:
                return 0
            await asyncio.sleep(_POLL_S)
    finally:
        for log in logs.values():
            log.close()


def _running(root: Path) -> dict[str, Path]:
    return {name: root / name for name in recorded(root)}


def _with_logs(root: Path) -> dict[str, Path]:
    return {folder.parent.name: folder.parent for folder in sorted(root.glob("*/logs"))}


def last_lines(file: BinaryIO, count: int) -> list[str]:
    """Return the last lines and leave the file's position at its end."""
    position = file.seek(0, os.SEEK_END)
    tail = b""
    # One line break more than lines: the text before the first break belongs to it.
    while position and tail.count(b"\n") <= count:
        step = min(_BLOCK_BYTES, position)
        position -= step
        file.seek(position)
        tail = file.read(step) + tail
    file.seek(0, os.SEEK_END)
    return _text(tail)[-count:] if count else []


class _Log:
    """One file that is read incrementally."""

    def __init__(self, path: Path, tail: int) -> None:
        self._path = path
        self._file = path.open("rb")
        self._rest = b""
        self._first = last_lines(self._file, tail)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def new_lines(self) -> Iterator[str]:
        """Return the whole lines that were added since the last call."""
        yield from self._first
        self._first = []
        yield from self._added()
        if self._is_replaced():
            self.close()
            self._file = self._path.open("rb")
            yield from self._added()

    def _added(self) -> Iterator[str]:
        data = self._rest + self._file.read()
        whole, broken, self._rest = data.rpartition(b"\n")
        yield from _text(whole + broken)

    def _is_replaced(self) -> bool:
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False


def _text(data: bytes) -> list[str]:
    # splitlines would also split at a form feed.
    return data.decode(errors="replace").removesuffix("\n").split("\n") if data else []
