"""Bounds of JSON that a client sends, checked before a parser makes objects of it.

Each object of a parser takes 30 to 100 bytes and time in every later walk. So the
number of values bounds the work of a body, which its size alone does not.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from ragcache_core.errors import InvalidInput, TooLarge

MAX_VALUES: Final = 5000
"""Most values of a body: objects, lists, texts, numbers, truth values and nulls. The names of
fields do not count. Thus an object has no more fields than this."""

MAX_NESTING: Final = 128
"""Most objects and lists around a value. Parsers recurse."""

_CHARS_PER_TOKEN: Final = 16
_QUESTION_EXTRA_BYTES: Final = 256 << 10

_SPACE: Final = b" \t\r\n"
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def question_max_bytes(max_model_len: int) -> int:
    """Return the size of the largest question for a model that holds this many tokens.

    A token has about 4 characters, and JSON writes a character in up to 6 bytes. Schemas of tools
    and the names of fields come on top.
    """
    return _CHARS_PER_TOKEN * max_model_len + _QUESTION_EXTRA_BYTES


def check_json(body: bytes, field: str = "body", max_values: int = MAX_VALUES) -> None:
    """Refuse JSON with too many values, or nested too deep.

    It takes time linear in the size of the body, and makes no object for a value. It may pass what
    is not JSON, which a parser refuses later.

    Args:
        body: JSON in UTF-8.
        field: Path of the JSON in the request, for errors.

    Raises:
        TooLarge: There are more values.
        InvalidInput: A value has more than MAX_NESTING objects and lists around it.
    """
    num_opened = body.count(b"[") + body.count(b"{")
    if num_opened <= MAX_NESTING and num_opened + body.count(b",") < max_values:
        return  # even if every character were outside of texts
    count_values(body, field, max_values)


def count_values(body: bytes, field: str, max_values: int) -> int:
    """Return the number of values of JSON, and refuse it as ``check_json`` does."""
    shape = json_shape(body, max_values)
    if shape is None:
        raise TooLarge(field, f"has over {max_values} values", "send fewer at once")
    if shape[1] > MAX_NESTING:
        raise InvalidInput(field, f"is nested over {MAX_NESTING} levels deep", "send less")
    return shape[0]


def json_shape(body: bytes, max_values: int) -> tuple[int, int] | None:
    """Return the number of values and the depth of JSON; None if it has more values.

    Args:
        body: JSON in UTF-8.
    """
    if b"\\" in body:
        # What is left of quotes are those around texts.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 4 * max_values:
        return None  # a value is at most a text with a name, and both have two quotes
    structure = b'"'.join(body.split(b'"')[::2]).translate(None, _SPACE)
    num_opened = structure.count(b"[") + structure.count(b"{")
    num_empty = structure.count(b"[]") + structure.count(b"{}")
    num_values = 1 + structure.count(b",") + num_opened - num_empty
    if num_values > max_values:
        return None
    brackets = structure.translate(None, _NO_BRACKETS)
    return num_values, max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)
