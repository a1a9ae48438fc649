"""The messages of a Put call over gRPC: a header, the bytes of the value, a completion."""

from __future__ import annotations

from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError

from ragcache_cachestore.puts import IncomingPut
from ragcache_core.errors import InvalidInput
from ragcache_core.store_api import PutCompletion
from ragcache_kv.values.conversions import from_completion
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.value_part import data_of


def parse_part(message: bytes) -> pb.PutPart:
    """Parse a message of the stream.

    Raises:
        InvalidInput: It is not a PutPart.
    """
    try:
        return pb.PutPart.FromString(message)
    except DecodeError as error:
        raise InvalidInput(
            "message", "is not a PutPart", "send the messages of cachestore.proto"
        ) from error


async def receive_value(incoming: IncomingPut, messages: AsyncIterator[bytes]) -> PutCompletion:
    """Copy the bytes of messages into the allocated memory. Return the completion.

    Raises:
        InvalidInput: The messages are not in order, or have too few or too many bytes.
    """
    num_bytes = incoming.new.info.num_bytes
    views, received = incoming.views, 0
    completion: PutCompletion | None = None
    async for message in messages:
        data = _decode_part(message)
        if completion is not None:
            raise InvalidInput("completion", "is not the last message", "send nothing after it")
        if isinstance(data, pb.PutCompletion):
            completion = from_completion("completion", data, len(incoming.new.part_bytes))
            continue
        received += len(data)
        if received > num_bytes:
            raise InvalidInput(
                "data",
                f"is longer than the {num_bytes} bytes announced",
                "send as many bytes as header.info.num_bytes says",
            )
        while data:
            taken = min(len(views[0]), len(data))
            views[0][:taken] = data[:taken]
            views[0], data = views[0][taken:], data[taken:]
            if not views[0]:
                del views[0]
    if received < num_bytes:
        raise InvalidInput(
            "data",
            f"has {received} of the {num_bytes} bytes announced",
            "send as many bytes as header.info.num_bytes says",
        )
    if completion is None:
        raise InvalidInput("completion", "is missing", "send it as the last message")
    return completion


def _decode_part(message: bytes) -> memoryview | pb.PutCompletion:
    """Return the bytes or the completion of a PutPart after the first one."""
    if (data := data_of(message)) is not None:
        return data
    part = parse_part(message)
    match part.WhichOneof("part"):
        case "data":
            return memoryview(part.data)
        case "completion":
            return part.completion
        case _:
            raise InvalidInput("header", "was sent twice", "send it once, then data only")
