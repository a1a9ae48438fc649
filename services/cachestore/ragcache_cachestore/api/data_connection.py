"""One connection of a data transport: gets, puts, releases and read reports as frames.

Over the Unix socket the store sends only the extents of a value. The client, on the same machine,
maps the memory tier and reads the file of values itself. Over TCP the store sends the bytes.

A client first proves that it has the platform's key. Until then the store takes
MAX_CREDENTIAL_BYTES from it, for at most HELLO_TIMEOUT_S.

When a connection ends, its leases and its puts end with it. The store ends a connection whose
client is slower than a lease lasts, or silent for IDLE_S. It ends idle ones earlier if it needs
their memory for others (``data_server``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from ragcache_cachestore.puts import IncomingPut
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.store import Store
from ragcache_cachestore.telemetry.exporter import count_hit, count_miss
from ragcache_core.errors import InvalidInput, RagCacheError, Unauthenticated, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.peer_token import CHALLENGE_BYTES
from ragcache_core.identity.variant import Miss, Tier, ValuePart
from ragcache_core.storage.extents import Extent
from ragcache_core.store_api import (
    LEASE_S,
    MAX_KEYS,
    Ack,
    NewVariant,
    PutCompletion,
    PutOutcome,
)
from ragcache_kv.transport.framing import (
    MAX_CREDENTIAL_BYTES,
    MAX_REQUEST_BYTES,
    PIECE_BYTES,
    SOCKET_BUFFER_BYTES,
    ConnectionBroken,
    FramedConnection,
    FrameKind,
    FrameLimits,
    frame,
    parse,
    to_error,
)
from ragcache_kv.transport.tls_connection import TlsConnection
from ragcache_kv.values.conversions import (
    from_completion,
    from_get_request,
    from_key,
    from_put_header,
    from_use,
    to_miss,
    to_outcome,
    to_value_header,
)
from ragcache_wire.peers.certificates import Certificates
from ragcache_wire.peers.peer_access import PeerGuard
from ragcache_wire.tracing import NO_SPAN, Span
from ragcache_wire.tracing import metadata as trace_metadata
from ragcache_wire.v1 import cachestore_pb2 as pb

log = logging.getLogger(__name__)

FRAMES_BYTES = 64 << 20
"""Bound of the large messages that clients send, for all connections together."""

FRAME_TIMEOUT_S = 5.0
"""How long a message may take after its first bytes."""

NEW_BUFFER_BYTES = 32 << 10
"""Kernel buffer for the bytes of a client that the store has not admitted yet."""

IDLE_S = 600.0
"""How long a connection may be silent. A client that needs it again opens another one."""

MAX_HEADERS = 4096
"""Number of encoded headers kept. They take a few MiB for usual numbers of layers."""

FIRST_BYTES = 64 << 10
"""Bytes of the first value that the store sends with its answer, so that the client wakes once."""

UNANSWERED = frozenset({FrameKind.RELEASE, FrameKind.READS})

MAX_REREADS = 4096
"""Bound of the repeated reads of one value that one message may report."""

HELLO_TIMEOUT_S = 5.0

EVICTED_S = 0.2
"""How long a connection that is evicted waits for its client to take the message."""

RETRY_AFTER_S = 1.0


class HeaderCache:
    """The encoded headers of values, which every reply repeats. Safe to use from any thread.

    A cached header is valid for the same tuple of parts, which a replaced value does not share.
    """

    def __init__(self) -> None:
        self._encoded: dict[VariantKey, tuple[tuple[ValuePart, ...], Tier, bytes]] = {}

    def get(self, lease: ReadLease) -> bytes:
        """Return an encoded LeasedValue with only the header."""
        known = self._encoded.get(lease.variant.key)
        if known is not None and known[0] is lease.variant.parts and known[1] is lease.source:
            return known[2]
        # The index is 0, because the position among the answers names the request's key.
        header = to_value_header(0, lease.header)
        encoded = pb.LeasedValue(header=header).SerializeToString()
        if len(self._encoded) >= MAX_HEADERS:
            self._encoded.clear()
        self._encoded[lease.variant.key] = (lease.variant.parts, lease.source, encoded)
        return encoded


@dataclass(frozen=True, slots=True)
class ConnectionContext:
    """What all connections of one listening socket share.

    Args:
        guard: Admits clients.
        limits: Bounds what clients send.
        certificates: Of this store. None: connections are plain. Those of a Unix socket always are.
    """

    store: Store
    hello: pb.HelloReply
    headers: HeaderCache
    guard: PeerGuard
    limits: FrameLimits
    certificates: Certificates | None


class DataConnection(threading.Thread):
    """Serves the calls of one client, one after another.

    Args:
        on_end: Called when the connection has ended.
    """

    def __init__(
        self,
        context: ConnectionContext,
        sock: socket.socket,
        on_end: Callable[[DataConnection], None],
    ) -> None:
        super().__init__(name="transport", daemon=True)
        self.channel = (
            FramedConnection(sock, context.limits)
            if context.certificates is None or sock.family == socket.AF_UNIX
            else TlsConnection(sock, context.certificates.current(), context.limits)
        )
        self._store = context.store
        self._hello = context.hello
        self._headers = context.headers
        self._guard = context.guard
        self._on_end = on_end
        self._shared = sock.family == socket.AF_UNIX
        self._transport = "shared" if self._shared else "socket"
        self._leases: dict[int, tuple[ReadLease, float]] = {}
        self._reads_reported_at = time.monotonic()
        self._lock = threading.Lock()  # guards the two below
        self._evicted = False
        self.is_admitted = False
        # The client of a Unix socket would take the reason for the byte that passes descriptors.
        self.idle_since: float | None = None if self._shared else time.monotonic()
        """When it began to wait for a credential or a call without a lease; else None."""

    def try_evict(self) -> bool:
        """End the connection if it is idle. Return whether it was. Safe to call from any thread."""
        with self._lock:
            if self.idle_since is None or self._evicted:
                return False
            self._evicted = True
        self.channel.end_input()  # its thread waits for a frame, and tells the client
        return True

    def refuse(self) -> None:
        """Tell the client that there are too many connections, without waiting for it."""
        error = Unavailable("cachestore", "it has too many connections", RETRY_AFTER_S)
        self.channel.refuse(frame(FrameKind.ERROR, to_error(error)))

    def run(self) -> None:
        """Serve calls until the client closes the connection."""
        try:
            self._admit()
            self._send_hello()
            while True:
                self._serve_one()
        except (ConnectionBroken, Unauthenticated) as error:
            log.debug("data server: connection ended transport=%s error=%s", self._transport, error)
            self._tell_evicted()
        except Exception:
            log.exception("data server: connection failed transport=%s", self._transport)
        finally:
            self.channel.close()
            try:
                self._store.reads.release(self._leases)
            except RagCacheError as error:
                log.warning(
                    "data server: leases expire by themselves transport=%s error=%s",
                    self._transport,
                    error,
                )
            self._on_end(self)

    def _tell_evicted(self) -> None:
        """Tell the client of an evicted connection to connect again."""
        if self._evicted:
            self.channel.deadline = time.monotonic() + EVICTED_S
            with contextlib.suppress(ConnectionBroken):
                self.channel.send(FrameKind.EVICTED)

    def _admit(self) -> None:
        """Let the client prove that it has a key. Raises ConnectionBroken, Unauthenticated."""
        self.channel.deadline = time.monotonic() + HELLO_TIMEOUT_S
        sock, challenge = self.channel.socket, os.urandom(CHALLENGE_BYTES)
        if not self._shared:
            _set_buffer(sock, NEW_BUFFER_BYTES)
        self.channel.shake_hands()
        self.channel.send(FrameKind.CHALLENGE, pb.DataChallenge(challenge=challenge))
        kind, payload = self.channel.receive(MAX_CREDENTIAL_BYTES)
        self._require_not_evicted()
        if kind != FrameKind.CREDENTIAL:
            raise ConnectionBroken(f"expected a credential, received a frame of kind {kind}")
        try:
            proof = parse(pb.DataCredential, payload).proof
            self._guard.check_proof(proof, challenge, self._hello.boot)
        except (InvalidInput, Unauthenticated) as error:
            greeting = b"\0" if self._shared else b""
            self.channel.send_raw(greeting + frame(FrameKind.ERROR, to_error(error)))
            raise ConnectionBroken(f"refused: {error}") from error
        self.is_admitted = True
        if not self._shared:
            _set_buffer(sock, SOCKET_BUFFER_BYTES)

    def _require_not_evicted(self) -> None:
        with self._lock:
            if self._evicted:
                raise ConnectionBroken("it was evicted while it was idle")
            self.idle_since = None

    def _send_hello(self) -> None:
        if self._shared:
            store = self._store
            fds = [store.memory_tier.fd, store.disk_tier.reader_fd, store.status_page.reader_fd]
            try:
                socket.send_fds(self.channel.socket, [b"\0"], fds)
            except OSError as error:
                raise ConnectionBroken(str(error)) from error
        self.channel.send(FrameKind.WELCOME, self._hello)

    def _serve_one(self) -> None:
        """Wait for a call and serve it."""
        now = time.monotonic()
        self.channel.release_messages()
        self.channel.deadline = now + IDLE_S
        self.idle_since = None if self._leases else now
        self.channel.spin_wait()
        kind, payload = self.channel.receive(MAX_REQUEST_BYTES)
        self._require_not_evicted()
        self.channel.deadline = time.monotonic() + LEASE_S
        try:
            self._dispatch(kind, payload)
        except RagCacheError as error:
            if kind in UNANSWERED:  # the client would take it for the answer to its next call
                raise ConnectionBroken(f"a message without an answer failed: {error}") from error
            self.channel.deadline = time.monotonic() + LEASE_S
            self.channel.send(FrameKind.ERROR, to_error(error))

    def _dispatch(self, kind: int, payload: memoryview) -> None:
        match kind:
            case FrameKind.GET:
                self._get(parse(pb.GetRequest, payload))
            case FrameKind.RELEASE:
                self._release(parse(pb.LeaseRelease, payload))
            case FrameKind.READS:
                self._note_reads(parse(pb.ReadReport, payload))
            case FrameKind.PUT:
                self._put(parse(pb.PutHeader, payload))
            case _:
                raise ConnectionBroken(f"expected a call, received a frame of kind {kind}")

    # Gets

    def _get(self, request: pb.GetRequest) -> None:
        with self._span("Get", request) as span:
            keys, exact, domain, uses = from_get_request(request)
            if len(self._leases) > MAX_KEYS:
                raise ConnectionBroken("the client does not release its leases")
            now = time.monotonic()
            answers = self._store.reads.open(keys, exact, domain)
            leases = [one for one in answers if not isinstance(one, Miss)]
            self._leases.update([(lease.id, (lease, now)) for lease in leases])
            if span.is_recording:
                span.set(keys=len(keys))
                for one in answers:
                    if isinstance(one, Miss):
                        count_miss(span, one)
                    else:
                        count_hit(span, one.source, one.variant.info.num_bytes)
            reply = pb.DataGetReply()
            for one in answers:
                self._add_answer(reply, one)
            pieces = iter(()) if self._shared else self._pieces(leases)
            rest = self._send_reply(reply, pieces)
            self._store.reads.note_opened(answers, uses)  # now, while the client reads the answer
            self._send(rest)

    def _add_answer(self, reply: pb.DataGetReply, answer: ReadLease | Miss) -> None:
        found = reply.values.add()
        if isinstance(answer, Miss):
            found.header.miss = to_miss(answer)
            return
        found.MergeFromString(self._headers.get(answer))
        found.lease = answer.id
        if self._shared:
            for extent in answer.copy.extents:
                found.extents.add(
                    disk=answer.on_disk, offset=extent.offset, num_bytes=extent.num_bytes
                )

    def _send_reply(
        self, reply: pb.DataGetReply, pieces: Iterator[memoryview | Extent]
    ) -> Iterator[memoryview | Extent]:
        """Send a reply together with the first bytes. Return the pieces that are left."""
        first = next(pieces, None)
        if not isinstance(first, memoryview):
            self.channel.send(FrameKind.GOT, reply)
            return pieces if first is None else chain([first], pieces)
        self.channel.send(FrameKind.GOT, reply, [first[:FIRST_BYTES]])
        return chain([first[FIRST_BYTES:]], pieces)

    def _send(self, pieces: Iterator[memoryview | Extent]) -> None:
        for piece in pieces:
            if isinstance(piece, Extent):
                self.channel.send_file(self._store.disk_tier.fd, piece.offset, piece.num_bytes)
            elif piece:
                # sendfile would send memory page by page, at half the speed.
                self.channel.send_raw(piece)

    def _pieces(self, leases: Sequence[ReadLease]) -> Iterator[memoryview | Extent]:
        """Yield the values in the order of sending: views of memory, or extents of the file."""
        for lease in leases:
            if lease.on_disk:
                yield from lease.copy.extents
            else:
                yield from self._store.memory_tier.views(lease.copy.extents)

    def _release(self, message: pb.LeaseRelease) -> None:
        # Only the leases of this connection: a client cannot end those of another one.
        own = [self._leases[one] for one in message.leases if one in self._leases]
        corrupt = set(message.corrupt)
        ids = [lease.id for lease, _ in own]
        expired = {lease_id for lease_id in ids if not self._store.reads.is_leased(lease_id)}
        self._store.reads.release(ids, [lease_id for lease_id in ids if lease_id in corrupt])
        now = time.monotonic()
        total_bytes = max(1, sum([lease.variant.info.num_bytes for lease, _ in own]))
        for lease, opened_at in own:
            self._leases.pop(lease.id, None)
            if lease.id in expired:
                self._store.reads.note_timed_out(lease.source)
            elif lease.id not in corrupt:
                # The client may have sent the release later, and reports one time for all values.
                taken_s = message.seconds if message.seconds > 0 else now - opened_at
                share = lease.variant.info.num_bytes / total_bytes
                seconds = min(taken_s, now - opened_at) * share
                self._store.reads.note_sent(
                    lease.source, self._transport, lease.variant.info.num_bytes, seconds
                )
        if corrupt:
            self.channel.send(FrameKind.RELEASED)

    def _note_reads(self, message: pb.ReadReport) -> None:
        """Count reads that the client made from shared memory without asking."""
        if not self._shared:
            raise ConnectionBroken("only a client of shared memory can read without asking")
        now, since = time.monotonic(), self._reads_reported_at
        self._reads_reported_at = now
        for read in message.reads:
            times = min(read.times, MAX_REREADS)
            use = from_use("reads.fix_overhead", read.fix_overhead)
            num_bytes = self._store.reads.note_reread(from_key("reads.key", read.key), times, use)
            if num_bytes:
                reported_s = read.seconds if math.isfinite(read.seconds) else 0.0
                seconds = min(max(0.0, reported_s / times), now - since)
                for _ in range(times):
                    self._store.reads.note_sent(Tier.MEMORY, self._transport, num_bytes, seconds)

    # Puts

    def _put(self, header: pb.PutHeader) -> None:
        began = time.monotonic()
        with self._span("Put", header) as span:
            new, ack = from_put_header("header", header, self._store.puts.max_value_bytes)
            incoming = self._store.puts.begin(new, ack, LEASE_S)
            if isinstance(incoming, PutOutcome):
                self._note_put(incoming, ack, new, began, span)
                refusal = pb.PutGrant(granted=False, outcome=to_outcome(incoming))
                self.channel.send(FrameKind.GRANT, refusal)
                return
            with incoming:
                completion = self._receive(incoming)
                if completion is None:
                    return
                outcome = incoming.commit(completion, ack, LEASE_S)
            self._note_put(outcome, ack, new, began, span)
            self.channel.deadline = time.monotonic() + LEASE_S
            self.channel.send(FrameKind.PUT_DONE, pb.PutReply(outcome=to_outcome(outcome)))

    def _span(self, name: str, request: pb.GetRequest | pb.PutHeader) -> Span:
        # Most calls are not traced, so this case is fast.
        parent = trace_metadata(request.traceparent)
        if parent is None:
            return NO_SPAN
        return self._store.telemetry.span(name, parent, transport=self._transport)

    def _receive(self, incoming: IncomingPut) -> PutCompletion | None:
        """Let the client write the value. Return None if the client aborts the put."""
        if self._shared:
            try:
                self.channel.send(FrameKind.GRANT, _grant(incoming.extents))
                payload = self._follow_writes(incoming)
            except BaseException:
                incoming.abort(quarantine_s=LEASE_S)  # the client may go on writing
                raise
        else:
            payload = self._receive_bytes(incoming)
        if payload is None:
            return None
        message = parse(pb.PutCompletion, payload)
        return from_completion("completion", message, len(incoming.new.part_bytes))

    def _receive_bytes(self, incoming: IncomingPut) -> memoryview:
        """Receive the value over TCP. Return the completion."""
        self.channel.accept_early_bytes()
        self.channel.send(FrameKind.GRANT, _grant(()))
        # Piece by piece, so that each is still in the CPU's cache when its checksum is computed.
        for view in incoming.views:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                self.channel.receive_into(piece)
                incoming.sums.add(piece)
        return self._require_commit(*self.channel.receive(MAX_REQUEST_BYTES))

    def _follow_writes(self, incoming: IncomingPut) -> memoryview | None:
        """Compute checksums as the client reports its writes. Return the completion, if any."""
        while True:
            kind, payload = self.channel.receive(MAX_REQUEST_BYTES)
            if kind == FrameKind.ABORT:
                return None
            if kind != FrameKind.WRITTEN:
                return self._require_commit(kind, payload)
            num_bytes = parse(pb.PutProgress, payload).num_bytes
            if not incoming.sums.num_bytes <= num_bytes <= incoming.new.info.num_bytes:
                raise ConnectionBroken(
                    f"the client reports {num_bytes} bytes written of {incoming.new.info.num_bytes}"
                )
            incoming.add_checksums_up_to(num_bytes)

    @staticmethod
    def _require_commit(kind: int, payload: memoryview) -> memoryview:
        if kind != FrameKind.COMMIT:
            raise ConnectionBroken(f"expected COMMIT, received a frame of kind {kind}")
        return payload

    def _note_put(
        self, outcome: PutOutcome, ack: Ack, new: NewVariant, began: float, span: Span
    ) -> None:
        span.set(bytes=new.info.num_bytes, ack=ack.value, outcome=outcome.value)
        seconds = time.monotonic() - began
        self._store.puts.note_put(outcome, ack, self._transport, new.info.num_bytes, seconds)


def _set_buffer(sock: socket.socket, num_bytes: int) -> None:
    with contextlib.suppress(OSError):  # the connection has ended, which the next call notices
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)


def _grant(extents: Sequence[Extent]) -> pb.PutGrant:
    return pb.PutGrant(
        granted=True,
        extents=[pb.DataExtent(offset=e.offset, num_bytes=e.num_bytes) for e in extents],
    )
