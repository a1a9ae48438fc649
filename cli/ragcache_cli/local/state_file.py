"""What runs in a data folder: written by the supervisor, read by every other command."""

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
"""Where data folders lie unless said otherwise, one per RagCache, below the working folder."""

_FILE = "state.json"
_LOCK = "lock"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PartRecord:
    """One part as last seen. pid 0: no process. started: its start, seconds since the epoch."""

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
    """One running RagCache. pid, started: the supervisor's. phase: starting, ready or stopping."""

    name: str
    pid: int
    started: float
    phase: str
    gateway_url: str
    model: str
    parts: tuple[PartRecord, ...]

    @property
    def supervisor_lives(self) -> bool:
        """Whether someone looks after the parts."""
        return is_alive(self.pid, self.started)

    @property
    def leaders(self) -> dict[int, float]:
        """Start time by process id, of every part that had a process."""
        return {part.pid: part.started for part in self.parts if part.pid}


def write_record(data: Path, record: PlatformRecord) -> None:
    """Replace the record of a data folder; a reader sees the old or the new one, never half."""
    text = json.dumps({"format": _FORMAT, **asdict(record)}, indent=1)
    draft = data / f"{_FILE}.new"
    draft.write_text(text)
    os.replace(draft, data / _FILE)


def remove_record(data: Path) -> None:
    """Nothing runs in the folder any more."""
    (data / _FILE).unlink(missing_ok=True)


def read_record(data: Path) -> PlatformRecord | None:
    """What was last written for a data folder; None when nothing runs there.

    Raises InvalidInput for a record that another version wrote.
    """
    path = data / _FILE
    try:
        fields = json.loads(path.read_text())
        if fields.pop("format") != _FORMAT:
            raise ValueError("another version wrote it")
        parts = tuple(PartRecord(**part) for part in fields.pop("parts"))
        return PlatformRecord(**fields, parts=parts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            str(path), f"cannot be read: {error}", "stop what runs there, then remove the file"
        ) from error


def recorded(root: Path = ROOT) -> list[str]:
    """Names of the folders in root where something runs, or was left behind."""
    return [path.parent.name for path in sorted(root.glob(f"*/{_FILE}"))]


def find_data(data: Path | None, root: Path = ROOT) -> tuple[Path, PlatformRecord]:
    """The data folder meant: the one named, else the only one in root where something runs.

    Raises InvalidInput when nothing runs, or several could be meant.
    """
    if data is not None:
        record = read_record(data)
        if record is None:
            raise _nothing_runs(data)
        return data, record
    found = [
        (path.parent, record)
        for path in sorted(root.glob(f"*/{_FILE}"))
        if (record := read_record(path.parent)) is not None
    ]
    living = [(folder, record) for folder, record in found if record.supervisor_lives]
    candidates = living or found
    if not candidates:
        raise _nothing_runs(root)
    if len(candidates) > 1:
        names = ", ".join(str(folder) for folder, _ in candidates)
        raise InvalidInput("--data", f"several are running: {names}", "say which with --data")
    return candidates[0]


@contextmanager
def only_supervisor(data: Path) -> Iterator[None]:
    """Hold the data folder. Raises InvalidInput while another process holds it.

    The system drops the lock when its holder ends, however it ends.
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


def _nothing_runs(folder: Path) -> InvalidInput:
    return InvalidInput("--data", f"nothing runs in {folder}", "start it with `ragcache up`")
