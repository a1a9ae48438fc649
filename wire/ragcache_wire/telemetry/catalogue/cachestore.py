"""Instruments of the cache store. Bytes are those of values as stored."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from ragcache_core.eviction import POLICY_NAMES
from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.store_api import Ack, PutOutcome
from ragcache_wire.telemetry.instrument import at_most, counter, gauge, histogram, one_of

_DURATIONS_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""From a memory hit of a small chunk over shared memory, to a cold disk and a slow network."""


class Undecrypted(StrEnum):
    """Why a value on disk was dropped although its bytes can be read."""

    NO_KEY = "no_key"  # it is encrypted, and the file of keys lacks its key
    PLAIN = "plain"  # it is plain, and the store encrypts
    CHANGED = "changed"  # it is not what was encrypted


_TIER: Final = one_of("tier", *Tier)
_TRANSPORT: Final = one_of("transport", "shared", "socket", "grpc")
_OUTCOME: Final = one_of("outcome", *PutOutcome)
_ACK: Final = one_of("ack", *Ack)
_POLICY: Final = one_of("policy", *POLICY_NAMES)

HITS: Final = counter("ragcache.store.hits", "{value}", "Values served.", _TIER, _TRANSPORT)
READ_SIZE: Final = counter(
    "ragcache.store.read.size", "By", "Bytes of values served.", _TIER, _TRANSPORT
)
MISSES: Final = counter(
    "ragcache.store.misses",
    "{variant}",
    "Variants asked for and not served.",
    one_of("reason", *Miss),
)
USES_REPORTED: Final = counter(
    "ragcache.store.uses.reported",
    "{use}",
    "Uses that engines reported without a read.",
    one_of("outcome", "stored", "not_stored"),
)
ORPHANS: Final = counter(
    "ragcache.store.orphans",
    "{variant}",
    "Variants dropped because the variant before them was evicted on another shard.",
)
UNDECRYPTED: Final = counter(
    "ragcache.store.undecrypted",
    "{value}",
    "Values on disk dropped because the store's keys do not decrypt them.",
    one_of("reason", *Undecrypted),
)
PUTS: Final = counter(
    "ragcache.store.puts", "{value}", "Puts that have ended.", _OUTCOME, _ACK, _TRANSPORT
)
WRITE_SIZE: Final = counter(
    "ragcache.store.write.size", "By", "Bytes of values put.", _OUTCOME, _TRANSPORT
)
EVICTIONS: Final = counter(
    "ragcache.store.evictions", "{value}", "Values that were evicted.", _TIER, _POLICY
)
EVICTIONS_SIZE: Final = counter(
    "ragcache.store.evictions.size", "By", "Bytes of evicted values.", _TIER, _POLICY
)
DELETIONS: Final = counter(
    "ragcache.store.deletions", "{variant}", "Variants that deletes removed."
)
READ_DURATION: Final = histogram(
    "ragcache.store.read.duration",
    "s",
    "Time from a get until the last byte was handed over.",
    _TIER,
    _TRANSPORT,
    buckets=_DURATIONS_S,
)
WRITE_DURATION: Final = histogram(
    "ragcache.store.write.duration",
    "s",
    "Time from a put until its acknowledgement. If a prefill engine puts a value while it computes "
    "it, this includes the computation.",
    _ACK,
    _TRANSPORT,
    buckets=_DURATIONS_S,
)
USED: Final = gauge("ragcache.store.used", "By", "Bytes of stored values.", _TIER)
CAPACITY: Final = gauge("ragcache.store.capacity", "By", "Capacity of a tier.", _TIER)
VARIANTS: Final = gauge("ragcache.store.variants", "{variant}", "Stored variants.")
LEASES: Final = gauge("ragcache.store.leases", "{lease}", "Open leases.")
TOMBSTONES: Final = gauge("ragcache.store.tombstones", "{tombstone}", "Remembered deletes.")
UNWRITTEN: Final = gauge(
    "ragcache.store.unwritten", "{variant}", "Writes to disk that are queued or running."
)
CONNECTIONS: Final = gauge(
    "ragcache.store.connections",
    "{connection}",
    "Open connections of the data transports shared and socket.",
)
CONNECTIONS_ENDED: Final = counter(
    "ragcache.store.connections.ended",
    "{connection}",
    "Connections that were evicted while idle, or refused, because there were too many.",
    one_of("reason", "evicted", "refused"),
)
PRECISION: Final = gauge(
    "ragcache.store.precision",
    "By",
    "Bytes of stored values, by the codecs of keys and values.",
    at_most("precision", 36, "native, packed, or codec of keys/codec of values"),
)
SCORE: Final = gauge(
    "ragcache.store.score",
    "{variant}",
    "Variants by the power of ten of their score, in saved seconds per GiB; 0 stands for 10^-6.",
    at_most("decade", 16, "0 to 15"),
)
