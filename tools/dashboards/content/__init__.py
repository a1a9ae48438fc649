"""The dashboards, one module each."""

from __future__ import annotations

from typing import Final

from tools.dashboards.content import (
    cache,
    ingest,
    operator,
    overview,
    retrieval,
    scheduling,
    tenants,
)
from tools.dashboards.dashboard import Dashboard

DASHBOARDS: Final[tuple[Dashboard, ...]] = (
    overview.DASHBOARD,
    cache.DASHBOARD,
    scheduling.DASHBOARD,
    retrieval.DASHBOARD,
    ingest.DASHBOARD,
    tenants.DASHBOARD,
    operator.DASHBOARD,
)
