"""Chunks' KV as tensors: vLLM's paged cache, pools of values, and values on their way to blocks."""
