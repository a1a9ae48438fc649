"""The data transports' end at the store: values as frames over Unix and TCP sockets.

One thread for each connection, blocking: a round trip is two system calls and no event loop. On the
Unix socket only the place of a value is told, for clients on this machine, which share the
memory tier and read the file of values themselves. Over TCP values go straight from either.
``ragcache_kv.transport.framing`` says what is sent when.

What a connection holds, leases and incoming_puts, goes with it; and it goes when its client is slower
than a lease lasts, or silent for IDLE_S.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from ragcache_cachestore.incoming_put import IncomingPut
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.store import Store
from ragcache_cachestore.telemetry.exporter import count_hit, count_miss
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Tier, ValuePart
from ragcache_core.storage.extents import Extent
from ragcache_core.store_api import (
    LEASE_S,
    MAX_KEYS,
    Ack,
    Hello,
    NewVariant,
    PutCompletion,
    PutOutcome,
)
from ragcache_kv.transport.framing import (
    MAX_REQUEST_BYTES,
    PIECE_BYTES,
    SOCKET_BUFFER_BYTES,
    ConnectionBroken,
    FramedConnection,
    FrameKind,
    frame,
    parse,
    to_error,
)
from ragcache_kv.values.buffers import slice_views
from ragcache_kv.values.conversions import (
    from_completion,
    from_get_request,
    from_key,
    from_put_header,
    to_hello,
    to_miss,
    to_outcome,
    to_value_header,
)
from ragcache_wire.trace_context import metadata as trace_metadata
from ragcache_wire.tracing import NO_SPAN, Span
from ragcache_wire.v1 import cachestore_pb2 as pb

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Bound of connections, and so of threads; an engine has a handful."""

IDLE_S = 600.0
"""How long a connection may be silent. A client that needs it again makes another."""

MAX_HEADERS = 4096
"""Values whose headers are kept encoded; a few MiB with as many layers as models have."""

FIRST_BYTES = 64 << 10
"""How much of the first value goes with the answer: less than its client takes to read that."""

UNANSWERED = frozenset({FrameKind.RELEASE, FrameKind.READS})

MAX_REREADS = 4096
"""How often a value may have been read again between two messages, for all that it counts."""

GREETING_S = 5.0
CLOSE_S = 5.0
"""How long the end waits for calls that wait themselves; they hold nothing of their clients."""

PROBE_S = 1.0
RETRY_AFTER_S = 1.0
SOCKET_MODE: Final = 0o660
"""Who may connect to the Unix socket may write to the memory tier."""


class DataServer:
    """Serves store's values on a Unix socket at path and on TCP; None: not offered.

    listen: (host, port); port 0 takes a free one, found in ``port``.
    """

    def __init__(self, store: Store, path: Path | None, listen: tuple[str, int] | None) -> None:
        """Raises InvalidInput if path or listen cannot be had."""
        self._store = store
        self._path = path
        self._headers = _Headers()
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._closed = False
        self._listeners: list[socket.socket] = []
        self._socket_id: tuple[int, int] | None = None
        self.port = 0
        try:
            if path is not None:
                self._listeners.append(_listen_unix(path))
                self._socket_id = _id_of(path)
            if listen is not None:
                self._listeners.append(_listen_tcp(*listen))
                self.port = self._listeners[-1].getsockname()[1]
        except BaseException:
            for listener in self._listeners:
                listener.close()
            raise
        self._threads = [
            threading.Thread(target=self._accept, args=[listener], name="transports", daemon=True)
            for listener in self._listeners
        ]

    def hello(self) -> Hello:
        """Who the store is, and which transports there are."""
        return Hello(
            boot=self._store.boot,
            store=self._store.store_id,
            max_value_bytes=self._store.max_value_bytes,
            data_socket="" if self._path is None else str(self._path.absolute()),
            data_port=self.port,
        )

    def start(self) -> None:
        """Accept connections."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End every connection; returns when nothing uses the store any more.

        A call that a disk holds up is left behind after CLOSE_S.
        """
        deadline = time.monotonic() + CLOSE_S
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            listener.close()
        # Another store may listen there by now.
        if self._path is not None and _id_of(self._path) == self._socket_id:
            self._path.unlink(missing_ok=True)
        for connection in connections:
            connection.channel.interrupt()
        threads = [*connections, *(thread for thread in self._threads if thread.ident is not None)]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := sum(thread.is_alive() for thread in threads):
            log.warning("%d calls are left behind: the disk holds them up", left)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("a connection could not be taken: %s", error)
                time.sleep(0.1)  # no descriptors left: some will be
                continue
            try:
                self._serve(sock)
            except Exception:  # no threads left, say; the next one may find some
                log.exception("a connection could not be served")
                sock.close()
                time.sleep(0.1)

    def _serve(self, sock: socket.socket) -> None:
        connection = _Connection(self._store, sock, self.hello(), self._headers, self._ended)
        with self._lock:
            room = len(self._connections) < MAX_CONNECTIONS and not self._closed
            if room:
                connection.start()  # within the lock: all that close finds can be joined
                self._connections.add(connection)
        if not room:
            connection.refuse()

    def _ended(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)


class _Headers:
    """What is said of values in every reply, encoded once. Safe for threads.

    A value is known by its very tuple of parts, which a replaced one does not share.
    """

    def __init__(self) -> None:
        self._encoded: dict[VariantKey, tuple[tuple[ValuePart, ...], Tier, bytes]] = {}

    def of(self, lease: ReadLease) -> bytes:
        """A LeasedValue with nothing but the header."""
        known = self._encoded.get(lease.key)
        if known is not None and known[0] is lease.parts and known[1] is lease.tier:
            return known[2]
        # Which value it is of a request is told by its place among the answers.
        header = to_value_header(
            0, lease.info, lease.parts, lease.shape, lease.value_format, lease.tier
        )
        encoded = pb.LeasedValue(header=header).SerializeToString()
        if len(self._encoded) >= MAX_HEADERS:
            self._encoded.clear()
        self._encoded[lease.key] = (lease.parts, lease.tier, encoded)
        return encoded


class _Connection(threading.Thread):
    """One client's calls, one after another."""

    def __init__(
        self,
        store: Store,
        sock: socket.socket,
        hello: Hello,
        headers: _Headers,
        ended: Callable[[_Connection], None],
    ) -> None:
        super().__init__(name="transport", daemon=True)
        self.channel = FramedConnection(sock)
        self._store = store
        self._hello = hello
        self._headers = headers
        self._ended = ended
        self._shared = sock.family == socket.AF_UNIX
        self._lane = "shared" if self._shared else "socket"
        self._leases: dict[int, tuple[ReadLease, float]] = {}
        self._reads_told_at = time.monotonic()

    def refuse(self) -> None:
        """Say that there are too many, to a client that may not even listen."""
        error = Unavailable("cachestore", "it has too many connections", RETRY_AFTER_S)
        greeting = b"\0" if self._shared else b""
        with contextlib.suppress(OSError):
            self.channel.socket.setblocking(False)
            self.channel.socket.send(greeting + frame(FrameKind.ERROR, to_error(error)))
        self.channel.close()

    def run(self) -> None:
        """Serve until the client goes."""
        try:
            self._greet()
            while True:
                self.channel.deadline = time.monotonic() + IDLE_S
                self.channel.spin_wait()
                kind, payload = self.channel.receive(MAX_REQUEST_BYTES)
                self.channel.deadline = time.monotonic() + LEASE_S
                try:
                    self._serve(kind, payload)
                except RagCacheError as error:
                    if kind in UNANSWERED:  # its sender would take it for the next answer
                        raise ConnectionBroken(
                            f"a message without an answer failed: {error}"
                        ) from error
                    self.channel.deadline = time.monotonic() + LEASE_S
                    self.channel.send(FrameKind.ERROR, to_error(error))
        except ConnectionBroken as error:
            log.debug("a %s transport ended: %s", self._lane, error)
        except Exception:
            log.exception("a %s transport failed", self._lane)
        finally:
            self.channel.close()
            try:
                self._store.release(self._leases)
            except RagCacheError as error:
                log.warning("leases of a %s transport end by themselves: %s", self._lane, error)
            self._ended(self)

    def _greet(self) -> None:
        self.channel.deadline = time.monotonic() + GREETING_S
        if self._shared:
            store = self._store
            fds = [store.memory_tier.fd, store.disk_tier.reader_fd, store.status_page.reader_fd]
            try:
                socket.send_fds(self.channel.socket, [b"\0"], fds)
            except OSError as error:
                raise ConnectionBroken(str(error)) from error
        self.channel.send(FrameKind.WELCOME, to_hello(self._hello))

    def _serve(self, kind: int, payload: memoryview) -> None:
        match kind:
            case FrameKind.GET:
                self._get(parse(pb.GetRequest, payload))
            case FrameKind.RELEASE:
                self._release(parse(pb.LeaseRelease, payload))
            case FrameKind.READS:
                self._reads(parse(pb.ReadReport, payload))
            case FrameKind.PUT:
                self._put(parse(pb.PutHeader, payload))
            case _:
                raise ConnectionBroken(f"a frame of kind {kind} where a call was due")

    def _get(self, request: pb.GetRequest) -> None:
        with self._span("Get", request) as span:
            keys, exact, domain = from_get_request(request)
            if len(self._leases) > MAX_KEYS:
                raise ConnectionBroken("its client does not release what it has read")
            now = time.monotonic()
            answers = self._store.open(keys, exact, domain)
            leases = [one for one in answers if not isinstance(one, Miss)]
            self._leases.update([(lease.id, (lease, now)) for lease in leases])
            if span.is_recording:
                span.set(keys=len(keys))
                for one in answers:
                    if isinstance(one, Miss):
                        count_miss(span, one)
                    else:
                        count_hit(span, one.tier, one.info.num_bytes)
            reply = pb.DataGetReply()
            for one in answers:
                self._add(reply, one)
            pieces = iter(()) if self._shared else self._pieces(leases, request.by_layer)
            rest = self._send_first(reply, pieces)
            self._store.note_opened(answers)  # its client is busy with what has come
            self._send(rest)

    def _add(self, reply: pb.DataGetReply, one: ReadLease | Miss) -> None:
        found = reply.values.add()
        if isinstance(one, Miss):
            found.header.miss = to_miss(one)
            return
        found.MergeFromString(self._headers.of(one))
        found.lease = one.id
        if self._shared:
            for extent in one.extents:
                found.extents.add(
                    disk=one.on_disk, offset=extent.offset, num_bytes=extent.num_bytes
                )

    def _send_first(
        self, reply: pb.DataGetReply, pieces: Iterator[memoryview | Extent]
    ) -> Iterator[memoryview | Extent]:
        """Send an answer, and with it the first bytes after it; what is left to be sent."""
        first = next(pieces, None)
        if not isinstance(first, memoryview):
            self.channel.send(FrameKind.GOT, reply)
            return pieces if first is None else chain([first], pieces)
        # Saves its client from being woken for them.
        self.channel.send(FrameKind.GOT, reply, [first[:FIRST_BYTES]])
        return chain([first[FIRST_BYTES:]], pieces)

    def _send(self, pieces: Iterator[memoryview | Extent]) -> None:
        for piece in pieces:
            if isinstance(piece, Extent):
                self.channel.send_file(self._store.disk_tier.fd, piece.offset, piece.num_bytes)
            elif piece:
                # Not by sendfile, whose page by page halves the speed on memory.
                self.channel.send_raw(piece)

    def _pieces(self, leases: Sequence[ReadLease], by_layer: bool) -> Iterator[memoryview | Extent]:
        """The values as they are sent: bytes of the memory tier, or extents of the file."""
        if not by_layer:
            for lease in leases:
                yield from self._cut(lease, 0, lease.info.num_bytes)
            return
        starts = [0] * len(leases)
        for layer in range(max([len(lease.parts) for lease in leases], default=0)):
            for i, lease in enumerate(leases):
                if layer < len(lease.parts):
                    yield from self._cut(lease, starts[i], lease.parts[layer].num_bytes)
                    starts[i] += lease.parts[layer].num_bytes

    def _cut(self, lease: ReadLease, start: int, num_bytes: int) -> Iterator[memoryview | Extent]:
        if not lease.on_disk:
            yield from slice_views(self._store.memory_tier.views(lease.extents), start, num_bytes)
            return
        for extent in lease.extents:
            step = min(extent.num_bytes - start, num_bytes)
            if step > 0:
                yield Extent(extent.offset + start, step)
                num_bytes -= step
            start = max(0, start - extent.num_bytes)

    def _release(self, message: pb.LeaseRelease) -> None:
        # Only its own: a client cannot end what another one holds.
        held = [self._leases[one] for one in message.leases if one in self._leases]
        corrupt = set(message.corrupt)
        ids = [lease.id for lease, _ in held]
        late = {lease_id for lease_id in ids if not self._store.is_leased(lease_id)}
        self._store.release(ids, [lease_id for lease_id in ids if lease_id in corrupt])
        now = time.monotonic()
        total = max(1, sum([lease.info.num_bytes for lease, _ in held]))
        for lease, since in held:
            self._leases.pop(lease.id, None)
            if lease.id in late:
                self._store.note_timed_out(lease.tier)
            elif lease.id not in corrupt:
                # This message may have waited for another to go with, and all values came as one.
                taken_s = message.seconds if message.seconds > 0 else now - since
                seconds = min(taken_s, now - since) * lease.info.num_bytes / total
                self._store.note_sent(lease.tier, self._lane, lease.info.num_bytes, seconds)
        if corrupt:
            self.channel.send(FrameKind.RELEASED)

    def _reads(self, message: pb.ReadReport) -> None:
        if not self._shared:
            raise ConnectionBroken("nothing can be read without asking over this transport")
        now, since = time.monotonic(), self._reads_told_at
        self._reads_told_at = now
        for read in message.reads:
            times = min(read.times, MAX_REREADS)
            num_bytes = self._store.note_reread(from_key("reads.key", read.key), times)
            if num_bytes and read.seconds != 0:  # else no transport has carried it
                said_s = read.seconds if math.isfinite(read.seconds) else 0.0
                seconds = min(max(0.0, said_s / times), now - since)  # none took longer
                for _ in range(times):
                    self._store.note_sent(Tier.MEMORY, self._lane, num_bytes, seconds)

    def _put(self, header: pb.PutHeader) -> None:
        since = time.monotonic()
        with self._span("Put", header) as span:
            new, ack = from_put_header("header", header, self._store.max_value_bytes)
            incoming = self._store.begin_put(new, ack, LEASE_S)
            if isinstance(incoming, PutOutcome):
                self._note_put(incoming, ack, new, since, span)
                refusal = pb.PutGrant(granted=False, outcome=to_outcome(incoming))
                self.channel.send(FrameKind.GRANT, refusal)
                return
            with incoming:
                completion = self._receive(incoming)
                if completion is None:
                    return
                outcome = incoming.commit(completion, ack, LEASE_S)
            self._note_put(outcome, ack, new, since, span)
            self.channel.deadline = time.monotonic() + LEASE_S
            self.channel.send(FrameKind.PUT_DONE, pb.PutReply(outcome=to_outcome(outcome)))

    def _span(self, name: str, request: pb.GetRequest | pb.PutHeader) -> Span:
        # At once where nobody traces, which is nearly always.
        parent = trace_metadata(request.traceparent)
        if parent is None:
            return NO_SPAN
        return self._store.telemetry.span(name, parent, transport=self._lane)

    def _receive(self, incoming: IncomingPut) -> PutCompletion | None:
        """Let the client write to an incoming; None if it is not to be committed after all."""
        if self._shared:
            try:
                self.channel.send(FrameKind.GRANT, _grant(incoming.extents))
                payload = self._follow(incoming)
            except BaseException:
                incoming.abort(quarantine_s=LEASE_S)  # its client may write on, unaware
                raise
        else:
            self.channel.accept_early_bytes()
            self.channel.send(FrameKind.GRANT, _grant(()))
            # Summed up piece by piece, while the next one comes and this one is in the CPU's cache.
            for view in incoming.views:
                for start in range(0, len(view), PIECE_BYTES):
                    piece = view[start : start + PIECE_BYTES]
                    self.channel.receive_into(piece)
                    incoming.sums.add(piece)
            payload = self._commit(*self.channel.receive(MAX_REQUEST_BYTES))
        if payload is None:
            return None
        message = parse(pb.PutCompletion, payload)
        return from_completion("completion", message, len(incoming.new.part_bytes))

    def _follow(self, incoming: IncomingPut) -> memoryview | None:
        """Sum up what the client writes, as it says so; its completion, None if there is none."""
        while True:
            kind, payload = self.channel.receive(MAX_REQUEST_BYTES)
            if kind == FrameKind.ABORT:
                return None
            if kind != FrameKind.WRITTEN:
                return self._commit(kind, payload)
            num_bytes = parse(pb.PutProgress, payload).num_bytes
            if not incoming.sums.num_bytes <= num_bytes <= incoming.new.info.num_bytes:
                raise ConnectionBroken(
                    f"{num_bytes} bytes written of {incoming.new.info.num_bytes}"
                )
            incoming.add_checksums_up_to(num_bytes)

    @staticmethod
    def _commit(kind: int, payload: memoryview) -> memoryview:
        if kind != FrameKind.COMMIT:
            raise ConnectionBroken(f"a frame of kind {kind} where COMMIT was due")
        return payload

    def _note_put(
        self, outcome: PutOutcome, ack: Ack, new: NewVariant, since: float, span: Span
    ) -> None:
        span.set(bytes=new.info.num_bytes, ack=ack.value, outcome=outcome.value)
        seconds = time.monotonic() - since
        self._store.note_put(outcome, ack, self._lane, new.info.num_bytes, seconds)


def _grant(extents: Sequence[Extent]) -> pb.PutGrant:
    return pb.PutGrant(
        granted=True,
        extents=[pb.DataExtent(offset=e.offset, num_bytes=e.num_bytes) for e in extents],
    )


def _listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear(path)
        listener.bind(str(path))
        os.chmod(path, SOCKET_MODE)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise InvalidInput(
            "RAGCACHE_DATA_SOCKET", f"{path}: {error}", "name a free path of up to 107 bytes"
        ) from error
    return listener


def _clear(path: Path) -> None:
    """Remove the socket of a store that was killed, and nothing else. Raises OSError."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # binding says that something is there
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


def _id_of(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _listen_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections take it over; set later it would not count for the TCP window.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        listener.bind((host.strip("[]"), port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise InvalidInput(
            "RAGCACHE_DATA_LISTEN", f"{host}:{port}: {error}", "name an address of this machine"
        ) from error
    return listener
