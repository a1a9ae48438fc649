"""The errors that every component raises; each API translates them once.

RagCacheError
├── InvalidInput    the caller's mistake: names the field and the fix   (400, INVALID_ARGUMENT)
│   └── TooLarge    a value over its bound                              (413, INVALID_ARGUMENT)
├── NotFound        a name that does not exist                          (404, NOT_FOUND)
├── Unauthenticated a caller that does not prove who it is              (no REST, UNAUTHENTICATED)
└── Unavailable     a component that does not answer; retry later       (503, UNAVAILABLE)
    └── Overloaded  a component that answers, and has too much to do    (503, RESOURCE_EXHAUSTED)
"""

from __future__ import annotations


class RagCacheError(Exception):
    """Base of every error that RagCache raises on purpose."""


class InvalidInput(RagCacheError):
    """A mistake of the caller.

    Args:
        field: Path of the wrong value, as the caller wrote it (``ragcache.top_k``).
        problem: What is wrong with it.
        fix: What to write instead.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(f"{field}: {problem}; {fix}")
        self.field = field
        self.problem = problem
        self.fix = fix


class TooLarge(InvalidInput):
    """A value whose size exceeds its bound."""


class NotFound(RagCacheError):
    """A named object does not exist.

    Args:
        kind: Its noun ("document").
        name: What the caller wrote.
        fix: What to do instead.
    """

    def __init__(self, kind: str, name: str, fix: str) -> None:
        super().__init__(f"{kind} {name!r} does not exist; {fix}")
        self.kind = kind
        self.name = name
        self.fix = fix


class Unauthenticated(RagCacheError):
    """A caller did not prove who it is.

    Args:
        field: What should prove it (a metadata field, a setting).
        problem: What is wrong with it.
        fix: What to do instead.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(f"{field}: {problem}; {fix}")
        self.field = field
        self.problem = problem
        self.fix = fix


class Unavailable(RagCacheError):
    """A component does not answer.

    Args:
        component: Its name.
        problem: What is wrong with it.
        retry_after_s: When a retry may succeed.
    """

    def __init__(self, component: str, problem: str, retry_after_s: float = 1.0) -> None:
        super().__init__(f"the {component} is unavailable: {problem}")
        self.component = component
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """A component has reached a limit of concurrent requests. It has not begun this one."""
