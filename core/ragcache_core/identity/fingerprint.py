"""Which model produced a KV: the fingerprint of a model folder, and the KV space it defines.

Gateway and engine compute both independently from the same folder, so neither has to trust the
other. The functions take file contents, not paths: the caller reads the files.

The weights are a part of the fingerprint. Small ones are hashed whole. Of larger ones these bytes
are hashed:

- the header of each file, which has the name, type and shape of every tensor,
- small tensors whole, such as norms and biases,
- the token embedding whole, because training of added tokens changes only some of its rows,
- of every other tensor, slices at positions that look random and depend on its name only.

A merged LoRA or further training changes most numbers of a matrix, and a sparse update a small
share of them at random. The slices contain some of these. A change of a few rows of an inner matrix
of a large model may be missed. Any new field of config.json then tells the models apart.

Source: https://huggingface.co/docs/safetensors, section Format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace

WHOLE_BYTES = 1 << 30
"""Weights up to this size are hashed whole. It takes about half a second on two cores."""

SLICE_BYTES = 4096
"""Size of a slice: a disk and the page cache read no less."""

MAX_SLICES = 64
"""Slices of one tensor, at most."""

MIN_SLICES = 4
"""Slices of one tensor, at least."""

ALL_SLICES = 1 << 16
"""Slices of all tensors together, as far as each tensor gets MIN_SLICES. They are 256 MiB."""

PIECE_BYTES = 1 << 20
"""Size of the pieces of what is hashed whole. Each thread keeps one in memory."""

_OUTPUT_HEAD = "lm_head."
"""Name of the output layer. It has a row for each token, and no KV depends on it."""

_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a weights file.

    Attributes:
        rows: Size of its first dimension; 1 if it has no dimension.
        span: Positions of its bytes in the file.
    """

    name: str
    rows: int
    span: range


def read_tensors(header: bytes, data: range) -> tuple[StoredTensor, ...]:
    """Return the tensors of a safetensors file, in the order of their bytes.

    Args:
        header: The JSON object at the beginning of the file.
        data: Positions in the file of what follows the header.

    Raises:
        ValueError: It is not a header, or it names bytes that the file lacks.
    """
    try:
        tensors = [
            _read_tensor(name, tensor, data.start)
            for name, tensor in json.loads(header).items()
            if name != _METADATA
        ]
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"it has no safetensors header: {error!r}") from error
    for one in tensors:
        if not data.start <= one.span.start <= one.span.stop <= data.stop:
            raise ValueError(f"it lacks bytes of the tensor {one.name}")
    return tuple(sorted(tensors, key=lambda one: (one.span.start, one.span.stop, one.name)))


def hashed_ranges(
    files: Sequence[Sequence[StoredTensor]], vocabulary: int
) -> list[list[tuple[range, ...]]]:
    """Return the bytes to hash of each file, in groups. The bytes of a group are hashed together.

    Args:
        files: The tensors of each file of a model.
        vocabulary: Number of tokens that the model knows; 0: unknown. A tensor with as many rows is
            the token embedding.
    """
    num_tensors = sum(map(len, files))
    slices = max(MIN_SLICES, min(MAX_SLICES, ALL_SLICES // max(1, num_tensors)))
    if sum(len(one.span) for tensors in files for one in tensors) <= WHOLE_BYTES:
        return [[group for one in tensors for group in _pieces(one.span)] for tensors in files]
    return [
        [group for one in tensors for group in _sample(one, vocabulary, slices)]
        for tensors in files
    ]


def _read_tensor(name: str, tensor: Mapping[str, Any], data_start: int) -> StoredTensor:
    shape, (start, end) = tensor["shape"], tensor["data_offsets"]
    rows = int(shape[0]) if shape else 1
    return StoredTensor(name, rows, range(data_start + int(start), data_start + int(end)))


def _sample(tensor: StoredTensor, vocabulary: int, slices: int) -> Iterator[tuple[range, ...]]:
    is_embedding = 0 < vocabulary <= tensor.rows and not tensor.name.startswith(_OUTPUT_HEAD)
    if is_embedding or len(tensor.span) <= slices * SLICE_BYTES:
        yield from _pieces(tensor.span)
    else:
        yield tuple(_slice(tensor, index, slices) for index in range(slices))


def _pieces(span: range) -> Iterator[tuple[range, ...]]:
    for start in range(span.start, span.stop, PIECE_BYTES):
        yield (range(start, min(start + PIECE_BYTES, span.stop)),)


def _slice(tensor: StoredTensor, index: int, slices: int) -> range:
    """Return one slice in each of as many equal parts of a tensor.

    Its position in the part differs from part to part. Otherwise all slices could lie in the same
    columns of a matrix.
    """
    size = len(tensor.span)
    first, end = (tensor.span.start + size * part // slices for part in (index, index + 1))
    seed = hashlib.blake2b(f"{index}\0{tensor.name}".encode(), digest_size=8).digest()
    start = first + int.from_bytes(seed, "little") % (end - first - SLICE_BYTES + 1)
    return range(start, start + SLICE_BYTES)


_FIELDS_WITHOUT_EFFECT = frozenset(
    {
        *("_name_or_path", "_commit_hash", "transformers_version"),
        *("dtype", "torch_dtype"),  # part of the KV space
        *("use_cache", "bos_token_id", "eos_token_id"),
    }
)
"""Top-level fields of config.json that do not change KV.

All others count. A field that does not change KV then costs reuse, once. A field that does change
KV, and is left out, makes an engine use the KV of another model.
"""


def model_fingerprint(
    config: Mapping[str, Any], other_files: Mapping[str, bytes], weights: bytes
) -> str:
    """Return the fingerprint of a model: 32 hex digits.

    Args:
        config: Content of config.json.
        other_files: Contents of the other files that change KV, such as tokenizer.json, by name.
        weights: Digest of the weights (``hashed_ranges``).
    """
    hasher = hashlib.blake2b(digest_size=16, person=b"ragcache-model")
    effective = {
        name: value for name, value in config.items() if name not in _FIELDS_WITHOUT_EFFECT
    }
    hasher.update(json.dumps(effective, sort_keys=True).encode() + b"\0")
    for name, content in sorted(other_files.items()):
        hasher.update(f"{name}\0{len(content)}\0".encode() + content)
    hasher.update(weights)
    return hasher.hexdigest()


def _sizes(heads: int, kv_heads: int, layers: int) -> dict[str, int]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
    }


CLASS_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "ernie4_5": {"head_dim": 128},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {**_sizes(8, 4, 26), "head_dim": 256},
    "glm4": {"head_dim": 128},
    "gpt_oss": {"head_dim": 64},
    "llama4_text": {"head_dim": 128},
    "minimax_m2": {"head_dim": 128},
    "ministral3": {**_sizes(32, 8, 34), "head_dim": 128},
    "mistral": _sizes(32, 8, 32),
    "qwen3": {"head_dim": 128},
}
"""Sizes that a config.json may leave out, because the model's class in transformers has them.

A ``text_config`` leaves out each one that equals its class's.
"""

_TEXT_CONFIG = "text_config"
_DTYPES = ("dtype", "torch_dtype")


def decoder_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model's decoder: those of config.json, or of its ``text_config``.

    Models that read images or sound as well have the decoder's settings in that object. It may
    leave out the dtype of the weights, and sizes that the model's class implies.

    Raises:
        InvalidInput: ``text_config`` is no object.
    """
    settings, inner = dict(config), config.get(_TEXT_CONFIG)
    if inner is not None:
        if not isinstance(inner, Mapping):
            raise InvalidInput(
                f"config.json {_TEXT_CONFIG}", "is no object", "correct the model folder"
            )
        settings = {**inner, **{name: config[name] for name in _DTYPES if config.get(name)}}
    kind = settings.get("model_type")
    return {**CLASS_DEFAULTS.get(kind if isinstance(kind, str) else "", {}), **settings}


_LONG_SIDE = "-long"
"""End of the fingerprint of a model whose engines use the rotation for long sequences."""


def _uses_long_rotation(config: Mapping[str, Any], max_length: int | None) -> bool:
    """Tell whether a model has two rotations (LongRoPE) and engines take the one for long prompts.

    vLLM decides once, by the most tokens of a sequence. So the same tokens have other keys in an
    engine with another limit.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters")
    rope = given if isinstance(given, Mapping) else {}
    name = "original_max_position_embeddings"
    for one in (rope, *(of_type for of_type in rope.values() if isinstance(of_type, Mapping))):
        if any(one.get(kind) in ("longrope", "su") for kind in ("rope_type", "type")):
            original = config.get(name) or one.get(name)
            if max_length and isinstance(original, int) and max_length > original:
                return True
    return False


def kv_space(
    fingerprint: str,
    config: Mapping[str, Any],
    dtype: str,
    name_key: bytes = b"",
    max_length: int | None = None,
) -> KVSpace:
    """Return the KV space of a decoder with ordinary (grouped-query) attention.

    Args:
        fingerprint: From ``model_fingerprint``.
        config: Content of config.json.
        dtype: As the engine stores KV. ``auto`` resolves as in vLLM: the dtype of the checkpoint,
            but bfloat16 for float32 or a checkpoint that names none.
        name_key: Of the platform's store key. Empty: it has none.
        max_length: Most tokens of prompt and answer together, which decides about the KV of models
            with LongRoPE.

    Raises:
        InvalidInput: The config lacks a size.
    """
    config = decoder_config(config)
    try:
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        layers = int(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            "config.json", f"lacks {error}", "name a Hugging Face decoder model"
        ) from error
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = "bfloat16" if dtype == "float32" else dtype
    if _uses_long_rotation(config, max_length):
        fingerprint += _LONG_SIDE
    return KVSpace(fingerprint, layers, kv_heads, head_dim, dtype, name_key)
