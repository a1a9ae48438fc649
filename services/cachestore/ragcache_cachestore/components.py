"""The components of a store: opens the data folder, and connects state, tiers, paths and tasks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ragcache_cachestore.background.encoding_swapper import EncodingSwapper
from ragcache_cachestore.background.housekeeping import Housekeeping
from ragcache_cachestore.background.sweeper import Sweeper
from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.deletes import MAX_TOMBSTONE_BYTES, Deletes
from ragcache_cachestore.puts import Puts
from ragcache_cachestore.reads import Reads
from ragcache_cachestore.recovery import recover
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.state.store_stats import StatsReader
from ragcache_cachestore.storage.data_dir import DataDir
from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_cachestore.storage.memory_tier import MemoryTier
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_cachestore.storage.metadata_reset import open_metadata
from ragcache_cachestore.storage.status_page import StatusPage
from ragcache_cachestore.storage.tier_space import TierSpace
from ragcache_cachestore.telemetry.exporter import Telemetry
from ragcache_cachestore.variants import VariantAccess
from ragcache_core.eviction import DEFAULT_POLICY, make_policy
from ragcache_core.eviction.admission import make_admission

FORGET_INTERVAL_S = 60.0
"""Interval at which the deletes are forgotten whose lifetime is over."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The settings of a store.

    Attributes:
        memory_bytes: Capacity of the memory tier, which is never exceeded.
        disk_bytes: Capacity of the disk tier, which is never exceeded.
        policy: Name of an eviction policy (``ragcache_core.eviction``).
        admission: Name of an admission policy for the disk tier.
        leaves_only: A parent outlives its children in a tier (``exact`` reuse).
        telemetry: Receives what happens.
        clock: Returns monotonic seconds.
        wall_ms: Returns the Unix time in milliseconds.
        free_bytes: Returns the free bytes of the folder's volume.
        max_tombstone_bytes: Bound of the memory for tombstones.
    """

    memory_bytes: int
    disk_bytes: int
    policy: str = DEFAULT_POLICY
    admission: str = "always"
    leaves_only: bool = False
    telemetry: Telemetry = field(default_factory=Telemetry)
    clock: Callable[[], float] = time.monotonic
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    free_bytes: Callable[[], int] | None = None
    max_tombstone_bytes: int = MAX_TOMBSTONE_BYTES


@dataclass(frozen=True, slots=True)
class StoreComponents:
    """The connected components of an open store.

    Attributes:
        resources: Closes the files and the threads of the mover.
    """

    memory_tier: MemoryTier
    disk_tier: DiskTier
    status_page: StatusPage
    metadata: MetadataDb
    state: StoreState
    mover: TierMover
    sweeper: Sweeper
    housekeeping: Housekeeping
    reads: Reads
    puts: Puts
    deletes: Deletes
    variants: VariantAccess
    swapper: EncodingSwapper
    stats: StatsReader
    resources: contextlib.ExitStack


def open_components(folder: Path, options: StoreOptions) -> StoreComponents:
    """Open a data folder, and recover the state from it. The sweeper is not started.

    Raises:
        InvalidInput: The folder cannot be used.
    """
    leaves_only = options.leaves_only
    with contextlib.ExitStack() as resources:
        data = DataDir(folder)
        resources.callback(data.close)
        memory_tier = MemoryTier(options.memory_bytes)
        resources.callback(memory_tier.close)
        status_page = StatusPage()
        resources.callback(status_page.close)
        metadata = open_metadata(data, options.wall_ms())  # first: a reset removes the values
        resources.callback(metadata.close)
        disk_tier = DiskTier(data.values, options.disk_bytes, options.free_bytes)
        resources.callback(disk_tier.close)
        state = _make_state(options, memory_tier, disk_tier, metadata)

        def sweep_soon() -> None:
            sweeper.wake()

        mover = TierMover(
            state,
            memory_tier,
            disk_tier,
            metadata,
            leaves_only=leaves_only,
            sweep_soon=sweep_soon,
        )
        resources.callback(mover.close)
        housekeeping = Housekeeping(state, mover, disk_tier, metadata, status_page, options.wall_ms)
        deletes = Deletes(
            state,
            mover,
            metadata,
            status_page,
            options.wall_ms,
            max_tombstone_bytes=options.max_tombstone_bytes,
        )
        tasks = [*housekeeping.tasks(), (FORGET_INTERVAL_S, deletes.forget)]
        sweeper = Sweeper(options.clock, tasks)
        recover(state, mover, metadata, disk_tier, options.wall_ms())
        return StoreComponents(
            memory_tier=memory_tier,
            disk_tier=disk_tier,
            status_page=status_page,
            metadata=metadata,
            state=state,
            mover=mover,
            sweeper=sweeper,
            housekeeping=housekeeping,
            reads=Reads(state, mover),
            puts=Puts(
                state,
                mover,
                memory_tier,
                status_page,
                leaves_only=leaves_only,
                sweep_soon=sweep_soon,
            ),
            deletes=deletes,
            variants=VariantAccess(state, mover),
            swapper=EncodingSwapper(state, memory_tier, mover),
            stats=StatsReader(state, lambda: mover.writer.backlog, metadata.reset),
            resources=resources.pop_all(),
        )


def _make_state(
    options: StoreOptions, memory_tier: MemoryTier, disk_tier: DiskTier, metadata: MetadataDb
) -> StoreState:
    memory_policy, disk_policy = (
        make_policy(options.policy, leaves_only=options.leaves_only) for _ in range(2)
    )
    return StoreState(
        memory=TierSpace(memory_tier.allocator, memory_policy),
        disk=TierSpace(disk_tier.allocator, disk_policy),
        admission=make_admission(options.admission, disk_policy),
        policy_name=options.policy,
        store_id=metadata.store_id,
        clock=options.clock,
        wall_ms=options.wall_ms,
        telemetry=options.telemetry,
    )
