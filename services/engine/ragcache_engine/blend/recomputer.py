"""Recompute chosen tokens of a request through vLLM's own model (Cache-Craft section 3.2.1).

Each run of consecutive positions passes through the model as a request of its own. Its queries are
the run's tokens, its context is all that the real request has before them, in the same blocks.
Every layer writes the keys and values of all runs before any run attends, so a run attends to the
recomputed KV of the others. The kernels, masks and scalings are vLLM's: what is correct in a
prefill is correct here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from ragcache_engine.blend.model_access import LoadedModel
from ragcache_engine.blend.prompt_slice import PromptSlice

_NO_SLOT = -1
"""The slot number that vLLM uses for padding. Its kernels write nothing there."""


class Recomputer:
    """Runs passes of a worker's model between the engine's own passes.

    Only the worker's main thread may use it. ``max_tokens`` and ``max_runs`` limit one pass: the
    model was compiled, and its buffers were allocated, for passes of that size.
    """

    def __init__(self, model: LoadedModel) -> None:
        scheduler = model.vllm_config.scheduler_config
        self.max_tokens: int = scheduler.max_num_batched_tokens
        self.max_runs: int = scheduler.max_num_seqs
        self._model = model

    def recompute(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        runs: Sequence[range],
        *,
        writes: bool = True,
    ) -> torch.Tensor:
        """Recompute the KV of runs of one prompt's positions; see ``recompute_slices``."""
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
        runs = [(one, run) for one in slices for run in one.runs]
        num_tokens = sum(len(run) for _, run in runs)
        if num_tokens > self.max_tokens or len(runs) > self.max_runs:
            raise ValueError(
                f"{num_tokens} tokens in {len(runs)} runs do not fit a pass of"
                f" {self.max_tokens} in {self.max_runs}"
            )
        if not num_tokens:
            raise ValueError("there is nothing to recompute")
        model, device = self._model, self._model.device
        positions = torch.tensor([p for _, run in runs for p in run], dtype=torch.int64)
        slots = torch.cat([one.slots(model.block_size) for one in slices]).to(device)
        if not writes:
            slots.fill_(_NO_SLOT)
        metadata = model.metadata_builder.build(
            common_prefix_len=0,
            common_attn_metadata=self._attention_metadata(slices, slots),
        )
        context = set_forward_context(
            dict.fromkeys(model.layer_names, metadata),
            model.vllm_config,
            num_tokens=num_tokens,
            slot_mapping=dict.fromkeys(model.layer_names, slots),
        )
        with context, torch.inference_mode():
            output: torch.Tensor = model.forward(
                # The compiled model has dropped its guards: any other type reads garbage.
                input_ids=torch.tensor(
                    [one.token_ids[p] for one, run in runs for p in run], dtype=torch.int32
                ).to(device),
                positions=positions.to(device),
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return output

    def _attention_metadata(
        self, slices: Sequence[PromptSlice], slots: torch.Tensor
    ) -> CommonAttentionMetadata:
        """Describe each run to the attention backend as a request of its own."""
        runs = [run for one in slices for run in one.runs]
        device = self._model.device
        starts = torch.tensor([0, *map(len, runs)], dtype=torch.int32).cumsum(0)
        starts = starts.to(torch.int32)
        ends = torch.tensor([run.stop for run in runs], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(device),
            num_reqs=len(runs),
            num_actual_tokens=sum(map(len, runs)),
            max_query_len=max(map(len, runs)),
            max_seq_len=max(run.stop for run in runs),
            block_table_tensor=self._block_tables(slices).to(device),
            slot_mapping=slots,
            causal=True,
            seq_lens_cpu_upper_bound=ends,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
        )

    def _block_tables(self, slices: Sequence[PromptSlice]) -> torch.Tensor:
        """Return a block table for each run, as wide as the widest: int32 [runs, blocks]."""
        tables = [self._model.kernel_table(one.blocks) for one in slices]
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        return padded.repeat_interleave(torch.tensor([len(one.runs) for one in slices]), dim=0)
