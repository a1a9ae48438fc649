"""Quotas of keys and tenants: what a request may use, and what it has used.

A request takes a ticket when it arrives, and reserves the tokens of its prompt and of the longest
answer before it is sent to an engine. At its end the ticket counts what it has really used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from ragcache_core.access.caller import Caller
from ragcache_core.access.quota import Quota, QuotaLimit, QuotaResource, Spend, exceeded, scarcest
from ragcache_core.access.usage import NOTHING_USED, Period, UsageCounts, window_end
from ragcache_core.scheduling.admission import RefusalCode
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.admission.usage_counter import Owner, UsageCounter

ONE_REQUEST: Final = Spend(requests=1)
LEAST_TOKENS: Final = Spend(tokens=1)
NOTHING: Final = Spend()

RATE_LIMIT_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{resource}"
    for what in ("limit", "remaining", "reset")
    for resource in QuotaResource
)
"""Names of OpenAI's headers about limits."""


class QuotaExceeded(Refused):
    """A key or a tenant has used up a quota.

    Args:
        owner: Whose quota it is.
        limit: The one that the request would exceed.
        retry_after_s: When the window ends.
    """

    def __init__(
        self, owner: Owner, limit: QuotaLimit, used: Spend, wanted: Spend, retry_after_s: float
    ) -> None:
        needed, resource = wanted.of(limit.resource), limit.resource
        what = f"{used.of(resource):,.0f} of {limit.limit:,} {resource} are used or reserved"
        fix = f"try again when the {limit.period} is over"
        if needed > limit.limit:
            fix = "ask for less: a shorter prompt, or a lower max_tokens"
        problem = (
            f"{limit.name}: {what} in this {limit.period} by the {owner.kind} {owner.name!r}, and "
            f"the request needs {needed:,.0f}; {fix}"
        )
        super().__init__(RefusalCode.QUOTA, problem, retry_after_s, is_predicted=False)


@dataclass(frozen=True, slots=True)
class _OwnedQuota:
    owner: Owner
    quota: Quota


class Quotas:
    """The quotas of all callers of one gateway. For one event loop."""

    def __init__(self, counter: UsageCounter) -> None:
        self.counter = counter
        self._reserved: dict[Owner, Spend] = {}

    def admit(self, caller: Caller) -> UsageTicket:
        """Let a request in if its requests and tokens are not used up. Raises QuotaExceeded."""
        self.check(caller, ONE_REQUEST + LEAST_TOKENS)
        ticket = UsageTicket(self, caller)
        ticket.hold(ONE_REQUEST)
        return ticket

    def check(self, caller: Caller, wanted: Spend) -> None:
        """Refuse a request that would exceed a quota. Raises QuotaExceeded.

        Args:
            wanted: What it adds to what is used and reserved.
        """
        for one in _quotas_of(caller):
            used = self._used(one.owner, caller.cached_token_price)
            limit = exceeded(one.quota, used, wanted)
            if limit is not None:
                now_s = self.counter.now()
                wait_s = window_end(limit.period, now_s) - now_s
                raise QuotaExceeded(one.owner, limit, used[limit.period], wanted, wait_s)

    def headers(self, caller: Caller) -> dict[str, str]:
        """Return OpenAI's headers with the limits that have the least left; {}: it has none."""
        found: dict[str, str] = {}
        now_s = self.counter.now()
        for resource in QuotaResource:
            left: list[tuple[float, QuotaLimit, float]] = []
            for one in _quotas_of(caller):
                used = self._used(one.owner, caller.cached_token_price)
                if (limit := scarcest(one.quota, used, resource)) is not None:
                    rest = max(0.0, limit.limit - used[limit.period].of(resource))
                    left.append((rest / limit.limit, limit, rest))
            if left:
                _, limit, rest = min(left, key=lambda item: item[0])
                reset_s = window_end(limit.period, now_s) - now_s
                found[f"x-ratelimit-limit-{resource}"] = str(limit.limit)
                found[f"x-ratelimit-remaining-{resource}"] = str(int(rest))
                found[f"x-ratelimit-reset-{resource}"] = f"{reset_s:.0f}s"
        return found

    def refused(self, caller: Caller) -> None:
        """Count a request that was refused before it had a ticket."""
        self.counter.add(caller, "", UsageCounts(refusals=1))

    def change_reserved(self, caller: Caller, change: Spend) -> None:
        """Add to what the requests in flight have reserved, or take from it."""
        for one in _quotas_of(caller):
            reserved = self._reserved.pop(one.owner, NOTHING) + change
            if reserved.requests >= 1 or reserved.tokens >= 1:
                self._reserved[one.owner] = reserved

    def _used(self, owner: Owner, cached_token_price: float) -> dict[Period, Spend]:
        reserved = self._reserved.get(owner, NOTHING)
        used: dict[Period, Spend] = {}
        for period in Period:
            counts = self.counter.used(owner, period)
            tokens = counts.priced_tokens(cached_token_price)
            used[period] = reserved + Spend(counts.requests, tokens)
        return used


def _quotas_of(caller: Caller) -> Iterator[_OwnedQuota]:
    if caller.quota:
        yield _OwnedQuota(Owner("key", caller.name), caller.quota)
    if caller.tenant is not None and caller.rules.quota:
        yield _OwnedQuota(Owner("tenant", caller.tenant), caller.rules.quota)


class UsageTicket:
    """What one request has reserved and used.

    Args:
        caller: Who asks.
    """

    def __init__(self, quotas: Quotas, caller: Caller) -> None:
        self._quotas = quotas
        self._caller = caller
        self._held = NOTHING
        self._model = ""
        self._is_counted = False
        self._expected = NOTHING_USED
        self._num_output: Callable[[], int] = int
        self._is_settled = False
        self._is_refused = False

    def hold(self, spend: Spend) -> None:
        """Reserve this instead of what the request has reserved."""
        self._quotas.change_reserved(self._caller, spend + -self._held)
        self._held = spend

    def reserve(self, model: str, prompt: UsageCounts, max_output_tokens: int) -> None:
        """Count the request, and reserve its tokens before an engine gets it.

        Args:
            prompt: Tokens of the prompt, by where their KV is expected to come from.
            max_output_tokens: Most tokens of the answer.

        Raises:
            QuotaExceeded: They are more than is left.
        """
        tokens = prompt.priced_tokens(self._caller.cached_token_price) + max_output_tokens
        try:
            self._quotas.check(self._caller, Spend(tokens=max(1.0, tokens)))
        except QuotaExceeded:
            self._is_refused = True  # the response may have begun with the events of stages
            raise
        self._model = model
        self._count(UsageCounts(requests=1))
        self._is_counted = True
        self._expected = prompt
        self.hold(Spend(tokens=tokens))

    def begin_output(self, num_output: Callable[[], int]) -> None:
        """Record that the answer has begun.

        Args:
            num_output: Returns how many tokens it has so far.
        """
        self._num_output = num_output

    def settle(self, used: UsageCounts) -> None:
        """Count the tokens that the request has used."""
        self._count(used)
        self._is_settled = True
        self.hold(NOTHING)

    def close(self, status: int | None) -> None:
        """Return what is still reserved.

        An answer that the client did not wait for counts as far as it was sent, and its prompt as
        it was expected. One that failed counts as a request without tokens.

        Args:
            status: HTTP status of the response. None: the client has left before it.
        """
        if self._is_refused or status == HTTPStatus.TOO_MANY_REQUESTS:
            self._count(UsageCounts(refusals=1))
        elif not self._is_counted:
            self._count(UsageCounts(requests=1))
        has_answer = status is None or status < HTTPStatus.BAD_REQUEST
        if has_answer and self._is_counted and not self._is_settled:
            self._count(self._expected + UsageCounts(output_tokens=self._num_output()))
        self.hold(NOTHING)

    def _count(self, counts: UsageCounts) -> None:
        if counts:
            self._quotas.counter.add(self._caller, self._model, counts)


_ticket: ContextVar[UsageTicket | None] = ContextVar("usage_ticket", default=None)


@contextmanager
def current(ticket: UsageTicket) -> Iterator[None]:
    """Make a ticket that of all work inside."""
    token = _ticket.set(ticket)
    try:
        yield
    finally:
        _ticket.reset(token)


def current_ticket() -> UsageTicket | None:
    """Return the ticket of the request that is served. None: the gateway itself asks."""
    return _ticket.get()
