"""How long each step took, printed as it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print `what` and its seconds when the block ends well."""
    begin = time.monotonic()
    yield
    print(f"[cluster] {what}: {time.monotonic() - begin:.1f} s", flush=True)
