"""Frames of the shared memory and TCP transports, for both ends.

A frame is a header (``HEADER``), a protobuf message, and bytes that the receiver may skip. A
connection carries one call at a time, so replies need no number. Most releases get no reply.

```
    client                            server
                                      CHALLENGE (DataChallenge)
    CREDENTIAL (DataCredential)       WELCOME (HelloReply); a Unix socket also passes three
                                      descriptors: the memory tier (read and write), the file of
                                      values (read) and the status page (read)
    GET (GetRequest)                  GOT (DataGetReply); over TCP the values follow, in the
                                      order asked
    RELEASE (LeaseRelease)            no reply; if it names corrupt values, RELEASED after the
                                      store has dropped them, so that a put can store them again
    READS (ReadReport)                no reply; shared memory: reads without a request
    PUT (PutHeader); over TCP         GRANT (PutGrant)
    with the first bytes
      shared: WRITTEN (PutProgress)   no reply
      after a part, if more follows
      TCP: the value's other bytes
    COMMIT (PutCompletion)            PUT_DONE (PutReply)
      shared: or ABORT                no reply
                                      ERROR (DataError) instead of any reply
```

A client may put a value while it computes it. The checksums of the parts are known only at the end,
so they come last. A short value goes out in one piece, with COMMIT among the first bytes.

A store with too many connections ends the one that has been idle for longest. It sends EVICTED
first, in place of a reply, so that the client connects again.

A call that breaks off ends its connection. The store then drops the connection's leases and its
incomplete puts.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ragcache_core.errors import (
    InvalidInput,
    NotFound,
    RagCacheError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from ragcache_wire.v1 import cachestore_pb2 as pb

HEADER = struct.Struct("<IBxxxI")
"""Size of the message that follows, its kind, and the number of skippable bytes after it."""

MAX_CREDENTIAL_BYTES = 256
"""Bound of a client's message before the store has admitted it."""

MAX_REQUEST_BYTES = 1 << 20
"""Bound of a client's message: MAX_KEYS keys, or the largest header of a put."""

MAX_REPLY_BYTES = 64 << 20
"""Bound of a store's message: MAX_KEYS values of MAX_PARTS parts just fit."""

FILE_STEP_BYTES = 1 << 20
"""Bytes of a file that are sent between two checks of the deadline."""

READ_BYTES = 16 << 10
"""Size of the read buffer, with which most frames take one system call."""

PIECE_BYTES = 128 << 10
"""Bytes that are received before they are verified, while they are still in the CPU cache."""

EARLY_BYTES = 512 << 10
"""Bytes of a value that a client sends before the store has granted the put."""

SPIN_S = 300e-6
"""How long to poll for a reply before the thread sleeps."""

SKIPPED_SPINS = 64
"""Replies that are waited for without polling after a poll without success."""

SOCKET_BUFFER_BYTES = 2 << 20
"""Kernel buffer of a TCP connection, with which verifying and sending overlap."""

M = TypeVar("M", bound=Message)


class FrameKind(IntEnum):
    """The kinds of frames."""

    GET = 1
    RELEASE = 2
    PUT = 3
    COMMIT = 4
    ABORT = 5
    READS = 6
    WRITTEN = 7
    CREDENTIAL = 8
    WELCOME = 64
    GOT = 65
    GRANT = 66
    PUT_DONE = 67
    ERROR = 68
    RELEASED = 69
    EVICTED = 70
    CHALLENGE = 71


class ConnectionBroken(Exception):
    """The connection ended or carried an invalid frame. It cannot be used any more."""


class ConnectionEvicted(ConnectionBroken):
    """The store has ended an idle connection, to have room for others. It has served no call."""


class TimedOut(ConnectionBroken):
    """The deadline passed before the other end answered."""


class TooManyCalls(TimedOut):
    """This client already has its maximum of concurrent calls. The other end may be fine."""


class FrameLimits:
    """What one server's clients may send: the bytes of all large messages, and the time of one.

    A message is large if it does not fit into the read buffer. Safe to use from any thread.

    Args:
        num_bytes: Bound of the large messages of all connections together.
        timeout_s: How long a message may take after its first bytes.
    """

    def __init__(self, num_bytes: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._free_bytes = num_bytes
        self._changed = threading.Condition()

    def take(self, num_bytes: int, deadline: float) -> None:
        """Wait until num_bytes are free, and take them. Raises TimedOut."""
        with self._changed:
            while self._free_bytes < num_bytes:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimedOut("other connections use the memory for messages")
            self._free_bytes -= num_bytes

    def give(self, num_bytes: int) -> None:
        """Give back what a connection took."""
        with self._changed:
            self._free_bytes += num_bytes
            self._changed.notify_all()


class FramedConnection:
    """One end of a connection. Only one thread may use it at a time.

    The kernel enforces the deadline of a call as a timeout of the socket. That costs nothing while
    bytes flow, and a transfer stays one system call.

    Args:
        limits: What the other end may send. None: each message is bounded alone.

    Attributes:
        deadline: Deadline of the current call, on the clock of time.monotonic.
        deferred: Messages without a reply. They go out with the next frame, since on their own they
            would wake the other end for no caller.
    """

    def __init__(self, sock: socket.socket, limits: FrameLimits | None = None) -> None:
        self.socket = sock
        self._limits = limits
        self._taken_bytes = 0
        self.deadline = 0.0
        self.deferred: list[tuple[FrameKind, Message]] = []
        self._ahead = bytearray(READ_BYTES)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0
        self._skippable = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._spins_to_skip = 0
        self._timeouts_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()
        self.release_messages()

    def release_messages(self) -> None:
        """Give back the memory of the large messages that were received. They are used no more."""
        if self._limits is not None and self._taken_bytes:
            taken, self._taken_bytes = self._taken_bytes, 0
            self._limits.give(taken)

    def shake_hands(self) -> None:
        """Agree with the other end on encryption, if this connection has any.

        Raises:
            ConnectionBroken: The connection ended.
            RagCacheError: The other end has no certificate that this one trusts.
        """

    def interrupt(self) -> None:
        """Shut the connection down while another thread uses it. That thread then closes it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def end_input(self) -> None:
        """Have the thread that waits for a frame see the end of the connection.

        It can still send. Safe to call from any thread.
        """
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)

    def refuse(self, reason: bytes) -> None:
        """Close a new connection after a frame with the reason, without waiting."""
        with contextlib.suppress(OSError):
            self.socket.setblocking(False)
            self.socket.send(reason)
        self.close()

    def send(
        self,
        kind: FrameKind,
        message: Message | None = None,
        data: Sequence[bytes | memoryview] = (),
        skippable: bool = False,
    ) -> None:
        """Send a frame and the deferred messages.

        Args:
            kind: Kind of the frame.
            message: Its message; None for an empty one.
            data: Bytes that follow the frame.
            skippable: Whether the other end may skip data.

        Raises:
            ConnectionBroken: The connection ended.
        """
        if kind == FrameKind.PUT:  # its value must follow it directly
            self.send_deferred()
        early = sum([len(piece) for piece in data]) if skippable else 0
        self.send_raw(frame(kind, message, early), *data)
        if self.deferred:  # while the other end works on the frame
            self.send_deferred()

    def send_deferred(self) -> None:
        """Send the deferred messages. Raises ConnectionBroken."""
        deferred, self.deferred = self.deferred, []
        if deferred:
            self.send_raw(*[frame(kind, message) for kind, message in deferred])

    @property
    def is_open(self) -> bool:
        """Whether the other end is still connected and has sent nothing unexpected."""
        if self._start < self._end:
            return False
        poll = select.poll()  # its own poll object: another thread may use self._poll
        try:
            poll.register(self.socket, select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):  # closed at this end
            return False

    def send_raw(self, *data: bytes | memoryview) -> None:
        """Send raw bytes, if possible as one packet, so that the other end wakes once.

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
        # The kernel's timeout would restart with every few pages that are sent.
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
        """Poll for the next frame for at most SPIN_S.

        A sleep and a wake-up take longer than a nearby store takes to reply. After a poll without
        success the next SKIPPED_SPINS calls return at once, since the store may be remote or share
        this processor.
        """
        if self._start < self._end:
            return
        if self._spins_to_skip:
            self._spins_to_skip -= 1
            return
        polls_until = time.monotonic() + SPIN_S
        while not self._poll.poll(0):
            if time.monotonic() > polls_until:
                self._spins_to_skip = SKIPPED_SPINS
                return

    def receive(self, most: int) -> tuple[int, memoryview]:
        """Receive the next frame. It first skips the skippable bytes of the last one.

        Args:
            most: Bound of the message's size in bytes.

        Returns:
            Kind and message of the frame. The message is valid until the next call.

        Raises:
            ConnectionBroken: The connection ended, or the message is larger than most.
        """
        deadline = self.deadline
        if self._skippable:
            self._limit_message()
            self._skip()
        self.deadline = deadline
        while self._end - self._start < HEADER.size:
            if self._start < self._end:
                self._limit_message()
            self._read_ahead()
        size, kind, self._skippable = HEADER.unpack_from(self._ahead, self._start)
        if size > most:
            raise ConnectionBroken(f"the frame has {size} bytes, more than {most}")
        self._start += HEADER.size
        if size <= READ_BYTES:
            while self._end - self._start < size:
                self._limit_message()
                self._read_ahead()
            message = self._view[self._start : self._start + size]
            self._start += size
            return kind, message
        self._limit_message()
        if self._limits is not None:
            self._limits.take(size, self.deadline)
            self._taken_bytes += size
        message = memoryview(bytearray(size))
        self.receive_into(message)
        return kind, message

    def _limit_message(self) -> None:
        """Bound the time until the message has arrived, which has begun."""
        if self._limits is not None:
            self.deadline = min(self.deadline, time.monotonic() + self._limits.timeout_s)

    def accept_early_bytes(self) -> None:
        """Keep the skippable bytes of the last frame: the caller receives them next."""
        self._skippable = 0

    def _skip(self) -> None:
        skipped = memoryview(bytearray(PIECE_BYTES))
        while self._skippable:
            piece = skipped[: self._skippable]
            self.receive_into(piece)
            self._skippable -= len(piece)

    def receive_into(self, target: memoryview) -> None:
        """Fill target with raw bytes. Raises ConnectionBroken."""
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
        """Set the timeout of the next system call to the deadline. Raises TimedOut."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimedOut("the deadline has passed")
        # Most calls have the same timeout as those before, so a little slack saves a system call.
        if not left_s <= self._timeouts_s[option] <= left_s * 1.1:
            self._timeouts_s[option] = limit_s = left_s * 1.05
            value = struct.pack("ll", *divmod(int(limit_s * 1e6) + 1, 1_000_000))
            try:
                self.socket.setsockopt(socket.SOL_SOCKET, option, value)
            except OSError as error:
                raise _broken(error) from error


def frame(kind: FrameKind, message: Message | None = None, skippable: int = 0) -> bytes:
    """Encode a frame without its skippable bytes."""
    if message is None:
        return HEADER.pack(0, kind, skippable)
    payload = message.SerializeToString()
    return HEADER.pack(len(payload), kind, skippable) + payload


def parse(message_type: type[M], payload: memoryview) -> M:
    """Decode a message. Raises InvalidInput."""
    try:
        return message_type.FromString(payload)  # type: ignore[arg-type]
    except DecodeError as error:
        raise InvalidInput(
            "message",
            f"is no {message_type.DESCRIPTOR.name}",
            "send the message that the proto defines",
        ) from error


def to_error(error: RagCacheError) -> pb.DataError:
    """Convert an error to a message."""
    match error:
        case TooLarge() | InvalidInput():
            kind = "too_large" if isinstance(error, TooLarge) else "invalid"
            return pb.DataError(type=kind, field=error.field, problem=error.problem, fix=error.fix)
        case Unauthenticated():
            return pb.DataError(
                type="unauthenticated", field=error.field, problem=error.problem, fix=error.fix
            )
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


def from_error(service: str, message: pb.DataError) -> RagCacheError:
    """Return the core error that a service sent."""
    match message.type:
        case "too_large":
            return TooLarge(message.field, message.problem, message.fix)
        case "invalid":
            return InvalidInput(message.field, message.problem, message.fix)
        case "unauthenticated":
            return Unauthenticated(message.field, message.problem, message.fix)
        case "not_found":
            return NotFound(message.field, message.problem, message.fix)
        case "unavailable":
            return Unavailable(service, message.problem, message.retry_after_s)
        case _:
            return RagCacheError(f"the {service} failed: {message.problem}")


def _broken(error: OSError) -> ConnectionBroken:
    if isinstance(error, (BlockingIOError, TimeoutError)):
        return TimedOut("the deadline has passed")
    return ConnectionBroken(str(error))
