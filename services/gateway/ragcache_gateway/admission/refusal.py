"""The error of a request that is not served now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ragcache_core.errors import RagCacheError
from ragcache_core.scheduling.admission import RefusalCode

_OTHER_STATUS: Final[Mapping[RefusalCode, tuple[int, str]]] = {
    RefusalCode.DEADLINE_PASSED: (504, "timeout_error"),
}
"""HTTP status and OpenAI's type of the errors that are not 429."""


class Refused(RagCacheError):
    """The gateway does not serve a request now; the client may come again.

    Args:
        reason: The code of the error, and a label of the metric of refusals.
        problem: Which limit was reached, and what to do.
        retry_after_s: When a retry may be served.
        field: Path of the value that set the limit, if the request has set it.
        is_predicted: Whether the wait is a prediction, which may be wrong.
    """

    def __init__(
        self,
        reason: RefusalCode,
        problem: str,
        retry_after_s: float,
        field: str | None = None,
        *,
        is_predicted: bool = True,
    ) -> None:
        super().__init__(problem)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.field = field
        self.is_predicted = is_predicted
        self.status, self.kind = _OTHER_STATUS.get(reason, (429, "rate_limit_error"))
