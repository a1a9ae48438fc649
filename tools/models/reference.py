"""Checks the rotation of a family's keys against transformers in float64, without vLLM.

It serves families whose code vLLM cannot run here. A token without tokens before it attends only to
itself, so only the rotation of its keys depends on its position.
"""

from __future__ import annotations

from pathlib import Path

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.fingerprint import decoder_config
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.rotation import KeyRotation, read_rope
from tools.models.families import MAX_LENGTH

_POSITIONS = (1, 78, 900)
_TOKEN = 1
_TOLERANCE = 1e-4
"""transformers computes cosines and sines in float32."""


def rotation_error(folder: Path) -> str:
    """Return how a model's keys differ from rotated ones; empty: they do not."""
    import torch  # noqa: PLC0415  slow to import
    from transformers import AutoModelForImageTextToText  # noqa: PLC0415

    loaded = load_model_folder(str(folder))
    space = loaded.space("float32", max_length=MAX_LENGTH)
    try:
        rope = read_rope(decoder_config(loaded.config), max_length=MAX_LENGTH)
    except InvalidInput as refused:
        return str(refused)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    decoder = model.model.language_model

    def keys(position: int) -> list[torch.Tensor]:
        with torch.inference_mode():
            output = decoder(
                input_ids=torch.tensor([[_TOKEN]]),
                position_ids=torch.tensor([[position]]),
                use_cache=True,
            )
        return [layer.keys[0, :, 0] for layer in output.past_key_values.layers]

    first = keys(0)
    if (len(first), *first[0].shape) != (space.num_layers, space.num_kv_heads, space.head_dim):
        return f"its KV has another shape than {space}"
    for position in _POSITIONS:
        for index, (start, expected) in enumerate(zip(first, keys(position), strict=True)):
            rotation = KeyRotation(rope.of_layer(index), "float32")
            moved = rotation.rotate_keys(start.float().contiguous(), position).double()
            error = float((moved - expected).norm() / expected.norm())
            if not error < _TOLERANCE:
                return f"layer {index} differs by {error:.1e} at position {position}"
    return ""
