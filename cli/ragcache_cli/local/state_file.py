"""The record of a running platform: the supervisor writes it, other commands read it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ragcache_cli.local.process import is_alive
from ragcache_core.errors import InvalidInput

ROOT = Path(".ragcache")
"""Default parent of the data folders, relative to the working folder."""

_FILE = "state.json"
_LOCK = "lock"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ComponentRecord:
    """The last known state of a component. ``pid`` 0 means no process; ``started`` is Unix time."""

    name: str
    component: str
    pid: int
    started: float
    phase: str
    cause: str
    restarts: int
    addresses: dict[str, str]
    log: str


@dataclass(frozen=True, slots=True)
class PlatformRecord:
    """A running RagCache. ``pid`` and ``started`` are the supervisor's."""

    name: str
    pid: int
    started: float
    phase: str
    gateway_url: str
    model: str
    parts: tuple[ComponentRecord, ...]

    @property
    def supervisor_lives(self) -> bool:
        """Return whether the supervisor still runs."""
        return is_alive(self.pid, self.started)

    @property
    def leaders(self) -> dict[int, float]:
        """Return start times by process id, for every component with a process."""
        return {part.pid: part.started for part in self.parts if part.pid}


def write_record(data: Path, record: PlatformRecord) -> None:
    """Replace the record of a data folder atomically."""
    text = json.dumps({"format": _FORMAT, **asdict(record)}, indent=1)
    draft = data / f"{_FILE}.new"
    draft.write_text(text)
    os.replace(draft, data / _FILE)


def remove_record(data: Path) -> None:
    """Delete the record: no platform runs in the folder."""
    (data / _FILE).unlink(missing_ok=True)


def read_record(data: Path) -> PlatformRecord | None:
    """Read the record of a data folder; return None if no platform runs there.

    Raises:
        InvalidInput: Another version wrote the record.
    """
    path = data / _FILE
    try:
        fields = json.loads(path.read_text())
        if fields.pop("format") != _FORMAT:
            raise ValueError("another version wrote it")
        parts = tuple(ComponentRecord(**part) for part in fields.pop("parts"))
        return PlatformRecord(**fields, parts=parts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            str(path), f"cannot be read: {error}", "stop what runs there, then remove the file"
        ) from error


def recorded(root: Path = ROOT) -> list[str]:
    """Return the names of the folders in ``root`` that have a record."""
    return [path.parent.name for path in sorted(root.glob(f"*/{_FILE}"))]


def find_data(
    data: Path | None, root: Path = ROOT, option: str = "--data"
) -> tuple[Path, PlatformRecord]:
    """Return the named data folder, else the only one in ``root`` with a running platform.

    Args:
        option: The command's option that names a platform, for errors.

    Raises:
        InvalidInput: No platform runs, or several do.
    """
    if data is not None:
        record = read_record(data)
        if record is None:
            raise _nothing_runs(data, option)
        return data, record
    found = [
        (path.parent, record)
        for path in sorted(root.glob(f"*/{_FILE}"))
        if (record := read_record(path.parent)) is not None
    ]
    living = [(folder, record) for folder, record in found if record.supervisor_lives]
    candidates = living or found
    if not candidates:
        raise _nothing_runs(root, option)
    if len(candidates) > 1:
        names = ", ".join(f"{folder} at {record.gateway_url}" for folder, record in candidates)
        raise InvalidInput(option, f"several are running: {names}", f"say which with {option}")
    return candidates[0]


@contextmanager
def only_supervisor(data: Path) -> Iterator[None]:
    """Lock the data folder. Raises InvalidInput while another process has the lock.

    The system releases the lock when its process ends.
    """
    with (data / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            record = read_record(data)
            who = f" (pid {record.pid})" if record else ""
            raise InvalidInput(
                "--data",
                f"a RagCache already runs in {data}{who}",
                "stop it with `ragcache down`, or use another folder",
            ) from error
        yield


def _nothing_runs(folder: Path, option: str) -> InvalidInput:
    fix = f"start one with `ragcache up`, or name another with {option}"
    return InvalidInput(option, f"nothing runs in {folder}", fix)
