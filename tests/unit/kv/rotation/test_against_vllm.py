"""Rotated keys against those that vLLM and transformers compute at the new position.

Their modules run in a process of their own, this file as a program: importing vLLM changes how a
process logs and starts threads. Keys there are float32, with tables of cosines in float32, and once
more in bfloat16 as vLLM serves them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ragcache_kv.codecs.numbers import BFLOAT16, nearest_bfloat16, widen
from ragcache_kv.rotation import KeyRotation, Pairing, Rope, read_rope

TIMEOUT_S = 280.0
TOKENS, HEADS = 5, 2
BFLOAT16_STEP = 2.0**-7  # between neighbours, of their size, at most
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SHORT, LONG = 16_384, 131_072
CASES: dict[str, dict[str, Any]] = {
    "plain": {"rope_parameters": {"rope_theta": 1e4}},
    "plain-long": {"rope_theta": 1e6, "head_dim": 128, "max_position_embeddings": LONG},
    "partial": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "partial-80": {"head_dim": 80, "rope_theta": 1e4, "partial_rotary_factor": 0.4},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear-3": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 3.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama3-long": {
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
        "head_dim": 128,
        "max_position_embeddings": LONG,
    },
    "ntk": {"rope_theta": 1e4, "rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
    "ntk-mixed": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "ntk", "factor": 8.0, "mixed_b": 0.625},
    },
    "yarn": {"rope_theta": 1e4, "rope_scaling": YARN},
    "yarn-long": {
        "rope_theta": 1e6,
        "rope_scaling": {**YARN, "original_max_position_embeddings": 32_768},
        "head_dim": 128,
        "max_position_embeddings": LONG,
    },
    "yarn-all": {
        "rope_theta": 1.5e5,
        "rope_scaling": {
            **YARN,
            "factor": 32.0,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "truncate": False,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
        "max_position_embeddings": SHORT,
    },
    "yarn-attention": {
        "rope_theta": 1e4,
        "rope_scaling": {**YARN, "attention_factor": 1.7},
        "partial_rotary_factor": 0.5,
    },
}
BOTH = [(name, pairing) for name in CASES for pairing in Pairing]


def config(name: str) -> dict[str, Any]:
    base = {
        "model_type": "llama",
        "head_dim": 64,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": SHORT,
    }
    return {**base, **CASES[name]}


def moves(name: str) -> list[tuple[int, int]]:
    """Positions from which and to which keys are moved."""
    last = config(name)["max_position_embeddings"] - TOKENS
    return [(0, 1000), (3000, 17), (1000, 1001), (11, last), (last, 0), (last, last - 700)]


def main(path: str) -> None:
    """Write what the modules compute, by case, pairing and move."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    def rotated(module: Any, keys: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + TOKENS)
        flat = keys.flatten(1)
        return module.forward_native(positions, flat.clone(), flat.clone())[1].view(keys.shape)

    def own_frequencies(module: Any, scaling: dict[str, Any]) -> torch.Tensor:
        kind = scaling.get("rope_type", "default")
        if kind == "yarn":
            return module._compute_inv_freq(scaling["factor"])
        own = module._compute_inv_freq(module.base)
        return own.double() / scaling["factor"] if kind == "linear" else own

    found: dict[str, NDArray[Any]] = {}
    generator = torch.Generator().manual_seed(5)
    for name, pairing in BOTH:
        given = config(name)
        parsed = LlamaConfig(**{n: v for n, v in given.items() if n != "model_type"})
        scaling = dict(parsed.rope_parameters)
        dim, longest = given["head_dim"], given["max_position_embeddings"]
        neox = pairing is Pairing.HALVES
        with set_current_vllm_config(VllmConfig()):
            exact, served = (
                rotary_embedding.get_rope(dim, longest, neox, scaling, dtype)
                for dtype in (torch.float32, torch.bfloat16)
            )
        label = f"{name} {pairing}"
        found[f"{label} frequencies"] = own_frequencies(exact, scaling).numpy()
        cosines, sines = exact.cos_sin_cache[1].chunk(2)
        found[f"{label} magnitude"] = (cosines**2 + sines**2).sqrt().numpy()
        theirs = None
        # Of transformers' models, Llama knows no ntk, and without scaling turns whole keys.
        partial = scaling["rope_type"] == "default" and "partial_rotary_factor" in scaling
        if neox and scaling["rope_type"] != "ntk" and not partial:
            theirs = modeling_llama.LlamaRotaryEmbedding(parsed)
            found[f"{label} theirs"] = theirs.inv_freq.numpy()
        for start, end in moves(name):
            keys = torch.randn(TOKENS, HEADS, dim, generator=generator)
            move = f"{label} {start} {end}"
            found[f"{move} before"] = rotated(exact, keys, start).numpy()
            found[f"{move} after"] = rotated(exact, keys, end).numpy()
            served_keys = rotated(served, keys.bfloat16(), end)
            found[f"{move} served"] = served_keys.float().numpy()
            found[f"{move} meant"] = rotated(exact, keys.bfloat16().float(), end).numpy()
            if theirs is not None and theirs.inv_freq.numel() == dim // 2:
                positions = torch.arange(end, end + TOKENS)[None]
                tables = theirs(keys, positions)
                by_head = keys.transpose(0, 1)[None]
                moved, _ = modeling_llama.apply_rotary_pos_emb(by_head, by_head, *tables)
                found[f"{move} transformers"] = moved[0].transpose(0, 1).numpy()
    np.savez(path, allow_pickle=True, **found)


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[Any]]:
    if any(importlib.util.find_spec(name) is None for name in ("vllm", "transformers")):
        pytest.skip("vLLM is not installed")
    path = tmp_path_factory.mktemp("vllm") / "keys.npz"
    done = subprocess.run(
        [sys.executable, __file__, str(path)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(path) as found:
        return dict(found)


def read(name: str, pairing: Pairing) -> Rope:
    return read_rope(config(name), pairing)


def sizes(keys: NDArray[Any], rope: Rope) -> NDArray[Any]:
    """Return the length of each number's pair; its own magnitude if it is not rotated.

    A rotation's error is a share of that.
    """
    result = np.abs(keys).astype(np.float64)
    turning = keys[..., : rope.rotary_dim].astype(np.float64)
    if rope.pairing is Pairing.HALVES:
        lengths = np.hypot(*np.split(turning, 2, axis=-1))
        result[..., : rope.rotary_dim] = np.concatenate([lengths, lengths], axis=-1)
    else:
        lengths = np.hypot(turning[..., ::2], turning[..., 1::2])
        result[..., : rope.rotary_dim] = np.repeat(lengths, 2, axis=-1)
    return result


def largest_error(actual: NDArray[Any], expected: NDArray[Any], rope: Rope) -> float:
    """Return the error as a share of the pair's length."""
    return float(np.max(np.abs(actual - expected) / np.maximum(sizes(expected, rope), 1e-30)))


def angle_error(name: str) -> float:
    """Return twice the error of a float32 angle at the last position: for start and end."""
    return 2 * config(name)["max_position_embeddings"] * 2.0**-24 + 2.0**-20


@pytest.mark.parametrize(("name", "pairing"), BOTH)
def test_frequencies_are_those_of_vllm_and_transformers(
    computed: dict[str, NDArray[Any]], name: str, pairing: Pairing
) -> None:
    ours = np.array(read(name, pairing).frequencies)
    np.testing.assert_allclose(ours, computed[f"{name} {pairing} frequencies"], rtol=2.0**-21)
    if f"{name} {pairing} theirs" in computed:
        np.testing.assert_allclose(ours, computed[f"{name} {pairing} theirs"], rtol=2.0**-21)


def test_yarn_really_has_a_magnitude(computed: dict[str, NDArray[Any]]) -> None:
    magnitude = computed["yarn-attention halves magnitude"]
    np.testing.assert_allclose(magnitude, 1.7, rtol=1e-5)
    assert computed["yarn halves magnitude"].min() > 1.1


@pytest.mark.parametrize(("name", "pairing"), BOTH)
def test_float32_keys_are_those_computed_at_the_new_position(
    computed: dict[str, NDArray[Any]], name: str, pairing: Pairing
) -> None:
    rope = read(name, pairing)
    rotation = KeyRotation(rope, "float32")
    for start, end in moves(name):
        move = f"{name} {pairing} {start} {end}"
        keys = computed[f"{move} before"].copy()
        rotation.rotate_keys(keys.view(np.uint32), end - start)
        bound = angle_error(name)
        assert largest_error(keys, computed[f"{move} after"], rope) <= bound
        if f"{move} transformers" in computed:
            assert largest_error(keys, computed[f"{move} transformers"], rope) <= bound


@pytest.mark.parametrize(("name", "pairing"), BOTH)
def test_bfloat16_keys_are_as_good_as_those_that_vllm_serves(
    computed: dict[str, NDArray[Any]], name: str, pairing: Pairing
) -> None:
    rope = read(name, pairing)
    rotation = KeyRotation(rope, "bfloat16")
    ours, theirs = [], []
    for start, end in moves(name):
        move = f"{name} {pairing} {start} {end}"
        expected = computed[f"{move} after"]
        keys = nearest_bfloat16(computed[f"{move} before"])
        moved = widen(rotation.rotate_keys(keys, end - start), BFLOAT16)
        # Rounded before and after: half a step each, along each of the two numbers before.
        bound = BFLOAT16_STEP * (0.5 + 0.5 * 2**0.5) + angle_error(name)
        assert largest_error(moved, expected, rope) <= bound
        turning = np.s_[..., : rope.rotary_dim]
        ours.append(((moved - expected) / sizes(expected, rope))[turning])
        meant, served = computed[f"{move} meant"], computed[f"{move} served"]
        theirs.append(((served - meant) / sizes(meant, rope))[turning])
    error, own = (float(np.sqrt(np.mean(np.square(some)))) for some in (ours, theirs))
    print(f"{name} {pairing}: rms {error:.5f} of a pair, vLLM's own bfloat16 {own:.5f}")
    assert error <= 1.25 * own


if __name__ == "__main__":
    main(sys.argv[1])
