"""Answers messages that cannot be decoded as invalid input.

gRPC would log a traceback for each of them, and answer INTERNAL.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from typing_extensions import override

from ragcache_core.errors import InvalidInput
from ragcache_wire.status import to_status, trailing_metadata

log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 10.0
"""Time between two log lines about messages that cannot be decoded."""

Decoder = Callable[[bytes], Any]


class _Undecodable:
    """Stands for a message that cannot be decoded."""


class MessageCheck:
    """Finds the messages of one server that cannot be decoded, and counts them in its log."""

    def __init__(self) -> None:
        self._next_log_s = 0.0
        self._count = 0

    def decoder(self, decode: Decoder | None) -> Decoder | None:
        """Return what decodes requests instead. None: handlers get bytes."""
        if decode is None:
            return None

        def decode_or_mark(message: bytes) -> Any:
            try:
                return decode(message)
            except DecodeError:
                return _Undecodable()

        return decode_or_mark

    def check(self, method: str, request: Any) -> Any:
        """Return what ``decoder`` has made of a message. Raises InvalidInput for no request."""
        if not isinstance(request, _Undecodable):
            return request
        self._count += 1
        now_s = time.monotonic()
        if now_s >= self._next_log_s:
            count, self._count = self._count, 0
            self._next_log_s = now_s + LOG_INTERVAL_S
            log.warning("grpc: messages cannot be decoded method=%s count=%d", method, count)
        raise InvalidInput(
            "message", f"is no request of {method}", "send the message that the proto defines"
        )


class BlockingMessageInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Checks the requests of a server with threads, whose calls have one request each."""

    def __init__(self) -> None:
        self._check = MessageCheck()

    @override
    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        call = handler.unary_stream if handler.response_streaming else handler.unary_unary

        def checked(request: Any, context: Any) -> Any:
            try:
                self._check.check(method, request)
            except InvalidInput as error:
                code, message, fields = to_status(error)
                context.set_trailing_metadata(trailing_metadata(fields))
                context.abort(code, message)
            return call(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        decode = self._check.decoder(handler.request_deserializer)
        return make(checked, decode, handler.response_serializer)
