"""Which files of audit logs a volume keeps whose gateways have stopped.

Each gateway keeps its own files below a bound. No gateway does so for those of one that has
stopped, and the gateway that takes its place has files of another name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

STOPPED_S: Final = 7 * 86_400.0
"""A gateway that has written nothing for so long has stopped."""

FULL_DIGITS: Final = 20
"""Digits of the time in the name of a full file, which follow a hyphen."""

_FULL: Final = re.compile(rf"(.+)-[0-9]{{{FULL_DIGITS}}}")


@dataclass(frozen=True, slots=True)
class AuditFile:
    """A file of an audit log.

    Attributes:
        stem: Its name without the suffix.
        changed_s: Unix time of its last change.
    """

    stem: str
    num_bytes: int
    changed_s: float

    @property
    def gateway(self) -> str:
        """Name of the gateway that has written it."""
        full = _FULL.fullmatch(self.stem)
        return self.stem if full is None else full.group(1)


def files_to_delete(
    files: Iterable[AuditFile], own: str, now_s: float, max_bytes: int
) -> list[AuditFile]:
    """Return the oldest files of stopped gateways, as far as these take more than a bound.

    Args:
        files: Of all gateways of a volume.
        own: Name of a gateway that has not stopped.
        now_s: Unix time.
        max_bytes: Most bytes of the files of all stopped gateways together.
    """
    by_age = sorted(files, key=lambda one: one.changed_s)
    running = {own, *(one.gateway for one in by_age if now_s - one.changed_s < STOPPED_S)}
    left = [one for one in by_age if one.gateway not in running]
    too_much = sum(one.num_bytes for one in left) - max_bytes
    deleted = []
    for one in left:
        if too_much <= 0:
            break
        deleted.append(one)
        too_much -= one.num_bytes
    return deleted
