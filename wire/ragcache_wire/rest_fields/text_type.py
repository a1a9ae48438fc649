"""The type of texts in requests: whole Unicode without NUL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


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


def union_by(tag_of: Callable[[object], str | None], wanted: str) -> Discriminator:
    """Return the discriminator of a union whose errors name the field alone.

    Args:
        tag_of: Returns the tag of a value's type, None for a wrong type.
        wanted: What to send instead of a wrong type.
    """
    return Discriminator(tag_of, "wrong_type", f"send {wanted}")


def validation_error(problem: str, fix: str) -> PydanticCustomError:
    """Make a validation error that says how to fix the value."""
    return PydanticCustomError("ragcache", "{problem}; {fix}", {"problem": problem, "fix": fix})


class WholeText:
    """The check of texts, and what of it JSON Schema can say."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(check_text, handler(source))

    @staticmethod
    def __get_pydantic_json_schema__(
        schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # An escape, because not every reader of the pattern takes the character itself.
        return {**handler(schema), "pattern": r"^[^\u0000]*$"}


Text = Annotated[str, WholeText]
NonEmptyText = Annotated[str, Field(min_length=1), WholeText]
