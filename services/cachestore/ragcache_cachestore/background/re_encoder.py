"""Keeps hot variants fine and near, cold ones coarse: HA-RAG's two strategies, online.

A thread of the store looks at what is held every few seconds, ranks it by decayed reads, asks an
assignment (``ragcache_core.tiering``) for precision and placement, and acts on the answer slowly:
bytes re-encoded and bytes moved per second are bounded, so that readers hardly notice.

What is lost by a wrong guess does not come back, so nothing is re-encoded that is young, or that
only one look in a row would have coarser: ranks at a border swap all the time, and each swap would
cost precision for good.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragcache_cachestore.background.re_encoding import CorruptValue, native_bytes, re_encode_value
from ragcache_cachestore.background.threads import end
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Precision, Tier, ValuePart, ValueShape, VariantInfo
from ragcache_core.tiering.access_counts import DecayedCounts
from ragcache_core.tiering.fidelity import decide_re_encoding
from ragcache_core.tiering.precision_assignment import (
    AccessObservation,
    Placement,
    PrecisionAssignment,
)
from ragcache_kv.values.layout import FORMAT, checksum

log = logging.getLogger(__name__)

LOOKING_SHARE = 0.05
"""Share of time that looks may take, as there are more variants than one look_s is enough for."""


@dataclass(frozen=True, slots=True)
class ReEncodingCandidate:
    """What a store says of one variant it holds.

    identity: names this very record among all of a store; another after any put or swap.
    reads: how often it was read since it was put or since the store started; a swap keeps it.
    score: decayed saved seconds per byte (DESIGN §1); 0 if unknown.
    """

    key: VariantKey
    identity: int
    info: VariantInfo
    shape: ValueShape | None
    value_format: int
    parts: tuple[ValuePart, ...]
    tier: Tier
    reads: int
    score: float
    wants_higher_precision: bool


class ReEncodableStore(Protocol):
    """What the keeper needs of a store. Every method may be called from its thread."""

    def candidates(self, now: float) -> Iterable[ReEncodingCandidate]:
        """A snapshot of all that is held and visible."""

    def read(self, key: VariantKey, identity: int) -> bytearray | None:
        """A copy of a value as held, parts one after another; None if that record is gone.

        It counts as no use: neither hit nor miss, and the eviction policy does not see it.
        """

    def swap(
        self,
        key: VariantKey,
        identity: int,
        precision: Precision,
        parts: Sequence[ValuePart],
        views: Sequence[memoryview],
    ) -> bool:
        """Hold a value in another encoding, if that record is still held and nobody reads it.

        views: one for each part. Reads, origin and place in the eviction order stay; identity
        changes. False: nothing was changed.
        """

    def want_better(self, key: VariantKey, wanted: bool) -> None:
        """Say in lookups whether a variant deserves better than it is held with."""

    def prefetch(self, keys: Sequence[VariantKey]) -> int:
        """Bring variants from disk into memory, in the background. Returns how many it begins."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the keeper goes.

    look_s: seconds between two looks at everything. half_life_s: of a read. settle_s: age at which
    a variant is judged. looks: how many in a row must want a variant coarser. encode_bytes_per_s,
    move_bytes_per_s: bytes of values, as held before. again_s: a variant that was brought into
    memory, and lost there again, is not brought again before.
    """

    look_s: float = 10.0
    half_life_s: float = 3600.0
    settle_s: float = 60.0
    looks: int = 3
    encode_bytes_per_s: float = 64 << 20
    move_bytes_per_s: float = 256 << 20
    again_s: float = 60.0


@dataclass(slots=True)
class ReEncoderCounters:
    """What the keeper has done since it started."""

    looks: int = 0
    re_encoded: int = 0
    bytes_saved: int = 0
    refused: int = 0  # read or replaced meanwhile; tried again after the next look
    corrupt: int = 0  # not re-encoded, which would have given bad bytes a good checksum
    prefetched: int = 0
    wants_higher_precision: int = 0  # as of the last look


class Allowance:
    """A rate in bytes per second. What is large is taken whole and waited for afterwards."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        if bytes_per_s <= 0:
            raise ValueError("bytes_per_s is above 0")
        self._bytes_per_s = bytes_per_s
        self._free_at = now

    def wait_s(self, now: float) -> float:
        """Seconds until more may be taken; 0: now."""
        return max(0.0, self._free_at - now)

    def take(self, num_bytes: int, now: float) -> None:
        """Note that num_bytes were moved."""
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s


@dataclass(slots=True)
class _Known:
    """What the keeper remembers of a variant between looks."""

    reads: int
    since: float
    target: Precision | None = None  # wanted by the last look
    looks: int = 0  # in a row that wanted it
    brought_at: float = float("-inf")


class ReEncoder:
    """Looks, and does one piece of work at a time; ``start`` gives it a thread.

    clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: ReEncodableStore,
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
        self._counts: DecayedCounts[bytes] = DecayedCounts(pace.half_life_s)
        self._known: dict[bytes, _Known] = {}  # by the key's bytes, as in all that follows
        self._encoding = Allowance(pace.encode_bytes_per_s, now)
        self._moving = Allowance(pace.move_bytes_per_s, now)
        self._to_encode: deque[tuple[ReEncodingCandidate, Precision]] = deque()
        self._to_bring: deque[ReEncodingCandidate] = deque()
        self._useless: set[int] = set()  # identities of what is not smaller when re-encoded
        self._next_look = now + pace.look_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the piece of work at hand, or soon."""
        self._ended.set()
        if self._thread is not None:
            end([self._thread])

    def _run(self) -> None:
        wait_s = 0.0
        while not self._ended.wait(wait_s):
            try:
                wait_s = self.step(self._clock())
            except RagCacheError as error:
                log.warning("keeper: %s", error)
                wait_s = self._pace.look_s
            except Exception:
                # Serving does not depend on the keeper, and the next look starts afresh.
                log.exception("keeper")
                wait_s = self._pace.look_s

    def step(self, now: float) -> float:
        """Look if it is time to, and do a piece of work. Returns seconds until the next step."""
        if now >= self._next_look:
            self.look(now)
            took_s = self._clock() - now
            self._next_look = now + max(self._pace.look_s, took_s / LOOKING_SHARE)
        if self._to_encode and not self._encoding.wait_s(now):
            candidate, target = self._to_encode.popleft()
            self._encoding.take(candidate.info.num_bytes, now)
            self._re_encode(candidate, target)
        if self._to_bring and not self._moving.wait_s(now):
            candidate = self._to_bring.popleft()
            self._moving.take(candidate.info.num_bytes, now)
            self._bring(candidate, now)
        waits = [self._next_look - now]
        if self._to_encode:
            waits.append(self._encoding.wait_s(now))
        if self._to_bring:
            waits.append(self._moving.wait_s(now))
        return max(0.0, min(waits))

    def look(self, now: float) -> None:
        """Rank everything anew, say what deserves better, and plan the work until the next look."""
        held = {candidate.key.to_bytes(): candidate for candidate in self._store.candidates(now)}
        self._count(held, now)
        known_numbers, observed = [], []
        for name, candidate in held.items():
            native = _native_bytes(candidate)
            observation = AccessObservation(
                name,
                self._counts.count(name, now),
                candidate.info.num_bytes if native is None else native,
                candidate.info.precision,
                candidate.score,
            )
            observed.append(observation)
            if native is not None:
                known_numbers.append(observation)
        self._plan_encoding(held, known_numbers, now)
        self._plan_moves(held, observed, now)
        self.counters.looks += 1

    def _count(self, held: dict[bytes, ReEncodingCandidate], now: float) -> None:
        known = {}
        for name, candidate in held.items():
            one = known[name] = self._known.get(name) or _Known(reads=0, since=now)
            # Fewer than before: the variant was put anew.
            fresh = candidate.reads - (one.reads if candidate.reads >= one.reads else 0)
            if fresh:
                self._counts.add(name, now, fresh)
            one.reads = candidate.reads
        self._known = known
        self._counts.keep(held.__contains__)
        if self._useless:
            self._useless &= {candidate.identity for candidate in held.values()}

    def _plan_encoding(
        self, held: dict[bytes, ReEncodingCandidate], observed: list[AccessObservation[bytes]], now: float
    ) -> None:
        wanted = self._assignment.assign_precisions(observed)
        to_encode = []
        self.counters.wants_higher_precision = 0
        for one in observed:
            candidate = held[one.key]
            settled = decide_re_encoding(one.held, wanted[one.key])
            self.counters.wants_higher_precision += settled.want_better
            if settled.want_better != candidate.wants_higher_precision:
                self._store.want_better(candidate.key, settled.want_better)
            agreed = self._agreed(one.key, settled.re_encode, now)
            if agreed and settled.re_encode and candidate.identity not in self._useless:
                to_encode.append((one.accesses, one.key, settled.re_encode))
        to_encode.sort(key=lambda work: work[:2])
        self._to_encode = deque((held[name], target) for _, name, target in to_encode)

    def _agreed(self, name: bytes, target: Precision | None, now: float) -> bool:
        """Note what this look wants; whether enough looks in a row have wanted it."""
        known = self._known[name]
        known.looks = 0 if target is None else 1 + (known.looks if target == known.target else 0)
        known.target = target
        return known.looks >= self._pace.looks and now - known.since >= self._pace.settle_s

    def _plan_moves(
        self, held: dict[bytes, ReEncodingCandidate], observed: list[AccessObservation[bytes]], now: float
    ) -> None:
        placed = self._assignment.assign_placements(observed)
        too_low = [
            (-one.accesses, one.key)
            for one in observed
            if one.accesses > 0
            and placed[one.key] is not Placement.DISK
            and held[one.key].tier is Tier.DISK
            and now - self._known[one.key].brought_at >= self._pace.again_s
        ]
        self._to_bring = deque(held[name] for _, name in sorted(too_low))

    def _bring(self, candidate: ReEncodingCandidate, now: float) -> None:
        self._known[candidate.key.to_bytes()].brought_at = now
        self.counters.prefetched += self._store.prefetch([candidate.key])

    def _re_encode(self, candidate: ReEncodingCandidate, target: Precision) -> None:
        value = self._store.read(candidate.key, candidate.identity)
        if value is None or candidate.shape is None:
            self.counters.refused += 1
            return
        info = candidate.info
        try:
            views = re_encode_value(
                value, candidate.parts, candidate.shape, info.num_tokens, info.precision, target
            )
        except (CorruptValue, ValueError):  # also what was put with sizes that cannot be
            self.counters.corrupt += 1
            self._useless.add(candidate.identity)
            return
        num_bytes = sum(view.nbytes for view in views)
        if num_bytes >= info.num_bytes:
            self._useless.add(candidate.identity)
            return
        parts = [ValuePart(view.nbytes, checksum(view)) for view in views]
        if self._store.swap(candidate.key, candidate.identity, target, parts, views):
            self.counters.re_encoded += 1
            self.counters.bytes_saved += info.num_bytes - num_bytes
        else:
            self.counters.refused += 1


def _native_bytes(candidate: ReEncodingCandidate) -> int | None:
    """Size of a value as computed; None where its numbers are not known."""
    if candidate.shape is None or candidate.value_format != FORMAT:
        return None
    if len(candidate.parts) != candidate.shape.num_layers:
        return None
    return native_bytes(candidate.shape, candidate.info.num_tokens)
