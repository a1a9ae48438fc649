"""Names in place of addresses."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.server_names import ServerNames

NAMES = ServerNames(b"s" * 32)
TEXTS = [
    ("10.0.0.3:8000: timed out", ["10.0.0.3:8000"]),
    ("docs-engine-0.ns.svc:8000 has left", ["docs-engine-0.ns.svc:8000"]),
    ("engine:10.0.0.3:8000", ["10.0.0.3:8000"]),
    ("store:docs-cachestore-0.ns:50051", ["docs-cachestore-0.ns:50051"]),
    ("[fd00::1:2]:8000 refused", ["[fd00::1:2]:8000"]),
    (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:50051: Failed",
        ["127.0.0.1:50051"],
    ),
    ("ipv6:%5B::1%5D:50051: Connection refused", ["%5B::1%5D:50051"]),
    ("POST http://user:pw@embed.ns:9000/v1/embeddings gave 500", ["embed.ns:9000"]),
    ("cannot reach 192.168.0.9", ["192.168.0.9"]),
    ("fe80:0:0:0:1:2:3:4 or ::1", ["fe80:0:0:0:1:2:3:4", "::1"]),
    ("a:8000, b:8001 and c:8002.", ["a:8000", "b:8001", "c:8002"]),
]


@pytest.mark.parametrize(("text", "addresses"), TEXTS)
def test_each_address_gets_its_name(text: str, addresses: list[str]) -> None:
    found = NAMES.replace_in(text)
    for address in addresses:
        assert address not in found
        assert NAMES.of(address) in found
    assert "pw" not in found


@pytest.mark.parametrize(
    "text",
    [
        "the retriever is unavailable: it did not answer within 10 s",
        "model smollm2: no engine answers",
        "128 question requests are in flight already, 3 of them by tenant 'a'",
        "it took 0.25 s, and 1.5e3 ms at most (3:1)",
        "server-0a1b2c",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert NAMES.replace_in(text) == text


@given(st.ip_addresses(), st.integers(10, 65_535))
def test_no_ip_address_with_a_port_is_left(ip: object, port: int) -> None:
    host = f"[{ip}]" if ":" in str(ip) else str(ip)
    text = f"engine {host}:{port} is away"
    assert NAMES.replace_in(text) == f"engine {NAMES.of(f'{host}:{port}')} is away"


def test_names_are_those_of_the_secret() -> None:
    assert NAMES.of("a:1") == ServerNames(b"s" * 32).of("a:1")
    assert NAMES.of("a:1") != ServerNames(b"t" * 32).of("a:1")
    assert NAMES.of("a:1") != NAMES.of("a:2")


@pytest.mark.parametrize("text", [":" * 100_000 + "g", "a+" * 50_000, "[::" + ":" * 100_000])
def test_a_text_without_an_address_takes_linear_time(text: str) -> None:
    began = time.thread_time()
    NAMES.replace_in(text)
    assert time.thread_time() - began < 1
