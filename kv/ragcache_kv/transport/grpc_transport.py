"""The last transport: values inside the store's own gRPC calls, where nothing else gets through.

gRPC for Python copies every byte several times and moves well under 1 GB/s; the other transports are
there for a reason. A message that carries a piece bypasses the generated code, which would copy
it four times more (``ragcache_wire.value_part``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import grpc

from ragcache_core.errors import RagCacheError
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import Ack, NewVariant, PutOutcome
from ragcache_kv.transport.transport import PART, Transport, ValueRequest
from ragcache_kv.values.buffers import Verifier, copy
from ragcache_kv.values.conversions import (
    from_outcome,
    to_completion,
    to_get_request,
    to_put_header,
)
from ragcache_kv.values.outgoing_value import OutgoingRuns, OutgoingValue
from ragcache_kv.values.stored_value import (
    LayeredValues,
    StoredValue,
    ValueOrMiss,
    allocate_value,
    num_layers,
)
from ragcache_wire.channel import PART_BYTES
from ragcache_wire.status import from_rpc_error
from ragcache_wire.trace_context import metadata, traceparent
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.value_part import data_of, encode_data


class GrpcTransport(Transport):
    """Values over channel, which is whoever made it's to close."""

    name = "grpc"

    def __init__(self, channel: grpc.Channel) -> None:
        self._get = channel.unary_stream(
            "/ragcache.v1.CacheStore/Get", pb.GetRequest.SerializeToString, None
        )
        self._put = channel.stream_unary(
            "/ragcache.v1.CacheStore/Put", None, pb.PutReply.FromString
        )

    def get(self, asking: ValueRequest) -> Iterator[ValueOrMiss]:
        """See Transport."""
        request = to_get_request(asking.keys, asking.exact, asking.domain)
        timeout_s = max(0.0, asking.deadline - time.monotonic())
        call = self._get(request, timeout=timeout_s, metadata=metadata(asking.traceparent))
        return _values(asking, call)

    def get_layers(self, asking: ValueRequest) -> LayeredValues:
        """See Transport. Here the first layer comes when every value has come."""
        values = list(self.get(asking))
        return LayeredValues(values, _layers(values))

    def put(
        self, variant: NewVariant, value: OutgoingValue, ack: Ack, deadline: float
    ) -> PutOutcome:
        """See Transport."""
        runs = OutgoingRuns(variant, value, deadline)
        first = next(runs)
        failures: list[Exception] = []

        def messages() -> Iterator[bytes]:  # gRPC asks for them on a thread of its own
            yield pb.PutPart(header=to_put_header(variant, ack)).SerializeToString()
            try:
                for run in chain([first], runs):
                    for start in range(0, len(run), PART_BYTES):
                        yield encode_data(run[start : start + PART_BYTES])
                completion = to_completion(runs.completion())
            except Exception as error:  # without a completion the store keeps nothing
                failures.append(error)
            else:
                yield pb.PutPart(completion=completion).SerializeToString()

        try:
            reply: pb.PutReply = self._put(
                messages(),
                timeout=max(0.0, deadline - time.monotonic()),
                metadata=metadata(traceparent()),
            )
        except grpc.RpcError as error:
            if failures:
                raise failures[0] from error
            raise from_rpc_error(PART, error) from error
        return from_outcome(reply.outcome)

    def close(self) -> None:
        """Nothing of its own is open."""


def _values(asking: ValueRequest, call: Any) -> Iterator[ValueOrMiss]:
    try:
        messages = iter(call)
        for index in range(len(asking.keys)):
            header = pb.GetPart.FromString(next(messages, b"")).header
            if header.index != index:
                raise RagCacheError(f"the {PART} sent value {header.index} for {index}")
            value = allocate_value(header, asking.allocate)
            if isinstance(value, StoredValue) and not _receive(messages, value):
                yield Miss.CORRUPT
            else:
                yield value
        with contextlib.suppress(grpc.RpcError):
            next(messages, None)  # ends the call well, where to cancel it looks like giving up
    except grpc.RpcError as error:
        raise from_rpc_error(PART, error) from error
    finally:
        call.cancel()


def _receive(messages: Iterator[bytes], value: StoredValue) -> bool:
    """Fill a value; whether its checksums hold."""
    verifier, received = Verifier(value.parts), 0
    while received < len(value.value):
        message = next(messages, b"")
        data = data_of(message)
        if data is None:
            data = memoryview(pb.GetPart.FromString(message).data)
        if not data or received + len(data) > len(value.value):
            raise RagCacheError(f"the {PART} sent another number of bytes than it allocate_value")
        piece = value.value[received : received + len(data)]
        copy(piece, data)
        verifier.add(piece)
        received += len(data)
    return verifier.good


def _layers(values: list[ValueOrMiss]) -> Iterator[list[memoryview | Miss]]:
    for layer in range(num_layers(values)):
        yield [value if isinstance(value, Miss) else value.part(layer) for value in values]
