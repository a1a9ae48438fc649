"""A PlatformPlacement for this machine: components on loopback ports, folders as volumes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ragcache_cli.local.ports import LOOPBACK
from ragcache_cli.models.cache import find_model
from ragcache_cli.models.catalog import FETCHED_MODELS
from ragcache_core.errors import InvalidInput
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.environment import EnvValue
from ragcache_operator.builders.placement import Address, Endpoint
from ragcache_operator.spec.ragcache import ModelSource
from ragcache_operator.spec.retriever import EmbedderSpec, RerankerSpec

API_KEYS_FILE: Final = "api-keys.toml"
"""Name of the user's file of API keys in the data folder."""
AUDIT_FILE: Final = "audit/gateway.jsonl"
"""Audit log of the gateway in the data folder."""
STORE_KEY_FILE: Final = "store.key"
"""Key that names stored values, in the data folder."""
DISK_KEY_FILE: Final = "disk.key"
"""Keys of the values on disk, in the data folder."""
ENGINE_KEYS_FOLDER: Final = "engine-keys"
"""Subfolder for the user's files with API keys of servers, by the name of the group."""
GATEWAY_TLS_FOLDER: Final = "gateway-tls"
"""Subfolder for the user's certificate of the gateway."""
RUN_FOLDER: Final = "run"
"""Subfolder for files that exist only while the platform runs."""
_SOCKET_PATH_BYTES: Final = 108
"""Longest path of a Unix socket, with its final zero byte (unix(7))."""

# In a checkout the repository's folders are beside this package.
_MODELS = Path(__file__).resolve().parents[3] / "models"


def _model_folder(field: str, given: str) -> Path:
    folder = Path(given).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise InvalidInput(
            field,
            f"{folder} holds no model",
            "name a folder with config.json, tokenizer.json and *.safetensors",
        )
    return folder


def checkout_model(name: str) -> Path | None:
    """Return the folder of a model that a checkout holds, or None."""
    folder = _checkout_folder(name)
    return folder if (folder / "config.json").is_file() else None


def _checkout_folder(name: str) -> Path:
    return _MODELS / name / "model"


class LocalPlacement:
    """Parts as processes of this machine.

    Args:
        data: Folder with one folder per component.
        gateway_port: Port of the REST API.
        ports: Free ports; each other port is taken from it at its first use.
        key_hash: Hash of the API key for the commands of this user; None if there is none.
    """

    # No API server sees these objects, so all capabilities are assumed.
    capabilities = Capabilities.latest()
    owner = ""
    operator_namespace = None
    source_networks = ()
    # The user of this machine chooses the issuers.
    issuer_networks = ("0.0.0.0/0", "::/0")
    certificate = None
    # Parts listen on loopback, so the gateway has one port, and needs no keys unless asked.
    is_cluster = False

    def __init__(
        self, data: Path, gateway_port: int, ports: Iterator[int], key_hash: str | None = None
    ) -> None:
        self._key_hash = key_hash
        self._data = data
        self._ports = ports
        self._addresses = {Endpoint("gateway", "http"): Address(LOOPBACK, gateway_port)}

    def bind_address(self, endpoint: Endpoint) -> Address:
        """Return the endpoint's port on loopback."""
        if endpoint not in self._addresses:
            self._addresses[endpoint] = Address(LOOPBACK, next(self._ports))
        return self._addresses[endpoint]

    def address_of(self, endpoint: Endpoint) -> Address:
        """Return the address on which it listens."""
        return self.bind_address(endpoint)

    def host_names(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Return no names: clients reach components by loopback only."""
        return ()

    def cache_store_members(self) -> str:
        """Return the address of the one store."""
        return str(self.address_of(Endpoint("cachestore", "grpc")))

    def shard_address(self, shards: Endpoint) -> str:
        """Return the address of the one store, which is the one member."""
        return self.cache_store_members()

    def pod_identity(self) -> Mapping[str, EnvValue]:
        """Return nothing: there are no pods."""
        return {}

    def data_socket(self) -> str:
        """Return a socket in the run folder, or nothing if its path is too long."""
        return self._socket("cachestore.sock")

    def signing_key_file(self) -> str:
        """Return a file in the private run folder."""
        return str(self._data / RUN_FOLDER / "plan.keys")

    def tls_dir(self) -> str:
        """Return a folder in the private run folder."""
        return str(self._data / RUN_FOLDER / "tls")

    def gateway_tls_dir(self) -> str:
        """Return the user's folder in the data folder."""
        return str(self._data / GATEWAY_TLS_FOLDER)

    def store_key_file(self) -> str:
        """Return a file beside the values, which outlive a run of the platform."""
        return str(self._data / STORE_KEY_FILE)

    def disk_key_file(self) -> str:
        """Return a file in the data folder, which outlives a run of the platform."""
        return str(self._data / DISK_KEY_FILE)

    def api_keys_file(self) -> str:
        """Return the user's file in the data folder."""
        return str(self._data / API_KEYS_FILE)

    def audit_log(self, *, has_claim: bool) -> str:
        """Return a file in the data folder."""
        return str(self._data / AUDIT_FILE)

    def engine_key_file(self, group: str) -> str:
        """Return the user's file in the data folder."""
        return str(self._data / ENGINE_KEYS_FOLDER / group)

    def builtin_keys(self) -> str | None:
        """Return the hash of the key for the commands of this user."""
        return None if self._key_hash is None else f"operator={self._key_hash}"

    def data_dir(self, part: str) -> str:
        """Return a folder under ``data``."""
        return str(self._data / part)

    def embedder(self, embedder: EmbedderSpec) -> str:
        """Return a folder of this machine, or the source as it is."""
        if embedder.claim:
            raise InvalidInput(
                "spec.retriever.embedder.source",
                f"{embedder.source} is a volume, which only pods can mount",
                "use path:FOLDER or hf:ORGANISATION/NAME on this machine",
            )
        if not embedder.local_folder:
            return embedder.source
        return f"path:{_model_folder('spec.retriever.embedder.source', embedder.local_folder)}"

    def reranker_model(self, reranker: RerankerSpec) -> str | None:
        """Return a folder of this machine, or the name as it is."""
        if reranker.claim:
            raise InvalidInput(
                "spec.retriever.reranker.model",
                f"{reranker.model} is a volume, which only pods can mount",
                "use path:FOLDER or the name of a model of the hub on this machine",
            )
        if not reranker.local_folder:
            return reranker.model
        return str(_model_folder("spec.retriever.reranker.model", reranker.local_folder))

    def model(self, source: ModelSource, number: int = 0) -> str:
        """Return a folder of this machine, or the hub's name."""
        match source.kind:
            case "hf":
                return source.value
            case "bundled" if source.value in FETCHED_MODELS:
                found = find_model(source.value)
                if found is None:
                    raise InvalidInput(
                        "spec.model.source",
                        f"bundled:{source.value} is not fetched yet",
                        f"run `ragcache model fetch {source.value}`",
                    )
                return str(found)
            case "bundled":
                folder = _checkout_folder(source.value)
                fix = "run from a checkout that holds it, or name another model (hf:..., path:...)"
            case "path":
                folder = Path(source.value).expanduser().absolute()
                fix = "name a folder with config.json, tokenizer.json and *.safetensors"
            case "pvc" | "image":
                raise InvalidInput(
                    "spec.model.source",
                    f"{source.kind}:{source.value} is a volume, which only pods can mount",
                    "use path:FOLDER, hf:ORGANISATION/NAME or bundled:smollm2 on this machine",
                )
        if not (folder / "config.json").is_file():
            raise InvalidInput("spec.model.source", f"{folder} holds no model", fix)
        return str(folder)

    def image(self, component: str) -> str:
        """Return no image: the command runs in this Python's environment."""
        return "local"

    def env(self) -> Mapping[str, str]:
        """Return variables that exclude loopback from proxies."""
        given = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
        no_proxy = ",".join(filter(None, (given, "127.0.0.1", "localhost")))
        return {"NO_PROXY": no_proxy, "no_proxy": no_proxy}

    def _socket(self, name: str) -> str:
        """Return the path of a socket of this name, or nothing if it is too long."""
        path = self._data / RUN_FOLDER / name
        return str(path) if len(os.fsencode(path)) < _SOCKET_PATH_BYTES else ""
