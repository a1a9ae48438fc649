"""How a layer's attention turns products of queries and keys into weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class KeyWeighing:
    """How one layer weighs keys.

    Attributes:
        scale: Factor of the products.
        window: Keys that a query attends to, with its own; None: all before it.
        soft_cap: Bound of a score, which tanh approaches; 0: none.
        sinks: Score of an extra key without a value, for each query head; None: there is none.
    """

    scale: float
    window: int | None
    soft_cap: float
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, impl: Any) -> KeyWeighing:
        """Read the attributes of a vLLM attention backend's layer.

        Raises:
            ValueError: If the layer has biases by distance (ALiBi) or another unknown window.
        """
        if getattr(impl, "alibi_slopes", None) is not None:
            raise ValueError("attention with alibi_slopes is not supported")
        soft_cap = float(getattr(impl, "logits_soft_cap", None) or 0.0)
        return cls(impl.scale, _window(impl), soft_cap, getattr(impl, "sinks", None))

    def weights(self, products: torch.Tensor, first: int) -> torch.Tensor:
        """Return attention weights.

        Args:
            products: float32 [kv heads, group, rows, keys]: of each query with each key. They are
                overwritten.
            first: Position of the first row. The first key is at position 0.

        Returns:
            The same shape. A row adds up to less than 1 where the layer has sinks.
        """
        heads, group, rows, keys = products.shape
        scores = products.mul_(self.scale)
        if self.soft_cap:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        distance = torch.arange(first, first + rows, device=scores.device)[:, None] - torch.arange(
            keys, device=scores.device
        )
        hidden = distance < 0
        if self.window is not None:
            hidden |= distance >= self.window
        scores.masked_fill_(hidden, -torch.inf)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.float().view(heads, group, 1, 1).expand(-1, -1, rows, -1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]


def _window(impl: Any) -> int | None:
    """Return the window of a layer. A CPU's backend counts keys, others those to the left."""
    given = getattr(impl, "sliding_window", None)
    if given in (None, -1, (-1, -1)):
        return None
    if isinstance(given, int):
        return given
    if isinstance(given, tuple) and len(given) == 2 and given[1] == 0:
        return int(given[0]) + 1
    raise ValueError(f"attention with sliding_window = {given} is not supported")
