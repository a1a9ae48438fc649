"""Whether the weights of a model and the KV of its prompts fit into the memory of a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuFit:
    """What of a GPU's memory an engine may take, and what the weights leave of it.

    Activations and CUDA graphs take a part of what is left. vLLM measures that at its start.

    Attributes:
        engine_bytes: What the engine takes of the GPU's memory.
        weights_bytes: Size of the weights.
        kv_bytes: What the weights leave; 0 if they do not fit.
        requests_at_once: Number of requests whose KV fits into that.
        fits: Whether the wanted number of requests fits.
    """

    engine_bytes: int
    weights_bytes: int
    kv_bytes: int
    requests_at_once: int
    fits: bool


def gpu_fit(engine_bytes: int, weights_bytes: int, request_bytes: int, num_requests: int) -> GpuFit:
    """Compare an engine's share of a GPU with a model.

    Args:
        engine_bytes: What the engine takes of the GPU's memory.
        request_bytes: KV of one request, with its answer. Above 0.
        num_requests: Requests that should fit at once.
    """
    kv_bytes = max(0, engine_bytes - weights_bytes)
    requests = kv_bytes // request_bytes
    return GpuFit(engine_bytes, weights_bytes, kv_bytes, requests, requests >= num_requests)
