"""Logs of a service on stderr: lines of text, or one JSON object in each line.

A JSON line has the time, the level, the component, the logger and the message. Inside a traced
request it also has the ids of trace and span, and a call with ``extra=log_fields(...)`` adds its
own fields. Messages and fields never have the text of documents, questions or answers, nor keys.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from ragcache_wire.settings.field_types import LogForm
from ragcache_wire.telemetry.metric_registry import exemplar
from ragcache_wire.tracing import current_span

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIELDS: Final = "ragcache_fields"


def log_fields(**fields: str | int | float | None) -> dict[str, Mapping[str, Any]]:
    """Return the ``extra`` of a log call, with fields for the JSON line. None is left out."""
    return {_FIELDS: {name: value for name, value in fields.items() if value is not None}}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object.

    Args:
        component: Name of the part.
    """

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC)
        span = current_span()
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
            **((exemplar(span.headers()) if span.is_recording else None) or {}),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def start_logging(level: str, form: LogForm, component: str) -> None:
    """Log to stderr from now on.

    Args:
        level: Least severe level, like ``info``.
        component: Name of the part, for JSON lines.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(component) if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # httpx logs a line for each request to an endpoint, which helps only in debugging.
    if level != "debug":
        logging.getLogger("httpx").setLevel(logging.WARNING)
