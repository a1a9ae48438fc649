"""ReusePlan: what the gateway asks of the engine for one prompt.

A plan travels as base64 of packed fields under ``kv_transfer_params.ragcache``, next to a signature
that proves its origin (``signature``). A list of JSON objects would take ten times as long to write
and to read. The engine does not trust a plan's tokens: it hashes the prompt's own tokens
and computes every segment that does not match.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import quote

from ragcache_core.access.reader import NO_READER, Reader
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KEY_BYTES, ChunkKey
from ragcache_core.identity.variant import LOSSLESS, Precision, PrecisionUse
from ragcache_core.store_api import MAX_NAME_CHARS

PLAN_VERSION = 6
MAX_SEGMENTS = 4096
DOMAIN_MAX_CHARS = 128
MAX_ALPHA = 1e6
MAX_HANDOFF_WAIT_S = 3600.0
PLAIN_DOMAIN = "plain:"
"""Prefix of the access domains of clients that send no plan (``plain_domain``).

A plan may not use it.
"""

NO_REUSE: Final = "off"
"""Sent in place of a plan: the engine loads no stored KV for the prompt and stores none of it.

A gateway sends it where it has no token ids of the prompt, which a signed plan needs. It is not
signed, because it gives a client access to nothing.
"""


_ROUNDING: Final = "ragcache.rounding"


class Action(StrEnum):
    """What the engine does with a segment."""

    EXACT = "exact"  # load the variant of exactly this prefix, or compute
    BLEND = "blend"  # load that or another variant and recompute a part of it, or compute
    COMPUTE = "compute"  # load nothing


class Handoff(StrEnum):
    """An engine's part where one engine computes a prompt and another one decodes it.

    Source: Mooncake section 3.
    """

    PREFILL = "prefill"  # computes the prompt and stores it, except for the last token
    DECODE = "decode"  # waits until the store has the prompt, and decodes


_ACTIONS: Final = tuple(Action)
_CODES: Final = {action: code for code, action in enumerate(_ACTIONS)}
_PREFILL, _TRIAL, _HAS_ALPHA, _DECODE, _READS_ALL, _OWN_HEAD = 1, 2, 4, 8, 16, 32
_LOSSY, _ROUNDS = 64, 128

# Little-endian without padding. The texts follow their lengths in UTF-8.
# Version, flags, planned_at_ms, recompute_share, alpha, handoff_wait_s.
_HEAD: Final = struct.Struct("<BBQddd")
_READER: Final = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sH")  # rights, key, num_head
_LENGTH: Final = struct.Struct("<H")
_COUNTS: Final = struct.Struct("<HH")  # documents, segments
_SEGMENT: Final = struct.Struct(f"<{KEY_BYTES}sIIBH")  # chunk, start, end, action, document

MAX_PLAN_CHARS: Final = 2 * MAX_SEGMENTS * (_SEGMENT.size + 4 * MAX_NAME_CHARS)
"""Most characters of an encoded plan; its base64 has a third more than its bytes."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt tokens [start, end) of one chunk, or of the template before the first chunk.

    Attributes:
        document: Name of the chunk's document (``document_name``). Its deletion deletes the chunk.
            "" for the template or an unknown document.
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
        handoff: The engine's part, if another one has the other part of this prompt.
        handoff_wait_s: How long an engine that decodes waits for the other one before it computes
            what is missing, in [0, MAX_HANDOFF_WAIT_S].
        alpha: Recomputation factor (Cache-Craft eq. 12), in [0, MAX_ALPHA]. None: the engine's
            default (``variant_selection.ALPHA``).
        trial: The engine stores nothing that it computes, excludes the timings from its cost
            estimates, and blends even where computing is faster. Used to measure the quality of a
            blend.
        reader: Who asks. It decides which variants a blend may use. The default has no rights.
        precision: Which values a blend may use, by how they are stored.
        num_head: How many of the first segments are no documents.
        own_head: Whether these have text of who asks, and not of the platform alone.
    """

    request: str
    domain: str
    segments: tuple[Segment, ...]
    planned_at_ms: int = 0
    recompute_share: float = 0.0
    handoff: Handoff | None = None
    handoff_wait_s: float = 0.0
    alpha: float | None = None
    trial: bool = False
    precision: PrecisionUse = LOSSLESS
    reader: Reader = NO_READER
    num_head: int = 0
    own_head: bool = True

    @property
    def blends(self) -> bool:
        """Whether any segment may be loaded from another prefix."""
        return any(segment.action is Action.BLEND for segment in self.segments)

    def encode(self) -> str:
        """Return the plan as text for a JSON field, which ``decode`` reads.

        Raises:
            ValueError: A text is too long, or there are too many segments.
        """
        documents = dict.fromkeys(one.document for one in self.segments if one.document)
        indexes = {"": 0} | {name: index for index, name in enumerate(documents, 1)}
        rounding = self.precision.rounding
        flags = (
            _PREFILL * (self.handoff is Handoff.PREFILL)
            | _DECODE * (self.handoff is Handoff.DECODE)
            | _TRIAL * self.trial
            | _HAS_ALPHA * (self.alpha is not None)
            | _READS_ALL * self.reader.reads_all
            | _OWN_HEAD * self.own_head
            | _LOSSY * self.precision.lossy
            | _ROUNDS * (rounding is not None)
        )
        try:
            packed = [
                _HEAD.pack(
                    PLAN_VERSION,
                    flags,
                    self.planned_at_ms,
                    self.recompute_share,
                    self.alpha or 0.0,
                    self.handoff_wait_s,
                ),
                _READER.pack(self.reader.rights, self.reader.key, self.num_head),
                *map(_pack_text, (self.request, self.domain)),
                *([] if rounding is None else [_pack_text(str(rounding))]),
                _COUNTS.pack(len(documents), len(self.segments)),
                *map(_pack_text, documents),
                *(
                    _SEGMENT.pack(
                        one.chunk, one.start, one.end, _CODES[one.action], indexes[one.document]
                    )
                    for one in self.segments
                ),
            ]
        except struct.error as error:
            raise ValueError(f"a plan cannot be encoded: {error}") from error
        return base64.b64encode(b"".join(packed)).decode()

    @classmethod
    def decode(cls, text: object) -> ReusePlan:
        """Parse and check a plan.

        Raises:
            InvalidInput: A field is wrong; the error names it.
        """
        reader = _PlanReader(_bytes_of(text))
        version = reader.version()
        if version != PLAN_VERSION:
            raise InvalidInput("ragcache.v", f"is {version}", f"send version {PLAN_VERSION}")
        _, flags, planned_at_ms, recompute_share, alpha, wait_s = reader.unpack(_HEAD)
        parts = flags & (_PREFILL | _DECODE)
        if parts == _PREFILL | _DECODE:
            raise InvalidInput("ragcache.flags", f"are {flags}", "set those of this version")
        rights, key, num_head = reader.unpack(_READER)
        request, domain = reader.text("ragcache.request"), reader.text("ragcache.domain")
        rounding = _precision(reader.text(_ROUNDING)) if flags & _ROUNDS else None
        num_documents, num_segments = reader.unpack(_COUNTS)
        if num_segments > MAX_SEGMENTS or num_documents > num_segments:
            raise InvalidInput(
                "ragcache.segments",
                f"has {num_segments} entries of {num_documents} documents",
                f"send at most {MAX_SEGMENTS}, and no document without one",
            )
        documents = ["", *(reader.text("ragcache.documents") for _ in range(num_documents))]
        segments = _segments(reader.rest(num_segments * _SEGMENT.size), documents)
        handoff = {_PREFILL: Handoff.PREFILL, _DECODE: Handoff.DECODE}.get(parts)
        trial = bool(flags & _TRIAL)
        if handoff and trial:
            raise InvalidInput(
                "ragcache.trial", "is set, but a trial stores nothing", "leave out the handoff"
            )
        if rounding is not None and not trial:
            raise InvalidInput(_ROUNDING, "is set without trial", "measure quality with it only")
        return cls(
            request=_short_text("ragcache.request", request),
            domain=_domain("ragcache.domain", domain),
            segments=segments,
            planned_at_ms=_unix_ms("ragcache.planned_at_ms", planned_at_ms),
            recompute_share=_in_range("ragcache.recompute_share", recompute_share, 1),
            handoff=handoff,
            handoff_wait_s=_in_range("ragcache.handoff_wait_s", wait_s, MAX_HANDOFF_WAIT_S),
            alpha=_in_range("ragcache.alpha", alpha, MAX_ALPHA) if flags & _HAS_ALPHA else None,
            trial=trial,
            precision=PrecisionUse(bool(flags & _LOSSY), rounding),
            reader=Reader(rights, key, bool(flags & _READS_ALL)),
            num_head=num_head,
            own_head=bool(flags & _OWN_HEAD),
        )


def document_name(collection: str, document: str) -> str:
    """Return a name of a document that is unique among all collections."""
    # The first slash ends the collection's name, so slashes inside that name are quoted.
    name = f"{quote(collection, safe='')}/{document}"
    if len(name) <= MAX_NAME_CHARS:
        return name
    return "blake2b:" + hashlib.blake2b(name.encode(), digest_size=KEY_BYTES).hexdigest()


class _PlanReader:
    """Reads packed fields one after the other. Raises InvalidInput at the end of the bytes."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self._position = 0

    def version(self) -> int:
        """Return the first byte and stay before it."""
        return self._packed[0] if self._packed else 0

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Return the next fields."""
        return layout.unpack(self._take(layout.size))

    def text(self, path: str) -> str:
        """Return the next text."""
        (length,) = self.unpack(_LENGTH)
        try:
            text = self._take(length).decode()
        except UnicodeDecodeError:
            raise InvalidInput(path, "is not UTF-8", "send text") from None
        if len(text) > MAX_NAME_CHARS:
            raise InvalidInput(
                path, f"has {len(text)} characters", f"send at most {MAX_NAME_CHARS}"
            )
        return text

    def rest(self, length: int) -> bytes:
        """Return all that is left, which has to have this length."""
        if len(self._packed) - self._position != length:
            raise InvalidInput(
                "ragcache.segments",
                f"have {len(self._packed) - self._position} bytes, not {length}",
                "send as many segments as announced",
            )
        return self._take(length)

    def _take(self, length: int) -> bytes:
        taken = self._packed[self._position : self._position + length]
        if len(taken) != length:
            raise InvalidInput("ragcache", "ends too early", "send a whole plan")
        self._position += length
        return taken


def _bytes_of(text: object) -> bytes:
    if not isinstance(text, str) or not text.isascii() or len(text) > MAX_PLAN_CHARS:
        raise InvalidInput(
            "ragcache", "is not a plan", f"send base64 of at most {MAX_PLAN_CHARS} characters"
        )
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise InvalidInput("ragcache", "is not base64", "send a whole plan") from None


def _pack_text(text: str) -> bytes:
    encoded = text.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def _segments(packed: bytes, documents: Sequence[str]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    position = 0
    for index, (chunk, start, end, code, document) in enumerate(_SEGMENT.iter_unpack(packed)):
        path = f"ragcache.segments[{index}]"
        if start >= end:
            raise InvalidInput(
                f"{path}.start", f"[{start}, {end}) is not a range", "send 0 <= start < end"
            )
        if start < position:
            raise InvalidInput(
                f"{path}.start",
                f"{start} lies before the end {position} of the segment before it",
                "send ascending segments that do not overlap",
            )
        if code >= len(_ACTIONS):
            raise InvalidInput(f"{path}.action", f"is {code}", "send that of an action")
        if document >= len(documents):
            raise InvalidInput(f"{path}.document", f"is {document}", "name a document of the plan")
        position = end
        segments.append(Segment(chunk, start, end, _ACTIONS[code], documents[document]))
    return tuple(segments)


def _precision(text: str) -> Precision:
    try:
        return Precision.parse(text)
    except ValueError as error:
        raise InvalidInput(_ROUNDING, f"is wrong: {error}", "name codecs") from error


def _unix_ms(path: str, value: int) -> int:
    if value >= 1 << 63:
        raise InvalidInput(path, f"is {value}", "send milliseconds of Unix time")
    return value


def _in_range(path: str, value: float, most: float) -> float:
    # NaN fails the check.
    if not 0 <= value <= most:
        raise InvalidInput(path, f"is {value!r}", f"send a number from 0 to {most:.0f}")
    return value


def _domain(path: str, value: str) -> str:
    domain = _short_text(path, value)
    if domain.startswith(PLAIN_DOMAIN):
        raise InvalidInput(
            path, f"is {domain!r}, which is reserved", f"do not begin with {PLAIN_DOMAIN!r}"
        )
    return domain


def _short_text(path: str, value: str) -> str:
    if not 0 < len(value) <= DOMAIN_MAX_CHARS:
        raise InvalidInput(path, "is not a short text", f"send 1 to {DOMAIN_MAX_CHARS} characters")
    return value
