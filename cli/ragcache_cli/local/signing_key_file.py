"""The key by which a local platform's engines know the plans of their own gateway."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_KEY_BYTES = 32


@contextmanager
def plan_key_file(path: Path) -> Iterator[None]:
    """A file with a new random key, which nobody else of this machine reads; gone at the end."""
    path.unlink(missing_ok=True)
    # Never there with more rights than these, nor followed to where a link leads.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(_KEY_BYTES)}\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
