"""BERT without padding, for the short texts of queries and for chunks alike.

The texts of a batch are rows of one matrix, so no multiplication is spent on padding; only
attention arranges them as a rectangle. The projections of queries, keys and values are one
multiplication, and weights are packed once for the CPU's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from ragcache_retriever.embedding.embedder import Vectors
from ragcache_retriever.embedding.text_encoder import Tokens

ROW_STEP = 8
"""Batches have a multiple of it as rows. Each new number of rows has kernels compiled, which takes
as long as a short query."""

Project = Callable[[torch.Tensor], torch.Tensor]


class _Layer(NamedTuple):
    """Functions of one layer, in the order of their use. Each takes and returns rows."""

    query_key_value: Project
    attention_output: Project
    attention_norm: Project
    intermediate: Project
    output: Project
    output_norm: Project


class BertEncoder:
    """Computes a BertModel of the transformers library.

    Args:
        bert: The model on its device, in the dtype to compute in.
        pooling: ``mean`` over the tokens of a text, or ``cls``, which is its first token.
        before_layer: Called before each layer. It may wait.
    """

    def __init__(self, bert: Any, pooling: str, before_layer: Callable[[], None]) -> None:
        self.dimension: int = bert.config.hidden_size
        self._num_heads: int = bert.config.num_attention_heads
        self._pooling = pooling
        self._before_layer = before_layer
        self._device: torch.device = bert.device
        embeddings = bert.embeddings
        with torch.inference_mode():
            # All tokens are of the first type.
            token_type = embeddings.token_type_embeddings.weight[0]
            self._words = embeddings.word_embeddings.weight + token_type
            self._positions = embeddings.position_embeddings.weight.clone()
            self._norm = _norm(embeddings.LayerNorm)
            self._layers = [_layer(layer) for layer in bert.encoder.layer]

    def embed(self, batch: Sequence[Tokens]) -> Vectors:
        """See TextEncoder.embed."""
        torch.set_num_threads(1)  # it applies to the calling thread
        with torch.inference_mode():
            rows = _Rows(batch, self._device, self._words.dtype)
            states = self._norm(
                F.embedding(rows.ids, self._words) + F.embedding(rows.positions, self._positions)
            )
            for layer in self._layers:
                self._before_layer()
                states = self._compute(layer, states, rows)
            return rows.pooled(states, self._pooling)

    def _compute(self, layer: _Layer, states: torch.Tensor, rows: _Rows) -> torch.Tensor:
        projected = rows.to_rectangle(layer.query_key_value(states))
        count, width = projected.shape[:2]
        query, key, value = projected.view(count, width, 3, self._num_heads, -1).permute(
            2, 0, 3, 1, 4
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=rows.mask)
        attended = rows.from_rectangle(attended.transpose(1, 2).reshape(count, width, -1))
        states = layer.attention_norm(states + layer.attention_output(attended))
        return layer.output_norm(states + layer.output(layer.intermediate(states)))


class _Rows:
    """Where the tokens of a batch are: one below the other, and as a rectangle for attention.

    Attributes:
        ids: Token ids, one for each row. The last rows are padding.
        positions: Index of each token in its text.
        mask: Added to attention scores, so that padding is not attended. None without padding.
    """

    def __init__(self, batch: Sequence[Tokens], device: torch.device, dtype: torch.dtype) -> None:
        lengths = np.array([len(tokens) for tokens in batch])
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._total = int(self._ends[-1])
        self._shape = len(batch), int(lengths.max())
        num_rows = -(-self._total // ROW_STEP) * ROW_STEP
        ids = np.zeros(num_rows, np.int64)
        ids[: self._total] = np.concatenate(batch)
        text = np.repeat(np.arange(len(batch)), lengths)
        position = np.zeros_like(ids)
        position[: self._total] = np.arange(self._total) - self._starts[text]
        self.ids = torch.from_numpy(ids).to(device)
        self.positions = torch.from_numpy(position).to(device)
        self.mask: torch.Tensor | None = None
        self._num_padding = num_rows - self._total
        if len(batch) > 1:
            self._arrange(text * self._shape[1] + position[: self._total], device, dtype)

    def _arrange(self, cells: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Prepare the rectangle. cells: Index of each row's cell, shape (tokens,)."""
        row_of_cell = np.zeros(self._shape[0] * self._shape[1], np.int64)
        row_of_cell[cells] = np.arange(self._total)
        self._row_of_cell = torch.from_numpy(row_of_cell).to(device)
        self._cell_of_row = torch.from_numpy(cells).to(device)
        is_padding = np.ones(row_of_cell.shape, np.bool_)
        is_padding[cells] = False
        mask = torch.zeros((self._shape[0], 1, 1, self._shape[1]), dtype=dtype, device=device)
        padded = torch.from_numpy(is_padding).to(device).view(mask.shape)
        self.mask = mask.masked_fill_(padded, -torch.inf)

    def to_rectangle(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows as a tensor of shape (texts, longest text, columns)."""
        if self.mask is None:
            return rows[: self._total].unsqueeze(0)
        return rows.index_select(0, self._row_of_cell).view(*self._shape, -1)

    def from_rectangle(self, cells: torch.Tensor) -> torch.Tensor:
        """Return the inverse of to_rectangle."""
        rows = cells.flatten(0, 1)
        if self.mask is not None:
            rows = rows.index_select(0, self._cell_of_row)
        return F.pad(rows, (0, 0, 0, self._num_padding)) if self._num_padding else rows

    def pooled(self, states: torch.Tensor, pooling: str) -> Vectors:
        """Return one vector for each text."""
        found: Vectors = states[: self._total].float().cpu().numpy()
        if pooling == "cls":
            first: Vectors = found[self._starts]
            return first
        means: Vectors = np.add.reduceat(found, self._starts) / (
            (self._ends - self._starts)[:, None].astype(np.float32)
        )
        return means


def _layer(layer: Any) -> _Layer:
    attention = layer.attention
    parts = [attention.self.query, attention.self.key, attention.self.value]
    return _Layer(
        _linear(torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])),
        _linear(attention.output.dense.weight, attention.output.dense.bias),
        _norm(attention.output.LayerNorm),
        _linear(layer.intermediate.dense.weight, layer.intermediate.dense.bias, gelu=True),
        _linear(layer.output.dense.weight, layer.output.dense.bias),
        _norm(layer.output.LayerNorm),
    )


def _linear(weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> Project:
    """Return a linear layer, packed where the CPU's kernels take packed weights."""
    kernels = torch.ops.mkldnn
    # These are kernels of torch.compile. Another version of torch may lack them.
    if (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(kernels, "_linear_pointwise")
        and hasattr(kernels, "_reorder_linear_weight")
    ):
        packed = kernels._reorder_linear_weight(weight.detach(), ROW_STEP)
        function, algorithm = ("gelu", "none") if gelu else ("none", "")
        offset = bias.detach().clone()
        return lambda rows: kernels._linear_pointwise(rows, packed, offset, function, [], algorithm)
    if gelu:
        return lambda rows: F.gelu(F.linear(rows, weight, bias))
    return lambda rows: F.linear(rows, weight, bias)


def _norm(module: Any) -> Project:
    shape, weight, bias, epsilon = module.normalized_shape, module.weight, module.bias, module.eps
    return lambda rows: F.layer_norm(rows, shape, weight, bias, epsilon)
