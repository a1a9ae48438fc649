"""ReusePlan: what the gateway asks of the engine for one prompt.

A plan travels as JSON under ``kv_transfer_params.ragcache``, next to a signature that proves its
origin (``signature``). The engine does not trust a plan's tokens: it hashes the prompt's own tokens
and computes every segment that does not match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import quote

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KEY_BYTES, ChunkKey
from ragcache_core.store_api import MAX_NAME_CHARS

PLAN_VERSION = 2
MAX_SEGMENTS = 4096
DOMAIN_MAX_CHARS = 128
MAX_ALPHA = 1e6
PLAIN_DOMAIN = "plain:"
"""Prefix of the access domains of clients that send no plan (``prefix_pieces``).

A plan may not use it.
"""


class Action(StrEnum):
    """What the engine does with a segment."""

    EXACT = "exact"  # load the variant of exactly this prefix, or compute
    BLEND = "blend"  # load that or another variant and recompute a part of it, or compute
    COMPUTE = "compute"  # load nothing


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt tokens [start, end) of one chunk, or of the template before the first chunk.

    Attributes:
        document: Name of the chunk's document (``document_name``), by which the chunk can be
            deleted. "" for the template or an unknown document.
    """

    chunk: ChunkKey
    start: int
    end: int
    action: Action = Action.EXACT
    document: str = ""


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """The segments of a prompt and how to serve them.

    Segments ascend without overlap. Tokens between segments are template text.

    Attributes:
        request: The gateway's id of the request. The engine keeps its request record under this id.
        domain: Access domain of every segment, that is, who may share their KV.
        planned_at_ms: Unix time before the gateway searched for the chunks. The KV of a chunk that
            is deleted after it is not stored. 0: unknown.
        recompute_share: Maximum share of the tokens loaded from other prefixes (``blend``) that may
            be recomputed, in [0, 1].
        handoff: One engine computes this prompt and another one decodes it, each with this plan. No
            segment may be blended then.
        alpha: Recomputation factor (Cache-Craft eq. 12), in [0, MAX_ALPHA]. None: the engine's
            default (``variant_selection.ALPHA``).
        trial: The engine stores nothing that it computes, excludes the timings from its cost
            estimates, and blends even where computing is faster. Used to measure the quality of a
            blend.
    """

    request: str
    domain: str
    segments: tuple[Segment, ...]
    planned_at_ms: int = 0
    recompute_share: float = 0.0
    handoff: bool = False
    alpha: float | None = None
    trial: bool = False

    @property
    def blends(self) -> bool:
        """Whether any segment may be loaded from another prefix."""
        return any(segment.action is Action.BLEND for segment in self.segments)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object, which ``from_json`` reads."""
        plan = {
            "v": PLAN_VERSION,
            "request": self.request,
            "domain": self.domain,
            "segments": [_to_json(segment) for segment in self.segments],
            "planned_at_ms": self.planned_at_ms,
            "recompute_share": self.recompute_share,
            "handoff": self.handoff,
            "trial": self.trial,
        }
        return plan | ({} if self.alpha is None else {"alpha": self.alpha})

    @classmethod
    def from_json(cls, value: object) -> ReusePlan:
        """Parse and check a plan.

        Raises:
            InvalidInput: A field is wrong; the error names it.
        """
        plan = _mapping("ragcache", value)
        version = plan.get("v")
        if version != PLAN_VERSION:
            raise InvalidInput("ragcache.v", f"is {version!r}", f"send version {PLAN_VERSION}")
        segments = _segments(plan.get("segments"))
        handoff = _flag("ragcache.handoff", plan.get("handoff", False))
        if handoff and any(segment.action is Action.BLEND for segment in segments):
            raise InvalidInput(
                "ragcache.handoff", "is set, but segments may be blended", "plan exact segments"
            )
        trial = _flag("ragcache.trial", plan.get("trial", False))
        if handoff and trial:
            raise InvalidInput(
                "ragcache.trial", "is set, but a trial stores nothing", "set handoff to false"
            )
        return cls(
            request=_text("ragcache.request", plan.get("request")),
            domain=_domain("ragcache.domain", plan.get("domain")),
            segments=segments,
            planned_at_ms=_unix_ms("ragcache.planned_at_ms", plan.get("planned_at_ms", 0)),
            recompute_share=_share("ragcache.recompute_share", plan.get("recompute_share", 0.0)),
            handoff=handoff,
            alpha=_alpha("ragcache.alpha", plan.get("alpha")),
            trial=trial,
        )


def document_name(collection: str, document: str) -> str:
    """Return a name of a document that is unique among all collections."""
    # The first slash ends the collection's name, so slashes inside that name are quoted.
    name = f"{quote(collection, safe='')}/{document}"
    if len(name) <= MAX_NAME_CHARS:
        return name
    return "blake2b:" + hashlib.blake2b(name.encode(), digest_size=KEY_BYTES).hexdigest()


def _to_json(segment: Segment) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "chunk": segment.chunk.hex(),
        "start": segment.start,
        "end": segment.end,
        "action": segment.action.value,
    }
    return entry | ({"document": segment.document} if segment.document else {})


def _segments(value: object) -> tuple[Segment, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidInput("ragcache.segments", "is not a list", "send a list of segments")
    if len(value) > MAX_SEGMENTS:
        raise InvalidInput(
            "ragcache.segments", f"has {len(value)} entries", f"send at most {MAX_SEGMENTS}"
        )
    segments: list[Segment] = []
    position = 0
    for index, entry in enumerate(value):
        segment = _segment(f"ragcache.segments[{index}]", entry)
        if segment.start < position:
            raise InvalidInput(
                f"ragcache.segments[{index}].start",
                f"{segment.start} lies before the end {position} of the segment before it",
                "send ascending segments that do not overlap",
            )
        position = segment.end
        segments.append(segment)
    return tuple(segments)


def _segment(path: str, value: object) -> Segment:
    entry = _mapping(path, value)
    start, end = entry.get("start"), entry.get("end")
    # bool is a subclass of int, but true is not a valid offset.
    if type(start) is not int or type(end) is not int or not 0 <= start < end:
        raise InvalidInput(
            f"{path}.start", f"[{start!r}, {end!r}) is not a range", "send 0 <= start < end"
        )
    raw = entry.get("chunk")
    try:
        chunk = bytes.fromhex(raw) if isinstance(raw, str) else b""
    except ValueError:
        chunk = b""
    if len(chunk) != KEY_BYTES:
        raise InvalidInput(
            f"{path}.chunk", "is not a chunk key", f"send {2 * KEY_BYTES} hex digits"
        )
    try:
        action = Action(entry.get("action", ""))
    except ValueError:
        names = ", ".join(Action)
        raise InvalidInput(f"{path}.action", "is unknown", f"send one of {names}") from None
    document = entry.get("document", "")
    if not isinstance(document, str) or len(document) > MAX_NAME_CHARS:
        raise InvalidInput(
            f"{path}.document",
            "is not a document name",
            f"send at most {MAX_NAME_CHARS} characters",
        )
    return Segment(chunk, start, end, action, document)


def _mapping(path: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(path, "is not an object", "send a JSON object")
    return value


def _unix_ms(path: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise InvalidInput(path, f"is {value!r}", "send milliseconds of Unix time")
    return value


def _flag(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(path, f"is {value!r}", "send true or false")
    return value


def _share(path: str, value: object) -> float:
    # bool is a subclass of int. NaN fails the range check.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidInput(path, f"is {value!r}", "send a share from 0 to 1")
    return float(value)


def _alpha(path: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_ALPHA:
        raise InvalidInput(
            path, f"is {value!r}", f"send a number from 0 to {MAX_ALPHA:.0f}, or leave it out"
        )
    return float(value)


def _domain(path: str, value: object) -> str:
    domain = _text(path, value)
    if domain.startswith(PLAIN_DOMAIN):
        raise InvalidInput(
            path, f"is {domain!r}, which is reserved", f"do not begin with {PLAIN_DOMAIN!r}"
        )
    return domain


def _text(path: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= DOMAIN_MAX_CHARS:
        raise InvalidInput(path, "is not a short text", f"send 1 to {DOMAIN_MAX_CHARS} characters")
    return value
