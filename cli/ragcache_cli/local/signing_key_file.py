"""Creates the key that signs the plans of a local platform."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_KEY_BYTES = 32


@contextmanager
def plan_key_file(path: Path) -> Iterator[None]:
    """Write a file with a new random key, readable by this user alone, and delete it at the end."""
    path.unlink(missing_ok=True)
    # The file never has wider permissions, and a link is not followed.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(_KEY_BYTES)}\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
