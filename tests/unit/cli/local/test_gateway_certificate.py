"""``ragcache up`` with spec.gateway.tls."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_cli.commands.options import local_target
from ragcache_cli.local.component import components_from
from ragcache_cli.local.key_files import demand_gateway_certificate
from ragcache_cli.local.placement import LocalPlacement
from ragcache_cli.local.state_file import PlatformRecord
from ragcache_core.errors import InvalidInput
from ragcache_operator.builders import build_children
from tests.kit.operator import make_cache


def test_the_gateway_reads_the_users_certificate_and_is_probed_by_https(tmp_path: Path) -> None:
    cache = make_cache(gateway={"tls": {"secretName": "any"}}, model={"source": "bundled:tinyrag"})
    placement = LocalPlacement(tmp_path, 8080, iter(range(20_000, 20_100)))
    parts = components_from(build_children(cache, placement), cache.metadata.name)
    (gateway,) = [one for one in parts if one.kind == "gateway"]
    assert gateway.env["RAGCACHE_SERVER_TLS_DIR"] == str(tmp_path / "gateway-tls")
    assert gateway.readiness.url == "https://127.0.0.1:8080/readyz"


def test_a_missing_certificate_is_named_with_what_makes_one(tmp_path: Path) -> None:
    folder = tmp_path / "gateway-tls"
    with pytest.raises(InvalidInput, match=r"spec\.gateway\.tls.*tls\.crt.*mkcert"):
        demand_gateway_certificate(tmp_path)
    folder.mkdir()
    (folder / "tls.crt").touch()
    with pytest.raises(InvalidInput, match=r"needs .*tls\.key"):
        demand_gateway_certificate(tmp_path)
    (folder / "tls.key").touch()
    demand_gateway_certificate(tmp_path)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_commands_trust_the_very_certificate_of_the_platform_here(
    tmp_path: Path, scheme: str
) -> None:
    record = PlatformRecord("docs", 1, 1.0, "ready", f"{scheme}://127.0.0.1:8080", "tiny", ())
    target = local_target(tmp_path, record)
    own = tmp_path / "gateway-tls" / "tls.crt"
    assert target.certificate == (own if scheme == "https" else None)
