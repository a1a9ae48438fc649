"""What searches have taught, in a file beside an index. A lost file costs accuracy for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


def read_learned(path: Path, parse: Callable[[str], T]) -> T | None:
    """Return what a file holds, or None if there is none or none that can be used.

    Args:
        parse: Raises ValueError for a text that it cannot use.
    """
    try:
        return parse(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("index: estimates are learned again file=%s error=%s", path, error)
        return None


def write_learned(path: Path, text: str) -> None:
    """Replace a file. A disk that refuses is logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.tmp")
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        log.warning("index: estimates not saved file=%s error=%s", path, error)
