"""Settings as a service reads them from an environment of a test's choice."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar
from unittest.mock import patch

from ragcache_wire.settings.table import ServiceSettings

S = TypeVar("S", bound=ServiceSettings)


def read_settings(table: type[S], environment: Mapping[str, str]) -> S:
    """Return the settings of table in a process that has only this environment."""
    with patch.dict(os.environ, environment, clear=True):
        return table()
