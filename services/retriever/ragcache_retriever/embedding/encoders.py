"""Models that run in this process: BERT, and other models of sentence-transformers.

BERT is computed without padding, for the short texts of queries and for chunks alike. The texts of
a batch are rows of one matrix, so no multiplication is spent on padding; only attention arranges
them as a rectangle. The projections of queries, keys and values are one multiplication, and weights
are packed once for the CPU's kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from safetensors import SafetensorError
from safetensors.torch import load_file
from typing_extensions import override

from ragcache_core.errors import InvalidInput
from ragcache_retriever.embedding.embedder import TextEncoder, Tokens, Vectors

ROW_STEP = 8
"""Batches have a multiple of it as rows. Each new number of rows has kernels compiled, which takes
as long as a short query."""
Project = Callable[[torch.Tensor], torch.Tensor]
LENGTH_STEP = 32
"""Batches are padded to a multiple of it, because each new shape has kernels compiled."""


class _Layer(NamedTuple):
    """Functions of one layer, in the order of their use. Each takes and returns rows."""

    query_key_value: Project
    attention_output: Project
    attention_norm: Project
    intermediate: Project
    output: Project
    output_norm: Project


class BertEncoder(TextEncoder):
    """Computes a BERT from its files, without the transformers library, which takes seconds to
    import.

    Args:
        folder: Holds config.json and ``*.safetensors``.
        pooling: ``mean`` over the tokens of a text, or ``cls``, which is its first token.
        device: As torch names it.
        dtype: Number format to compute in.
        before_step: Called twice in each layer. It may wait.

    Raises:
        InvalidInput: The files hold no BERT.
    """

    def __init__(
        self,
        folder: Path,
        pooling: str,
        device: str,
        dtype: torch.dtype,
        before_step: Callable[[], None],
    ) -> None:
        self._pooling = pooling
        self._before_step = before_step
        self._device = torch.device(device)
        try:
            config = json.loads((folder / "config.json").read_text())
            self.dimension = int(config["hidden_size"])
            self._num_heads = int(config["num_attention_heads"])
            weights = _Weights(folder, self._device, dtype, config.get("layer_norm_eps", 1e-12))
            with torch.inference_mode():
                # All tokens are of the first type.
                token_type = weights.tensor("embeddings.token_type_embeddings.weight")[0]
                self._words = weights.tensor("embeddings.word_embeddings.weight") + token_type
                self._positions = weights.tensor("embeddings.position_embeddings.weight")
                self._norm = weights.norm("embeddings.LayerNorm")
                self._layers = [
                    weights.layer(f"encoder.layer.{i}") for i in range(config["num_hidden_layers"])
                ]
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise InvalidInput(
                "RAGCACHE_EMBEDDER",
                f"{folder} cannot be loaded: {error}",
                "restore the model's folder",
            ) from error

    @override
    def embed(self, batch: Sequence[Tokens]) -> Vectors:
        torch.set_num_threads(1)  # it applies to the calling thread
        with torch.inference_mode():
            rows = _Rows(batch, self._device, self._words.dtype)
            states = self._norm(
                F.embedding(rows.ids, self._words) + F.embedding(rows.positions, self._positions)
            )
            for layer in self._layers:
                self._before_step()
                states = self._attend(layer, states, rows)
                self._before_step()
                states = layer.output_norm(states + layer.output(layer.intermediate(states)))
            return rows.pooled(states, self._pooling)

    def _attend(self, layer: _Layer, states: torch.Tensor, rows: _Rows) -> torch.Tensor:
        projected = rows.to_rectangle(layer.query_key_value(states))
        count, width = projected.shape[:2]
        query, key, value = projected.view(count, width, 3, self._num_heads, -1).permute(
            2, 0, 3, 1, 4
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=rows.mask)
        attended = rows.from_rectangle(attended.transpose(1, 2).reshape(count, width, -1))
        return layer.attention_norm(states + layer.attention_output(attended))


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


class _Weights:
    """Tensors of a BERT by the names that the transformers library gives them."""

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, epsilon: float
    ) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for path in folder.glob("*.safetensors"):
            # Models with a head have the BERT under a prefix.
            for name, tensor in load_file(path).items():
                self._tensors[name.removeprefix("bert.")] = tensor.to(device, dtype)
        self._epsilon = epsilon

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor. Raises KeyError if there is none."""
        return self._tensors[name]

    def layer(self, name: str) -> _Layer:
        """Return the functions of a layer."""
        attention = f"{name}.attention"
        parts = [f"{attention}.self.{part}" for part in ("query", "key", "value")]
        return _Layer(
            _linear(
                torch.cat([self.tensor(f"{part}.weight") for part in parts]),
                torch.cat([self.tensor(f"{part}.bias") for part in parts]),
            ),
            self._linear(f"{attention}.output.dense"),
            self.norm(f"{attention}.output.LayerNorm"),
            self._linear(f"{name}.intermediate.dense", gelu=True),
            self._linear(f"{name}.output.dense"),
            self.norm(f"{name}.output.LayerNorm"),
        )

    def norm(self, name: str) -> Project:
        """Return a layer normalization."""
        # Checkpoints of the first version name them as the paper does.
        weight = self._tensors.get(f"{name}.weight", self._tensors.get(f"{name}.gamma"))
        bias = self._tensors.get(f"{name}.bias", self._tensors.get(f"{name}.beta"))
        if weight is None or bias is None:
            raise KeyError(name)
        epsilon = self._epsilon
        return lambda rows: F.layer_norm(rows, weight.shape, weight, bias, epsilon)

    def _linear(self, name: str, *, gelu: bool = False) -> Project:
        return _linear(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"), gelu=gelu)


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
        packed = kernels._reorder_linear_weight(weight, ROW_STEP)
        function, algorithm = ("gelu", "none") if gelu else ("none", "")
        return lambda rows: kernels._linear_pointwise(rows, packed, bias, function, [], algorithm)
    if gelu:
        return lambda rows: F.gelu(F.linear(rows, weight, bias))
    return lambda rows: F.linear(rows, weight, bias)


class SentenceEncoder(TextEncoder):
    """Computes a model with the modules of the sentence-transformers library.

    Args:
        device: As torch names it.
        dtype: Number format to compute in.
        max_tokens: Most tokens of a text, and of a batch's width.
        before_batch: Called before each batch. It may wait.

    Raises:
        InvalidInput: The library cannot load the model without running code of it.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        dtype: torch.dtype,
        max_tokens: int,
        before_batch: Callable[[], None],
    ) -> None:
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415  slow to import

        try:
            model: Any = SentenceTransformer(
                str(folder),
                device=device,
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"dtype": dtype},
            )
        except Exception as error:  # each family raises errors of its own
            raise InvalidInput(
                "RAGCACHE_EMBEDDER",
                f"{folder} cannot be loaded: {error}",
                "name a model that sentence-transformers loads without code of the model's",
            ) from error
        self._model = model.eval()
        self._device = device
        self._max_tokens = max_tokens
        self._padding = int(getattr(model.tokenizer, "pad_token_id", None) or 0)
        self._before_batch = before_batch
        self.dimension = self.embed([[self._padding]]).shape[1]

    @override
    def embed(self, batch: Sequence[Tokens]) -> Vectors:
        torch.set_num_threads(1)  # it applies to the calling thread
        self._before_batch()
        lengths = [len(tokens) for tokens in batch]
        width = min(-(-max(lengths) // LENGTH_STEP) * LENGTH_STEP, self._max_tokens)
        ids = np.full((len(batch), width), self._padding, np.int64)
        mask = np.zeros_like(ids)
        for row, (tokens, length) in enumerate(zip(batch, lengths, strict=True)):
            ids[row, :length] = tokens
            mask[row, :length] = 1
        features = {
            "input_ids": torch.from_numpy(ids).to(self._device),
            "attention_mask": torch.from_numpy(mask).to(self._device),
        }
        with torch.inference_mode():
            vectors: Vectors = self._model(features)["sentence_embedding"].float().cpu().numpy()
        return vectors
