"""The GPUs of a machine: what ``nvidia-smi`` says, and who gets which.

A script stands in for the driver's program. Everything else is as on a machine with a GPU.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ragcache_cli.local.component import components_from
from ragcache_cli.local.gpus import Gpu, check_gpus, find_gpus, gpus_for
from ragcache_cli.local.placement import LocalPlacement
from ragcache_core.errors import InvalidInput
from ragcache_operator.builders import build_children
from tests.kit.operator import make_cache

H100 = "NVIDIA H100 80GB HBM3"
TABLE = f"0, GPU-5e0f, {H100}, 81559\n1, GPU-77aa, {H100}, 81559\n"


def driver(folder: Path, said: str, status: int = 0) -> dict[str, str]:
    """Return the environment of a machine whose driver prints this."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def engines(*devices: str) -> list[dict[str, Any]]:
    return [{"name": f"e{i}", "device": device} for i, device in enumerate(devices)]


def test_the_driver_names_its_gpus(tmp_path: Path) -> None:
    found = find_gpus(driver(tmp_path, TABLE))
    assert found == [
        Gpu("GPU-5e0f", "0", H100, 81559 << 20),
        Gpu("GPU-77aa", "1", H100, 81559 << 20),
    ]


def test_only_visible_gpus_count(tmp_path: Path) -> None:
    environment = driver(tmp_path, TABLE)
    for allowed in ("1", "GPU-77aa", "GPU-77", " 1, 9"):
        environment["CUDA_VISIBLE_DEVICES"] = allowed
        assert [gpu.index for gpu in find_gpus(environment)] == ["1"]
    with pytest.raises(InvalidInput, match="CUDA_VISIBLE_DEVICES=7 allows"):
        find_gpus(environment | {"CUDA_VISIBLE_DEVICES": "7"})


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ("No devices were found", 0, "lists no GPU"),
        ("couldn't communicate with the NVIDIA driver", 9, "fails: couldn't communicate"),
    ],
)
def test_a_driver_without_gpus_is_named(tmp_path: Path, said: str, status: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        find_gpus(driver(tmp_path, said, status))


def test_a_machine_without_a_driver_runs_no_engine_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_for(make_cache(engines=engines("cpu")).spec) == ()
    with pytest.raises(InvalidInput) as refused:
        gpus_for(make_cache(engines=engines("cpu", "cuda")).spec)
    assert refused.value.problem.endswith("no NVIDIA GPU: nvidia-smi is not installed")
    assert refused.value.fix.startswith("install the NVIDIA driver, or set engines[].device to cpu")
    with pytest.raises(InvalidInput, match="no NVIDIA GPU"):
        gpus_for(make_cache(retriever={"gpu": {}}).spec)


def test_each_group_needs_a_gpu_of_its_own() -> None:
    theirs = {"name": "theirs", "url": "http://vllm.ml.svc:8000"}
    spec = make_cache(engines=[theirs, *engines("cuda", "cuda")]).spec
    check_gpus(spec, 2, "2.13.0")
    with pytest.raises(InvalidInput, match=r"engines\[2\].device.*this machine has 1"):
        check_gpus(spec, 1, "2.13.0")


def test_each_rank_needs_a_gpu_of_its_own() -> None:
    [ranked] = engines("cuda")
    spec = make_cache(model={"source": "hf:a/b"}, engines=[ranked | {"tensorParallel": 3}]).spec
    check_gpus(spec, 3, "2.13.0")
    with pytest.raises(InvalidInput, match=r"engines\[0\].tensorParallel.*this machine has 2"):
        check_gpus(spec, 2, "2.13.0")


def test_an_engine_sees_the_gpus_of_all_its_ranks(tmp_path: Path) -> None:
    ranked, other = engines("cuda", "cuda")
    model = {"source": f"path:{_model(tmp_path)}"}
    other |= {"model": {**model, "name": "other"}}
    cache = make_cache(model=model, engines=[ranked | {"tensorParallel": 2}, other])
    children = build_children(cache, LocalPlacement(tmp_path / "data", 8123, count(20_000)))
    found = components_from(children, cache.metadata.name, ["3", "5", "7"])
    devices = [part.env.get("CUDA_VISIBLE_DEVICES") for part in found if part.kind == "engine"]
    assert devices == ["3,5", "7"]


def test_a_retriever_on_a_gpu_has_its_own() -> None:
    spec = make_cache(engines=engines("cuda"), retriever={"gpu": {}}).spec
    check_gpus(spec, 2, "2.13.0")
    with pytest.raises(InvalidInput, match=r"spec.retriever.gpu.*this machine has 1"):
        check_gpus(spec, 1, "2.13.0")
    check_gpus(make_cache(engines=engines("cpu"), retriever={"gpu": {}}).spec, 1, "2.13.0")


def test_one_machine_has_one_build_of_vllm() -> None:
    spec = make_cache(engines=engines("cuda", "cpu")).spec
    with pytest.raises(InvalidInput, match=r"engines\[1\].device.*one device for all"):
        check_gpus(spec, 2, "2.13.0")


def test_a_torch_for_processors_is_refused() -> None:
    spec = make_cache(engines=engines("cuda")).spec
    with pytest.raises(InvalidInput, match=r"engines\[0\].device.*2.13.0\+cpu.*engine-gpu"):
        check_gpus(spec, 1, "2.13.0+cpu")


def test_each_engine_on_a_gpu_sees_one(tmp_path: Path) -> None:
    cache = make_cache(
        model={"source": f"path:{_model(tmp_path)}"}, engines=engines("cuda", "cpu", "cuda")
    )
    children = build_children(cache, LocalPlacement(tmp_path / "data", 8123, count(20_000)))
    found = components_from(children, cache.metadata.name, ["3", "5"])
    assert {part.name: part.env.get("CUDA_VISIBLE_DEVICES") for part in found} == {
        "cachestore": None,
        "retriever": None,
        "engine-e0": "3",
        "engine-e1": None,
        "engine-e2": "5",
        "gateway": None,
    }


def _model(folder: Path) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model
