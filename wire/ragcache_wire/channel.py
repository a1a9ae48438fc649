"""Options of every gRPC channel and server: message bounds, keepalive, reconnects."""

from __future__ import annotations

PART_BYTES = 1 << 20
"""Size of one streamed piece of a value: it amortises a message, and lets other calls through."""

MAX_MESSAGE_BYTES = 16 << 20
"""Bound of one message. A document fits, since the retriever bounds it; values are streamed."""

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Services reach each other directly. The proxy of the environment is for other traffic.
    ("grpc.enable_http_proxy", 0),
    # A peer that vanished without closing (a killed node) is noticed within seconds.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A client reconnects to a restarted peer within a second; gRPC's default takes minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A replaced pod has another address, which gRPC by default looks up only after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *OPTIONS[:2],
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two servers on one port would share its connections at random. The second must fail.
    ("grpc.so_reuseport", 0),
]
