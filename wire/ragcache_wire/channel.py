"""Options of every gRPC channel and server: message bounds, keepalive, reconnects."""

from __future__ import annotations

from collections.abc import Iterable

PART_BYTES = 1 << 20
"""Size of one streamed piece of a value: it amortises a message, and lets other calls through."""

MAX_MESSAGE_BYTES = 16 << 20
"""Bound of one message. A document fits, since the retriever bounds it; values are streamed."""

Option = tuple[str, int | str]

MIN_PING_INTERVAL_MS = 5_000
"""A server closes the connection of a client that pings more often while no data is sent."""

OPTIONS: list[Option] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Services reach each other directly. The proxy of the environment is for other traffic.
    ("grpc.enable_http_proxy", 0),
    # A peer that vanished without closing (a killed node, a partition) is noticed within seconds.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Pings that measure the bandwidth have a limit of their own, a minute by default. While one is
    # under way, no other ping is sent.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A client reconnects to a restarted peer within a second; gRPC's default takes minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Longest attempt to connect. Calls wait for it.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A replaced pod has another address, which gRPC by default looks up only after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]

SERVER_OPTIONS: list[Option] = [
    *OPTIONS[:2],
    # Unlike the constant of gRPC, the name has no "recv", and gRPC ignores names that it does not
    # know.
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    # Two servers on one port would share its connections at random. The second must fail.
    ("grpc.so_reuseport", 0),
]


def with_options(base: Iterable[Option], *changed: Option) -> list[Option]:
    """Return options of a channel or a server with other values for some of them.

    gRPC takes the first of two values for a name, so a second one has no effect.
    """
    names = {name for name, _ in changed}
    return [*changed, *(option for option in base if option[0] not in names)]
