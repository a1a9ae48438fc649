"""The type of texts in requests: whole Unicode without NUL."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def check_text(value: str) -> str:
    """Return the value if every part behind the gateway can take it.

    The prompt builder marks the position of the chunks with NUL, and no text document contains it.
    """
    if "\0" in value:
        raise validation_error("holds a NUL character", "send text, not binary data")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise validation_error("holds half of a surrogate pair", "send whole characters") from None
    return value


def validation_error(problem: str, fix: str) -> PydanticCustomError:
    """Make a validation error that says how to fix the value."""
    return PydanticCustomError("ragcache", "{problem}; {fix}", {"problem": problem, "fix": fix})


Text = Annotated[str, AfterValidator(check_text)]
