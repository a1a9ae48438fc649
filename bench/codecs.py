"""Measures the speed and the error of each KV codec.

Error: on KV of the bundled model and on heavy-tailed random numbers, the root mean square of the
change by coding, and the change in the output of attention.

Speed: encoding and decoding on one core, in bytes of bf16 per second, as a share of a plain copy
(``np.copyto``) of these bytes. The buffers are far larger than any CPU cache. Each codec runs next
to a copy in every round, and shares are medians over the rounds. Decoding writes to memory in use;
encoding includes the allocation of its result.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.coded_values import decode_value, encode_value
from bench.support.program import is_quick
from models.tinyrag.handbook import make_handbook
from ragcache_core.identity.variant import Codec, Precision, ValueShape
from ragcache_kv.codecs import warm_up

LAYER = ValueShape(1, 8, 128, "bfloat16")
PART_TOKENS = 256
"""A part of the speed runs: 1 MiB, like one layer of a chunk of an 8B model."""
MIXED = Precision(Codec.INT8, Codec.INT4)
PRECISIONS = [Precision(codec, codec) for codec in Codec] + [MIXED]
PAPER_ORDER = ["int8", "e4m3", "e5m2", "gse8"]
"""HA-RAG Fig. 9, least error first."""
PAPER_GSE_BEST = "gse8"  # §III-B1: 1+4+3 has the least error of the three

Report = dict[str, float]


def errors(precision: Precision, samples: list[Sample]) -> Report:
    """Compression and error over all samples.

    ``rmse`` is absolute, ``rmse_share`` relative to the numbers' root mean square.
    ``median_relative`` is the median of |error| / |number|. ``attention_share`` is the root mean
    square of the change in attention's output, relative to the output's.
    """
    native = held = 0
    squared = own = moved = output = 0.0
    count = 0
    relative = []
    for sample in samples:
        parts = encode_value(sample.value, sample.shape, sample.num_tokens, precision)
        result = decode_value(parts, sample.shape, sample.num_tokens, precision)
        native += sample.value.size
        held += sum(part.size for part in parts)
        before = from_bfloat16(sample.value).astype(np.float64)
        error = from_bfloat16(result) - before
        squared += float(np.sum(error**2))
        own += float(np.sum(before**2))
        count += before.size
        relative.append(np.abs(error[before != 0] / before[before != 0]))
        exact = attention(sample.value, sample)
        moved += float(np.sum((attention(result, sample) - exact) ** 2, dtype=np.float64))
        output += float(np.sum(exact**2, dtype=np.float64))
    return {
        "ratio": native / held,
        "rmse": (squared / count) ** 0.5,
        "rmse_share": (squared / own) ** 0.5,
        "median_relative": float(np.median(np.concatenate(relative))),
        "attention_share": (moved / output) ** 0.5,
    }


def speeds(buffer_mib: int, decode_rounds: int, encode_rounds: int) -> dict[str, Report]:
    """Return shares of the copy speed, by precision."""
    shape = ValueShape(buffer_mib, LAYER.num_kv_heads, LAYER.head_dim, LAYER.dtype)
    value = _numbers(buffer_mib)
    out = np.zeros_like(value)
    parts = {
        precision: encode_value(value, shape, PART_TOKENS, precision) for precision in PRECISIONS
    }

    def decoder(precision: Precision) -> Callable[[], object]:
        return lambda: decode_value(parts[precision], shape, PART_TOKENS, precision, out)

    def encoder(precision: Precision) -> Callable[[], object]:
        return lambda: encode_value(value, shape, PART_TOKENS, precision)

    def copy() -> None:
        np.copyto(out, value)

    decode = _beside(copy, {p: decoder(p) for p in PRECISIONS}, decode_rounds)
    encode = _beside(copy, {p: encoder(p) for p in PRECISIONS}, encode_rounds)
    return {
        str(precision): {
            "decode_over_memcpy": statistics.median(c / t for t, c in decode[precision]),
            "memcpy_gb_s": value.size / statistics.median(c for _, c in decode[precision]) / 1e9,
            "encode_over_memcpy": statistics.median(c / t for t, c in encode[precision]),
        }
        for precision in PRECISIONS
    }


def _numbers(buffer_mib: int) -> np.ndarray:
    """Make different 1 MiB layers of bf16 from one normal sample, rolled and scaled."""
    layer = np.random.default_rng(0).standard_normal(1 << 19).astype(np.float32)
    layers = [to_bfloat16(np.roll(layer, 997 * i) * (1 + i / 7)) for i in range(buffer_mib)]
    return np.concatenate(layers)


def _beside(
    copy: Callable[[], object], tasks: dict[Precision, Callable[[], object]], rounds: int
) -> dict[Precision, list[tuple[float, float]]]:
    """Time each task and a copy right after it, round by round."""
    taken: dict[Precision, list[tuple[float, float]]] = {precision: [] for precision in tasks}
    for _ in range(rounds):
        for precision, task in tasks.items():
            taken[precision].append((_seconds(task), _seconds(copy)))
    return taken


def _seconds(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


MODEL = Path(__file__).resolve().parents[1] / "models/tinyrag/model"
QUERIES = 64
"""Number of last positions of a text whose attention is measured."""


@dataclass(frozen=True, slots=True)
class Sample:
    """KV of one text in bf16, and queries over it.

    value: uint8, native format. queries: float32, [layers, heads, QUERIES, head_dim], of the last
    positions; as many heads as the keys have.
    """

    shape: ValueShape
    num_tokens: int
    value: np.ndarray
    queries: np.ndarray


def real_samples(texts: int, tokens: int) -> list[Sample]:
    """The bundled model's own keys, values and queries, rotated, over handbook pages."""
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model: Any = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    config = model.config
    shape = ValueShape(
        config.num_hidden_layers, config.num_key_value_heads, config.head_dim, "bfloat16"
    )
    projected: list[Any] = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(
            lambda _module, _inputs, output: projected.append(output)
        )
    samples = []
    for seed in range(texts):
        pages = make_handbook(seed, 40, "held_out").documents
        text = "\n\n".join(page.text for page in pages)
        ids = torch.tensor(
            [tokenizer(text[: 8 * tokens], add_special_tokens=False).input_ids[:tokens]]
        )
        projected.clear()
        with torch.inference_mode():
            cache = model(ids, use_cache=True).past_key_values
            layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
            value = torch.stack(layers).transpose(2, 3).contiguous()
            cos, sin = model.model.rotary_emb(value, torch.arange(ids.shape[1])[None])
            rotated = [
                apply_rotary_pos_emb(
                    query.view(1, ids.shape[1], -1, config.head_dim).transpose(1, 2),
                    query.view(1, ids.shape[1], -1, config.head_dim).transpose(1, 2),
                    cos,
                    sin,
                )[0][0, :, -QUERIES:]
                for query in projected
            ]
        native = value.view(torch.uint8).numpy().reshape(-1)
        samples.append(Sample(shape, ids.shape[1], native, torch.stack(rotated).float().numpy()))
    return samples


def heavy_tailed_sample(seed: int, tokens: int) -> Sample:
    """Student's t with 3 degrees of freedom, and in the keys a few channels 20 times as large.

    Such channels are what large models have in their keys and small ones lack.
    """
    shape = ValueShape(2, 8, 128, "bfloat16")
    rng = np.random.default_rng(seed)
    kv = rng.standard_t(3, (2, 2, tokens, 8, 128)).astype(np.float32)
    for layer in range(2):
        kv[layer, 0, :, :, rng.choice(128, 4, replace=False)] *= 20
    queries = rng.standard_normal((2, 8, QUERIES, 128)).astype(np.float32) / 20
    return Sample(shape, tokens, to_bfloat16(kv), queries)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bytes of the values as bf16, cut off."""
    return (values.reshape(-1).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def attention(value: np.ndarray, sample: Sample) -> np.ndarray:
    """Outputs of causal attention of the sample's queries over value: float32."""
    kv = from_bfloat16(value).reshape(
        sample.shape.num_layers, 2, sample.num_tokens, -1, sample.shape.head_dim
    )
    keys, values = kv[:, 0].transpose(0, 2, 3, 1), kv[:, 1].transpose(0, 2, 1, 3)
    scores = sample.queries @ keys / np.sqrt(sample.shape.head_dim)
    ahead = np.arange(sample.num_tokens) > np.arange(-QUERIES, 0)[:, None] + sample.num_tokens
    scores = np.where(ahead, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ values


def from_bfloat16(value: np.ndarray) -> np.ndarray:
    """The float32 of bf16 bytes."""
    return (value.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def main() -> None:
    quick = is_quick(__doc__, "fewer rounds and texts")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, for copies too

    compiled = {}
    for precision in PRECISIONS:
        start = time.process_time()
        warm_up(precision, LAYER)
        compiled[str(precision)] = round(time.process_time() - start, 3)
    samples = {
        "real": real_samples(texts=1 if quick else 8, tokens=1000),
        "heavy_tailed": [heavy_tailed_sample(i, 500) for i in range(1 if quick else 4)],
    }
    found = {name: {str(p): errors(p, some) for p in PRECISIONS} for name, some in samples.items()}
    buffer_mib = 256 if quick else 512
    speed = speeds(buffer_mib, decode_rounds=5 if quick else 25, encode_rounds=1 if quick else 7)

    def order(sample: str, names: list[str], measure: str) -> list[str]:
        return sorted(names, key=lambda name: found[sample][name][measure])

    gse = [str(codec) for codec in (Codec.GSE8, Codec.GSE8_134, Codec.GSE8_125)]
    result = {
        **{
            f"{name}_decode_over_memcpy": round(speed[name]["decode_over_memcpy"], 3)
            for name in PAPER_ORDER
        },
        "decode_over_memcpy": {p: round(r["decode_over_memcpy"], 3) for p, r in speed.items()},
        "encode_over_memcpy": {p: round(r["encode_over_memcpy"], 3) for p, r in speed.items()},
        "memcpy_gb_s": round(statistics.median(r["memcpy_gb_s"] for r in speed.values()), 2),
        "buffer_mib": buffer_mib,
        "errors": found,
        "error_order": order("real", PAPER_ORDER, "rmse"),
        "error_order_heavy_tailed": order("heavy_tailed", PAPER_ORDER, "rmse"),
        "error_order_in_paper": PAPER_ORDER,
        "gse_order_by_rmse": order("real", gse, "rmse"),
        "gse_order_by_median_relative": order("real", gse, "median_relative"),
        "gse_best_in_paper": PAPER_GSE_BEST,
        "compile_cpu_s": compiled,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
