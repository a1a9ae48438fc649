"""Renders the sizes of a platform for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.table import Table

from ragcache_core.sizing.platform_size import PlatformSize

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_table(found: PlatformSize) -> Table:
    """Render a row for each size."""
    table = Table(box=None, pad_edge=False)
    table.add_column("COMPONENT")
    table.add_column("SIZE")
    table.add_column("", justify="right")
    component = ""
    for of, what, amount in _rows(found):
        table.add_row("" if of == component else of, what, amount)
        component = of
    return table


def notes(found: PlatformSize, *, is_known: bool, counts_decoding: bool) -> Iterator[str]:
    """Yield what the sizes leave out.

    Args:
        is_known: Whether the share of reused tokens was given or follows from the store.
        counts_decoding: Whether engines are counted with the time of answers.
    """
    if found.engines.replicas is None:
        yield (
            "engines are not counted: give --prefill-tokens-per-second or --profile, "
            "which an engine measures at its start"
        )
    elif not counts_decoding:
        yield "engines are counted for prompts alone: give --decode-seconds to count answers"
    if not is_known:
        yield "exact reuse depends on prefixes and counts as none: give a measured --reuse-share"


def _rows(found: PlatformSize) -> Iterator[tuple[str, str, str]]:
    for precision, kv in found.kv.items():
        of = f"KV, {precision}"
        yield of, "one token", _amount(kv.token_bytes)
        yield of, "one chunk", _amount(kv.chunk_bytes)
        yield of, "all chunks", _amount(kv.all_chunks_bytes)
    store, bandwidth = found.store, found.bandwidth
    of = f"cache store, {store.shards} shards" if store.shards > 1 else "cache store"
    each = " of each shard" if store.shards > 1 else ""
    yield of, f"memory tier{each}", _amount(store.memory_bytes)
    yield of, f"volume{each}", _amount(store.volume_bytes)
    yield of, f"memory of the pod{each}", _amount(store.pod_memory_bytes)
    yield of, "chunks stored", f"{store.stored_chunks:,}"
    yield of, "reads answered", f"{store.hit_share:.1%}"
    yield of, "reads answered from memory", f"{store.memory_hit_share:.1%}"
    yield of, "read", _rate(bandwidth.read)
    yield of, "read from disk", _rate(bandwidth.read_from_disk)
    yield of, "written", _rate(bandwidth.write)
    if bandwidth.least_useful is not None:
        yield of, "least useful rate of one load", _rate(bandwidth.least_useful)
    engines = found.engines
    yield "engines", "prompt tokens loaded", f"{engines.reused_share:.1%}"
    yield "engines", "tokens computed for a prompt", f"{engines.computed_tokens:,}"
    if engines.prefill_s is not None:
        yield "engines", "time to compute a prompt", f"{engines.prefill_s:.3f} s"
        yield "engines", "replicas", f"{engines.replicas:,}"
        yield "engines", "replicas without reuse", f"{engines.replicas_without_reuse:,}"
    yield "engines", "KV memory of each", _amount(engines.kv_memory_bytes)
    yield "engines", "memory of each", _amount(engines.memory_request_bytes)
    retriever = found.retriever
    yield "retriever", "vector index", _amount(retriever.index_bytes)
    yield "retriever", "memory of each replica", _amount(retriever.memory_request_bytes)
    yield "retriever", "volume of each replica", _amount(retriever.volume_bytes)


def _rate(bytes_per_s: float) -> str:
    return f"{_amount(bytes_per_s)}/s"


def _amount(num_bytes: float) -> str:
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:,.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:,.2f} {_UNITS[unit]}"
