"""The images' recipes, layers and archives; containers of them run in tests/cluster."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cli.models.catalog import FETCHED_MODELS
from ragcache_core.errors import InvalidInput
from tools.images.archive import Image, full_name
from tools.images.build import IMAGES, ROOT
from tools.images.closure import Project, closure, shared_groups
from tools.images.debian import tree
from tools.images.environment import PREFIX, PYTHON, built, find_installed, installed
from tools.images.layer import (
    Entry,
    Layer,
    LayerCache,
    digest_of,
    folder_entries,
    portable_bytecode,
    with_parents,
    write_layer,
)
from tools.images.recipe import Recipe, parse_recipe


def recipe_of(name: str) -> Recipe:
    return parse_recipe((ROOT / "Dockerfile").read_text(), name, {"VERSION": "1.2.3"})


# The Dockerfile


@pytest.mark.parametrize("name", IMAGES)
def test_every_target_describes_a_restricted_image(name: str) -> None:
    recipe = recipe_of(name)
    assert recipe.user == "10001:10001"
    assert recipe.env["PATH"].startswith(f"/{PREFIX}/bin:")
    assert recipe.env["HOME"] == "/tmp"
    assert recipe.labels["org.opencontainers.image.version"] == "1.2.3"
    assert recipe.labels["org.opencontainers.image.title"]
    assert recipe.entrypoint


@pytest.mark.parametrize("name", IMAGES)
def test_every_target_copies_what_there_is_and_installs_an_extra_there_is(name: str) -> None:
    recipe = recipe_of(name)
    for path in (*recipe.sources, *(source for source, _ in recipe.files)):
        assert (ROOT / path).exists(), path
    Project.read(ROOT).requirements(recipe.extra)


def test_an_image_has_a_part_s_own_packages_and_no_other_part_s() -> None:
    for name in ("gateway", "retriever", "engine", "cachestore"):
        parts = {path for path in recipe_of(name).sources if path.startswith("services/")}
        assert parts == {f"services/{name}"}
    assert not any(path.startswith("services/") for path in recipe_of("operator").sources)


def test_the_images_that_read_the_model_have_the_bundled_ones() -> None:
    with_models = {name for name in IMAGES if recipe_of(name).has_bundled_models}
    assert with_models == {"gateway", "retriever", "engine"}
    for name in with_models:
        assert ("models/tinyrag/model", "/models/tinyrag") in recipe_of(name).files
    for model in FETCHED_MODELS:
        made = f"python -m ragcache_cli.models {model} /models/{model}\n"
        assert made in (ROOT / "Dockerfile").read_text()


def test_a_recipe_takes_arguments_variables_and_continued_lines() -> None:
    recipe = parse_recipe(
        """
        FROM some AS sources
        ARG EXTRA=lost
        COPY a.toml \\
            # a comment between
            b.txt ./
        FROM some AS base
        ENV PATH=/opt/bin:$PATH
        USER 5:6
        FROM sources AS build
        ARG EXTRA=small
        ARG UNUSED="one two"
        COPY c.txt ./
        FROM base AS image
        ARG VERSION=dev
        COPY --from=build /opt /opt
        COPY weights /models/x
        ENV MODE="two words"
        LABEL version="$VERSION"
        EXPOSE 80 81
        VOLUME /data
        ENTRYPOINT ["run", "it"]
        FROM base AS other
        COPY --from=build /opt /opt
        """,
        "image",
        {"EXTRA": "large"},
    )
    assert recipe.extra == "large"
    assert recipe.unused == ("one", "two")
    assert recipe.sources == ("a.toml", "b.txt", "c.txt")
    assert recipe.files == (("weights", "/models/x"),)
    assert recipe.env["PATH"].startswith("/opt/bin:/usr/local/sbin:")
    assert recipe.env["MODE"] == "two words"
    assert recipe.labels == {"version": "dev"}
    assert (recipe.ports, recipe.volumes, recipe.user) == ((80, 81), ("/data",), "5:6")
    assert recipe.entrypoint == ("run", "it")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("FROM a AS x\nFROM b AS image\nHEALTHCHECK x", "line 3"),
        ("FROM a AS x\nCOPY --chown=1 x y\nFROM b AS image", "line 2"),
        ("FROM a AS image", "copies from no build stage"),
        ("FROM a AS x", "no stage 'image'"),
        ("FROM a", "line 1"),
        ("USER 5:6\nFROM a AS image", "line 1"),
    ],
)
def test_what_a_recipe_cannot_carry_is_refused(text: str, where: str) -> None:
    with pytest.raises(InvalidInput, match=where):
        parse_recipe(text, "image")


# Which distributions


class Installed(PathDistribution):
    """A distribution that says what it needs."""

    def __init__(self, name: str, version: str, *requires: str) -> None:
        super().__init__(Path())
        self._text = "\n".join(
            [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        )

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        return self._text if filename == "METADATA" else None


def needed(extra: str, *found: Distribution, unused: tuple[str, ...] = ()) -> set[str]:
    extras = {
        "web": ("server[fast]>=1", "app[base]"),
        "base": ("Shared.Lib",),
        "all": ("app[web]",),
    }
    project = Project("app", "1", ("core-lib",), extras)
    by_name: dict[str, Distribution] = {each.name: each for each in found}
    return set(closure(project, extra, by_name.get, unused))


CORE = Installed("core-lib", "1")
SERVER = Installed(
    "server",
    "1.5",
    "loop; extra == 'fast'",
    "slow; extra == 'slow'",
    "elsewhere; sys_platform == 'nowhere'",
)
LOOP = Installed("loop", "2", "server")
SHARED = Installed("shared-lib", "1")


def test_an_extra_needs_what_its_requirements_need_on_this_platform() -> None:
    assert needed("web", CORE, SERVER, LOOP, SHARED) == {"core-lib", "server", "loop", "shared-lib"}


def test_an_extra_of_the_project_itself_brings_its_own() -> None:
    assert needed("base", CORE, SHARED) == {"core-lib", "shared-lib"}
    assert needed("all", CORE, SERVER, LOOP, SHARED) == needed("web", CORE, SERVER, LOOP, SHARED)


def test_what_is_unused_is_left_out() -> None:
    assert needed("web", CORE, SERVER, SHARED, unused=("Loop",)) == {
        "core-lib",
        "server",
        "shared-lib",
    }


@pytest.mark.parametrize(
    ("found", "says"),
    [((CORE, SERVER, SHARED), "loop"), ((CORE, Installed("server", "0.9"), LOOP, SHARED), "0.9")],
)
def test_what_is_missing_or_does_not_fit_is_named(
    found: tuple[Distribution, ...], says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        needed("web", *found)


def test_an_unknown_extra_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match="all, base, web"):
        needed("wbe", CORE)


def test_this_environment_has_all_that_every_image_needs() -> None:
    project, found = Project.read(ROOT), find_installed()
    for name in IMAGES:
        recipe = recipe_of(name)
        assert closure(project, recipe.extra, found.get, recipe.unused)


@given(
    st.dictionaries(
        st.sampled_from("ABCDEF"), st.sets(st.sampled_from("uvwxyz"), min_size=1), min_size=1
    )
)
def test_groups_hold_everything_an_image_needs_once(needs: dict[str, set[str]]) -> None:
    groups = shared_groups(needs, lambda name: ord(name) - ord("t"))
    for image, names in needs.items():
        layers = [each for users, each_names in groups if image in users for each in each_names]
        assert sorted(layers) == sorted(names)


def test_what_saves_most_by_being_shared_lies_lowest() -> None:
    sizes = {"torch": 900, "numpy": 70, "faiss": 300}
    needs = {"a": ["torch", "numpy", "faiss"], "b": ["numpy", "torch"], "c": ["numpy"]}
    assert [names for _, names in shared_groups(needs, sizes.__getitem__)] == [
        ["torch"],
        ["numpy"],
        ["faiss"],
    ]


# Layers


def layer_of(entries: Iterable[Entry]) -> bytes:
    file = io.BytesIO()
    assert write_layer(file, entries) == digest_of(file.getvalue())
    return file.getvalue()


def members(content: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {member.name: member for member in tar}


ENTRIES = (
    Entry("a", mode=0o1777),
    Entry("a/data", b"content", 0o755),
    Entry("a/link", link="data"),
    Entry("b", b"", uid=5, gid=6),
)


@given(st.permutations(ENTRIES))
def test_a_layer_depends_on_its_content_alone(entries: list[Entry]) -> None:
    assert layer_of(entries) == layer_of(ENTRIES)


def test_a_layer_has_modes_owners_and_links_but_no_times(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("read from disk")
    found = members(layer_of([*ENTRIES, Entry("file", file)]))
    assert list(found) == sorted(found)
    assert {member.mtime for member in found.values()} == {0}
    assert {member.uname for member in found.values()} == {""}
    assert found["a"].isdir()
    assert found["a"].mode == 0o1777
    assert found["a/link"].linkname == "data"
    assert (found["b"].uid, found["b"].gid) == (5, 6)
    assert found["file"].size == len("read from disk")


def test_folders_above_files_are_there_and_readable(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir(mode=0o700)
    (tmp_path / "deep" / "file").write_text("x")
    paths = [entry.path for entry in folder_entries(tmp_path, "/models/x")]
    assert paths == ["models", "models/x", "models/x/deep", "models/x/deep/file"]
    assert {entry.mode for entry in with_parents([Entry("a/b/c")])[:2]} == {0o755}


def test_a_cached_layer_is_made_once_for_the_same_inputs(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path)
    made: list[int] = []

    def entries() -> tuple[Entry, ...]:
        made.append(1)
        return ENTRIES

    first, again = cache.get(["x"], entries), cache.get(["x"], entries)
    assert first == again
    assert first.digest == f"sha256:{digest_of(first.path.read_bytes())}"
    other = cache.get(["y"], entries)
    assert other.path != first.path
    assert other.digest == first.digest
    assert len(made) == 2


def test_layers_nobody_asked_for_go_away_in_time(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path)
    layer = cache.get(["x"], lambda: ENTRIES)
    cache.prune()
    assert layer.path.exists()
    cache.prune(now_s=layer.path.stat().st_mtime + 365 * 24 * 3600)
    assert not list(tmp_path.iterdir())


def test_bytecode_holds_whatever_the_time_of_its_source(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("def where():\n    return __file__\n")
    bytecode = portable_bytecode(source, "/image/module.py")
    assert bytecode is not None
    cached = Path(importlib.util.cache_from_source(str(source)))
    cached.parent.mkdir()
    cached.write_bytes(bytecode)
    os.utime(source, (0, 0))
    said = subprocess.run(
        [sys.executable, "-v", "-c", "import module; module.where()"],
        cwd=tmp_path,
        env={"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"matches {source}" in said.stderr


def test_bytecode_that_is_there_is_used_only_if_it_is_of_its_source(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("x = 1\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", tmp_path], check=True)
    first = portable_bytecode(source, "/image/module.py")
    source.write_text("x = 222\n")
    second = portable_bytecode(source, "/image/module.py")
    assert first is not None
    assert second is not None
    assert first[16:] != second[16:]
    source.write_text("{% template %}")
    assert portable_bytecode(source, "/image/module.py") is None


# Debian's and Python's files


def test_a_root_file_system_loses_this_machine_s_files_and_its_set_uid_bits(tmp_path: Path) -> None:
    for path in ("etc", "tmp", "usr/bin", "usr/share/doc/x", "var/log"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "etc/hostname").write_text("here")
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "tmp/left").write_text("x")
    (tmp_path / "usr/share/doc/x/copyright").write_text("x")
    (tmp_path / "usr/bin/su").write_text("x")
    (tmp_path / "usr/bin/su").chmod(0o4755)
    (tmp_path / "bin").symlink_to("usr/bin")
    entries = {entry.path: entry for entry in tree(tmp_path)}
    assert sorted(entries) == [
        *("bin", "etc", "tmp", "usr", "usr/bin", "usr/bin/su"),
        *("usr/share", "usr/share/doc", "var", "var/log"),
    ]
    assert entries["tmp"].mode == 0o1777
    assert entries["usr/bin/su"].mode == 0o755
    assert entries["bin"].link == "usr/bin"


def test_installed_files_move_to_the_image_s_environment() -> None:
    found = find_installed()
    entries = {entry.path: entry for entry in installed([found["pytest"]], Path(sys.prefix))}
    script = entries[f"{PREFIX}/bin/pytest"]
    assert isinstance(script.content, bytes)
    assert script.content.startswith(f"#!/{PREFIX}/bin/python".encode())
    assert script.mode == 0o755
    site = f"{PREFIX}/lib/{PYTHON}/site-packages"
    assert f"{site}/pytest/__init__.py" in entries
    assert f"{site}/pytest/__pycache__/__init__.{sys.implementation.cache_tag}.pyc" in entries
    assert sys.prefix.encode() not in script.content


def test_an_incomplete_distribution_is_refused(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: broken\nVersion: 1\n")
    (info / "RECORD").write_text("broken/__init__.py,,\n")
    with pytest.raises(InvalidInput, match="broken lacks"):
        installed([PathDistribution(info)], tmp_path)


def test_the_project_s_own_package_has_the_copied_sources_and_its_entry_points() -> None:
    with built(ROOT, recipe_of("engine").sources) as (distribution, prefix):
        paths = {entry.path for entry in installed([distribution], prefix)}
        plugins = {
            plugin.group: plugin.value
            for plugin in distribution.entry_points
            if plugin.group.startswith("vllm.")
        }
    site = f"{PREFIX}/lib/{PYTHON}/site-packages"
    assert f"{site}/ragcache_engine/plugin.py" in paths
    assert f"{site}/ragcache_core/py.typed" in paths
    assert not any("ragcache_gateway" in path for path in paths)
    assert plugins == {
        "vllm.general_plugins": "ragcache_engine.plugin:register",
        "vllm.stat_logger_plugins": "ragcache_engine.telemetry.step_logger:StepLogger",
    }


def test_a_checkout_that_does_not_build_says_why(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 1\n")
    with pytest.raises(InvalidInput, match="is not built"), built(tmp_path, ["pyproject.toml"]):
        pass


# Archives


@pytest.fixture
def image(tmp_path: Path) -> Image:
    recipe = Recipe(
        extra="x",
        env={"PATH": "/bin"},
        labels={"a": "b"},
        user="10001:10001",
        ports=(80,),
        volumes=("/data",),
        entrypoint=("run",),
    )
    cache = LayerCache(tmp_path / "layers")
    one, other = cache.get(["1"], lambda: ENTRIES), cache.get(["2"], lambda: ENTRIES[:2])
    return Image("ragcache/gateway:1", recipe, (one, other, one))


def blobs(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: _content(tar, member) for member in tar}


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


def test_an_archive_is_an_oci_layout_whose_digests_hold(image: Image, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    assert image.save(path)
    found = blobs(path)
    assert json.loads(found["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    for name, content in found.items():
        if name.startswith("blobs/sha256/"):
            assert name.endswith(digest_of(content))

    def blob(descriptor: dict[str, object]) -> bytes:
        content = found[f"blobs/{str(descriptor['digest']).replace(':', '/')}"]
        assert descriptor["size"] == len(content)
        return content

    [described] = json.loads(found["index.json"])["manifests"]
    assert described["annotations"]["io.containerd.image.name"] == "docker.io/ragcache/gateway:1"
    manifest = json.loads(blob(described))
    config = json.loads(blob(manifest["config"]))
    assert [digest_of(blob(layer)) for layer in manifest["layers"]] == [
        diff_id.removeprefix("sha256:") for diff_id in config["rootfs"]["diff_ids"]
    ]
    assert config["config"]["User"] == "10001:10001"
    assert config["config"]["Env"] == ["PATH=/bin"]
    assert config["config"]["ExposedPorts"] == {"80/tcp": {}}
    [docker] = json.loads(found["manifest.json"])
    assert docker["RepoTags"] == ["ragcache/gateway:1"]
    assert set(docker["Layers"]) | {docker["Config"]} <= found.keys()


def test_an_archive_is_written_again_only_if_it_differs(image: Image, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    assert image.save(path)
    assert not image.save(path)
    assert Image("ragcache/gateway:2", image.recipe, image.layers).save(path)
    path.write_bytes(b"no archive")
    assert image.save(path)


def test_a_command_gets_the_archive(image: Image, tmp_path: Path) -> None:
    saved, loaded = tmp_path / "saved.tar", tmp_path / "loaded.tar"
    image.save(saved)
    image.load(["dd", f"of={loaded}"])
    assert blobs(loaded) == blobs(saved)


def test_a_command_that_does_not_take_the_archive_says_why(image: Image) -> None:
    with pytest.raises(InvalidInput, match="no room"):
        image.load(["sh", "-c", "echo no room >&2; exit 3"])


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("ragcache/gateway:1", "docker.io/ragcache/gateway:1"),
        ("registry.example/ragcache/gateway:1", "registry.example/ragcache/gateway:1"),
        ("localhost:5000/gateway:1", "localhost:5000/gateway:1"),
    ],
)
def test_a_name_without_a_registry_gets_the_default_one(name: str, full: str) -> None:
    assert full_name(name) == full


def test_a_layer_on_disk_is_described_by_its_bytes(tmp_path: Path) -> None:
    layer = LayerCache(tmp_path).get(["x"], lambda: ENTRIES)
    assert layer == Layer(layer.path, layer.digest, len(layer.path.read_bytes()))
