"""Recomputes tokens in the forward pass that computes the rest of their prompt.

A pass has a fixed cost: the weights are read once, however few tokens it computes. A blend that is
recomputed in a pass of its own pays it twice. Here vLLM's own pass computes the selected tokens
too. vLLM neither schedules nor sees them: their rows follow its own rows, and are cut off the
output. In each layer all rows write their KV before any row attends, so the rest of the prompt
attends to recomputed KV.

vLLM ends the engine on an exception. So if a slice fails, vLLM's own pass runs without it, and the
slice is reported: vLLM then recomputes its blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, get_forward_context, set_forward_context

from ragcache_core.blend.token_selection import split_into_passes
from ragcache_engine.protocol.messages import PromptSlice

if TYPE_CHECKING:
    from ragcache_engine.blend.recomputer import Recomputer

log = logging.getLogger("vllm.ragcache")

_FORWARD = "_model_forward"
"""The method of vLLM's model runner that calls the model for a step."""


class JointPass:
    """Adds slices of prompts to the passes of a vLLM model runner.

    Only the worker's main thread may use it.

    Args:
        runner: vLLM's model runner. From now on its passes go through this object.
        recomputer: Computes slices that cannot join a pass, and describes slices to the backend.
    """

    def __init__(self, runner: Any, recomputer: Recomputer) -> None:
        self._recomputer = recomputer
        self._forward = getattr(runner, _FORWARD)
        self._slices: tuple[PromptSlice, ...] = ()
        self._failed: tuple[PromptSlice, ...] = ()
        setattr(runner, _FORWARD, self._forward_jointly)

    @staticmethod
    def supports(runner: Any) -> bool:
        """Tell whether the runner's passes can take more tokens.

        A captured CUDA graph cannot. This has run on CPUs only, so GPUs recompute in separate
        passes.
        """
        return (
            hasattr(runner, _FORWARD)
            and runner.device.type == "cpu"
            and not getattr(runner, "use_aux_hidden_state_outputs", False)
        )

    def prepare(self, slices: Sequence[PromptSlice]) -> None:
        """Compute these slices in the next pass."""
        self._slices, self._failed = tuple(slices), ()

    def take_failed(self) -> tuple[PromptSlice, ...]:
        """Return the prepared slices that the last pass did not recompute."""
        failed, self._slices, self._failed = (*self._slices, *self._failed), (), ()
        return failed

    def _forward_jointly(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        slices, self._slices = self._slices, ()
        if slices:
            is_plain = inputs_embeds is None and intermediate_tensors is None and not model_kwargs
            output = None
            if is_plain and input_ids is not None and positions is not None:
                output = self._try_jointly(input_ids, positions, slices)
            else:
                self._run_separately(slices)
            if output is not None:
                return output
        return self._forward(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=inputs_embeds,
            **model_kwargs,
        )

    def _try_jointly(
        self, input_ids: torch.Tensor, positions: torch.Tensor, slices: Sequence[PromptSlice]
    ) -> torch.Tensor | None:
        """Run vLLM's pass with the slices; return None if vLLM's pass has yet to run."""
        try:
            context = get_forward_context()
            if self._fits(context, input_ids, positions, slices):
                return self._run_jointly(context, input_ids, positions, slices)
        except Exception:
            log.exception("joint pass: recompute failed slices=%d", len(slices))
            self._failed += tuple(slices)
            return None
        self._run_separately(slices)
        return None

    def _fits(
        self,
        context: ForwardContext,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slices: Sequence[PromptSlice],
    ) -> bool:
        """Tell whether vLLM's pass has room for the slices, and the form that joining needs."""
        metadata = self._step_metadata(context)
        if metadata is None or context.cudagraph_runtime_mode is not CUDAGraphMode.NONE:
            return False
        num_tokens = len(input_ids) + sum(one.num_tokens for one in slices)
        num_runs = len(metadata.seq_lens) + sum(len(one.runs) for one in slices)
        return (
            positions.dim() == 1
            and metadata.num_actual_tokens == len(input_ids)
            and num_tokens <= self._recomputer.max_tokens
            and num_runs <= self._recomputer.max_runs
        )

    def _step_metadata(self, context: ForwardContext) -> Any:
        """Return the attention metadata of vLLM's pass; None if layers have different ones."""
        by_layer = context.attn_metadata
        if not isinstance(by_layer, dict) or not by_layer:
            return None
        first = next(iter(by_layer.values()))
        return first if all(other is first for other in by_layer.values()) else None

    def _run_jointly(
        self,
        context: ForwardContext,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slices: Sequence[PromptSlice],
    ) -> torch.Tensor:
        inputs = self._recomputer.pass_inputs(slices, after=self._step_metadata(context))
        joined = set_forward_context(
            inputs.metadata_by_layer,
            self._recomputer.vllm_config,
            num_tokens=len(input_ids) + len(inputs.input_ids),
            slot_mapping=inputs.slots_by_layer,
        )
        with self._recomputer.ranks.in_pass(), joined, self._recomputer.shifting(slices):
            output: torch.Tensor = self._forward(
                input_ids=torch.cat([input_ids, inputs.input_ids.to(input_ids.dtype)]),
                positions=torch.cat([positions, inputs.positions.to(positions.dtype)]),
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return output[: len(input_ids)]

    def _run_separately(self, slices: Sequence[PromptSlice]) -> None:
        """Recompute slices in passes of their own. One that fails does not affect the others."""
        limits = {"max_tokens": self._recomputer.max_tokens, "max_runs": self._recomputer.max_runs}
        for one in slices:
            try:
                for runs in split_into_passes(one.runs, **limits):
                    self._recomputer.recompute_slices([replace(one, runs=runs)])
            except Exception:
                log.exception("joint pass: recompute failed slices=1")
                self._failed += (one,)
