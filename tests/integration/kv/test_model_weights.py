"""The size of weights from the headers of real safetensors files, on disk and over HTTP."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from ragcache_kv.model_weights import read_weights_bytes

Tensors = dict[str, npt.NDArray[Any]]

TINYRAG = Path(__file__).parents[3] / "models" / "tinyrag" / "model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards with an index, and the same weights again in one file, as some models have."""
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    tensors: Tensors = {"a": np.ones((4, 8), np.float16), "b": np.ones(16, np.float32)}
    ids: Tensors = {"c": np.ones(3, np.int64)}
    save_file(tensors, folder / "model-1.safetensors")
    save_file(ids, folder / "model-2.safetensors")
    save_file(tensors | ids, folder / "consolidated.safetensors")
    weight_map = {
        "a": "model-1.safetensors",
        "b": "model-1.safetensors",
        "c": "model-2.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("auto", 64 + 64 + 24), ("float32", 128 + 64 + 24), ("bfloat16", 64 + 32 + 24)],
)
def test_a_folder_has_the_size_of_its_indexed_tensors(
    model: Path, dtype: str, num_bytes: int
) -> None:
    assert read_weights_bytes(str(model), dtype) == num_bytes


def test_the_bundled_test_model_is_almost_all_weights() -> None:
    size = (TINYRAG / "model.safetensors").stat().st_size
    stored = read_weights_bytes(str(TINYRAG), "auto")
    assert stored is not None
    assert 0.99 * size < stored < size
    assert read_weights_bytes(str(TINYRAG), "float32") == 2 * stored


def test_a_folder_without_readable_weights_has_no_size(tmp_path: Path) -> None:
    assert read_weights_bytes(str(tmp_path), "auto") is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert read_weights_bytes(str(tmp_path), "auto") is None


class _Hub(http.server.SimpleHTTPRequestHandler):
    """Serves files under the paths of the hub."""

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.replace("/resolve/main", ""))

    def send_error(self, code: int, *_: object) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def end_headers(self) -> None:
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "0" * 40)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  as its base
        """Keep the test's output clean."""


@pytest.fixture
def hub(model: Path) -> Iterator[str]:
    handler = lambda *args: _Hub(*args, directory=str(model.parents[1]))  # noqa: E731
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_model_of_the_hub_is_measured_without_its_weights(hub: str, tmp_path: Path) -> None:
    """In a process of its own, because the hub's library reads its address at import."""
    code = (
        "from ragcache_kv.model_weights import read_weights_bytes as read\n"
        "print([read('org/model', 'auto'), read('org/model', 'float32'), read('org/no', 'auto')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[152, 216, None]"
