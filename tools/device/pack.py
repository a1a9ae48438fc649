"""Pack vLLM and what it needs into ``.gpu/packed``, for a GPU machine without network.

::

    python tools/device/pack.py

Takes wheels from the configured package index, or from ``.gpu/wheels`` where an earlier run put
them. Cuts the compiled parts of vLLM to one GPU architecture and compresses all. Prints one JSON
object as its last line.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a program

from tools.device.fat_binary import cut
from tools.device.packages import (
    ARCHITECTURE,
    FOLDER,
    LIBRARIES,
    MANIFEST,
    PACKED,
    PYTHON,
    WHEELS,
    is_needed,
    requirements,
    wheel_of,
)

LIMIT_BYTES: Final = 49_500_000
"""Of the packed folder. With the tracked files of the repository it stays under 64 MiB."""

_PLATFORMS: Final = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)),
    *("manylinux2014_x86_64", "manylinux1_x86_64"),
)
"""pip compares the names of platforms and not their versions."""


def download() -> dict[str, Path]:
    """Return the wheel of each requirement. Fetches only those that are not there."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    wanted = requirements()
    missing = [one for one in wanted if wheel_of(one, list(WHEELS.iterdir())) is None]
    if missing:
        print(f"pack: downloading {len(missing)} wheels", file=sys.stderr)
        target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
        target += [f"--platform={name}" for name in _PLATFORMS]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *target]
        subprocess.run([*command, "--dest", str(WHEELS), *missing], check=True)
    found = {one: wheel_of(one, list(WHEELS.iterdir())) for one in wanted}
    absent = [one for one, path in found.items() if path is None]
    if absent:
        raise LookupError(f"pip fetched no wheel of {', '.join(absent)}")
    return {one: path for one, path in found.items() if path is not None}


def pack_library(wheel: Path, name: str, target: Path) -> dict[str, Any]:
    """Write one cut library of vLLM's wheel; return its line of the manifest."""
    with zipfile.ZipFile(wheel) as archive:
        library = bytearray(archive.read(name))
    original = _sha256(library)
    done = cut(library, ARCHITECTURE)
    _write(target, iter([(name, bytes(library))]))
    return {
        "original_sha256": original,
        "sha256": _sha256(library),
        "fat_binaries": done.fat_binaries,
        "code_bytes": done.code_bytes,
        "kept_bytes": done.kept_bytes,
    }


def pack_vllm(wheel: Path, target: Path) -> None:
    """Write vLLM's Python files."""
    _write(target, _files(wheel, is_needed))


def pack_packages(wheels: list[Path], target: Path) -> None:
    """Write all other packages."""
    _write(target, (file for wheel in wheels for file in _files(wheel, lambda _: True)))


def _files(wheel: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if wanted(name) and not name.endswith("/"):
                yield name, archive.read(name)


def _write(target: Path, files: Iterator[tuple[str, bytes]]) -> None:
    """Write an archive whose bytes depend on its files only."""
    with (
        lzma.open(target, "wb", preset=9 | lzma.PRESET_EXTREME) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def _sha256(content: bytes | bytearray) -> str:
    return hashlib.sha256(content).hexdigest()


def pack() -> dict[str, Any]:
    """Write the folder and its manifest; return the manifest."""
    wheels = download()
    vllm = next(path for one, path in wheels.items() if one.startswith("vllm=="))
    PACKED.mkdir(parents=True, exist_ok=True)
    for old in PACKED.iterdir():
        old.unlink()
    # The largest library first: it takes longest to compress.
    by_size = sorted(LIBRARIES, key=lambda name: -zipfile.ZipFile(vllm).getinfo(name).file_size)
    with ProcessPoolExecutor() as pool:
        libraries = {
            name: pool.submit(pack_library, vllm, name, PACKED / f"library-{index}.tar.xz")
            for index, name in enumerate(by_size)
        }
        others = [path for path in wheels.values() if path != vllm]
        written = [
            pool.submit(pack_packages, others, PACKED / "packages.tar.xz"),
            pool.submit(pack_vllm, vllm, PACKED / "vllm.tar.xz"),
        ]
        for future in written:
            future.result()
        cut_libraries = {name: future.result() for name, future in libraries.items()}
    archives = sorted(PACKED.glob("*.tar.xz"))
    manifest = {
        "python": PYTHON,
        "architecture": f"sm_{ARCHITECTURE}",
        "packages": {one: _sha256(path.read_bytes()) for one, path in sorted(wheels.items())},
        "libraries": cut_libraries,
        "archives": {path.name: _sha256(path.read_bytes()) for path in archives},
        "packed_bytes": sum(path.stat().st_size for path in archives),
    }
    (PACKED / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return manifest


def main() -> int:
    """Run the command; 1 if the folder is too large."""
    started = time.monotonic()
    packed = pack()["packed_bytes"]
    found = {
        "packed_bytes": packed,
        "limit_bytes": LIMIT_BYTES,
        "seconds": round(time.monotonic() - started, 1),
        "folder": str(PACKED.relative_to(FOLDER.parent)),
    }
    print(json.dumps(found))
    return 0 if packed <= LIMIT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
