"""The size of weights from real safetensors files and pickles, on disk and over HTTP."""

from __future__ import annotations

import http.server
import json
import os
import re
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

from ragcache_kv.model.weights import read_weights_bytes

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
    [("auto", 64 + 32 + 24), ("float32", 128 + 64 + 24), ("bfloat16", 64 + 32 + 24)],
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


def save(folder: Path, name: str, **tensors: int) -> None:
    """Save tensors of 16-bit numbers, each with a number of elements."""
    save_file({key: np.ones(size, np.float16) for key, size in tensors.items()}, folder / name)


@pytest.mark.parametrize(
    ("files", "num_bytes"),
    [
        # Mistral's format is what vLLM prefers.
        ({"consolidated-1": {"a": 4}, "consolidated-2": {"b": 5}, "adapter_model": {"c": 6}}, 18),
        # The same weights in two formats, of which a flag chooses one.
        ({"consolidated": {"a": 9}, "model-1": {"x": 4}, "model-2": {"y": 4}}, 16),
        ({"consolidated": {"a": 7}, "model-1": {"x": 4}, "model-2": {"y": 4}}, 14),
        # Files that are no part of the model.
        ({"model": {"a": 4}, "adapter_model": {"b": 5}, "optimizer": {"c": 90}}, 8),
        # One file and its shards. vLLM loads a tensor twice into the same memory.
        ({"model": {"a": 4, "b": 5}, "model-1": {"a": 4}, "model-2": {"b": 5}}, 18),
        # Other names: vLLM loads all files.
        ({"weights-1": {"a": 4}, "weights-2": {"b": 5}}, 18),
    ],
)
def test_only_files_that_vllm_loads_count(
    tmp_path: Path, files: dict[str, dict[str, int]], num_bytes: int
) -> None:
    for name, tensors in files.items():
        save(tmp_path, f"{name}.safetensors", **tensors)
    assert read_weights_bytes(str(tmp_path), "auto") == num_bytes


def test_mistrals_index_names_its_files(tmp_path: Path) -> None:
    save(tmp_path, "consolidated-1.safetensors", a=4)
    save(tmp_path, "consolidated-old.safetensors", b=5)
    index = {"weight_map": {"a": "consolidated-1.safetensors"}}
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    assert read_weights_bytes(str(tmp_path), "auto") == 8


def test_float32_counts_as_the_16_bits_that_vllm_loads(tmp_path: Path) -> None:
    save_file({"a": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    sizes = [read_weights_bytes(str(tmp_path), dtype) for dtype in ("auto", "float32")]
    assert sizes == [16, 32]


def test_pickled_weights_count_by_their_least_size(tmp_path: Path) -> None:
    """Numbers of a pickle can have 32 bits, of which loading drops half."""
    (tmp_path / "optimizer.bin").write_bytes(bytes(400))
    assert read_weights_bytes(str(tmp_path), "auto") is None
    for i in (1, 2):
        (tmp_path / f"pytorch_model-0000{i}-of-00002.bin").write_bytes(bytes(100))
    sizes = [read_weights_bytes(str(tmp_path), dtype) for dtype in ("auto", "bfloat16", "float32")]
    assert sizes == [100, 100, 200]
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(180))
    assert read_weights_bytes(str(tmp_path), "auto") == 90
    save(tmp_path, "model.safetensors", a=4)
    assert read_weights_bytes(str(tmp_path), "auto") == 8


def test_a_folder_of_unknown_files_has_no_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.pt").write_bytes(bytes(100))
    assert read_weights_bytes(str(tmp_path), "auto") is None
    assert f"size of weights is unknown source={tmp_path}" in caplog.text


COMMIT = "7" * 40


class _Hub(http.server.SimpleHTTPRequestHandler):
    """Serves the files of one model under the paths of the hub, on its branch and at a commit."""

    def translate_path(self, path: str) -> str:
        return super().translate_path(re.sub(f"/resolve/(main|{COMMIT})", "", path))

    def do_GET(self) -> None:
        model, mark, commit = self.path.partition("?")[0].partition("/tree/")
        if not mark or commit != COMMIT:
            super().do_GET()
            return
        files = Path(self.translate_path(model.removeprefix("/api/models"))).iterdir()
        tree = [
            {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": "1" * 40}
            for one in files
        ]
        body = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, *_: object) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def end_headers(self) -> None:
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", COMMIT)
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
        "from ragcache_kv.model.weights import read_weights_bytes as read\n"
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
    assert done.stdout.splitlines()[-1] == "[120, 216, None]"


def test_a_commit_pins_what_is_read_of_the_hub(hub: str, model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text("{}")
    code = (
        "from ragcache_kv.model.folder import find_tokenizer\n"
        "from ragcache_kv.model.weights import read_weights_bytes as read\n"
        f"pinned = 'org/model@{COMMIT}'\n"
        f"other = 'org/model@{'8' * 40}'\n"
        "print([read(pinned, 'auto'), read(other, 'auto')])\n"
        "print(find_tokenizer(pinned))\n"
        "find_tokenizer(other)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    sizes, folder = done.stdout.splitlines()
    assert sizes == "[120, None]"
    assert folder.endswith(f"/snapshots/{COMMIT}")
    assert "InvalidInput: model.source: 'org/model'" in done.stderr
