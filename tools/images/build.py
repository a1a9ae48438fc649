"""Images from recipes: which layers each has, in which order, and the archives."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final

from ragcache_cli.models.cache import cache_folder, fetch_model
from ragcache_cli.models.catalog import FETCHED_MODELS, FetchedModel
from ragcache_core.errors import InvalidInput
from tools.images import environment
from tools.images.archive import Image
from tools.images.closure import Project, closure, shared_groups
from tools.images.debian import Base
from tools.images.layer import Entry, Layer, LayerCache, digest_of, folder_entries, held
from tools.images.recipe import Recipe, parse_recipe

ROOT: Final = Path(__file__).resolve().parents[2]

IMAGES: Final = ("gateway", "retriever", "engine", "cachestore", "operator", "tools")
"""The targets of the Dockerfile that are images."""

_CODE: Final = [
    digest_of(Path(__file__).with_name(f"{module}.py").read_bytes())
    for module in ("debian", "environment", "layer")
]
"""What a layer's content follows from beside its inputs."""


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image as an OCI archive. name: as a pod names it, ``ragcache/gateway:TAG``."""

    name: str
    path: Path


def make_images(
    names: Sequence[str],
    tag: str | None = None,
    *,
    images: str = "ragcache",
    source: Path = ROOT,
    log: Callable[[str], None] = lambda line: None,
) -> list[Image]:
    """Images (of IMAGES), made of cached layers: seconds where nothing changed.

    tag: the project's version by default. images: what comes before an image's name. source: the
    checkout whose Dockerfile and packages are built; everything else comes from this environment.
    Raises InvalidInput if something needed is missing here, with what to do about it.
    """
    project = Project.read(source)
    # Layers are shared by all images, so that they are the same whichever are made now; of another
    # checkout by those alone that are asked for: the others may need what is not installed here.
    sharing = IMAGES if source == ROOT else names
    recipes = {name: _recipe(source, name, project) for name in sharing}
    found = environment.find_installed()
    needs = {
        name: closure(project, recipe.extra, found.get, recipe.unused)
        for name, recipe in recipes.items()
    }
    groups = shared_groups(needs, lambda name: environment.size(found[name]))
    cache = cache_folder() / "images"
    with _lock(cache):
        builder = _Builder(source, Base.make(cache), LayerCache(cache / "layers"), log)
        made = []
        for name in names:
            parts = [[found[each] for each in group] for users, group in groups if name in users]
            layers = builder.layers(name, recipes[name], parts)
            made.append(Image(f"{images}/{name}:{tag or project.version}", recipes[name], layers))
        builder.cache.prune()
    return made


def build_images(
    names: Sequence[str],
    folder: Path,
    tag: str | None = None,
    *,
    images: str = "ragcache",
    source: Path = ROOT,
    log: Callable[[str], None] = lambda line: None,
) -> list[BuiltImage]:
    """The images of make_images as archives ``folder/NAME-TAG.tar``."""
    built = []
    for image in make_images(names, tag, images=images, source=source, log=log):
        file = f"{image.name.rpartition('/')[2].replace(':', '-')}.tar"
        image.save(folder / file)
        built.append(BuiltImage(image.name, folder / file))
    return built


@contextmanager
def _lock(cache: Path) -> Iterator[None]:
    """One build at a time: two would make the same layers."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _recipe(source: Path, name: str, project: Project) -> Recipe:
    path = source / "Dockerfile"
    try:
        text = path.read_text()
    except OSError as error:
        problem = f"{path} is not there ({error.strerror})"
        raise InvalidInput("source", problem, "name a checkout that has it") from error
    return parse_recipe(text, name, {"VERSION": project.version})


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes the layers of images out of one checkout and one environment."""

    source: Path
    base: Base
    cache: LayerCache
    log: Callable[[str], None]

    def layers(
        self, name: str, recipe: Recipe, parts: Sequence[Sequence[Distribution]]
    ) -> tuple[Layer, ...]:
        """From what all images share to what changes most often."""
        layers = [self._base(recipe)]
        layers += [self._installed(part) for part in parts]
        if recipe.packages:
            layers.append(self._packages(recipe))
        layers += [self._copied(source, target) for source, target in recipe.files]
        if recipe.has_bundled_models:
            layers += [self._fetched(model) for model in FETCHED_MODELS.values()]
        layers.append(self._own(name, recipe))
        return tuple(layers)

    def _base(self, recipe: Recipe) -> Layer:
        return self._layer(
            "Debian's base",
            [*self.base.inputs, recipe.user],
            lambda: [*self.base.entries(recipe.user), *environment.skeleton()],
        )

    def _installed(self, part: Sequence[Distribution]) -> Layer:
        biggest = max(part, key=environment.size).name
        return self._layer(
            f"{biggest} ({len(part)} distributions)",
            [environment.key(each) for each in part],
            lambda: environment.installed(part, Path(sys.prefix)),
        )

    def _packages(self, recipe: Recipe) -> Layer:
        return self._layer(
            f"Debian's {', '.join(recipe.packages)}",
            [*self.base.inputs, *recipe.packages],
            lambda: self.base.added_by(recipe.packages),
        )

    def _copied(self, source: str, target: str) -> Layer:
        return self._layer(
            source,
            [target, environment.source_key(self.source, [source])],
            lambda: folder_entries(self.source / source, target),
        )

    def _fetched(self, model: FetchedModel) -> Layer:
        target = f"/models/{model.name}"
        return self._layer(
            f"{target} from {model.requirement}",
            [target, sorted((name, check.sha256) for name, check in model.files.items())],
            lambda: folder_entries(fetch_model(model.name, report=self.log), target),
        )

    def _own(self, name: str, recipe: Recipe) -> Layer:
        def entries() -> list[Entry]:
            with environment.built(self.source, recipe.sources) as (distribution, prefix):
                return held(environment.installed([distribution], prefix))

        inputs = environment.source_key(self.source, recipe.sources)
        return self._layer(f"{name}'s own package", inputs, entries)

    def _layer(self, title: str, inputs: object, entries: Callable[[], Sequence[Entry]]) -> Layer:
        started_s = time.monotonic()
        layer = self.cache.get([_CODE, environment.PYTHON, inputs], entries)
        seconds = time.monotonic() - started_s
        self.log(f"{title}: {layer.size / 1e6:.0f} MB, {seconds:.1f} s")
        return layer
