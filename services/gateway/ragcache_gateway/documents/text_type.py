"""Text that every part behind the gateway can take."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def clean(value: str) -> str:
    """The value, if it is whole Unicode without NUL.

    NUL marks the place of the chunks in a rendered chat template, and no document in text has it.
    """
    if "\0" in value:
        raise problem("holds a NUL character", "send text, not binary data")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise problem("holds half of a surrogate pair", "send whole characters") from None
    return value


def problem(problem: str, fix: str) -> PydanticCustomError:
    """A validation error that says the fix."""
    return PydanticCustomError("ragcache", "{problem}; {fix}", {"problem": problem, "fix": fix})


Text = Annotated[str, AfterValidator(clean)]
