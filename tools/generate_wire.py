"""Generate wire/ragcache_wire/v1 from the protos; with --check, fail if it is stale."""

from __future__ import annotations

import argparse
import filecmp
import os
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "wire" / "proto" / "ragcache" / "v1"
TARGET = ROOT / "wire" / "ragcache_wire" / "v1"


def generate(out: Path) -> None:
    """Write the generated modules below out, as package ragcache_wire.v1."""
    # The virtual path makes the modules import each other as ragcache_wire.v1.
    names = [f"ragcache_wire/v1/{proto.name}" for proto in sorted(PROTO.glob("*.proto"))]
    arguments = [
        "protoc",
        f"-Iragcache_wire/v1={PROTO}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *names,
    ]
    # protoc looks for the stub generators on the path; they are installed beside this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    (out / "ragcache_wire" / "v1" / "__init__.py").write_text(
        '"""Generated from wire/proto/ragcache/v1 by tools/generate_wire.py."""\n'
    )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "ragcache_wire" / "v1"
        names = sorted(path.name for path in fresh.iterdir())
        if check:
            _, changed, missing = filecmp.cmpfiles(fresh, TARGET, names, shallow=False)
            extra = {p.name for p in TARGET.iterdir() if p.is_file()} - set(names)
            if changed or missing or extra:
                stale = sorted({*changed, *missing, *extra})
                print(f"stale: {', '.join(stale)}; run `make wire`", file=sys.stderr)
                return 1
            return 0
        TARGET.mkdir(parents=True, exist_ok=True)
        for stale_file in TARGET.iterdir():
            if stale_file.is_file():
                stale_file.unlink()
        for name in names:
            (TARGET / name).write_bytes((fresh / name).read_bytes())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
