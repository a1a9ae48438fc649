"""Sends mutated messages to every method of a gRPC service, and checks how each call ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from ragcache_wire.channel import OPTIONS
from ragcache_wire.peers.peer_access import PeerTokens
from ragcache_wire.status import DETAIL_KEY
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.attack.mutations import mutated_message

AT_ONCE: Final = 16
CALL_TIMEOUT_S: Final = 60.0
END: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]
MAX_REPLIES: Final = 4
"""Replies of a stream that are read. A feed never ends."""

REFUSALS: Final = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
)
"""How a service may refuse a message, with the reason in the metadata."""


@dataclass(frozen=True, slots=True)
class Call:
    """A valid call: the name of its method, and the messages that it sends."""

    method: str
    messages: tuple[Message, ...]


def calls(corpus: Mapping[str, Sequence[Message]]) -> list[Call]:
    """Return a call with one message for each message, by the method's name."""
    return [Call(name, (message,)) for name, messages in corpus.items() for message in messages]


class FuzzedService:
    """A client of a service that sends what its proto does not define.

    Args:
        address: "host:port" of a process.
        service: Descriptor of the service.
        keys: The platform's signing keys. None: calls carry no token.
    """

    def __init__(self, address: str, service: Any, keys: SigningKeys | None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        # A call of grpc.aio ends with INTERNAL if the service ends it while it sends.
        self._blocking = grpc.insecure_channel(address, options=OPTIONS)
        self._tokens = PeerTokens(keys)
        self._service = service
        self._streamed = {one.name for one in service.methods if one.client_streaming}
        self.outcomes: dict[grpc.StatusCode, int] = {}

    async def fuzz(self, corpus: Sequence[Call], seed: int, count: int) -> None:
        """Send calls with mutated messages, AT_ONCE at the same time."""
        assert {one.method for one in corpus} == {one.name for one in self._service.methods}
        rng, free = random.Random(seed), asyncio.Semaphore(AT_ONCE)

        async def send(number: int, call: Call, messages: list[bytes]) -> None:
            try:
                await self._send(f"seed {seed}, call {number}: {call.method}", call, messages)
            finally:
                free.release()

        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                call = rng.choice(corpus)
                messages = [mutated_message(one, rng) for one in call.messages]
                if len(messages) > 1:
                    messages = _reordered(messages, call.messages, rng)
                await free.acquire()
                tasks.create_task(send(number, call, messages))

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(grace=None)
        self._blocking.close()

    async def _send(self, told: str, call: Call, messages: list[bytes]) -> None:
        code, named, details = await self._outcome(call.method, messages)
        self.outcomes[code] = self.outcomes.get(code, 0) + 1
        told += f" with {[one[:200] for one in messages]} ended with {code} {details}"
        if self._tokens.metadata(call.method):
            assert code is grpc.StatusCode.OK or (code in REFUSALS and named), told
        else:
            assert code is grpc.StatusCode.UNAUTHENTICATED, told

    async def _outcome(self, name: str, messages: list[bytes]) -> tuple[grpc.StatusCode, bool, str]:
        """Return how a call ends, whether the service has named the problem, and what it says."""
        method = f"/{self._service.full_name}/{name}"
        options: Any = {"metadata": self._tokens.metadata(method), "timeout": CALL_TIMEOUT_S}
        try:
            if name in self._streamed:
                send = self._blocking.stream_unary(method, None, None)
                await asyncio.to_thread(send, iter(messages), **options)
                return grpc.StatusCode.OK, False, ""
            call = self._channel.unary_stream(method, None, None)(messages[0], **options)
            for _ in range(MAX_REPLIES):
                if await call.read() is END:
                    break
            call.cancel()
        except grpc.RpcError as failure:
            error: Any = failure  # what calls raise is a grpc.Call as well
            trailing = error.trailing_metadata() or ()
            is_named = any(key == DETAIL_KEY for key, _ in trailing)
            return error.code(), is_named, error.details() or ""
        return grpc.StatusCode.OK, False, ""


def _reordered(messages: list[bytes], valid: Sequence[Message], rng: random.Random) -> list[bytes]:
    """Let most messages of a stream be valid, since the first wrong one ends it."""
    found = [one.SerializeToString() for one in valid]
    for _ in range(rng.randint(0, 2)):
        i = rng.randrange(len(found) + 1)
        match rng.randrange(4):
            case 0 if i < len(found):
                del found[i]
            case 1:
                found[i:i] = [rng.choice(messages)]
            case 2:
                found = found[:i]
            case _ if i < len(found):
                found[i] = messages[i % len(messages)]
    return found
