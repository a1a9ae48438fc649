"""Checks requests about usage, and encodes what they ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from ragcache_core.access.usage import UsageCounts
from ragcache_core.errors import InvalidInput
from ragcache_retriever.messages.replies import page_token
from ragcache_retriever.messages.requests import after_of
from ragcache_retriever.store.usage import CountedUse, UsageSender, UsageTotal, UsageWanted
from ragcache_wire.usage_counts import PERIOD_OF, PERIODS, counts_message, counts_of
from ragcache_wire.v1 import retriever_pb2 as pb

GATEWAY_ID_BYTES: Final = 16
MAX_SEQUENCE: Final = (1 << 63) - 1
MAX_WAITING_BYTES: Final = 64 << 10
MAX_NAME_CHARS: Final = 512
MAX_DELTAS: Final = 20_000
"""Most deltas of one call, and most names whose totals it asks for."""

MAX_COUNT: Final = 1 << 40
"""Of one minute. The database adds up millions of them in 64 bits."""

MAX_UNIX_S: Final = 1 << 37
"""A time in the year 6325. Later years may have five digits."""


def sender_of(request: pb.AddUsageRequest) -> UsageSender:
    """Return the gateway that sends usage. Raises InvalidInput."""
    if len(request.gateway) != GATEWAY_ID_BYTES:
        raise InvalidInput("gateway", "is no id", f"send {GATEWAY_ID_BYTES} bytes")
    if len(request.waiting) > MAX_WAITING_BYTES:
        raise InvalidInput("waiting", "is too long", f"send at most {MAX_WAITING_BYTES} bytes")
    return UsageSender(request.gateway, min(request.sequence, MAX_SEQUENCE), request.waiting)


def counted_of(request: pb.AddUsageRequest) -> list[CountedUse]:
    """Return what a gateway has counted. Raises InvalidInput."""
    if len(request.deltas) > MAX_DELTAS or len(request.keys) + len(request.tenants) > MAX_DELTAS:
        raise InvalidInput("deltas", "has too many", f"send at most {MAX_DELTAS} at once")
    checked_time("now_unix_s", request.now_unix_s)
    checked_names("keys", request.keys)
    checked_names("tenants", request.tenants)
    return [_counted(f"deltas[{i}]", delta) for i, delta in enumerate(request.deltas)]


def checked_time(path: str, unix_s: int) -> int:
    """Return a Unix time. Raises InvalidInput."""
    if not 0 <= unix_s < MAX_UNIX_S:
        raise InvalidInput(path, f"{unix_s} is out of range", "send a Unix time in seconds")
    return unix_s


def checked_names(path: str, names: Sequence[str]) -> Sequence[str]:
    """Return names of keys, tenants and models. Raises InvalidInput."""
    if wrong := [one for one in names if len(one) > MAX_NAME_CHARS or "\0" in one]:
        fix = f"send at most {MAX_NAME_CHARS} characters and no NUL"
        raise InvalidInput(path, f"has {wrong[0][:40]!r}", fix)
    return names


def wanted_of(request: pb.ListUsageRequest) -> UsageWanted:
    """Return what a listing is to have. Raises InvalidInput."""
    period = PERIOD_OF.get(request.period)
    if period is None:
        raise InvalidInput("period", f"{request.period} is unknown", "send a UsagePeriod")
    checked_names("tenant", [request.tenant])
    checked_names("key", [request.key])
    return UsageWanted(
        period,
        checked_time("start_unix_s", request.start_unix_s),
        checked_time("end_unix_s", request.end_unix_s),
        request.tenant if request.HasField("tenant") else None,
        request.key if request.HasField("key") else None,
        *([_position(request.page_token)] if request.page_token else []),
    )


def total_message(owner: str, total: UsageTotal) -> pb.UsageTotal:
    """Return the message of a total of a "key" or a "tenant"."""
    message = pb.UsageTotal(
        period=PERIODS[total.period],
        start_unix_s=total.start_unix_s,
        counts=counts_message(total.counts),
    )
    setattr(message, owner, total.name)
    return message


def rows_message(rows: Sequence[CountedUse], limit: int) -> pb.ListUsageReply:
    """Return a page of a listing.

    Args:
        rows: Those of the page, and the first one of the next page if there is one.
        limit: Most rows of the page.
    """
    return pb.ListUsageReply(
        rows=[
            pb.UsageRow(
                start_unix_s=one.start_unix_s,
                tenant=one.tenant,
                key=one.key,
                model=one.model,
                counts=counts_message(one.counts),
            )
            for one in rows[:limit]
        ],
        next_page_token=(
            page_token(json.dumps(rows[limit - 1].position)) if len(rows) > limit else ""
        ),
    )


def _counted(path: str, delta: pb.UsageDelta) -> CountedUse:
    checked_names(path, (delta.tenant, delta.key, delta.model))
    minute = checked_time(f"{path}.minute_unix_s", delta.minute_unix_s)
    for field, count in delta.counts.ListFields():
        if count > MAX_COUNT:
            problem = f"{count} is out of range"
            raise InvalidInput(
                f"{path}.counts.{field.name}", problem, f"send at most {MAX_COUNT} for a minute"
            )
    counts: UsageCounts = counts_of(delta.counts)
    return CountedUse(minute, delta.tenant, delta.key, delta.model, counts)


def _position(token: str) -> tuple[int, str, str, str]:
    text = after_of(token)
    try:
        start, tenant, key, model = json.loads(text)
        return int(start), str(tenant), str(key), str(model)
    except (ValueError, TypeError) as error:
        fix = "send next_page_token of the page before"
        raise InvalidInput("page_token", "is not a token of this service", fix) from error
