"""Properties of every rotation of keys, for all models, dtypes and differences."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragcache_core.identity.variant import ValueShape
from ragcache_kv.codecs import native_part_bytes
from ragcache_kv.codecs.numbers import BFLOAT16, NUMBERS, Bits, nearest_bfloat16, widen
from ragcache_kv.rotation import KeyRotation, Pairing, Rope, read_rope
from ragcache_kv.rotation.rope import cos_sin

STEPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative error of one rounding."""
FLOAT32_NOISE = 2.0**-21  # of products, a sum, and of the table's cosines


def rope(
    head_dim: int = 64, partial: float = 1.0, pairing: Pairing = Pairing.HALVES, theta: float = 1e4
) -> Rope:
    config = {"model_type": "llama", "head_dim": head_dim, "rope_theta": theta}
    return read_rope(config | {"partial_rotary_factor": partial}, pairing)


ropes = st.builds(
    rope,
    head_dim=st.just(64),
    partial=st.sampled_from([1.0, 0.5]),
    pairing=st.sampled_from(Pairing),
    theta=st.sampled_from([1e4, 5e5]),
)
dtypes = st.sampled_from(list(NUMBERS))
deltas = st.integers(-131_072, 131_072)


def some_keys(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Bits:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if dtype == "bfloat16":
        return nearest_bfloat16(values)
    number = NUMBERS[dtype]
    return values.astype(np.float16 if dtype == "float16" else np.float32).view(number.bits)


def pairs(keys: NDArray[Any], given: Rope) -> NDArray[np.complex128]:
    """Rotate each pair as a product of complex numbers."""
    turning = keys[..., : given.rotary_dim].astype(np.float64)
    if given.pairing is Pairing.HALVES:
        left, right = np.split(turning, 2, axis=-1)
    else:
        left, right = turning[..., ::2], turning[..., 1::2]
    return np.asarray(left + 1j * right)


@given(given=ropes, dtype=dtypes, delta=deltas, seed=st.integers(0, 2**32))
def test_a_rotation_is_a_product_of_complex_numbers(
    given: Rope, dtype: str, delta: int, seed: int
) -> None:
    number = NUMBERS[dtype]
    keys = some_keys(dtype, (3, 2, given.head_dim), seed)
    before = widen(keys, number)
    moved = KeyRotation(given, dtype).rotate_keys(keys.copy(), delta)
    after = widen(moved, number)
    expected = pairs(before, given) * np.exp(1j * np.array(given.frequencies) * delta)
    error = pairs(after, given) - expected
    share = np.maximum(abs(error.real), abs(error.imag)) / abs(expected)
    assert share.max() <= STEPS[dtype] + FLOAT32_NOISE
    lengths = abs(pairs(after, given)) / abs(pairs(before, given))
    np.testing.assert_allclose(lengths, 1, atol=2**0.5 * (STEPS[dtype] + FLOAT32_NOISE))
    rest = np.s_[..., given.rotary_dim :]
    np.testing.assert_array_equal(moved[rest], keys[rest])


@given(given=ropes, dtype=dtypes, first=deltas, second=deltas)
@example(given=rope(), dtype="bfloat16", first=131_072, second=-131_072)
def test_two_rotations_add_up_and_cancel_out(
    given: Rope, dtype: str, first: int, second: int
) -> None:
    rotation, number = KeyRotation(given, dtype), NUMBERS[dtype]
    keys = some_keys(dtype, (4, given.head_dim))
    twice = rotation.rotate_keys(rotation.rotate_keys(keys.copy(), first), second)
    once = rotation.rotate_keys(keys.copy(), first + second)
    back = rotation.rotate_keys(rotation.rotate_keys(keys.copy(), first), -first)
    # Three roundings, each of both numbers of a pair.
    bound = 3 * 2**0.5 * (STEPS[dtype] + FLOAT32_NOISE)
    for other, wanted in ((twice, once), (back, keys)):
        expected = pairs(widen(wanted, number), given)
        error = abs(pairs(widen(other, number), given) - expected)
        assert (error / abs(expected)).max() <= bound


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("pairing", Pairing)
def test_no_difference_changes_no_bit(pairing: Pairing, dtype: str) -> None:
    number = NUMBERS[dtype]
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 1 << (8 * number.num_bytes), (2, 3, 2, 64), dtype=number.bits)
    rotation = KeyRotation(rope(pairing=pairing), dtype)
    out = np.zeros_like(patterns)
    np.testing.assert_array_equal(rotation.rotate_part(patterns.copy(), 0), patterns)
    np.testing.assert_array_equal(rotation.rotate_part(patterns, 0, out), patterns)
    np.testing.assert_array_equal(rotation.rotate_keys(patterns, 0, out), patterns)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_parts_and_values_in_place_and_elsewhere(
    dtype: str, pairing: Pairing, partial: float
) -> None:
    given = rope(64, partial, pairing)
    rotation = KeyRotation(given, dtype)
    value = some_keys(dtype, (3, 2, 5, 2, 64))
    expected = value.copy()
    for layer in expected:
        layer[0] = rotation.rotate_keys(layer[0].copy(), -123)
    assert (expected[:, 0] != value[:, 0]).any()
    np.testing.assert_array_equal(expected[:, 1], value[:, 1])
    np.testing.assert_array_equal(rotation.rotate_part(value.copy(), -123), expected)
    untouched, out = value.copy(), np.zeros_like(value)
    assert rotation.rotate_part(value, -123, out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(value, untouched)
    np.testing.assert_array_equal(rotation.rotate_part(value[1].copy(), -123), expected[1])
    assert rotation.rotate_part(value, -123, value) is value
    np.testing.assert_array_equal(value, expected)


def test_a_native_part_as_the_codecs_have_it() -> None:
    shape = ValueShape(1, 2, 64, "bfloat16")
    part = np.zeros(native_part_bytes(shape, 3), np.uint8)
    keys, values = part.view(np.uint16).reshape(2, 3, 2, 64)
    keys[:], values[:] = nearest_bfloat16(np.ones((2, 3, 2, 64), np.float32))
    KeyRotation(rope(), "bfloat16").rotate_part(part.view(np.uint16).reshape(2, 3, 2, 64), 1)
    assert widen(keys[0, 0], BFLOAT16)[0] == pytest.approx(np.cos(1) - np.sin(1), rel=2**-8)
    assert (widen(values, BFLOAT16) == 1).all()


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("pairing", Pairing)
def test_tensors_hold_the_same_bits(dtype: str, pairing: Pairing) -> None:
    torch = pytest.importorskip("torch")
    rotation = KeyRotation(rope(64, 0.5, pairing), dtype)
    part = some_keys(dtype, (2, 3, 2, 64))
    expected = rotation.rotate_part(part.copy(), 77)
    signed = np.dtype(f"<i{NUMBERS[dtype].num_bytes}")
    tensor = torch.from_numpy(part.view(signed)).view(getattr(torch, dtype))
    out = torch.zeros_like(tensor)
    assert rotation.rotate_part(tensor, 77, out) is out
    rotation.rotate_part(tensor, 77)
    for made in (out, tensor):
        actual = made.view(torch.uint8).numpy().view(NUMBERS[dtype].bits)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("pairing", Pairing)
def test_pairs_at_odd_addresses(pairing: Pairing) -> None:
    """A part in a frame may begin at any multiple of a number's size."""
    rotation = KeyRotation(rope(pairing=pairing), "bfloat16")
    keys = some_keys("bfloat16", (3, 64))
    expected = rotation.rotate_keys(keys.copy(), 9)
    for offset in range(1, 4):
        frame = np.zeros(keys.size + 8, np.uint16)
        view = frame[offset : offset + keys.size].reshape(3, 64)
        np.testing.assert_array_equal(rotation.rotate_keys(keys, 9, view), expected)
        view[:] = keys
        np.testing.assert_array_equal(rotation.rotate_keys(view, 9), expected)
        assert not frame[:offset].any()
        assert not frame[offset + keys.size :].any()


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("pairing", Pairing)
def test_a_number_that_is_not_finite_affects_only_its_own_pair(
    dtype: str, pairing: Pairing
) -> None:
    given, number = rope(pairing=pairing), NUMBERS[dtype]
    keys = some_keys(dtype, (3, 64))
    infinity, nan = {
        "bfloat16": (0x7F80, 0xFFFF),
        "float16": (0x7C00, 0xFFFF),
        "float32": (0x7F800000, 0xFFFFFFFF),
    }[dtype]
    keys[0, 3], keys[1, 5] = infinity, nan
    after = widen(KeyRotation(given, dtype).rotate_keys(keys, 1000), number)
    assert np.count_nonzero(~np.isfinite(after)) == 4
    assert np.count_nonzero(np.isnan(after)) >= 2


def test_bytes_that_are_read_only_are_rotated_elsewhere() -> None:
    rotation = KeyRotation(rope(), "bfloat16")
    part = some_keys("bfloat16", (2, 3, 2, 64))
    received = np.frombuffer(part.tobytes(), np.uint16).reshape(part.shape)
    out = np.zeros_like(part)
    for delta in (12, 0):
        expected = rotation.rotate_part(part.copy(), delta)
        np.testing.assert_array_equal(rotation.rotate_part(received, delta, out), expected)


def test_no_tokens_and_no_layers() -> None:
    rotation = KeyRotation(rope(), "bfloat16")
    for shape in ((2, 0, 2, 64), (0, 2, 3, 2, 64), (3, 2, 0, 1, 64)):
        empty = np.zeros(shape, np.uint16)
        assert rotation.rotate_part(empty, 5).shape == shape
        assert rotation.rotate_part(empty, 5, np.zeros(shape, np.uint16)).shape == shape


def test_arrays_of_another_kind_are_refused() -> None:
    rotation = KeyRotation(rope(), "bfloat16")
    part = np.zeros((2, 3, 2, 64), np.uint16)
    frame = np.zeros(part.size + 64, np.uint16)
    readonly = part.copy()
    readonly.flags.writeable = False
    shifted = frame.view(np.uint8)[1 : 1 + part.nbytes].view(np.uint16).reshape(part.shape)
    overlapping = frame[: part.size].reshape(part.shape), frame[64:].reshape(part.shape)
    for wrong, out in (
        (part.view(np.float16), None),
        (part.astype(np.uint32), None),
        (part[:, ::2], None),
        (part[..., :32], None),
        (part[:1], None),
        (part[0], None),
        (part, part[:, :2]),
        (part, part.astype(np.uint32)),
        (part, np.zeros((2, 2, 3, 64), np.uint16).transpose(0, 2, 1, 3)),
        overlapping,
        (readonly, None),
        (part, readonly),
        (shifted, None),
    ):
        with pytest.raises(ValueError, match=r".+"):
            rotation.rotate_part(wrong, 1, out)
    with pytest.raises(ValueError, match="int8"):
        KeyRotation(rope(), "int8")


def test_tensors_of_another_kind_are_refused() -> None:
    torch = pytest.importorskip("torch")
    rotation = KeyRotation(rope(), "bfloat16")
    part = torch.zeros(2, 3, 2, 64, dtype=torch.bfloat16)
    for wrong, out in (
        (part.half(), None),
        (part.transpose(1, 2), None),
        (part, part.half()),
        (part, np.zeros((2, 3, 2, 64), np.uint16)),
        (part, torch.zeros_like(part, device="meta")),
    ):
        with pytest.raises(ValueError, match=r".+"):
            rotation.rotate_part(wrong, 1, out)


def test_angles_are_exact_at_128k_where_float32_is_off() -> None:
    """Compare with angles that integers and a pi of 256 bits reduce."""
    given, delta = rope(128, theta=1e6), 131_071
    pi = 0x3243F6A8885A308D313198A2E03707344A4093822299F31D0082EFA98EC4E6C89
    unit = 1 << 252  # of pi, which begins with 3
    angles = [Fraction(frequency) * delta * unit for frequency in given.frequencies]
    reduced = [float(Fraction(int(angle) % (2 * pi), unit)) for angle in angles]
    exact = np.array([np.cos(reduced), np.sin(reduced)])
    assert np.abs(cos_sin(given, delta) - exact).max() <= 2**-24
    single = np.array(given.frequencies, np.float32) * np.float32(delta)
    off = np.abs(np.cos(single.astype(np.float64)) - exact[0]).max()
    print(f"with float32 angles cosines would be off by {off:.5f}")
    assert off > 1000 * 2**-24


def test_each_layer_of_a_value_is_rotated_by_its_own_frequencies() -> None:
    first, second = rope(theta=10_000.0), rope(theta=500_000.0)
    both = replace(first, by_layer=(first.frequencies, second.frequencies))
    rng = np.random.default_rng(0)
    value = rng.standard_normal((2, 2, 5, 3, 64)).astype(np.float32).view(np.uint32)
    out = KeyRotation(both, "float32").rotate_part(value, 77, np.empty_like(value))
    for index, of_layer in enumerate((first, second)):
        alone = value[index].copy()
        KeyRotation(of_layer, "float32").rotate_part(alone, 77)
        assert np.array_equal(out[index], alone)
    with pytest.raises(ValueError, match="has 1 layers, not 2"):
        KeyRotation(both, "float32").rotate_part(value[:1], 77)
    with pytest.raises(ValueError, match="layer decides"):
        KeyRotation(both, "float32").rotate_keys(value[0, 0], 77)
