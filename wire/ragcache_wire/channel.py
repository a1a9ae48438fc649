"""How every channel and server is set up: message bounds, keepalive."""

from __future__ import annotations

PART_BYTES = 1 << 20
"""Size of one streamed value part: large enough to amortise a message, small enough to share."""

MAX_MESSAGE_BYTES = 16 << 20
"""Bound of one message. Documents fit whole (the retriever bounds them); values are streamed."""

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Parts reach each other directly, whatever proxy the environment names for the outside.
    ("grpc.enable_http_proxy", 0),
    # A peer that vanished without closing (a killed node) is noticed within seconds.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is found again within a second instead of gRPC's minutes of backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # One that comes back as another pod has another address, which gRPC would not look up for 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *OPTIONS[:2],
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two servers on one port would share its connections at random; the second must fail instead.
    ("grpc.so_reuseport", 0),
]
