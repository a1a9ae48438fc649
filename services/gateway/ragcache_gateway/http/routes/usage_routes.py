"""The route of what keys have used."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, BeforeValidator, Field

from ragcache_core.access.caller import Caller, Scope
from ragcache_core.access.usage import COUNT_NAMES, Period, window_end, window_start
from ragcache_core.errors import InvalidInput
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.services import Asking, Services
from ragcache_wire.rest_fields.fields import Text
from ragcache_wire.usage_counts import PERIODS, counts_of
from ragcache_wire.v1 import retriever_pb2 as pb

MAX_ROWS = 1000
_DEFAULT_MONTHS = timedelta(days=365)

router = APIRouter(tags=["usage"], responses={**ERRORS, **UPSTREAM_ERRORS})


class UsageEntry(BaseModel):
    """What one key has used of one model in a day or a month."""

    object: Literal["usage"] = "usage"
    start: datetime = Field(description="Begin of the day or month, in UTC.")
    end: datetime = Field(description="Begin of the next one.")
    tenant: str | None = Field(description="Null: the key has none.")
    key: str = Field(description="Name of the key.")
    model: str | None = Field(description="Null for searches, embeddings and reranking.")
    requests: int = Field(description="Requests that were let in.")
    refusals: int = Field(description="Requests answered with 429, for any reason.")
    computed_tokens: int = Field(description="Prompt tokens that engines computed.")
    cached_tokens: int = Field(description="Prompt tokens in an engine's own prefix cache.")
    loaded_tokens: int = Field(description="Prompt tokens loaded from the cache store.")
    recomputed_tokens: int = Field(description="Prompt tokens loaded for a blend and computed.")
    output_tokens: int = Field(description="Tokens of answers.")
    quota_tokens: float = Field(description="Tokens as quotas count them.")


class UsageList(BaseModel):
    """A page of usage, by time, tenant, key and model."""

    object: Literal["list"] = "list"
    data: list[UsageEntry]
    next: str | None = Field(description="Send it as after for the next page.")


def _no_number(value: object) -> object:
    """Refuse a number, which would be seconds."""
    if isinstance(value, str) and "-" not in value:
        raise ValueError("is no day, write it like 2026-11-27")
    return value


Day = Annotated[date, BeforeValidator(_no_number)]


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which entries to list."""

    period: Annotated[Literal["day", "month"], Query(description="Length of an entry.")] = "day"
    start: Annotated[
        Day | None,
        Query(description="First day. Default: that of this month; with months, a year ago."),
    ] = None
    end: Annotated[Day | None, Query(description="Last day. Default: today, in UTC.")] = None
    tenant: Annotated[Text | None, Query(description="Only this tenant; for the scope admin.")] = (
        None
    )
    limit: Annotated[int, Query(ge=1, le=MAX_ROWS, description="Most entries of the page.")] = 100
    after: Annotated[str, Query(description="`next` of the page before.", max_length=4096)] = ""


@router.get("/v1/usage", summary="List what keys have used")
async def list_usage(
    services: Services, caller: Asking, query: Annotated[UsageQuery, Depends()]
) -> UsageList:
    """Return requests and tokens by key and model.

    A caller sees the keys of its own tenant, and without a tenant its own key. One with the scope
    admin sees all. Counts of the last seconds may be missing.
    """
    wanted = Period(query.period)
    request = pb.ListUsageRequest(
        period=PERIODS[wanted], page_size=query.limit, page_token=query.after
    )
    request.start_unix_s, request.end_unix_s = _times(wanted, query.start, query.end)
    _restrict(request, caller, query.tenant)
    reply = await services.retriever.list_usage(request)
    return UsageList(
        data=[_entry(wanted, row, caller.cached_token_price) for row in reply.rows],
        next=reply.next_page_token or None,
    )


def _times(period: Period, start: date | None, end: date | None) -> tuple[int, int]:
    """Return the Unix times of the first window and after the last one. Raises InvalidInput."""
    now = datetime.now(UTC)
    last = end or now.date()
    if start is None:
        start = last.replace(day=1) if period is Period.DAY else last - _DEFAULT_MONTHS
    if start > last:
        raise InvalidInput("start", f"{start} is after {last}", "send an earlier start, or an end")
    return window_start(period, _unix_s(start)), window_end(period, _unix_s(last))


def _unix_s(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def _restrict(request: pb.ListUsageRequest, caller: Caller, tenant: str | None) -> None:
    """Leave out what the caller may not see."""
    if caller.may(Scope.ADMIN):
        if tenant is not None:
            request.tenant = tenant
        return
    request.tenant = caller.tenant or ""
    if caller.tenant is None:
        request.key = caller.name
    if tenant not in (None, caller.tenant):
        fix = "leave it out, or use a key with the scope admin"
        raise InvalidInput("tenant", "is not that of your key", fix)


def _entry(period: Period, row: pb.UsageRow, cached_token_price: float) -> UsageEntry:
    counts = counts_of(row.counts)
    return UsageEntry(
        start=datetime.fromtimestamp(row.start_unix_s, UTC),
        end=datetime.fromtimestamp(window_end(period, row.start_unix_s), UTC),
        tenant=row.tenant or None,
        key=row.key,
        model=row.model or None,
        quota_tokens=counts.priced_tokens(cached_token_price),
        **{name: getattr(counts, name) for name in COUNT_NAMES},
    )
