"""What ``--output json`` prints: one JSON value, with these names and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ragcache_cli.main import app

ROOT = Path(__file__).resolve().parents[4]
MANIFEST = ROOT / "examples" / "quickstart.yaml"


def output(*words: object) -> tuple[int, Any]:
    result = CliRunner().invoke(app, [*map(str, words), "--output", "json"])
    return result.exit_code, json.loads(result.stdout)


def test_render_prints_a_list_of_the_objects_that_it_prints_as_yaml() -> None:
    status, found = output("render", "-f", MANIFEST)
    assert status == 0
    assert found.keys() == {"apiVersion", "kind", "items"}
    assert (found["apiVersion"], found["kind"]) == ("v1", "List")
    as_text = CliRunner().invoke(app, ["render", "-f", str(MANIFEST)])
    assert found["items"] == [one for one in yaml.safe_load_all(as_text.stdout) if one]
    assert "Deployment" in {one["kind"] for one in found["items"]}


def test_doctor_prints_what_it_examined_and_how_to_fix_it(tmp_path: Path) -> None:
    status, found = output("doctor", "-f", MANIFEST, "--data", tmp_path / "data")
    assert all(one.keys() == {"what", "found", "fix"} for one in found)
    named = {one["what"]: one for one in found}
    assert {"python", "system", "memory", "disk", "data folder", "port", "model"} <= named.keys()
    assert (named["python"]["found"][:2], named["python"]["fix"]) == ("3.", "")
    assert str(tmp_path) in named["data folder"]["found"]
    assert status == int(any(one["fix"] for one in found))


def test_model_list_prints_each_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status, found = output("model", "list")
    assert status == 0
    assert all(
        one.keys() == {"source", "max_tokens", "num_bytes", "licence", "folder", "fix"}
        for one in found
    )
    names = [one["source"] for one in found]
    assert names
    assert len(set(names)) == len(names)
    as_text = CliRunner().invoke(app, ["model", "list"]).stdout
    assert all(name in as_text for name in names)


def test_model_fetch_prints_the_folder_of_a_model_that_is_here() -> None:
    status, found = output("model", "fetch", "tinyrag")
    assert (status, found.keys()) == (0, {"name", "folder"})
    assert found["name"] == "tinyrag"
    assert (Path(found["folder"]) / "config.json").is_file()
