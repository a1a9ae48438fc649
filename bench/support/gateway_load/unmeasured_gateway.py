"""Runs a gateway whose metrics record nothing, to compare one that records them with it.

The product has no such setting. Run it as a program:
``python -m bench.support.gateway_load.unmeasured_gateway``.
"""

from __future__ import annotations

import sys
from typing import Any

from prometheus_client import Counter, Gauge, Histogram


def record_nothing() -> None:
    """Have every metric of this process record nothing from now on. It cannot be undone."""

    def keep(metric: Any, *_: object, **__: object) -> Any:
        return metric

    for kind in (Counter, Gauge, Histogram):
        for name in ("labels", "inc", "dec", "set", "observe"):
            if hasattr(kind, name):
                setattr(kind, name, keep)


if __name__ == "__main__":
    from ragcache_gateway.__main__ import main

    record_nothing()
    sys.exit(main())
