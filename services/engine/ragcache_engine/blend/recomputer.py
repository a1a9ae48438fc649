"""Recompute chosen tokens of a request through vLLM's own model (Cache-Craft section 3.2.1).

Each run of consecutive positions passes through the model as a request of its own. Its queries are
the run's tokens, its context is all that the real request has before them, in the same blocks.
Every layer writes the keys and values of all runs before any run attends, so a run attends to the
recomputed KV of the others. The kernels, masks and scalings are vLLM's: what is correct in a
prefill is correct here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.interfaces import requires_raw_input_tokens
from vllm.v1.attention.backend import CommonAttentionMetadata

from ragcache_engine.kv_cache.host_memory import upload
from ragcache_engine.kv_cache.paged_cache import cut_blocks
from ragcache_engine.protocol.messages import PromptSlice

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ragcache_engine.blend.chunk_shift import ChunkShift


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder whose layers all attend in the same way, and what a pass through it needs.

    Attributes:
        forward: The model as the runner calls it, compiled or not.
        vllm_config: vLLM's configuration.
        metadata_builder: Metadata builder of the attention backend, used only by recomputation
            passes. The runner's own builder has buffers that belong to the step in progress.
        layer_names: Names of all attention layers.
        block_size: Tokens per block of vLLM's block tables.
        kernel_block_size: Tokens per block that the backend's kernel reads.
        device: The model's device.
        embed: Returns the embeddings of int32 token ids, in a model that the runner calls with
            embeddings; None: it is called with token ids. A compiled model takes one of the two.
        reads_tokens: Whether a model that is called with embeddings reads the token ids too.
    """

    forward: Callable[..., Any]
    vllm_config: VllmConfig
    metadata_builder: Any
    layer_names: tuple[str, ...]
    block_size: int
    kernel_block_size: int
    device: torch.device
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    reads_tokens: bool = False

    def inputs_of(self, token_ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Return token ids as the arguments of ``forward`` that the runner gives it."""
        if self.embed is None:
            return {"input_ids": token_ids, "inputs_embeds": None}
        kept = token_ids if self.reads_tokens else None
        return {"input_ids": kept, "inputs_embeds": self.embed(token_ids)}

    def kernel_table(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return a block table as the backend reads it; int32, one entry per kernel block."""
        per_block = self.block_size // self.kernel_block_size
        return torch.tensor(cut_blocks(blocks, per_block), dtype=torch.int32)


def access_model(runner: Any, block_size: int) -> LoadedModel:
    """Return the model that a vLLM model runner has loaded.

    Args:
        runner: vLLM's model runner.
        block_size: Block size of the KV cache manager, whose block tables the passes get.

    Raises:
        ValueError: If the layers attend in several ways, or their blocks are interleaved.
    """
    groups = [group for of_cache in runner.attn_groups for group in of_cache]
    if len(groups) != 1:
        raise ValueError(f"its layers attend in {len(groups)} ways")
    group = groups[0]
    # vLLM's own builder has the block size of the kernel, under one name in all its versions.
    kernel_spec = group.get_metadata_builder().kv_cache_spec
    kernel_block_size = kernel_spec.block_size
    is_packed = getattr(group, "kernel_block_stride", 0)  # vLLM 0.31 packs no layers
    if block_size % kernel_block_size or is_packed:
        raise ValueError(f"its kernel has blocks of {kernel_block_size}, its cache of {block_size}")
    builder = group.backend.get_builder_cls()(
        kernel_spec, group.layer_names, runner.vllm_config, runner.device
    )
    model = runner.model
    takes_embeddings = runner.supports_mm_inputs or runner.model_config.enable_prompt_embeds
    return LoadedModel(
        forward=model,
        vllm_config=runner.vllm_config,
        metadata_builder=builder,
        layer_names=tuple(group.layer_names),
        block_size=block_size,
        kernel_block_size=kernel_block_size,
        device=runner.device,
        embed=model.embed_input_ids if takes_embeddings else None,
        reads_tokens=requires_raw_input_tokens(model),
    )


_NO_SLOT = -1
"""The slot number that vLLM uses for padding. Its kernels write nothing there."""


@dataclass(frozen=True, slots=True)
class PassInputs:
    """What a pass over slices of prompts needs.

    Attributes:
        input_ids: int32, one per row.
        positions: int64, one per row.
        slots_by_layer: int64 slots of all rows of the pass, by name of the layer.
        metadata_by_layer: Attention metadata of all rows of the pass, by name of the layer.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots_by_layer: dict[str, torch.Tensor]
    metadata_by_layer: dict[str, Any]


class Recomputer:
    """Runs passes of a worker's model between the engine's own passes.

    Only the worker's main thread may use it. ``max_tokens`` and ``max_runs`` limit one pass: the
    model was compiled, and buffers were allocated, for passes of that size. The CPU backend has no
    buffers by number of requests, so there each token may be a run.

    Attributes:
        chunk_shift: Shifts the other tokens of chunks that are recomputed in part; None: nothing
            does.
    """

    def __init__(self, model: LoadedModel) -> None:
        scheduler = model.vllm_config.scheduler_config
        self.max_tokens: int = scheduler.max_num_batched_tokens
        on_cpu = model.device.type == "cpu"
        if on_cpu and torch.cpu._is_amx_tile_supported():
            # vLLM's attention uses these instructions, and Linux allows them after a request only.
            # oneDNN makes it in the first large enough product, which may come later.
            torch.cpu._init_amx()
        self.max_runs: int = self.max_tokens if on_cpu else scheduler.max_num_seqs
        self.vllm_config = model.vllm_config
        self._model = model
        self.chunk_shift: ChunkShift | None = None

    def shifting(self, slices: Sequence[PromptSlice]) -> AbstractContextManager[None]:
        """Shift the chunks of slices in the pass inside the context, whose last rows they are."""
        return self.chunk_shift.attached(slices) if self.chunk_shift else nullcontext()

    def recompute(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        runs: Sequence[range],
        *,
        writes: bool = True,
    ) -> torch.Tensor:
        """Recompute the KV of runs of one prompt's positions, as ``recompute_slices`` does."""
        return self.recompute_slices([PromptSlice(token_ids, blocks, runs)], writes=writes)

    def recompute_slices(
        self, slices: Sequence[PromptSlice], *, writes: bool = True
    ) -> torch.Tensor:
        """Recompute the KV of slices of some prompts, in place, in one pass.

        Passes over the parts of a larger selection, in ascending order, have the same result as one
        pass: a token attends only to tokens before it.

        Args:
            slices: Together at most max_tokens tokens and max_runs runs, of prompts that share no
                blocks.
            writes: Whether the pass writes the KV. If not, the blocks must hold the KV of the runs
                as well. Such a pass serves an ``AttentionHook``.

        Returns:
            The model's hidden states, one row per position.

        Raises:
            ValueError: If the slices are empty or exceed one pass.
        """
        num_runs = sum(len(one.runs) for one in slices)
        num_tokens = sum(one.num_tokens for one in slices)
        if num_tokens > self.max_tokens or num_runs > self.max_runs:
            raise ValueError(
                f"{num_tokens} tokens in {num_runs} runs do not fit a pass of"
                f" {self.max_tokens} in {self.max_runs}"
            )
        if not num_tokens:
            raise ValueError("there is nothing to recompute")
        inputs = self.pass_inputs(slices, writes=writes)
        context = set_forward_context(
            inputs.metadata_by_layer,
            self.vllm_config,
            num_tokens=num_tokens,
            slot_mapping=inputs.slots_by_layer,
        )
        with context, self.shifting(slices), torch.inference_mode():
            output: torch.Tensor = self._model.forward(
                **self._model.inputs_of(inputs.input_ids),
                positions=inputs.positions,
                intermediate_tensors=None,
            )
        return output

    def compute_alone(self, token: int, blocks: Sequence[int], position: int) -> None:
        """Compute the KV of a token that attends only to itself, without compiled code.

        Args:
            token: Its id.
            blocks: Its KV is written to the first slot of the first block.
            position: The position that its keys are rotated to.
        """
        inputs = self.pass_inputs([PromptSlice([token], blocks, [range(1)])])
        context = set_forward_context(
            inputs.metadata_by_layer,
            self.vllm_config,
            num_tokens=1,
            slot_mapping=inputs.slots_by_layer,
            skip_compiled=True,  # vLLM compiles in a pass of its own, later
        )
        with context, torch.inference_mode():
            self._model.forward(
                **self._model.inputs_of(inputs.input_ids),
                positions=torch.full_like(inputs.positions, position),
                intermediate_tensors=None,
            )

    def pass_inputs(
        self, slices: Sequence[PromptSlice], *, writes: bool = True, after: Any = None
    ) -> PassInputs:
        """Return the inputs of a pass over slices.

        Args:
            slices: The slices, not empty.
            writes: Whether the pass writes the KV.
            after: Attention metadata of vLLM's own rows, which come first in the pass. Slots and
                metadata of the result then cover all rows, input_ids and positions the slices only.
        """
        model = self._model
        runs = [(one, run) for one in slices for run in one.runs]
        # The compiled model has dropped its guards: any other type reads garbage.
        input_ids = [one.token_ids[p] for one, run in runs for p in run]
        positions = [p for _, run in runs for p in run]
        slots = torch.cat([_slots(one, model.block_size) for one in slices])
        if not writes:
            slots.fill_(_NO_SLOT)
        rows = _SlicedRows(
            lengths=torch.tensor([len(run) for _, run in runs], dtype=torch.int32),
            ends=torch.tensor([run.stop for _, run in runs], dtype=torch.int32),
            block_tables=self._block_tables(slices),
            slots=slots,
        )
        if after is not None:
            rows = rows.after(after)
        starts = functional.pad(rows.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        # Together, so that the device gets them in one copy.
        ids, at, starts_there, ends, block_tables, slots = upload(
            [
                torch.tensor(input_ids, dtype=torch.int32),
                torch.tensor(positions, dtype=torch.int64),
                starts,
                rows.ends,
                rows.block_tables,
                rows.slots,
            ],
            model.device,
        )
        common = CommonAttentionMetadata(
            query_start_loc=starts_there,
            query_start_loc_cpu=starts,
            seq_lens=ends,
            num_reqs=len(rows.lengths),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(rows.lengths.max()),
            max_seq_len=int(rows.ends.max()),
            block_table_tensor=block_tables,
            slot_mapping=slots,
            causal=True,
            seq_lens_cpu_upper_bound=rows.ends,
            is_prefilling=torch.ones(len(rows.lengths), dtype=torch.bool),
        )
        metadata = model.metadata_builder.build(common_prefix_len=0, common_attn_metadata=common)
        return PassInputs(
            ids,
            at,
            dict.fromkeys(model.layer_names, slots),
            dict.fromkeys(model.layer_names, metadata),
        )

    def _block_tables(self, slices: Sequence[PromptSlice]) -> torch.Tensor:
        """Return a block table for each run, as wide as the widest: int32 [runs, blocks]."""
        tables = [self._model.kernel_table(one.blocks) for one in slices]
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        return padded.repeat_interleave(torch.tensor([len(one.runs) for one in slices]), dim=0)


def _slots(one: PromptSlice, block_size: int) -> torch.Tensor:
    """Return the slot of each position of a slice; int64."""
    positions = torch.tensor([p for run in one.runs for p in run], dtype=torch.int64)
    table = torch.tensor(one.blocks, dtype=torch.int64)
    return table[positions // block_size] * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class _SlicedRows:
    """Rows of a pass on the host, described as one request for each run of positions.

    Attributes:
        lengths: Rows of each run; int32 [runs].
        ends: Position after each run; int32 [runs].
        block_tables: int32 [runs, blocks].
        slots: Of each row; int64.
    """

    lengths: torch.Tensor
    ends: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor

    def after(self, metadata: Any) -> _SlicedRows:
        """Return these rows after the rows of vLLM's own attention metadata."""
        tables = [metadata.block_table, self.block_tables]
        width = max(table.shape[1] for table in tables)
        padded = [functional.pad(table, (0, width - table.shape[1])) for table in tables]
        own_slots = metadata.slot_mapping[: metadata.num_actual_tokens]
        return _SlicedRows(
            lengths=torch.cat([metadata.query_start_loc.diff(), self.lengths]),
            ends=torch.cat([metadata.seq_lens, self.ends]),
            block_tables=torch.cat(padded),
            slots=torch.cat([own_slots, self.slots]),
        )
