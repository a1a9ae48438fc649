"""Which wheels and files of them the packed folder holds.

The GPU machine brings torch, Triton, transformers and what these need (README.md). The folder adds
vLLM without the code of other architectures, and the packages that it and our services import.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".gpu"
"""Ignored by git."""

WHEELS: Final = FOLDER / "wheels"
PACKED: Final = FOLDER / "packed"
MANIFEST: Final = "manifest.json"

PYTHON: Final = "3.12"
"""Of the GPU machine; wheels with compiled code are for it."""

ARCHITECTURE: Final = 90
"""Hopper: H100, H200."""

LIBRARIES: Final = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
"""Compiled parts of vLLM that a decoder on Hopper needs. Not FlashAttention 2, DeepGEMM, FlashMLA
and the HTTP front end in Rust."""

_NOT_NEEDED: Final = re.compile(
    r"\.(so|h|hpp|cuh|cu|inl)$|^vllm/(vllm-rs$|benchmarks/)|/static/|/third_party/fmha_sm100/"
)

PACKAGES: Final = (
    # vLLM imports them when its engine starts.
    *("annotated-types", "apache-tvm-ffi", "astor", "blake3", "cachetools", "cbor2"),
    *("compressed-tensors", "depyf", "dill", "distro", "fastapi", "httpx2", "ijson", "jiter"),
    *("jsonschema", "jsonschema-specifications", "lark", "llguidance", "loguru", "msgspec"),
    *("openai", "oss-harmony", "partial-json-parser", "pybase64", "pydantic", "pydantic-core"),
    *("pydantic-settings", "python-dotenv", "python-json-logger", "pyzmq", "referencing"),
    *("rpds-py", "setproctitle", "sniffio", "starlette", "typing-extensions"),
    *("typing-inspection", "watchfiles", "xgrammar"),
    # The cache store and the connector.
    *("grpcio", "grpcio-health-checking", "opentelemetry-api"),
    *("opentelemetry-sdk", "opentelemetry-semantic-conventions", "protobuf", "rocksdict"),
)


def is_needed(path: str) -> bool:
    """Tell whether a file of vLLM's wheel belongs into the folder, apart from ``LIBRARIES``."""
    return not _NOT_NEEDED.search(path)


def requirements() -> list[str]:
    """Return vLLM and all packages as ``name==version``, from the project's own pins.

    Raises:
        LookupError: A package has no pin in constraints.txt.
    """
    pins = _pins((ROOT / "constraints.txt").read_text().splitlines())
    missing = [name for name in PACKAGES if _normalized(name) not in pins]
    if missing:
        raise LookupError(f"constraints.txt pins no version of {', '.join(missing)}")
    return [_vllm(), *(pins[_normalized(name)] for name in PACKAGES)]


def wheel_of(requirement: str, wheels: Sequence[Path]) -> Path | None:
    """Return the wheel of a requirement, or None."""
    name, version = requirement.split("==")
    for path in wheels:
        its_name, its_version, *_ = path.name.split("-")
        if _normalized(its_name) == _normalized(name) and its_version == version:
            return path
    return None


def _pins(lines: Sequence[str]) -> dict[str, str]:
    pinned = (line.split(";")[0].strip() for line in lines if "==" in line)
    return {_normalized(line.split("==")[0]): line for line in pinned if line[0] != "#"}


def _vllm() -> str:
    """Return the CUDA build of the vLLM that the project supports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted: list[str] = project["optional-dependencies"]["engine-gpu"]
    return next(line for line in wanted if line.startswith("vllm=="))


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
