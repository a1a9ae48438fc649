"""Who asks: the name of the key of a request, from the gateway to the parts that serve it.

Parts let keys take turns by it. It proves nothing: what a key may do is decided in the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

HEADER: Final = "ragcache-key-name"
"""Name of the metadata of a call."""

_name: ContextVar[str] = ContextVar("asking", default="")


@contextmanager
def asking(name: str) -> Iterator[None]:
    """Have all work inside be that of a key, by its name."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


def asker() -> str:
    """Return the name of the key that asks. Empty: the platform's own work."""
    return _name.get()


def asker_metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata that names the key in a call."""
    name = _name.get()
    return ((HEADER, name),) if name else ()


def adopt_asker(metadata: Any) -> None:
    """Have this task be the work of the key that the metadata of its call names."""
    found = next((value for key, value in metadata or () if key == HEADER), "")
    _name.set(found if isinstance(found, str) else "")
