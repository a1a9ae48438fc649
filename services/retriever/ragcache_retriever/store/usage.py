"""What keys have used: the counts of all gateways, by minute, day and month.

A gateway sends what it has counted with a sequence number, which the database keeps in the
transaction that adds the counts. So a repetition of a call whose reply was lost adds nothing.
Several retrievers may share the database: the row of the gateway is locked first, and rows of usage
are changed in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import and_, bindparam, delete, func, or_, select, tuple_
from sqlalchemy.dialects.postgresql import insert as upsert  # SQLite has the same clause
from sqlalchemy.sql import ColumnElement

from ragcache_core.access.usage import COUNT_NAMES, Period, UsageCounts, window_start
from ragcache_retriever.store.database import Database
from ragcache_retriever.store.statements import Statement
from ragcache_retriever.store.tables import usage, usage_senders

PERIODS: Final = tuple(Period)
"""By their number in the table, which is that of UsagePeriod in retriever.proto."""

KEPT_DAYS: Final = {Period.MINUTE: 1, Period.DAY: 400, Period.MONTH: 10 * 366}
"""Days for which rows are kept. A gateway is known as long as the rows of days are."""

WAITING_MS: Final = 5_000
"""Time for which the other gateways get what a gateway has said of its waiting requests."""

_DAY_S: Final = 24 * 3600
_POSITION: Final = ("start_unix_s", "tenant", "key", "model")


@dataclass(frozen=True, slots=True)
class UsageSender:
    """The gateway that sends usage.

    Attributes:
        sequence: Ascends with each call that is not a repetition.
        waiting: What it says of its waiting requests, for the other gateways.
    """

    gateway: bytes
    sequence: int
    waiting: bytes = b""


@dataclass(frozen=True, slots=True)
class CountedUse:
    """What one key has used of one model in a window.

    Attributes:
        start_unix_s: When the window began.
        tenant: Empty: the key has none.
        model: Empty: the requests named none.
    """

    start_unix_s: int
    tenant: str
    key: str
    model: str
    counts: UsageCounts

    @property
    def position(self) -> tuple[int, str, str, str]:
        """Its place in a listing."""
        return self.start_unix_s, self.tenant, self.key, self.model


@dataclass(frozen=True, slots=True)
class UsageWanted:
    """The rows of a listing.

    Attributes:
        start_unix_s: Of the first window.
        end_unix_s: Windows that begin at this time or later are left out.
        tenant: None: all of them.
        key: None: all of them.
        after: Position of the last row of the page before.
    """

    period: Period
    start_unix_s: int
    end_unix_s: int
    tenant: str | None = None
    key: str | None = None
    after: tuple[int, str, str, str] = (-1, "", "", "")


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """What a key, or all keys of a tenant, have used in a window."""

    name: str
    period: Period
    start_unix_s: int
    counts: UsageCounts


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """What counts against quotas, and what the other gateways say of their waiting requests."""

    keys: Sequence[UsageTotal]
    tenants: Sequence[UsageTotal]
    waiting: Sequence[bytes]


def _known() -> Statement:
    names = ("gateway", "sequence", "waiting", "updated_unix_ms")
    inserted = upsert(usage_senders).values({name: bindparam(name) for name in names})
    changed = {name: inserted.excluded[name] for name in names[1:]}
    put = inserted.on_conflict_do_update(
        index_elements=["gateway"],
        set_=changed,
        where=usage_senders.c.sequence < inserted.excluded.sequence,
    )
    return Statement(put.returning(usage_senders.c.sequence))


def _add() -> Statement:
    names = ("period", *_POSITION, *COUNT_NAMES)
    inserted = upsert(usage).values({name: bindparam(name) for name in names})
    added = {name: usage.c[name] + inserted.excluded[name] for name in COUNT_NAMES}
    return Statement(
        inserted.on_conflict_do_update(index_elements=["period", *_POSITION], set_=added)
    )


def _totals(owner: ColumnElement[str]) -> Statement:
    sums = (func.sum(usage.c[name]) for name in COUNT_NAMES)
    in_window = (
        and_(usage.c.period == number, usage.c.start_unix_s == bindparam(f"{period}_start_unix_s"))
        for number, period in enumerate(PERIODS)
    )
    return Statement(
        select(owner, usage.c.period, usage.c.start_unix_s, *sums)
        .where(or_(*in_window), owner.in_(bindparam("names", expanding=True)))
        .group_by(owner, usage.c.period, usage.c.start_unix_s)
    )


def _page() -> Statement:
    position = tuple_(*(usage.c[name] for name in _POSITION))
    after = [bindparam(f"after_{name}", type_=usage.c[name].type) for name in _POSITION]
    return Statement(
        select(*position.clauses, *(usage.c[name] for name in COUNT_NAMES))
        .where(
            usage.c.period == bindparam("period"),
            usage.c.start_unix_s >= bindparam("start"),
            usage.c.start_unix_s < bindparam("end"),
            or_(bindparam("any_tenant") == 1, usage.c.tenant == bindparam("tenant")),
            or_(bindparam("any_key") == 1, usage.c.key == bindparam("key")),
            position > tuple_(*after),
        )
        .order_by(*position.clauses)
        .limit(bindparam("limit"))
    )


_KNOW = _known()
_ADD = _add()
_TOTALS = {"key": _totals(usage.c.key), "tenant": _totals(usage.c.tenant)}
_PAGE = _page()
_WAITING = Statement(
    select(usage_senders.c.waiting)
    .where(
        usage_senders.c.updated_unix_ms > bindparam("unix_ms"),
        usage_senders.c.gateway != bindparam("gateway"),
        usage_senders.c.waiting != b"",
    )
    .order_by(usage_senders.c.gateway)
)
_FORGET = Statement(
    delete(usage).where(
        usage.c.period == bindparam("period"), usage.c.start_unix_s < bindparam("unix_s")
    )
)
_FORGET_SENDERS = Statement(
    delete(usage_senders).where(usage_senders.c.updated_unix_ms < bindparam("unix_ms"))
)


class UsageTable:
    """The usage in one database. ``add`` needs a transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._forgotten_day = 0

    def add(self, sender: UsageSender, counted: Iterable[CountedUse], now_ms: int) -> bool:
        """Add what a gateway has counted in windows of minutes. False: it was added before."""
        known = {
            "gateway": sender.gateway,
            "sequence": sender.sequence,
            "waiting": sender.waiting,
            "updated_unix_ms": now_ms,
        }
        if self._database.query_one(_KNOW, known) is None:
            return False
        added: dict[tuple[int, tuple[int, str, str, str]], UsageCounts] = {}
        for one in counted:
            for number, period in enumerate(PERIODS):
                start = window_start(period, one.start_unix_s)
                window = number, (start, one.tenant, one.key, one.model)
                added[window] = added.get(window, UsageCounts()) + one.counts
        for (number, position), counts in sorted(added.items(), key=lambda item: item[0]):
            row = dict(zip(_POSITION, position, strict=True))
            self._database.execute(_ADD, {"period": number, **row, **_columns(counts)})
        self._forget(now_ms)
        return True

    def totals(self, owner: str, names: Sequence[str], unix_s: int) -> list[UsageTotal]:
        """Return what keys or tenants have used in the windows of a time.

        Args:
            owner: "key" or "tenant".
        """
        if not names:
            return []
        starts = {f"{one}_start_unix_s": window_start(one, unix_s) for one in PERIODS}
        rows = self._database.read(_TOTALS[owner], {"names": list(names), **starts})
        return [
            UsageTotal(str(name), PERIODS[number], int(start), _counts(counts))
            for name, number, start, *counts in rows
        ]

    def waiting(self, gateway: bytes, now_ms: int) -> list[bytes]:
        """Return what the gateways other than this one have said of their waiting requests."""
        wanted = {"gateway": gateway, "unix_ms": now_ms - WAITING_MS}
        return [bytes(waiting) for (waiting,) in self._database.read(_WAITING, wanted)]

    def page(self, wanted: UsageWanted, limit: int) -> list[CountedUse]:
        """Return the first rows of a listing, by start, tenant, key and model."""
        after = {f"after_{n}": v for n, v in zip(_POSITION, wanted.after, strict=True)}
        parameters = {
            "period": PERIODS.index(wanted.period),
            "start": wanted.start_unix_s,
            "end": wanted.end_unix_s,
            "any_tenant": int(wanted.tenant is None),
            "tenant": wanted.tenant or "",
            "any_key": int(wanted.key is None),
            "key": wanted.key or "",
            "limit": limit,
        }
        rows = self._database.read(_PAGE, {**parameters, **after})
        return [
            CountedUse(int(start), str(tenant), str(key), str(model), _counts(counts))
            for start, tenant, key, model, *counts in rows
        ]

    def _forget(self, now_ms: int) -> None:
        """Forget old rows, once a day."""
        now_s = now_ms // 1000
        if now_s // _DAY_S == self._forgotten_day:
            return
        self._forgotten_day = now_s // _DAY_S
        for number, period in enumerate(PERIODS):
            oldest_s = now_s - KEPT_DAYS[period] * _DAY_S
            self._database.execute(_FORGET, {"period": number, "unix_s": oldest_s})
        oldest_ms = now_ms - 1000 * KEPT_DAYS[Period.DAY] * _DAY_S
        self._database.execute(_FORGET_SENDERS, {"unix_ms": oldest_ms})


def _columns(counts: UsageCounts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in COUNT_NAMES}


def _counts(values: Iterable[Any]) -> UsageCounts:
    # PostgreSQL's sums are decimals.
    return UsageCounts(*map(int, values))
