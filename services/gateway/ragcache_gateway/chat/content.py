"""The text in a message's content: a text, or a list of parts of several kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ragcache_core.errors import InvalidInput

TEXT_TYPES: Final = frozenset({"text", "input_text", "output_text"})
"""Types of parts that engines take as text."""

_PLAIN_FIELDS: Final = frozenset({"type", "text", "cache_control"})
"""Fields of a part of text that engines ignore or take as text. With others, such as
``image_url``, vLLM ignores the token ids of the prompt."""

_THOUGHT_TYPES: Final = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"}
)
"""Types of parts with what a model has thought, which no later turn repeats."""

_MEDIA: Final[Mapping[str, str]] = {
    "image": "image",
    "image_url": "image",
    "image_embeds": "image",
    "image_pil": "image",
    "input_image": "image",
    "audio": "audio recording",
    "audio_url": "audio recording",
    "audio_embeds": "audio recording",
    "input_audio": "audio recording",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
}
"""What is left out, by the type of the part. A prompt is made of the token ids of texts."""

_KNOWN_TYPES: Final = ", ".join(sorted({*TEXT_TYPES, "refusal", "thinking", *_MEDIA}))


@dataclass(frozen=True, slots=True)
class MessageText:
    """What a prompt has of a message's content.

    Args:
        left_out: Kinds of the parts that are no text, in their order.
        is_plain: Whether an engine may get the content as it is, because all of it is text.
    """

    text: str
    left_out: tuple[str, ...] = ()
    is_plain: bool = True


def read_content(content: object, path: str) -> MessageText:
    """Return the text in a message's content. Null and an empty list are an empty text.

    Args:
        path: Of the content, for errors.

    Raises:
        InvalidInput: A part is of no known type, or lacks its text. The error names the part.
    """
    if content is None or isinstance(content, str):
        return MessageText(content or "")
    if not isinstance(content, list):
        raise InvalidInput(path, "is no text", "send a text or a list of parts")
    texts: list[str] = []
    left_out: list[str] = []
    is_plain = bool(content)
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            is_plain = False
            continue
        kind = _type_of(part, f"{path}[{i}]")
        is_plain = is_plain and kind in TEXT_TYPES and part.keys() <= _PLAIN_FIELDS
        if kind in TEXT_TYPES:
            texts.append(_text_of(part, "text", f"{path}[{i}]"))
        elif kind == "refusal":
            texts.append(_text_of(part, "refusal", f"{path}[{i}]"))
        elif kind in _MEDIA:
            left_out.append(_MEDIA[kind])
    return MessageText("\n".join(texts), tuple(left_out), is_plain)


def media_warnings(left_out: Iterable[str]) -> list[str]:
    """Say how many parts of each kind are left out of a prompt."""
    kinds = list(left_out)
    return [
        f"messages: {kinds.count(kind)} {kind}{'s' * (kinds.count(kind) > 1)} left out, because "
        "prompts are made of text; send the content as text, or ingest the file as a document"
        for kind in sorted(set(kinds))
    ]


def _type_of(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidInput(path, "is neither a text nor an object", "send an object with a type")
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind not in TEXT_TYPES | _THOUGHT_TYPES | {"refusal", *_MEDIA}:
        shown = repr(kind)[:60]
        raise InvalidInput(f"{path}.type", f"is {shown}", f"send one of {_KNOWN_TYPES}")
    return kind


def _text_of(part: Mapping[str, Any], name: str, path: str) -> str:
    text = part.get(name)
    if not isinstance(text, str):
        problem = "is missing" if text is None else "is no text"
        raise InvalidInput(f"{path}.{name}", problem, "send a text")
    return text
