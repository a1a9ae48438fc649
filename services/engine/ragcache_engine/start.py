"""Starts vLLM's server, if the engine's memory holds the model.

The container runs ``python -m ragcache_engine.start`` with the arguments of vLLM's server. The
operator derives the memory request before anything has read the model, and a request that ignores
the weights would put the engine on a node where the kernel kills it. So the start compares the
request with the real size of the weights. It ends with a message that the operator reports.

It imports nothing large, and vLLM replaces its process.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from ragcache_core.cost.engine_memory import (
    INSUFFICIENT_MEMORY_EXIT_CODE,
    MEMORY_REQUEST,
    EngineMemory,
    check_engine_memory,
)
from ragcache_core.errors import InvalidInput
from ragcache_kv.model.weights import read_weights_bytes
from ragcache_wire.settings import EngineSettings

SERVER: Final = "vllm.entrypoints.openai.api_server"

_LIMIT_FILES: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Memory limit of the container, in cgroups version 2 and 1."""

log = logging.getLogger("ragcache.engine")


def check_memory(arguments: Sequence[str], settings: EngineSettings) -> None:
    """Check that the engine's memory holds the model of the server's arguments.

    Raises:
        InvalidInput: It does not.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default="")
    parser.add_argument("--revision", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    given, _ = parser.parse_known_args(list(arguments))
    num_ranks = given.tensor_parallel_size
    if settings.device == "cuda":
        memory = EngineMemory.beside_gpu(settings.host_tier_bytes, num_ranks)
    else:
        is_pinned = given.revision and not Path(given.model).is_dir()
        source = f"{given.model}@{given.revision}" if is_pinned else given.model
        weights_bytes = read_weights_bytes(source, given.dtype)
        if weights_bytes is None:
            return
        rank_kv_gib = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 0)
        kv_bytes = num_ranks * int(rank_kv_gib * (1 << 30))
        memory = EngineMemory(
            weights_bytes, kv_bytes, settings.host_tier_bytes, num_ranks=num_ranks
        )
    limits_bytes = _limits_bytes(settings)
    log.info(
        "start: memory weights_bytes=%d least_bytes=%d limits=%s",
        memory.weights_bytes,
        memory.least_bytes,
        limits_bytes,
    )
    check_engine_memory(memory, limits_bytes)


def _limits_bytes(settings: EngineSettings) -> dict[str, int]:
    limits = {"machine's memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    for file in _LIMIT_FILES:
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            limits["memory limit"] = int(text)
    if settings.memory_request_bytes:
        limits[MEMORY_REQUEST] = settings.memory_request_bytes
    return limits


def main() -> NoReturn:
    """Run the command."""
    arguments = sys.argv[1:]
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s %(message)s")
    try:
        check_memory(arguments, EngineSettings())
    except InvalidInput as error:
        # The last line of the log becomes the message of the container's status.
        print(f"ragcache_engine.start: {error}", file=sys.stderr)
        sys.exit(INSUFFICIENT_MEMORY_EXIT_CODE)
    os.execv(sys.executable, [sys.executable, "-m", SERVER, *arguments])


if __name__ == "__main__":
    main()
