"""Resolves whose log a command means, and formats its lines."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from rich.console import Console
from rich.text import Text

from ragcache_cli.output.console import printable
from ragcache_core.errors import NotFound
from ragcache_operator.spec.ragcache import COMPONENTS

_STYLES: Final = ("cyan", "green", "yellow", "magenta", "blue")


def read_words(
    name: str | None, component: str | None, caches: Collection[str]
) -> tuple[str | None, str | None]:
    """Return (RagCache, part or component) from the command's words; None means all.

    A single word that names a part and no RagCache means the part.

    Raises:
        NotFound: The second word names no part.
    """
    if name is not None and component is None and name not in caches and is_part(name):
        return None, name
    if component is not None and not is_part(component):
        raise NotFound("part", component, f"the parts are {', '.join(COMPONENTS)}, engine-NAME")
    return name, component


def is_part(word: str) -> bool:
    """Return whether a word can name a component, or one engine of several."""
    return word in COMPONENTS or word.startswith("engine-")


def is_of(part: str, wanted: str | None) -> bool:
    """Return whether a part is the wanted one, or belongs to the wanted component."""
    return wanted is None or part == wanted or (wanted == "engine" and part.startswith("engine-"))


class LogLines:
    """Shows lines of several logs on one console, each after the name of its source."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._styles: dict[str, str] = {}

    def show(self, source: str, text: str) -> None:
        """Show one line."""
        style = self._styles.setdefault(source, _STYLES[len(self._styles) % len(_STYLES)])
        line = Text.assemble((f"{source} | ", style), printable(text))
        self._console.print(line, soft_wrap=True)
