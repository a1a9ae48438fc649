"""The processes of a platform as ``ragcache up`` starts them, with engines and gateway replaceable.

The operator's builders give the containers of a RagCache, and ``ragcache up`` runs them as
processes with the same commands and settings. Here a simulated engine may take the place of each
engine, and a rival's gateway that of the gateway. Several platforms share one retriever, as
replicas of a gateway do.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from bench.support.api_keys import headers
from bench.support.cluster.engine_times import EngineTimes
from bench.support.cluster.simulated_engine import EngineConfig
from harness.processes import Service, answers
from ragcache_cli.local.component import LocalComponent, components_from
from ragcache_cli.local.key_files import ensure_key, plan_key_file
from ragcache_cli.local.placement import RUN_FOLDER, LocalPlacement
from ragcache_cli.local.ports import free_ports
from ragcache_cli.models.number_type import read_cpu_features, use_fast_number_type
from ragcache_operator.builders import build_children
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_wire.watched.signing_keys import SigningKeys

_ROOT = Path(__file__).resolve().parents[3]
_PORTS = free_ports(random.Random())
_MODULES = "bench.support.cluster"


@dataclass(frozen=True, slots=True)
class PlatformSpec:
    """What the RagCache of a platform says.

    Attributes:
        model: Folder of the model.
        engines: Number of engines.
        kv_memory: Of each engine.
        store_memory: Of the cache store's memory tier.
        max_length: Longest prompt with its answer, in tokens.
    """

    model: Path
    engines: int
    kv_memory: str = "1Gi"
    store_memory: str = "512Mi"
    max_length: int = 4096

    def components(self, data: Path) -> list[LocalComponent]:
        """Return the components of a platform with its data in a folder."""
        engine = {"kvMemory": self.kv_memory, "resources": {"cpuLimit": "1"}}
        manifest = {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCache",
            "metadata": {"name": "cluster"},
            "spec": {
                "model": {"source": f"path:{self.model}", "maxLength": self.max_length},
                "engines": [{"name": f"e{i}", **engine} for i in range(self.engines)],
                "cacheStore": {"memory": self.store_memory, "disk": {"size": "4Gi"}},
                "gateway": {"limits": {"questions": 2048}},
                "tls": {"enabled": False},  # simulated engines serve plain HTTP
            },
        }
        placement = LocalPlacement(data, next(_PORTS), _PORTS)
        cache = use_fast_number_type(parse_manifest(manifest), read_cpu_features())
        children = build_children(cache, placement)
        return components_from(children, "cluster")


@dataclass(slots=True)
class Platform:
    """The running processes of one platform, by component."""

    data: Path
    components: Mapping[str, LocalComponent]
    services: dict[str, Service] = field(default_factory=dict)

    @property
    def key_file(self) -> Path:
        """The file of the signing keys of its parts."""
        return Path(self.components["gateway"].env["RAGCACHE_SIGNING_KEY_FILE"])

    @property
    def keys(self) -> SigningKeys:
        """The signing keys of its parts."""
        return SigningKeys(self.key_file)

    def of(self, kind: str) -> list[LocalComponent]:
        """Return the components of a kind."""
        return [one for one in self.components.values() if one.kind == kind]

    def port(self, component: str) -> int:
        """Return the HTTP port of a component."""
        return self.components[component].ports["http"].port

    def start(self, name: str, command: Sequence[str] = (), **settings: str) -> None:
        """Start a component. ``command`` replaces its own, and ``settings`` extend its own."""
        one = self.components[name]
        (self.data / name).mkdir(exist_ok=True)
        env = {"PYTHONPATH": str(_ROOT), **one.env, **settings}
        log = self.data / f"{name}.log"
        self.services[name] = Service(name, command or one.command, env, log)

    def start_gateway(self, api_keys: Path, admin: str, **settings: str) -> int:
        """Start a gateway with API keys, and wait until it is ready. Return its port.

        Args:
            api_keys: The key file.
            admin: Name of a key in it with the scope ``admin``.
        """
        self.start("gateway", RAGCACHE_API_KEYS_FILE=str(api_keys), **settings)
        self.wait("gateway")
        port = self.port("gateway")

        def is_ready() -> bool:
            url = f"http://127.0.0.1:{port}/v1/status"
            return httpx.get(url, headers=headers(admin)).is_success

        self.services["gateway"].wait_until("ready", is_ready)
        return port

    def simulate_engines(self, times: EngineTimes) -> None:
        """Start one process with all engines, simulated."""
        configs = []
        for one in self.of("engine"):
            words = dict(zip(one.command, one.command[1:], strict=False))
            port, dtype = one.ports["http"].port, words["--dtype"]
            config = EngineConfig(port, words["--model"], dtype, one.env, times.to_json())
            configs.append(asdict(config))
        file = self.data / "engines.json"
        file.write_text(json.dumps(configs))
        command = [sys.executable, "-m", f"{_MODULES}.simulated_engine", str(file)]
        log, env = self.data / "engines.log", {"PYTHONPATH": str(_ROOT)}
        self.services["engines"] = Service("engines", command, env, log)

    def wait(self, *names: str) -> None:
        """Wait until components are ready; those that are simulated, too."""
        for name in names:
            check = self.components[name].startup
            url = check.url
            service = self.services.get(name) or self.services["engines"]
            service.wait_until("ready", lambda url=url: answers(url))


@contextlib.contextmanager
def platform(spec: PlatformSpec, data: Path) -> Iterator[Platform]:
    """A platform whose components are not started yet. They stop at the end."""
    (data / RUN_FOLDER).mkdir(parents=True, mode=0o700)
    components = {one.name: one for one in spec.components(data)}
    found = Platform(data, components)
    ensure_key(Path(components["gateway"].env["RAGCACHE_STORE_KEY_FILE"]))
    with plan_key_file(found.key_file):
        try:
            yield found
        finally:
            for service in reversed(found.services.values()):
                service.stop()


def simulated_model(folder: Path) -> Path:
    """Write a model whose KV is small, so that two cores can move that of many engines.

    Its tokenizer and its weights, which nothing loads, are those of the bundled tinyrag.
    """
    folder.mkdir(parents=True)
    tinyrag = _ROOT / "models" / "tinyrag" / "model"
    for file in tinyrag.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((tinyrag / "config.json").read_text())
    (folder / "config.json").unlink()
    small = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config | small))
    return folder
