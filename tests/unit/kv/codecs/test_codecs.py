"""The largest error of each codec, and the bytes that it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.variant import Codec, Precision, ValueShape
from ragcache_kv.codecs import (
    decode_part,
    encode_part,
    encoded_part_bytes,
    native_part_bytes,
    warm_up,
)
from ragcache_kv.codecs.grouped import E4M3, E5M2, Fp8
from ragcache_kv.codecs.numbers import NUMBERS, Bits, Bytes, Floats, narrow, widen
from ragcache_kv.values import layout as kv_value

LOSSY = [codec for codec in Codec if not codec.lossless]
LOSSLESS = [codec for codec in Codec if codec.lossless]
GROUP = {Codec.INT8: 64, Codec.INT4: 32, Codec.E4M3: 64, Codec.E5M2: 64}
GSE_INDEX_BITS = {Codec.GSE8_125: 2, Codec.GSE8_134: 3, Codec.GSE8: 4}
DTYPES = list(NUMBERS)

shapes = st.builds(
    ValueShape,
    num_layers=st.just(1),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 7, 31, 32, 64, 80, 96, 128, 130]),
    dtype=st.sampled_from(DTYPES),
)


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """Compile the kernels before the examples."""
    for codec in Codec:
        for dtype in DTYPES:
            warm_up(Precision(codec, codec), ValueShape(1, 1, 2, dtype))


@st.composite
def finite_parts(draw: st.DrawFn) -> tuple[Bytes, ValueShape, int]:
    """Layers of finite numbers: of one scale, of all scales, or of a few distinct ones."""
    shape, num_tokens = draw(shapes), draw(st.integers(0, 5))
    count = 2 * num_tokens * shape.num_kv_heads * shape.head_dim
    number = NUMBERS[shape.dtype]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    style = draw(st.sampled_from(["normal", "heavy", "patterns", "few"]))
    if style == "patterns":
        bits = rng.integers(0, 1 << (8 * number.num_bytes), count, dtype=number.bits)
    elif style == "few":
        few = draw(hnp.arrays(number.bits, 4))
        bits = few[rng.integers(0, 4, count)]
    else:
        values = rng.standard_normal(count) if style == "normal" else rng.standard_t(1.2, count)
        spread = np.exp2(rng.integers(-20, 5, count)) if style == "heavy" else 1
        bits = narrow(np.clip(values * spread, -6e4, 6e4).astype(np.float32), number)
    values32 = widen(bits, number)
    with np.errstate(invalid="ignore"):
        usable = np.abs(values32) <= number.limit
    bits = np.where(usable, bits, 0).astype(number.bits)
    return bits.view(np.uint8), shape, num_tokens


def decoded(part: Bytes, shape: ValueShape, num_tokens: int, codec: Codec) -> Bytes:
    precision = Precision(codec, codec)
    encoded = encode_part(part, shape, num_tokens, precision)
    return decode_part(encoded, shape, num_tokens, precision)


def floats(part: Bytes, shape: ValueShape) -> Floats:
    number = NUMBERS[shape.dtype]
    return widen(part.view(number.bits), number)


def group_most(values: Floats, dim: int, group: int) -> Floats:
    """Return the largest magnitude of each number's group."""
    rows = np.abs(values).reshape(-1, dim)
    most = np.zeros_like(rows)
    for start in range(0, dim, group):
        some = rows[:, start : start + group]
        most[:, start : start + group] = some.max(axis=1, keepdims=True)
    return most.reshape(-1)


def error_bound(codec: Codec, values: Floats, shape: ValueShape) -> np.ndarray:
    """Return the largest allowed error of each number, in float64.

    INT8, INT4: half a step of the group, a hair more for a scale of eight bits. FP8: half a unit of
    its fraction, or of its smallest number. GSE-8: a quarter of the number, which is half a unit
    where the leading 1 is lowest. All: the dtype's own rounding, and half of its least number.
    """
    number = NUMBERS[shape.dtype]
    exact = np.abs(values.astype(np.float64))
    own = exact * 2.0 ** (-8 if shape.dtype == "bfloat16" else -11) + 2.0**number.least
    if codec in GSE_INDEX_BITS:
        index_bits = GSE_INDEX_BITS[codec]
        halves = np.abs(values.astype(np.float64)).reshape(2, -1)
        most = np.repeat(halves.max(axis=1, initial=0), halves.shape[1])
        below = (6 - index_bits) * ((1 << index_bits) - 1) + 7 - index_bits
        return exact / 4 + most * 2.0**-below + own
    most = group_most(values, shape.head_dim, GROUP[codec]).astype(np.float64)
    if codec is Codec.INT8:
        return most / 127 * 0.51 + own
    if codec is Codec.INT4:
        return most / 7 * 0.51 + own
    fraction_bits, range_bits = (3, 17) if codec is Codec.E4M3 else (2, 31)
    return np.maximum(exact * 2.0 ** -(fraction_bits + 1), most * 2.0**-range_bits) + own


@pytest.mark.parametrize("codec", LOSSY)
@settings(max_examples=150, deadline=None)
@given(held=finite_parts())
def test_no_number_is_further_off_than_its_codec_allows(
    codec: Codec, held: tuple[Bytes, ValueShape, int]
) -> None:
    part, shape, num_tokens = held
    before = floats(part, shape)
    after = floats(decoded(part, shape, num_tokens, codec), shape)
    error = np.abs(after.astype(np.float64) - before)
    assert np.all(error <= error_bound(codec, before, shape))


@pytest.mark.parametrize("codec", LOSSY)
@settings(max_examples=150, deadline=None)
@given(held=finite_parts())
def test_decoded_kv_encodes_to_itself(codec: Codec, held: tuple[Bytes, ValueShape, int]) -> None:
    part, shape, num_tokens = held
    if codec in (Codec.INT8, Codec.INT4):
        # A scale below bfloat16's normal numbers has fewer bits than it takes to find it again.
        most = group_most(floats(part, shape), shape.head_dim, GROUP[codec]).astype(np.float64)
        assume(bool(np.all((most == 0) | (most >= 127 * 2.0**-126))))
    once = decoded(part, shape, num_tokens, codec)
    assert np.array_equal(decoded(once, shape, num_tokens, codec), once)


@pytest.mark.parametrize("codec", LOSSLESS)
@settings(max_examples=150, deadline=None)
@given(shape=shapes, num_tokens=st.integers(0, 40), seed=st.integers(0, 2**32))
def test_lossless_codecs_return_every_bit(
    codec: Codec, shape: ValueShape, num_tokens: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    number = NUMBERS[shape.dtype]
    count = native_part_bytes(shape, num_tokens) // number.num_bytes
    part = narrow(rng.standard_normal(count).astype(np.float32), number).view(np.uint8)
    part[rng.random(part.size) < 0.01 * rng.integers(0, 4)] = rng.integers(0, 256)
    assert np.array_equal(decoded(part, shape, num_tokens, codec), part)


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("order", ["as they are", "shuffled", "among others"])
def test_lossless_codecs_return_all_bfloat16(codec: Codec, order: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    if order == "shuffled":
        np.random.default_rng(0).shuffle(patterns)
    elif order == "among others":  # few enough at a time that packing them pays
        spread = np.full((1 << 16) * 32, 0x3F80, np.uint16)
        spread[::32] = patterns
        patterns = spread
    shape = ValueShape(1, 1, 64, "bfloat16")
    part = patterns.view(np.uint8)
    assert np.array_equal(decoded(part, shape, patterns.size // 128, codec), part)


def test_packed_kv_is_smaller_and_noise_hardly_larger() -> None:
    shape, precision = ValueShape(1, 8, 128, "bfloat16"), Precision(Codec.PACKED, Codec.PACKED)
    rng = np.random.default_rng(1)
    kv = narrow(rng.standard_normal(2 * 64 * 1024).astype(np.float32), NUMBERS["bfloat16"])
    assert encode_part(kv.view(np.uint8), shape, 64, precision).size < 0.77 * kv.nbytes
    noise = rng.integers(0, 256, kv.nbytes, dtype=np.uint8)
    assert encode_part(noise, shape, 64, precision).size == noise.size + 8


@pytest.mark.parametrize("codec", LOSSY)
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from(DTYPES))
def test_order_is_kept(codec: Codec, seed: int, dtype: str) -> None:
    """Two numbers with one scale never change their order."""
    rng = np.random.default_rng(seed)
    shape = ValueShape(1, 1, 32, dtype)
    values = rng.standard_t(1.5, 64) * np.exp2(rng.integers(-12, 6, 64))
    ordered = np.sort(np.clip(values, -5e4, 5e4).reshape(2, 32)).astype(np.float32)
    part = narrow(ordered.reshape(-1), NUMBERS[dtype]).view(np.uint8)
    after = floats(decoded(part, shape, 1, codec), shape).reshape(2, 32)
    assert np.all(np.diff(after) >= 0)


@pytest.mark.parametrize("codec", LOSSY)
@settings(max_examples=60, deadline=None)
@given(held=finite_parts())
def test_bfloat16_decodes_as_float32_does(
    codec: Codec, held: tuple[Bytes, ValueShape, int]
) -> None:
    """The kernels and numpy agree on every bit, except for the sign of zero."""
    part, shape, num_tokens = held
    bits = narrow(floats(part, shape), NUMBERS["bfloat16"])
    short = ValueShape(1, shape.num_kv_heads, shape.head_dim, "bfloat16")
    wide = ValueShape(1, shape.num_kv_heads, shape.head_dim, "float32")
    same = widen(bits, NUMBERS["bfloat16"]).view(np.uint8)
    with np.errstate(over="ignore"):
        values = floats(decoded(same, wide, num_tokens, codec), wide)
    expected = widen(narrow(values, NUMBERS["bfloat16"]), NUMBERS["bfloat16"])
    actual = floats(decoded(bits.view(np.uint8), short, num_tokens, codec), short)
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_never_decode_as_finite(
    codec: Codec, dtype: str, bad: float
) -> None:
    number, shape = NUMBERS[dtype], ValueShape(1, 2, 128, dtype)
    values = np.ones((2, 3, 2, 128), np.float32)
    values[1, 2, 1, 100] = bad
    part = narrow(values.reshape(-1), number).view(np.uint8)
    after = floats(decoded(part, shape, 3, codec), shape).reshape(2, 3, 2, 128)
    spoilt = np.zeros(after.shape, bool)
    if codec in GSE_INDEX_BITS:
        spoilt[1] = True
    else:
        start = 100 // GROUP[codec] * GROUP[codec]
        spoilt[1, 2, 1, start : start + GROUP[codec]] = True
    assert np.array_equal(np.isnan(after), spoilt)
    assert np.all(np.abs(after[~spoilt] - 1) <= 1 / 127)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_near_the_end_of_their_dtype_stay_finite(codec: Codec, dtype: str) -> None:
    number, shape = NUMBERS[dtype], ValueShape(1, 1, 32, dtype)
    most = 65504 if dtype == "float16" else np.finfo(np.float32).max
    values = np.full(64, most, np.float32)
    values[1::2] *= -1
    bits: Bits = (values.view(np.uint32) >> 16).astype(np.uint16)  # rounding would overflow
    part = (bits if dtype == "bfloat16" else narrow(values, number)).view(np.uint8)
    after = floats(decoded(part, shape, 1, codec), shape)
    assert np.all(np.isfinite(after))
    assert np.all(np.abs(after) >= 0.8 * number.limit)
    assert np.array_equal(np.sign(after), np.sign(values))


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_denormals(codec: Codec, dtype: str) -> None:
    number, shape = NUMBERS[dtype], ValueShape(1, 1, 32, dtype)
    zeros = np.zeros(64, number.bits)
    zeros[::3] = 1 << (8 * number.num_bytes - 1)
    assert np.all(floats(decoded(zeros.view(np.uint8), shape, 1, codec), shape) == 0)
    denormals = np.arange(64).astype(number.bits)
    after = floats(decoded(denormals.view(np.uint8), shape, 1, codec), shape)
    assert np.all(np.abs(after - widen(denormals, number)) <= 2.0**number.least * 32)


@settings(max_examples=100, deadline=None)
@given(
    shape=shapes,
    num_tokens=st.integers(0, 40),
    key=st.sampled_from([codec for codec in Codec if codec is not Codec.PACKED]),
    value=st.sampled_from([codec for codec in Codec if codec is not Codec.PACKED]),
)
def test_sizes_are_as_announced(
    shape: ValueShape, num_tokens: int, key: Codec, value: Codec
) -> None:
    precision = Precision(key, value)
    part = np.zeros(native_part_bytes(shape, num_tokens), np.uint8)
    encoded = encode_part(part, shape, num_tokens, precision)
    assert encoded.size == encoded_part_bytes(shape, num_tokens, precision)


def test_sizes_of_a_usual_layer() -> None:
    shape = ValueShape(1, 8, 128, "bfloat16")
    numbers = 2 * 256 * 8 * 128
    sizes = {codec: encoded_part_bytes(shape, 256, Precision(codec, codec)) for codec in LOSSY}
    assert sizes[Codec.INT8] == sizes[Codec.E4M3] == sizes[Codec.E5M2] == numbers * 66 // 64
    assert sizes[Codec.INT4] == numbers * 18 // 32
    assert sizes[Codec.GSE8] == numbers + 4
    mixed = encoded_part_bytes(shape, 256, Precision(Codec.INT8, Codec.INT4))
    assert mixed == (sizes[Codec.INT8] + sizes[Codec.INT4]) // 2
    with pytest.raises(ValueError, match="packed"):
        encoded_part_bytes(shape, 256, Precision(Codec.INT8, Codec.PACKED))


@settings(max_examples=60, deadline=None)
@given(held=finite_parts(), key=st.sampled_from(list(Codec)), value=st.sampled_from(list(Codec)))
def test_keys_and_values_are_encoded_separately(
    held: tuple[Bytes, ValueShape, int], key: Codec, value: Codec
) -> None:
    part, shape, num_tokens = held
    precision = Precision(key, value)
    encoded = encode_part(part, shape, num_tokens, precision)
    mixed = decode_part(encoded, shape, num_tokens, precision)
    half = part.size // 2
    assert np.array_equal(mixed[:half], decoded(part, shape, num_tokens, key)[:half])
    assert np.array_equal(mixed[half:], decoded(part, shape, num_tokens, value)[half:])


@pytest.mark.parametrize("codec", list(Codec))
def test_memory_that_is_not_aligned(codec: Codec) -> None:
    shape, precision = ValueShape(1, 2, 64, "bfloat16"), Precision(codec, codec)
    rng = np.random.default_rng(2)
    part = narrow(rng.standard_normal(2 * 3 * 128).astype(np.float32), NUMBERS["bfloat16"])
    native = part.view(np.uint8)
    encoded = encode_part(native, shape, 3, precision)
    expected = decode_part(encoded, shape, 3, precision)
    odd_native = np.empty(native.size + 1, np.uint8)[1:]
    odd_native[:] = native
    odd_encoded = np.empty(encoded.size + 1, np.uint8)[1:]
    odd_encoded[:] = encode_part(odd_native, shape, 3, precision)
    assert np.array_equal(odd_encoded, encoded)
    out = np.empty(native.size + 1, np.uint8)[1:]
    assert decode_part(odd_encoded, shape, 3, precision, out) is out
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("codec", list(Codec))
def test_bytes_of_another_size_are_refused(codec: Codec) -> None:
    shape, precision = ValueShape(1, 2, 64, "bfloat16"), Precision(codec, codec)
    part = np.zeros(native_part_bytes(shape, 3), np.uint8)
    encoded = encode_part(part, shape, 3, precision)
    for held in (encoded[:-1], np.append(encoded, np.uint8(0)), encoded[:0]):
        with pytest.raises(ValueError, match=r"bytes|short"):
            decode_part(held, shape, 3, precision)
    with pytest.raises(ValueError, match="bytes"):
        encode_part(part[:-2], shape, 3, precision)
    with pytest.raises(ValueError, match="bytes"):
        decode_part(encoded, shape, 3, precision, part[:-2])


@settings(max_examples=200, deadline=None)
@given(
    codec=st.sampled_from(list(Codec)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_any_bytes_decode_or_are_refused(codec: Codec, dtype: str, seed: int) -> None:
    shape, precision = ValueShape(1, 2, 64, dtype), Precision(codec, codec)
    rng = np.random.default_rng(seed)
    part = np.zeros(native_part_bytes(shape, 3), np.uint8)
    size = encode_part(part, shape, 3, precision).size
    try:
        with np.errstate(all="ignore"):
            decode_part(rng.integers(0, 256, size, dtype=np.uint8), shape, 3, precision)
    except ValueError:
        pass


def test_a_packed_exception_outside_is_refused() -> None:
    shape, precision = ValueShape(1, 1, 64, "bfloat16"), Precision(Codec.PACKED, Codec.NATIVE)
    bits = np.full(2 * 64 * 4, 0x3F80, np.uint16)
    bits[5] = 0
    encoded = encode_part(bits.view(np.uint8), shape, 4, precision)
    values = bits.nbytes // 2
    encoded[encoded.size - values - 5 : encoded.size - values - 1] = 255
    with pytest.raises(ValueError, match="exception"):
        decode_part(encoded, shape, 4, precision)


@pytest.mark.parametrize(("codec", "name"), [(E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2")])
def test_fp8_equals_that_of_torch(codec: Fp8, name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    theirs = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    finite = np.isfinite(theirs)
    assert np.array_equal(codec.table()[finite], theirs[finite])

    # All bfloat16 in range, in groups whose largest number makes the scale 1.
    most = float(codec.table()[codec.most])
    every = widen(np.arange(1 << 16, dtype=np.uint16), NUMBERS["bfloat16"])
    with np.errstate(invalid="ignore"):
        inside = every[np.abs(every) <= most]
    rows = np.full((-(-inside.size // 63), 64), most, np.float32)
    padded = np.full(rows.shape[0] * 63, most, np.float32)
    padded[: inside.size] = inside
    rows[:, 1:] = padded.reshape(-1, 63)
    expected = torch.from_numpy(rows).to(dtype).float().numpy()
    for dtype_name in ("bfloat16", "float32"):
        number = NUMBERS[dtype_name]
        bits = narrow(rows.reshape(-1), number)
        out = np.empty_like(bits)
        codec.decode(codec.encode(bits, 64, number), out, 64, number)
        assert np.array_equal(widen(out, number).reshape(-1, 64), expected)


def test_a_native_value_has_as_many_bytes_as_its_parts() -> None:
    shape = ValueShape(3, 2, 8, "bfloat16")
    assert kv_value.value_bytes(shape, 5) == 3 * native_part_bytes(shape, 5)
    assert kv_value.value_parts(shape, 5) == (native_part_bytes(shape, 5),) * 3
    assert kv_value.value_parts(KVSpace("m", 3, 2, 8, "bfloat16"), 5) == (160 * 2,) * 3


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        native_part_bytes(ValueShape(1, 1, 1, "int32"), 1)
