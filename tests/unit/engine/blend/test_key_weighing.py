"""Weights of attention with windows, soft caps and sinks, against loops in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragcache_engine.blend.key_weighing import KeyWeighing

HEADS, GROUP, FIRST, ROWS = 2, 3, 4, 5
KEYS = FIRST + ROWS


def expected(products: torch.Tensor, impl: dict[str, Any], window: int | None) -> torch.Tensor:
    """Return the weights of each query by the definition, one key at a time."""
    found = torch.zeros(products.shape, dtype=torch.float64)
    cap, sinks = impl.get("logits_soft_cap"), impl.get("sinks")
    for head in range(HEADS):
        for group in range(GROUP):
            for row in range(ROWS):
                position = FIRST + row
                powers = {}
                for key in range(position + 1):
                    if window is not None and key <= position - window:
                        continue
                    score = float(products[head, group, row, key]) * impl["scale"]
                    powers[key] = math.exp(cap * math.tanh(score / cap) if cap else score)
                total = sum(powers.values())
                if sinks is not None:
                    total += math.exp(float(sinks[head * GROUP + group]))
                for key, power in powers.items():
                    found[head, group, row, key] = power / total
    return found


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])
CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "plain": ({"sliding_window": -1}, None),
    "no window on a GPU": ({"sliding_window": (-1, -1)}, None),
    "window on a CPU": ({"sliding_window": 3}, 3),
    "window on a GPU": ({"sliding_window": (2, 0)}, 3),
    "window of all": ({"sliding_window": 4096}, None),
    "soft cap": ({"logits_soft_cap": 1.5}, None),
    "sinks": ({"sinks": SINKS}, None),
    "all": ({"sinks": SINKS, "logits_soft_cap": 2.0, "sliding_window": 4}, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_the_definition(case: str) -> None:
    given, window = CASES[case]
    impl = {"scale": 0.3, **given}
    generator = torch.Generator().manual_seed(0)
    products = torch.randn(HEADS, GROUP, ROWS, KEYS, generator=generator) * 4
    wanted = expected(products, impl, window)
    weighing = KeyWeighing.of(SimpleNamespace(**impl))
    found = weighing.weights(products.clone(), FIRST)
    assert torch.allclose(found.double(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"alibi_slopes": [0.1]}, "alibi_slopes"), ({"sliding_window": (3, 3)}, "sliding_window")],
)
def test_what_the_observer_does_not_know_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        KeyWeighing.of(SimpleNamespace(scale=1.0, **given))
