"""From pod specs to local processes: sites, parts, ports."""

from __future__ import annotations

import socket
import stat
import sys
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ragcache_cli.local.component import LocalComponent, components_from
from ragcache_cli.local.key_files import (
    ensure_key,
    ensure_key_file,
    plan_key_file,
    platform_key,
    read_api_key,
)
from ragcache_cli.local.placement import LocalPlacement
from ragcache_cli.local.ports import demand_free, free_ports, is_free
from ragcache_core.access.key_file import hash_text, parse_key_file
from ragcache_core.errors import InvalidInput
from ragcache_core.plan.signature import parse_keys
from ragcache_core.retrieval.filters import In
from ragcache_operator.builders import build_children
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_operator.spec.ragcache import ModelSource
from ragcache_operator.spec.retriever import EmbedderSpec, RerankerSpec


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def parts(tmp_path: Path, model: Path) -> dict[str, LocalComponent]:
    return local_parts(tmp_path, model={"source": f"path:{model}"}, gateway={"port": 8123})


def local_parts(tmp_path: Path, **spec: Any) -> dict[str, LocalComponent]:
    cache = parse_manifest(
        {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCache",
            "metadata": {"name": "docs"},
            "spec": spec,
        }
    )
    site = LocalPlacement(tmp_path / "data", cache.spec.gateway.port, count(20_000))
    found = components_from(build_children(cache, site), "docs")
    return {part.name: part for part in found}


def test_an_engine_with_a_url_is_no_part_and_the_gateway_gets_its_address(
    tmp_path: Path, model: Path
) -> None:
    url = "http://127.0.0.1:8000"
    found = local_parts(tmp_path, model={"source": f"path:{model}"}, engines=[{"url": url}])
    assert list(found) == ["cachestore", "retriever", "gateway"]
    assert found["gateway"].env["RAGCACHE_ENGINES"] == url


def test_the_parts_are_those_of_the_pods(parts: dict[str, LocalComponent], tmp_path: Path) -> None:
    assert list(parts) == ["cachestore", "retriever", "engine-main", "gateway"]
    store = parts["cachestore"]
    assert store.command == (sys.executable, "-m", "ragcache_cachestore")
    assert store.env["RAGCACHE_DATA_DIR"] == str(tmp_path / "data" / "cachestore")
    assert store.env["RAGCACHE_LISTEN"] == str(store.ports["grpc"])
    assert store.env["RAGCACHE_HEALTH_LISTEN"] == str(store.ports["health"])
    assert store.env["RAGCACHE_DATA_LISTEN"] == str(store.ports["data"])
    # Engines of this machine share memory with it.
    assert store.env["RAGCACHE_DATA_SOCKET"] == str(tmp_path / "data" / "run" / "cachestore.sock")
    assert (
        store.env["RAGCACHE_OWN_ADDRESS"]
        == store.env["RAGCACHE_CACHESTORE"]
        == store.env["RAGCACHE_LISTEN"]
    )
    assert store.startup.url == f"http://{store.ports['health']}/healthz"
    assert store.readiness.url == f"http://{store.ports['health']}/readyz"
    gateway = parts["gateway"]
    assert str(gateway.ports["http"]) == "127.0.0.1:8123"
    assert gateway.readiness.url == "http://127.0.0.1:8123/readyz"
    assert gateway.liveness.url == "http://127.0.0.1:8123/healthz"
    assert gateway.env["RAGCACHE_CACHESTORE"] == str(store.ports["grpc"])
    engine = parts["engine-main"]
    records = engine.env["RAGCACHE_RECORDS_LISTEN"].rpartition(":")[2]
    assert gateway.env["RAGCACHE_ENGINES"] == f"https://{engine.ports['http']};records={records}"
    assert engine.readiness.url == f"https://{engine.ports['http']}/health"
    assert engine.env["RAGCACHE_CACHESTORE"] == str(store.ports["grpc"])
    keys = str(tmp_path / "data" / "run" / "plan.keys")
    # Other users of the machine reach the ports too, and cannot read the file.
    for part in (gateway, engine, store, parts["retriever"]):
        assert part.env["RAGCACHE_SIGNING_KEY_FILE"] == keys
        assert part.env["RAGCACHE_TLS_DIR"] == str(tmp_path / "data" / "run" / "tls")
    for part in (gateway, engine):
        assert part.env["RAGCACHE_STORE_KEY_FILE"] == str(tmp_path / "data" / "store.key")
    assert "RAGCACHE_STORE_KEY_FILE" not in store.env
    assert "ragcache_engine.peer_middleware.PeerMiddleware" in engine.command


def test_a_key_is_new_each_time_and_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "plan.keys"
    found: list[bytes] = []
    theirs = tmp_path / "theirs"
    theirs.write_text("")
    path.symlink_to(theirs)
    for _ in range(2):
        with plan_key_file(path):
            assert stat.S_IMODE(path.stat(follow_symlinks=False).st_mode) == 0o600
            found += parse_keys("keys", path.read_bytes())
        assert not path.exists()
    assert len(set(found)) == 2
    assert theirs.read_text() == ""


def test_the_store_key_stays_as_the_values_do(tmp_path: Path) -> None:
    path = tmp_path / "store.key"
    ensure_key(path)
    first = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(parse_keys("key", first)) == 1
    ensure_key(path)
    assert path.read_bytes() == first


def test_an_engine_publishes_no_events_of_its_cache(parts: dict[str, LocalComponent]) -> None:
    assert "--kv-events-config" not in parts["engine-main"].command


def test_every_port_is_used_once(parts: dict[str, LocalComponent]) -> None:
    ports = [address.port for part in parts.values() for address in part.ports.values()]
    assert len(ports) == len(set(ports)) == 10


def test_who_asks_starts_after_and_stops_before_who_is_asked(
    parts: dict[str, LocalComponent],
) -> None:
    components = {part.kind for part in parts.values()}
    for part in parts.values():
        assert part.after < components
        for other in parts.values():
            if other.kind in part.after:
                assert part.stop_rank < other.stop_rank


def test_every_engine_is_a_part_and_the_gateway_knows_them_all(tmp_path: Path) -> None:
    parts = local_parts(
        tmp_path,
        model={"source": "hf:a/b"},
        engines=[{"name": "one", "replicas": 3}, {"name": "two"}],
    )
    engines = [parts["engine-one"], parts["engine-two"]]
    gateway = parts["gateway"]
    assert gateway.env["RAGCACHE_ENGINES"] == ",".join(
        f"https://{e.ports['http']};records={e.ports['grpc'].port}" for e in engines
    )


def test_secrets_are_left_to_the_users_environment(tmp_path: Path) -> None:
    parts = local_parts(
        tmp_path,
        model={"source": "hf:a/b", "tokenSecret": {"name": "hub"}},
        retriever={
            "embedder": {"source": "http://e/v1", "model": "e", "keySecret": {"name": "keys"}}
        },
    )
    for part in parts.values():
        assert not {"HF_TOKEN", "RAGCACHE_EMBEDDER_API_KEY"} & part.env.keys()


def site() -> LocalPlacement:
    return LocalPlacement(Path("data"), 1, count(20_000))


def test_a_model_folder_is_found_from_anywhere(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert site().model(ModelSource("path", "model")) == str(model)
    assert site().model(ModelSource("hf", "a/b")) == "a/b"


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^spec\.model\.source: .* holds no model; name a"):
        site().model(ModelSource("path", str(tmp_path)))
    with pytest.raises(InvalidInput, match=r"holds no model; run from a checkout that holds it"):
        site().model(ModelSource("bundled", "no-such-model"))


def test_a_bundled_model_is_in_the_checkout_or_in_the_user_s_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert site().model(ModelSource("bundled", "tinyrag")).endswith("models/tinyrag/model")
    monkeypatch.setenv("RAGCACHE_CACHE", str(tmp_path))
    with pytest.raises(InvalidInput, match="not fetched yet; run `ragcache model fetch smollm2`"):
        site().model(ModelSource("bundled", "smollm2"))


@pytest.mark.parametrize("source", [ModelSource("pvc", "models/a"), ModelSource("image", "a/b:1")])
def test_a_volume_of_a_cluster_is_refused_here(source: ModelSource) -> None:
    with pytest.raises(InvalidInput, match=r"is a volume, which only pods can mount; use path:"):
        site().model(source)


def test_an_embedder_of_this_machine_is_found_from_anywhere(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert site().embedder(EmbedderSpec(source="path:model")) == f"path:{model}"
    for source in ("bundled:all-minilm-l6-v2", "hf:a/b", "http://e/v1"):
        assert site().embedder(EmbedderSpec(source=source, model=None)) == source


def test_an_embedder_that_this_machine_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^spec\.retriever\.embedder\.source: .* no model;"):
        site().embedder(EmbedderSpec(source=f"path:{tmp_path}"))
    with pytest.raises(InvalidInput, match=r"is a volume, which only pods can mount; use path:"):
        site().embedder(EmbedderSpec(source="pvc:models/e5"))


def test_a_cross_encoder_of_this_machine_is_found_from_anywhere(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)

    def used(model: str) -> str | None:
        return site().reranker_model(RerankerSpec(source="cross-encoder", model=model))

    assert used("path:model") == str(model)
    assert used("a/b") == "a/b"
    assert site().reranker_model(RerankerSpec()) is None
    with pytest.raises(InvalidInput, match=r"^spec\.retriever\.reranker\.model: .* no model;"):
        used("path:elsewhere")
    with pytest.raises(InvalidInput, match=r"is a volume, which only pods can mount; use path:"):
        used("pvc:models/ranker")


def test_a_socket_that_no_kernel_would_take_is_left_out() -> None:
    short, long = (LocalPlacement(Path("/", "d" * n), 1, count(20_000)) for n in (10, 100))
    assert len(short.data_socket()) < 108
    assert long.data_socket() == ""


def test_loopback_is_never_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    env = site().env()
    assert env["NO_PROXY"] == env["no_proxy"] == "example.org,127.0.0.1,localhost"


def test_free_ports_are_free_and_given_once() -> None:
    ports = free_ports(Random(7))
    given = [next(ports) for _ in range(20)]
    assert len(set(given)) == 20
    assert all(map(is_free, given))


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(InvalidInput, match=rf"^spec\.gateway\.port: port {port} is in use"):
            demand_free(port, "spec.gateway.port")


def test_a_local_platform_has_one_port_and_no_keys_unless_asked(
    parts: dict[str, LocalComponent], tmp_path: Path, model: Path
) -> None:
    gateway = parts["gateway"]
    assert set(gateway.ports) == {"http", "metrics"}
    assert not {"RAGCACHE_API_KEYS_FILE", "RAGCACHE_ADMIN_LISTEN"} & gateway.env.keys()
    assert gateway.env["RAGCACHE_MAX_QUESTIONS"] == "128", "limits are variables here"
    asked = {"source": f"path:{model}"}
    keyed = local_parts(tmp_path, model=asked, gateway={"auth": {}})["gateway"]
    assert keyed.env["RAGCACHE_API_KEYS_FILE"] == str(tmp_path / "data" / "api-keys.toml")


def test_the_key_of_the_commands_is_private_and_ends_with_the_platform(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert read_api_key(tmp_path) is None
    with platform_key(tmp_path) as text:
        key = read_api_key(tmp_path)
        assert key is not None
        assert hash_text(key) == text
        assert stat.S_IMODE((tmp_path / "run" / "api.key").stat().st_mode) == 0o600
    assert read_api_key(tmp_path) is None


def test_the_users_file_is_kept(tmp_path: Path) -> None:
    ensure_key_file(tmp_path)
    path = tmp_path / "api-keys.toml"
    assert parse_key_file(path.read_bytes(), lambda path, value: In(path, (value,))).callers == {}
    path.write_text("# mine")
    ensure_key_file(tmp_path)
    assert path.read_text() == "# mine"


def test_fields_of_the_gateway_reach_the_local_process(tmp_path: Path, model: Path) -> None:
    gateway = local_parts(
        tmp_path,
        model={"source": f"path:{model}"},
        gateway={
            "speculation": "off",
            "order": "cached",
            "maxDisplacement": 3,
            "reordering": {"windowMilliseconds": 500},
            "layout": "documents-first",
            "rewrite": "model",
            "oidc": [
                {
                    "name": "id",
                    "issuer": "http://localhost:8443/realms/docs",
                    "audiences": ["docs"],
                    "defaultScopes": ["ask"],
                }
            ],
            "limits": {"connections": 99},
        },
    )["gateway"]
    given = {
        "RAGCACHE_SPECULATION": "off",
        "RAGCACHE_ORDER": "cached",
        "RAGCACHE_MAX_DISPLACEMENT": "3",
        "RAGCACHE_REORDERING_WINDOW_MS": "500",
        "RAGCACHE_LAYOUT": "documents-first",
        "RAGCACHE_REWRITE": "model",
        "RAGCACHE_API_KEYS_FILE": str(tmp_path / "data" / "api-keys.toml"),
        "RAGCACHE_MAX_CONNECTIONS": "99",
    }
    assert given.items() <= gateway.env.items()
    # Tokens need keys beside them, and may come from this machine.
    assert '"issuer":"http://localhost:8443/realms/docs"' in gateway.env["RAGCACHE_OIDC"]
    assert gateway.env["RAGCACHE_ISSUER_NETWORKS"] == "0.0.0.0/0,::/0"
    # One machine needs no second port.
    assert "RAGCACHE_ADMIN_LISTEN" not in gateway.env
