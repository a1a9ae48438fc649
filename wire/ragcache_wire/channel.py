"""Options of every gRPC channel and server: message bounds, keepalive, reconnects."""

from __future__ import annotations

PART_BYTES = 1 << 20
"""Size of one streamed piece of a value: it amortises a message, and lets other calls through."""

MAX_MESSAGE_BYTES = 16 << 20
"""Bound of one message. A document fits, since the retriever bounds it; values are streamed."""

_MESSAGES: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]


def channel_options(keepalive_ms: int = 20_000, silence_ms: int = 5_000) -> list[tuple[str, int]]:
    """Return the options of a channel. Adding an option again has no effect: gRPC takes the first.

    Args:
        keepalive_ms: Time without data after which a ping is sent while a call runs.
        silence_ms: Time after which the peer of an unanswered ping counts as lost.
    """
    return [
        *_MESSAGES,
        # Services reach each other directly. The proxy of the environment is for other traffic.
        ("grpc.enable_http_proxy", 0),
        # A peer that vanished without closing (a killed node, a partition) is noticed in seconds.
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", silence_ms),
        # Pings that measure the bandwidth have a limit of their own, a minute by default. While one
        # is under way, no other ping is sent.
        ("grpc.http2.ping_timeout_ms", silence_ms),
        ("grpc.http2.max_pings_without_data", 0),
        # A client reconnects to a restarted peer within a second; gRPC's default takes minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Longest attempt to connect. Calls wait for it.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        # A replaced pod has another address, which gRPC by default looks up only after 30 s.
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ]


OPTIONS = channel_options()

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGES,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two servers on one port would share its connections at random. The second must fail.
    ("grpc.so_reuseport", 0),
]
