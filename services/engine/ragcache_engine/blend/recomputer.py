"""Recompute chosen tokens of a request through vLLM's own model (Cache-Craft §3.2.1).

Each run of consecutive positions passes through the model as a request of its own: its queries are
the run's tokens, its context all that the real request has before them, in the same blocks. Every
layer writes the keys and values of all runs before any of them attends, so a run sees what others
have become. The kernels, masks and scalings are vLLM's: what is right in a prefill is right here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from ragcache_engine.blend.model_access import LoadedModel
from ragcache_engine.blend.prompt_slice import PromptSlice

_NOWHERE = -1
"""What vLLM pads slots with; its kernels write nothing there."""


class Recomputer:
    """Passes of a worker's model between its own. For the worker's main thread only.

    max_tokens, max_runs: bounds of one pass, by what the model was compiled and its buffers made
    for.
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
        """Compute the KV of runs of one prompt's positions anew; see ``recompute_slices``."""
        return self.recompute_slices([PromptSlice(token_ids, blocks, runs)], writes=writes)

    def recompute_slices(self, parts: Sequence[PromptSlice], *, writes: bool = True) -> torch.Tensor:
        """Compute the KV of parts of some prompts anew, in place, in one pass.

        parts: within max_tokens and max_runs together, of prompts with blocks of their own. Where a
        selection is larger, passes over its parts in ascending order come to the same: what is
        later looks at what is earlier, never the other way round.

        writes: whether the KV is written; without, that of the runs has to be in place, too, and
        what a pass is for is to be seen in it.
        """
        runs = [(part, run) for part in parts for run in part.runs]
        num_tokens = sum(len(run) for _, run in runs)
        if num_tokens > self.max_tokens or len(runs) > self.max_runs:
            raise ValueError(
                f"{num_tokens} tokens in {len(runs)} runs do not fit a pass of"
                f" {self.max_tokens} in {self.max_runs}"
            )
        if not num_tokens:
            raise ValueError("there is nothing to recompute")
        model, device = self._model, self._model.device
        where = torch.tensor([at for _, run in runs for at in run], dtype=torch.int64)
        slots = torch.cat([part.slots(model.block_size) for part in parts]).to(device)
        if not writes:
            slots.fill_(_NOWHERE)
        starts = torch.tensor([0, *(len(run) for _, run in runs)], dtype=torch.int32).cumsum(0)
        starts = starts.to(torch.int32)
        ends = torch.tensor([run.stop for _, run in runs], dtype=torch.int32)
        metadata = model.metadata_builder.build(
            common_prefix_len=0,
            common_attn_metadata=CommonAttentionMetadata(
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=ends.to(device),
                num_reqs=len(runs),
                num_actual_tokens=num_tokens,
                max_query_len=max(len(run) for _, run in runs),
                max_seq_len=max(run.stop for _, run in runs),
                block_table_tensor=self._tables(parts).to(device),
                slot_mapping=slots,
                causal=True,
                seq_lens_cpu_upper_bound=ends,
                is_prefilling=torch.ones(len(runs), dtype=torch.bool),
            ),
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
                    [part.token_ids[at] for part, run in runs for at in run], dtype=torch.int32
                ).to(device),
                positions=where.to(device),
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return output

    def _tables(self, parts: Sequence[PromptSlice]) -> torch.Tensor:
        """A block table for each run, as wide as the widest: int32 [runs, blocks]."""
        tables = [self._model.kernel_table(part.blocks) for part in parts]
        wide = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        return wide.repeat_interleave(torch.tensor([len(part.runs) for part in parts]), dim=0)
