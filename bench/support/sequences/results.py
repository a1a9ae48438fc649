"""A file of measured requests, which an interrupted run goes on from.

The first line has the settings of the run. Each further line has one request of one contestant. The
lines of a turn are appended when it has ended, so an interrupted turn is measured again.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.support.sequences.figures import Measured
from ragcache_wire.v1 import engine_pb2


class Results:
    """What contestants were measured at, by contestant and index of the request.

    Args:
        path: Where to keep it. None: it is not kept.
        settings: What the requests and their times depend on.

    Raises:
        SystemExit: The file is of a run with other settings.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._measured: dict[str, dict[int, Measured]] = defaultdict(dict)
        if path is None:
            return
        header = json.dumps(settings, sort_keys=True)
        # A killed run may have left a part of its last line.
        raw = path.read_text().splitlines(keepends=True) if path.exists() else []
        lines = [line for line in raw if line.endswith("\n")]
        if lines and lines[0].strip() != header:
            raise SystemExit(
                f"--results {path} is of a run with other settings. Name another file, or repeat"
                f" the settings of its first line: {lines[0].strip()}"
            )
        path.write_text("".join(lines or [f"{header}\n"]))
        for line in lines[1:]:
            found = json.loads(line)
            self._measured[found["contestant"]][found["request"]] = _measured(found)

    def add(self, contestant: str, requests: Sequence[int], found: Sequence[Measured]) -> None:
        """Keep the requests of a turn."""
        self._measured[contestant].update(zip(requests, found, strict=True))
        if self._path is not None:
            with self._path.open("a") as file:
                for request, one in zip(requests, found, strict=True):
                    file.write(json.dumps(_line(contestant, request, one)) + "\n")

    def has(self, contestant: str, requests: Sequence[int]) -> bool:
        """Tell whether all of these requests were measured."""
        return self._measured[contestant].keys() >= set(requests)

    def first_missing(self, contestant: str, requests: range) -> int:
        """Return the first of these requests that was not measured, or their end."""
        known = self._measured[contestant]
        return next((request for request in requests if request not in known), requests.stop)

    def common(self, contestants: Sequence[str]) -> dict[str, list[Measured]]:
        """Return the requests that all contestants were measured at, in order."""
        known = [self._measured[name].keys() for name in contestants]
        shared = sorted(set.intersection(*map(set, known)))
        return {name: [self._measured[name][index] for index in shared] for name in contestants}


def _line(contestant: str, request: int, one: Measured) -> dict[str, Any]:
    record = one.record.SerializeToString() if one.record is not None else None
    return {
        "contestant": contestant,
        "request": request,
        "ttft_s": one.ttft_s,
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "cpu_s": one.cpu_s,
        "record": base64.b64encode(record).decode() if record is not None else None,
    }


def _measured(line: Mapping[str, Any]) -> Measured:
    raw = line["record"]
    record = engine_pb2.RequestRecord.FromString(base64.b64decode(raw)) if raw is not None else None
    return Measured(
        line["ttft_s"], line["prompt_tokens"], line["cached_tokens"], record, line["cpu_s"]
    )
