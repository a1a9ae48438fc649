"""The one family of errors every part raises; each edge translates it once.

RagCacheError
├── InvalidInput    the caller's mistake: names the field and the fix   (400, INVALID_ARGUMENT)
│   └── TooLarge    a value over its bound                              (413, INVALID_ARGUMENT)
├── NotFound        a name that does not exist                          (404, NOT_FOUND)
└── Unavailable     a part that does not answer now; retrying may help  (503, UNAVAILABLE)
"""

from __future__ import annotations


class RagCacheError(Exception):
    """Base of every error raised by RagCache on purpose."""


class InvalidInput(RagCacheError):
    """The caller's mistake.

    field: path of the offending value, as the caller wrote it (``ragcache.top_k``).
    problem: what is wrong with it. fix: what to write instead.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(f"{field}: {problem}; {fix}")
        self.field = field
        self.problem = problem
        self.fix = fix


class TooLarge(InvalidInput):
    """A value whose size is over its bound."""


class NotFound(RagCacheError):
    """Something named does not exist. kind: its noun ("document"); name: what the caller wrote."""

    def __init__(self, kind: str, name: str, fix: str) -> None:
        super().__init__(f"{kind} {name!r} does not exist; {fix}")
        self.kind = kind
        self.name = name
        self.fix = fix


class Unavailable(RagCacheError):
    """A part does not answer now. part: its name; retry_after_s: when trying again makes sense."""

    def __init__(self, part: str, problem: str, retry_after_s: float = 1.0) -> None:
        super().__init__(f"the {part} is unavailable: {problem}")
        self.part = part
        self.retry_after_s = retry_after_s
