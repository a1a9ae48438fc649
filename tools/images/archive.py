"""OCI archives: one image as a tar, which containerd, podman and docker load."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from ragcache_core.errors import InvalidInput
from tools.images.layer import Layer, digest_of
from tools.images.recipe import Recipe

_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
_INDEX: Final = "application/vnd.oci.image.index.v1+json"

_INDEX_FILE: Final = "index.json"
_BUFFER_BYTES: Final = 1 << 20
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Image:
    """One image, whose layers are on disk. name: as a pod names it, ``ragcache/gateway:TAG``."""

    name: str
    recipe: Recipe
    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        """Bytes of its layers."""
        return sum(layer.size for layer in self.layers)

    def write(self, file: IO[bytes]) -> None:
        """Write the archive; file need not seek."""
        config, manifest, index = self._documents()
        with tarfile.open(fileobj=file, mode="w|", bufsize=_BUFFER_BYTES) as tar:
            # First, so that it is found without reading gigabytes.
            _add(tar, _INDEX_FILE, index)
            _add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
            _add(tar, "manifest.json", _json(self._docker_manifest(config)))
            _add(tar, _blob(_digest(manifest)), manifest)
            _add(tar, _blob(_digest(config)), config)
            # Two layers are one blob if they hold the same.
            for layer in {layer.digest: layer for layer in self.layers}.values():
                info = tarfile.TarInfo(_blob(layer.digest))
                info.size = layer.size
                with layer.path.open("rb") as content:
                    tar.addfile(info, content)

    def save(self, path: Path) -> bool:
        """Write the archive to path; False: that is what is there already."""
        if _index_of(path) == self._documents()[-1]:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            with made.open("wb") as file:
                self.write(file)
            made.rename(path)
        return True

    def load(self, command: Sequence[str]) -> None:
        """Give the archive to a command that reads one: ``ctr images import -``, ``docker load``.

        Raises InvalidInput with the command's own words if it fails.
        """
        with (
            tempfile.TemporaryFile() as said,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said) as process,
        ):
            assert process.stdin is not None
            # A command that ends before it has read all says why.
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                self.write(pipe)
            if process.wait() != 0:
                said.seek(0)
                problem = f"{command[0]} did not take {self.name}: {said.read().decode().strip()}"
                raise InvalidInput("load", problem, "correct what it reports")

    def _documents(self) -> tuple[bytes, bytes, bytes]:
        """Config, manifest and index, each naming the one before by its digest."""
        config = _json(self._config())
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": _descriptor(_CONFIG, config),
                "layers": [
                    {"mediaType": _LAYER, "digest": layer.digest, "size": layer.size}
                    for layer in self.layers
                ],
            }
        )
        described = {
            **_descriptor(_MANIFEST, manifest),
            "platform": _platform(),
            "annotations": {
                "io.containerd.image.name": full_name(self.name),
                "org.opencontainers.image.ref.name": self.name.rpartition(":")[2],
            },
        }
        index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [described]}
        return config, manifest, _json(index)

    def _config(self) -> dict[str, Any]:
        recipe = self.recipe
        return {
            **_platform(),
            "created": "1970-01-01T00:00:00Z",  # equal inputs, equal image
            "config": {
                "User": recipe.user,
                "WorkingDir": "/",
                "Env": [f"{name}={value}" for name, value in recipe.env.items()],
                "Entrypoint": list(recipe.entrypoint),
                "ExposedPorts": {f"{port}/tcp": {} for port in recipe.ports},
                "Volumes": {volume: {} for volume in recipe.volumes},
                "Labels": dict(recipe.labels),
            },
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in self.layers]},
            "history": [{"created_by": "tools/images"} for _ in self.layers],
        }

    def _docker_manifest(self, config: bytes) -> list[dict[str, Any]]:
        return [
            {
                "Config": _blob(_digest(config)),
                "RepoTags": [self.name],
                "Layers": [_blob(layer.digest) for layer in self.layers],
            }
        ]


def full_name(name: str) -> str:
    """The image's name with its registry, as containerd writes it."""
    first, slash, _ = name.partition("/")
    with_registry = bool(slash) and (first == "localhost" or "." in first or ":" in first)
    return name if with_registry else f"docker.io/{name}"


def _platform() -> dict[str, str]:
    machine = platform.machine()
    return {"architecture": _ARCHITECTURES.get(machine, machine), "os": "linux"}


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{digest_of(content)}"


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _index_of(path: Path) -> bytes | None:
    """The index of the archive that is there; None: there is none."""
    try:
        with tarfile.open(path) as tar:
            first = tar.next()
            file = tar.extractfile(first) if first and first.name == _INDEX_FILE else None
            return file.read() if file else None
    except (OSError, tarfile.TarError):
        return None
