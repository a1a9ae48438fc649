"""The types of whole numbers in requests."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field


def to_integer(value: Any) -> Any:
    """Return a float without a fraction as an integer, and every other value as it is.

    JSON Schema counts 5.0 as an integer, and some clients write numbers like this.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGRAL: Final = BeforeValidator(to_integer)

Count = Annotated[int, Field(ge=0, strict=True), INTEGRAL]
PositiveCount = Annotated[int, Field(ge=1, strict=True), INTEGRAL]
