"""Re-encodes variants by access frequency: hot ones lossless and in memory, cold ones quantized.

A thread of the store scans all variants every few seconds and ranks them by decayed reads. A
``PrecisionAssignment`` (``ragcache_core.tiering``) then gives each a precision and a tier. The
re-encoder acts on it slowly: the bytes re-encoded and promoted per second are bounded, so that
readers hardly notice.

Precision that is lost does not come back. Therefore the re-encoder leaves young variants alone. It
also waits until several scans in a row agree on a lower precision, because ranks near a border
swap all the time.

It makes lossy values only while engines may use them (``VariantAccess.has_lossy_readers``). And it
makes only encodings that the client has tagged, since others would be refused as forged.

Source: HA-RAG, the strategies for precision and placement, applied online.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ragcache_cachestore.background.graded_assignment import GradedAssignment
from ragcache_cachestore.background.threads import join_all
from ragcache_cachestore.background.variant_access import VariantAccess
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.variant import Precision, Tier, ValuePart, ValueShape, ValueTags
from ragcache_core.tiering.precision_assignment import (
    AccessObservation,
    DecayedCounts,
    Placement,
    PrecisionAssignment,
    decide_re_encoding,
)
from ragcache_kv.codecs import decode_part, encode_part, native_part_bytes
from ragcache_kv.values.layout import FORMAT, checksum

log = logging.getLogger(__name__)

SCAN_TIME_SHARE = 0.05
"""Share of time that scans may take. With many variants, scans become less frequent."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the re-encoder works.

    Attributes:
        scan_interval_s: Time between two scans.
        half_life_s: Time after which a read counts half.
        min_age_s: Age at which a variant may be re-encoded.
        num_scans: Number of scans in a row that must agree on a lower precision.
        encode_bytes_per_s: Bytes of values, as stored before.
        move_bytes_per_s: Bytes of values that are promoted.
        promote_interval_s: Least time between two promotions of the same variant.
    """

    scan_interval_s: float = 10.0
    half_life_s: float = 3600.0
    min_age_s: float = 60.0
    num_scans: int = 3
    encode_bytes_per_s: float = 64 << 20
    move_bytes_per_s: float = 256 << 20
    promote_interval_s: float = 60.0


@dataclass(slots=True)
class ReEncoderCounters:
    """Counts since the start of the re-encoder."""

    scans: int = 0
    re_encoded: int = 0
    bytes_saved: int = 0
    refused: int = 0  # read or replaced meanwhile; the next scan tries again
    corrupt: int = 0  # not re-encoded, because that would give wrong bytes a valid checksum
    prefetched: int = 0
    wanting_higher_precision: int = 0  # as of the last scan


class Allowance:
    """A rate limit in bytes per second. A large item is taken whole, and delays the next one."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        if bytes_per_s <= 0:
            raise ValueError("bytes_per_s must be above 0")
        self._bytes_per_s = bytes_per_s
        self._free_at = now

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next item may be taken."""
        return max(0.0, self._free_at - now)

    def take(self, num_bytes: int, now: float) -> None:
        """Note that num_bytes were taken."""
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s


@dataclass(slots=True)
class _ScannedVariant:
    """What the re-encoder remembers of a variant between scans."""

    reads: int
    first_seen_at: float
    target: Precision | None = None  # of the last scan
    num_scans: int = 0  # in a row with that target
    promoted_at: float = float("-inf")


class ReEncoder:
    """Scans the store, and does one piece of work at a time. ``start`` runs it in a thread.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        store: VariantAccess,
        assignment: PrecisionAssignment,
        pace: Pace,
        clock: Callable[[], float],
    ) -> None:
        self.counters = ReEncoderCounters()
        self._store = store
        self._assignment = assignment
        self._pace = pace
        self._clock = clock
        now = clock()
        # Keys are encoded as bytes here and in what follows, because they are compared.
        self._counts: DecayedCounts[bytes] = DecayedCounts(pace.half_life_s)
        self._scanned: dict[bytes, _ScannedVariant] = {}
        self._encode_allowance = Allowance(pace.encode_bytes_per_s, now)
        self._move_allowance = Allowance(pace.move_bytes_per_s, now)
        self._to_encode: deque[tuple[CatalogVariant, Precision]] = deque()
        self._to_promote: deque[CatalogVariant] = deque()
        self._incompressible: set[int] = set()  # identities of values that would not get smaller
        self._next_scan = now + pace.scan_interval_s
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="re-encoder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the current piece of work."""
        self._closing.set()
        if self._thread is not None:
            join_all([self._thread])

    def _run(self) -> None:
        wait_s = 0.0
        while not self._closing.wait(wait_s):
            try:
                wait_s = self.step(self._clock())
            except RagCacheError as error:
                log.warning("re-encoder: step failed error=%s", error)
                wait_s = self._pace.scan_interval_s
            except Exception:
                # Serving does not depend on the re-encoder, and the next scan plans again.
                log.exception("re-encoder: step failed")
                wait_s = self._pace.scan_interval_s

    def step(self, now: float) -> float:
        """Scan if it is due, and do a piece of work. Return the seconds until the next step."""
        if now >= self._next_scan:
            self.scan(now)
            took_s = self._clock() - now
            self._next_scan = now + max(self._pace.scan_interval_s, took_s / SCAN_TIME_SHARE)
        if self._to_encode and not self._encode_allowance.wait_s(now):
            candidate, target = self._to_encode.popleft()
            self._encode_allowance.take(candidate.info.num_bytes, now)
            self._re_encode(candidate, target)
        if self._to_promote and not self._move_allowance.wait_s(now):
            candidate = self._to_promote.popleft()
            self._move_allowance.take(candidate.info.num_bytes, now)
            self._promote(candidate, now)
        waits = [self._next_scan - now]
        if self._to_encode:
            waits.append(self._encode_allowance.wait_s(now))
        if self._to_promote:
            waits.append(self._move_allowance.wait_s(now))
        return max(0.0, min(waits))

    def scan(self, now: float) -> None:
        """Rank all variants, and plan the work until the next scan."""
        stored = {candidate.key.to_bytes(): candidate for candidate in self._store.all()}
        self._count_reads(stored, now)
        encodable, observations = [], []
        for name, candidate in stored.items():
            native = _native_bytes(candidate)
            observation = AccessObservation(
                name,
                self._counts.count(name, now),
                candidate.info.num_bytes if native is None else native,
                candidate.info.precision,
                candidate.score(now),
            )
            observations.append(observation)
            if native is not None:
                encodable.append(observation)
        self._plan_encoding(stored, encodable, now)
        self._plan_promotions(stored, observations, now)
        self.counters.scans += 1

    def _count_reads(self, stored: dict[bytes, CatalogVariant], now: float) -> None:
        scanned = {}
        for name, candidate in stored.items():
            known = scanned[name] = self._scanned.get(name) or _ScannedVariant(
                reads=0, first_seen_at=now
            )
            reads = candidate.reads  # calls add to it meanwhile
            # A smaller count than before means that the variant was put again.
            counted = known.reads if reads >= known.reads else 0
            if new_reads := reads - counted:
                self._counts.add(name, now, new_reads)
            known.reads = reads
        self._scanned = scanned
        self._counts.keep(stored.__contains__)
        if self._incompressible:
            self._incompressible &= {candidate.identity for candidate in stored.values()}

    def _plan_encoding(
        self,
        stored: dict[bytes, CatalogVariant],
        observations: list[AccessObservation[bytes]],
        now: float,
    ) -> None:
        if isinstance(self._assignment, GradedAssignment):
            self._sample(self._assignment, stored, observations)
        precisions = self._assignment.assign_precisions(observations)
        may_lose = self._store.has_lossy_readers()
        to_encode = []
        self.counters.wanting_higher_precision = 0
        for one in observations:
            candidate = stored[one.key]
            decision = decide_re_encoding(candidate.info.precision, precisions[one.key])
            self.counters.wanting_higher_precision += decision.wants_higher_precision
            if decision.wants_higher_precision != candidate.wants_higher_precision:
                self._store.set_wants_higher_precision(
                    candidate.key, decision.wants_higher_precision
                )
            target = decision.re_encode
            if target is not None and not (may_lose or target.lossless):
                target = None
            confirmed = self._confirm_target(one.key, target, now)
            encodable = candidate.identity not in self._incompressible
            if confirmed and target and encodable and _is_tagged(candidate, target):
                to_encode.append((one.accesses, one.key, target))
        to_encode.sort(key=lambda work: work[:2])
        self._to_encode = deque((stored[name], target) for _, name, target in to_encode)

    def _sample(
        self,
        assignment: GradedAssignment,
        stored: dict[bytes, CatalogVariant],
        observations: list[AccessObservation[bytes]],
    ) -> None:
        """Measure the grades' errors on lossless values, as far as that is needed."""
        for one in observations:
            if not assignment.needs_samples:
                return
            candidate = stored[one.key]
            if not candidate.info.precision.lossless or candidate.shape is None:
                continue
            if assignment.has_seen(candidate.identity):
                continue
            value = self._store.read(candidate.key, candidate.identity)
            if value is not None:
                assignment.add_sample(candidate, candidate.shape, value)

    def _confirm_target(self, name: bytes, target: Precision | None, now: float) -> bool:
        """Note the target of this scan. Return whether enough scans in a row agree on it."""
        known = self._scanned[name]
        same = target == known.target
        known.num_scans = 0 if target is None else 1 + (known.num_scans if same else 0)
        known.target = target
        old_enough = now - known.first_seen_at >= self._pace.min_age_s
        return known.num_scans >= self._pace.num_scans and old_enough

    def _plan_promotions(
        self,
        stored: dict[bytes, CatalogVariant],
        observations: list[AccessObservation[bytes]],
        now: float,
    ) -> None:
        placements = self._assignment.assign_placements(observations)
        too_low = [
            (-one.accesses, one.key)
            for one in observations
            if one.accesses > 0
            and placements[one.key] is not Placement.DISK
            and stored[one.key].tier is Tier.DISK
            and now - self._scanned[one.key].promoted_at >= self._pace.promote_interval_s
        ]
        self._to_promote = deque(stored[name] for _, name in sorted(too_low))

    def _promote(self, candidate: CatalogVariant, now: float) -> None:
        self._scanned[candidate.key.to_bytes()].promoted_at = now
        self.counters.prefetched += self._store.prefetch([candidate.key])

    def _re_encode(self, candidate: CatalogVariant, target: Precision) -> None:
        value = self._store.read(candidate.key, candidate.identity)
        if value is None or candidate.shape is None:
            self.counters.refused += 1
            return
        info = candidate.info
        try:
            views = re_encode_value(
                value, candidate.parts, candidate.shape, info.num_tokens, info.precision, target
            )
        except (CorruptValue, ValueError):  # ValueError: a client has put impossible sizes
            self.counters.corrupt += 1
            self._incompressible.add(candidate.identity)
            return
        num_bytes = sum(view.nbytes for view in views)
        if num_bytes >= info.num_bytes:
            self._incompressible.add(candidate.identity)
            return
        parts = [ValuePart(view.nbytes, checksum(view)) for view in views]
        if self._store.swap(candidate.key, candidate.identity, target, parts, views):
            self.counters.re_encoded += 1
            self.counters.bytes_saved += info.num_bytes - num_bytes
        else:
            self.counters.refused += 1


def _is_tagged(candidate: CatalogVariant, target: Precision) -> bool:
    """Tell whether readers accept a value in this precision: tagged, or of clients without key."""
    tags = ValueTags.from_bytes(candidate.tag)
    return not tags.put or any(precision == target for precision, _ in tags.encodings)


def _native_bytes(candidate: CatalogVariant) -> int | None:
    """Return the size of a value as computed, or None if it cannot be re-encoded."""
    if candidate.shape is None or candidate.value_format != FORMAT:
        return None
    if len(candidate.parts) != candidate.shape.num_layers:
        return None
    return native_bytes(candidate.shape, candidate.info.num_tokens)


class CorruptValue(Exception):
    """A part does not match its checksum."""


def native_bytes(shape: ValueShape, num_tokens: int) -> int | None:
    """Return the size of a value as computed, or None for an unknown dtype."""
    try:
        return shape.num_layers * native_part_bytes(shape, num_tokens)
    except ValueError:
        return None


def re_encode_value(
    value: bytearray,
    parts: Sequence[ValuePart],
    shape: ValueShape,
    num_tokens: int,
    stored: Precision,
    target: Precision,
) -> list[memoryview]:
    """Return the parts of a value in another precision.

    Args:
        stored: Precision of value.

    Raises:
        CorruptValue: A part does not match its checksum. Encoding it would give wrong numbers a
            valid checksum.
    """
    whole = memoryview(value)
    start = 0
    views = []
    for part in parts:
        view = whole[start : start + part.num_bytes]
        start += part.num_bytes
        if view.nbytes != part.num_bytes or checksum(view) != part.checksum:
            raise CorruptValue
        native = decode_part(np.frombuffer(view, np.uint8), shape, num_tokens, stored)
        views.append(encode_part(native, shape, num_tokens, target).data)
    return views
