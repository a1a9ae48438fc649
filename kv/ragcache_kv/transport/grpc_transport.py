"""The fallback transport: values in gRPC calls, for clients that can use no other transport.

gRPC for Python copies every byte several times and moves well under 1 GB/s. Messages with a piece
of a value bypass the generated code, which would copy the piece four more times
(``ragcache_wire.value_part``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import grpc
from typing_extensions import override

from ragcache_core.errors import RagCacheError
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import Ack, NewVariant, PutOutcome
from ragcache_kv.transport.transport import SERVICE, Transport, ValueRequest
from ragcache_kv.values.buffers import Verifier, copy
from ragcache_kv.values.conversions import (
    from_outcome,
    to_completion,
    to_get_request,
    to_put_header,
)
from ragcache_kv.values.outgoing_value import OutgoingRuns, OutgoingValue
from ragcache_kv.values.stored_value import (
    StoredValue,
    ValueOrMiss,
    allocate_value,
)
from ragcache_wire.channel import PART_BYTES
from ragcache_wire.status import from_rpc_error
from ragcache_wire.tracing import metadata, traceparent
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.value_part import data_of, encode_data


class GrpcTransport(Transport):
    """Carries values over a channel, which its owner closes."""

    name = "grpc"

    def __init__(self, channel: grpc.Channel) -> None:
        self._get = channel.unary_stream(
            "/ragcache.v1.CacheStore/Get", pb.GetRequest.SerializeToString, None
        )
        self._put = channel.stream_unary(
            "/ragcache.v1.CacheStore/Put", None, pb.PutReply.FromString
        )

    @override
    def get(self, request: ValueRequest) -> Iterator[ValueOrMiss]:
        message = to_get_request(
            request.keys, request.exact, request.domain, fix_overheads=request.fix_overheads
        )
        timeout_s = max(0.0, request.deadline - time.monotonic())
        call = self._get(message, timeout=timeout_s, metadata=metadata(request.traceparent))
        return _values(request, call)

    @override
    def put(
        self, variant: NewVariant, value: OutgoingValue, ack: Ack, deadline: float
    ) -> PutOutcome:
        runs = OutgoingRuns(variant, value, deadline)
        first = next(runs)
        failures: list[Exception] = []

        def messages() -> Iterator[bytes]:  # gRPC runs this on its own thread
            yield pb.PutPart(header=to_put_header(variant, ack)).SerializeToString()
            try:
                for run in chain([first], runs):
                    for start in range(0, len(run), PART_BYTES):
                        yield encode_data(run[start : start + PART_BYTES])
                completion = to_completion(runs.completion())
            except Exception as error:  # without a completion the store drops the value
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
            raise from_rpc_error(SERVICE, error) from error
        return from_outcome(reply.outcome)

    def close(self) -> None:
        """Do nothing: the channel's owner closes it."""


def _values(request: ValueRequest, call: Any) -> Iterator[ValueOrMiss]:
    try:
        messages = iter(call)
        for index in range(len(request.keys)):
            header = pb.GetPart.FromString(next(messages, b"")).header
            if header.index != index:
                raise RagCacheError(f"the {SERVICE} sent value {header.index} for {index}")
            value = allocate_value(header, request.allocate)
            if isinstance(value, StoredValue) and not _receive(messages, value):
                yield Miss.CORRUPT
            else:
                yield value
        with contextlib.suppress(grpc.RpcError):
            next(messages, None)  # finish the call; a cancel would look like an abort
    except grpc.RpcError as error:
        raise from_rpc_error(SERVICE, error) from error
    finally:
        call.cancel()


def _receive(messages: Iterator[bytes], value: StoredValue) -> bool:
    """Fill a value. Return whether its checksums hold."""
    verifier, received = Verifier(value.parts), 0
    while received < len(value.value):
        message = next(messages, b"")
        data = data_of(message)
        if data is None:
            data = memoryview(pb.GetPart.FromString(message).data)
        if not data or received + len(data) > len(value.value):
            raise RagCacheError(f"the {SERVICE} sent more or fewer bytes than it announced")
        piece = value.value[received : received + len(data)]
        copy(piece, data)
        verifier.add(piece)
        received += len(data)
    return verifier.good
