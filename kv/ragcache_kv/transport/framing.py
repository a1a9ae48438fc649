"""Frames of the data transports: small messages over a Unix or a TCP socket, for both ends.

A frame is a header (``HEADER``), a protobuf message, and bytes that may be skipped. A connection
carries one call at a time, so an answer needs no number to be told from another; hardly any release
is answered.

    client                            server
                                      WELCOME (HelloReply); on a Unix socket with three fds, the
                                      memory tier (read and write), the file of values (read) and
                                      the board (read)
    GET (GetRequest)                  GOT (DataGetReply); on the socket transport then the values, in
                                      the order asked, or layer by layer if that was asked
    RELEASE (LeaseRelease)             nothing; RELEASED if it names corrupt values, once they are
                                      dropped, so that a put that follows finds room
    READS (ReadReport)                 nothing; shared: what was read again without asking
    PUT (PutHeader); on the socket    GRANT (PutGrant)
    transport with the first bytes
      shared: WRITTEN (PutProgress)   nothing
      when some of it is, more follows
      socket: the value's other bytes
    COMMIT (PutCompletion)            PUT_DONE (PutReply)
      shared: or ABORT                nothing
                                      ERROR (DataError) instead of any answer

A put goes out while its value is still computed: what is only known of a whole one, the checksums
of its parts, comes last. Short values are put whole in one go, COMMIT among the first bytes.

What one end has not heard of for too long it lets go: a call that breaks off in the middle ends the
connection, and with it go its leases and its arrivals.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ragcache_core.errors import InvalidInput, NotFound, RagCacheError, TooLarge, Unavailable
from ragcache_wire.v1 import cachestore_pb2 as pb

HEADER = struct.Struct("<IBxxxI")
"""Bytes of the message that follows, its kind, and bytes after it, to be skipped if not taken."""

MAX_REQUEST_BYTES = 1 << 20
"""Bound of a client's message: MAX_KEYS keys, or the header of a put with all it may name."""

MAX_REPLY_BYTES = 64 << 20
"""Bound of a store's message: MAX_KEYS values of MAX_PARTS parts would just fit."""

FILE_STEP_BYTES = 1 << 20
"""How much of a file is sent before the deadline is looked at."""

READ_BYTES = 16 << 10
"""How much is read ahead, which makes most frames one system call."""

PIECE_BYTES = 128 << 10
"""How much is received before it is verified: still in the cache, and worth a system call."""

EARLY_BYTES = 512 << 10
"""How much of a value is put before the store has agreed to take it: what it reads meanwhile."""

AWAKE_S = 300e-6
NAPS = 64
"""How long to stay awake for an answer, and how many answers are slept for after that was in
vain."""

SOCKET_BUFFER_BYTES = 2 << 20
"""What the kernel may hold of a TCP connection, so that verifying and sending overlap."""

M = TypeVar("M", bound=Message)


class FrameKind(IntEnum):
    """What a frame is."""

    GET = 1
    RELEASE = 2
    PUT = 3
    COMMIT = 4
    ABORT = 5
    READS = 6
    WRITTEN = 7
    WELCOME = 64
    GOT = 65
    GRANT = 66
    PUT_DONE = 67
    ERROR = 68
    RELEASED = 69


class ConnectionBroken(Exception):
    """The connection ended, or what came over it makes no sense; nothing can follow on it."""


class TimedOut(ConnectionBroken):
    """The other end let too much time pass."""


class TooManyCalls(TimedOut):
    """This end has too many calls going on, which says nothing about the other one."""


class FramedConnection:
    """One end of a connection. Not for two threads at once.

    Every call has its deadline (on time.monotonic's clock) as the kernel's own time limit of the
    socket, which costs nothing while bytes flow: a transfer is one system call however long.

    owed: messages without an answer, which go with the next one: by themselves they would wake the
    other end for nothing that anybody waits for.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.deadline = 0.0
        self.owed: list[tuple[FrameKind, Message]] = []
        self._ahead = bytearray(READ_BYTES)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0
        self._skippable = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._naps = 0
        self._limits_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def interrupt(self) -> None:
        """End the connection while another thread uses it: that one notices, and closes it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def send(
        self,
        kind: FrameKind,
        message: Message | None = None,
        data: Sequence[bytes | memoryview] = (),
        skippable: bool = False,
    ) -> None:
        """Send a frame, with the bytes that begin what follows it, and what is owed.

        skippable: whether the other end may do without the bytes. Raises ConnectionBroken.
        """
        if kind == FrameKind.PUT:  # nothing may come between it and its value
            self.send_deferred()
        early = sum([len(piece) for piece in data]) if skippable else 0
        self.send_raw(frame(kind, message, early), *data)
        if self.owed:  # while the other end is busy with what was sent
            self.send_deferred()

    def send_deferred(self) -> None:
        """Send what is owed. Raises ConnectionBroken."""
        owed, self.owed = self.owed, []
        if owed:
            self.send_raw(*[frame(kind, message) for kind, message in owed])

    @property
    def is_open(self) -> bool:
        """Whether the other end still is there, and nothing has come that nobody waits for."""
        if self._start < self._end:
            return False
        poll = select.poll()  # one of its own: the channel's is not for two threads at once
        try:
            poll.register(self.socket, select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):  # closed at this end
            return False

    def send_raw(self, *data: bytes | memoryview) -> None:
        """Send bytes as they are, as one packet where it can be: the other end wakes once.

        Raises ConnectionBroken.
        """
        try:
            self._limit(socket.SO_SNDTIMEO)
            sent = self.socket.send(data[0]) if len(data) == 1 else self.socket.sendmsg(data)
            for piece in data:
                rest = memoryview(piece)[sent:]
                sent = max(0, sent - len(piece))
                while rest:
                    self._limit(socket.SO_SNDTIMEO)
                    rest = rest[self.socket.send(rest) :]
        except OSError as error:
            raise _broken(error) from error

    def send_file(self, fd: int, offset: int, num_bytes: int) -> None:
        """Send bytes of a file. Raises ConnectionBroken."""
        # The kernel's own limit counts anew for every few pages, as long as some bytes go.
        self.socket.setblocking(False)
        try:
            while num_bytes:
                if time.monotonic() >= self.deadline:
                    raise TimedOut("the deadline has passed")
                step = min(num_bytes, FILE_STEP_BYTES)
                try:
                    sent = os.sendfile(self.socket.fileno(), fd, offset, step)
                except BlockingIOError:
                    self._wait_until_writable()
                    continue
                if not sent:
                    raise ConnectionBroken("the file ends early")
                offset += sent
                num_bytes -= sent
            self.socket.setblocking(True)
        except OSError as error:
            raise _broken(error) from error

    def _wait_until_writable(self) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        poll.poll(max(0.0, self.deadline - time.monotonic()) * 1e3 + 1)

    def spin_wait(self) -> None:
        """Wait a moment for what is to come, without sleeping; it may still be to come after that.

        To fall asleep and be woken takes longer than a store in reach takes to answer. Where it did
        not pay it is not tried for a while: the store may be far, or share this processor.
        """
        if self._start < self._end:
            return
        if self._naps:
            self._naps -= 1
            return
        give_up = time.monotonic() + AWAKE_S
        while not self._poll.poll(0):
            if time.monotonic() > give_up:
                self._naps = NAPS
                return

    def receive(self, most: int) -> tuple[int, memoryview]:
        """FrameKind and message of the next frame; the message is valid until the next call.

        Skips what may be skipped of the last one, if nobody took it. Raises ConnectionBroken, also for a
        message of more than most bytes.
        """
        if self._skippable:
            self._skip()
        while self._end - self._start < HEADER.size:
            self._read_ahead()
        size, kind, self._skippable = HEADER.unpack_from(self._ahead, self._start)
        if size > most:
            raise ConnectionBroken(f"a frame of {size} bytes")
        self._start += HEADER.size
        if size <= READ_BYTES:
            while self._end - self._start < size:
                self._read_ahead()
            message = self._view[self._start : self._start + size]
            self._start += size
            return kind, message
        message = memoryview(bytearray(size))
        self.receive_into(message)
        return kind, message

    def take_early(self) -> None:
        """What could be skipped of the last frame is wanted: it comes next."""
        self._skippable = 0

    def _skip(self) -> None:
        waste = memoryview(bytearray(PIECE_BYTES))
        while self._skippable:
            piece = waste[: self._skippable]
            self.receive_into(piece)
            self._skippable -= len(piece)

    def receive_into(self, target: memoryview) -> None:
        """Fill target with bytes that are no frame. Raises ConnectionBroken."""
        done = min(self._end - self._start, len(target))
        if done:
            target[:done] = self._view[self._start : self._start + done]
            self._start += done
        while done < len(target):
            done += self._receive(target[done:] if done else target, socket.MSG_WAITALL)

    def _read_ahead(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            kept = bytes(self._view[self._start : self._end])
            self._view[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        self._end += self._receive(self._view[self._end :], 0)

    def _receive(self, target: memoryview, flags: int) -> int:
        self._limit(socket.SO_RCVTIMEO)
        try:
            count = self.socket.recv_into(target, 0, flags)
        except OSError as error:
            raise _broken(error) from error
        if not count:
            raise ConnectionBroken("the connection was closed")
        return count

    def _limit(self, option: int) -> None:
        """Let the next system call wait no longer than until the deadline. Raises TimedOut."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimedOut("the deadline has passed")
        # Most calls have as long as those before: setting it anew would cost more than slack does.
        if not left_s <= self._limits_s[option] <= left_s * 1.1:
            self._limits_s[option] = limit_s = left_s * 1.05
            value = struct.pack("ll", *divmod(int(limit_s * 1e6) + 1, 1_000_000))
            try:
                self.socket.setsockopt(socket.SOL_SOCKET, option, value)
            except OSError as error:
                raise _broken(error) from error


def frame(kind: FrameKind, message: Message | None = None, skippable: int = 0) -> bytes:
    """A frame as bytes, without the skippable ones."""
    if message is None:
        return HEADER.pack(0, kind, skippable)
    payload = message.SerializeToString()
    return HEADER.pack(len(payload), kind, skippable) + payload


def parse(message_type: type[M], payload: memoryview) -> M:
    """A message. Raises InvalidInput if payload is none."""
    try:
        return message_type.FromString(payload)  # type: ignore[arg-type]
    except DecodeError as error:
        raise InvalidInput(
            "message", f"is no {message_type.DESCRIPTOR.name}", "send what the proto says"
        ) from error


def to_error(error: RagCacheError) -> pb.DataError:
    """An error as it crosses a transport."""
    match error:
        case TooLarge() | InvalidInput():
            kind = "too_large" if isinstance(error, TooLarge) else "invalid"
            return pb.DataError(type=kind, field=error.field, problem=error.problem, fix=error.fix)
        case NotFound():
            return pb.DataError(
                type="not_found", field=error.kind, problem=error.name, fix=error.fix
            )
        case Unavailable():
            return pb.DataError(
                type="unavailable", problem=str(error), retry_after_s=error.retry_after_s
            )
        case _:
            return pb.DataError(type="internal", problem=str(error))


def from_error(part: str, message: pb.DataError) -> RagCacheError:
    """The core error that part sent."""
    match message.type:
        case "too_large":
            return TooLarge(message.field, message.problem, message.fix)
        case "invalid":
            return InvalidInput(message.field, message.problem, message.fix)
        case "not_found":
            return NotFound(message.field, message.problem, message.fix)
        case "unavailable":
            return Unavailable(part, message.problem, message.retry_after_s)
        case _:
            return RagCacheError(f"the {part} failed: {message.problem}")


def _broken(error: OSError) -> ConnectionBroken:
    if isinstance(error, (BlockingIOError, TimeoutError)):
        return TimedOut("the deadline has passed")
    return ConnectionBroken(str(error))
