"""The rotation of each layer is compared with that of the config, on a real paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from ragcache_engine.blend.rotation_check import check_rotation
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_kv.rotation import KeyRotation, Pairing, Rope
from tests.unit.engine.kv_cache.test_paged_cache import DIM, HEADS, LAYERS, ORDERS, FakeLayer

PLAIN = Rope(DIM, DIM, Pairing.HALVES, tuple(10.0 ** (-i / 4) for i in range(DIM // 2)))
STILL = (0.0,) * (DIM // 2)
BY_LAYER = replace(PLAIN, by_layer=(PLAIN.frequencies, STILL, PLAIN.frequencies))


class FakeModel:
    """Computes keys that depend on token and layer, and rotates them by ``rope``."""

    def __init__(self, rope: Rope, cache: PagedCache, *, max_length: int = 4096) -> None:
        self.rope, self.cache = rope, cache
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_length))
        self.positions: set[int] = set()

    def compute_alone(self, token: int, blocks: Sequence[int], position: int) -> None:
        self.positions.add(position)
        generator = torch.Generator().manual_seed(token)
        kv = torch.randn(LAYERS, 2, 1, HEADS, DIM, generator=generator).bfloat16()
        for index in range(LAYERS):
            rotation = KeyRotation(self.rope.of_layer(index), "bfloat16")
            rotation.rotate_keys(kv[index, 0], position)
        self.cache.write(kv, self.cache.slots(blocks, 0, 1))


def check(config: Rope, model: Rope, *, max_length: int = 4096) -> set[int]:
    """Check a model. Return the positions that were computed."""
    layers = {f"{index}": FakeLayer(ORDERS["as presented"], torch.bfloat16) for index in range(3)}
    cache = PagedCache(layers, torch.device("cpu"))
    fake = FakeModel(model, cache, max_length=max_length)
    check_rotation(config, cast(Any, fake), cache)
    return fake.positions


@pytest.mark.parametrize("rope", [PLAIN, BY_LAYER], ids=["plain", "by layer"])
def test_the_rotation_of_the_config_is_accepted(rope: Rope) -> None:
    assert max(check(rope, rope)) == 900


def test_positions_fit_the_longest_sequence() -> None:
    assert max(check(PLAIN, PLAIN, max_length=512)) == 78


@pytest.mark.parametrize(
    ("config", "model", "layer"),
    [
        (PLAIN, BY_LAYER, 1),
        (BY_LAYER, PLAIN, 1),
        (PLAIN, replace(PLAIN, pairing=Pairing.NEIGHBOURS), 0),
        (PLAIN, replace(PLAIN, frequencies=tuple(f / 2 for f in PLAIN.frequencies)), 0),
    ],
    ids=["a layer does not rotate", "a layer rotates", "other pairs", "other frequencies"],
)
def test_another_rotation_is_refused_by_layer(config: Rope, model: Rope, layer: int) -> None:
    with pytest.raises(ValueError, match=f"its layer {layer} rotates keys in another way"):
        check(config, model)
