"""The quantizer: bounded error, exact agreement of encoder and decoder, and the ends of float32."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coanerv_codec.quantizer import dequantize, quantize

LARGEST = float(np.finfo(np.float32).max)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=12), elements=finite)


@settings(max_examples=200, deadline=None)
@given(arrays, st.integers(2, 8))
def test_error_is_at_most_half_a_step(tokens, bits):
    symbols, z, s = quantize(tokens, bits)
    assert symbols.dtype == np.uint8
    assert symbols.shape == tokens.shape
    assert symbols.max() < 2**bits
    restored = dequantize(symbols, z, s)
    assert restored.dtype == np.float32
    assert np.isfinite(restored).all()
    magnitude = np.abs(tokens).max().astype(np.float64)
    step = np.float64(s) if s else np.float64(2.0**-149) * 256  # ranges below the smallest step collapse to z
    # Half a step, plus what rounding s and the result to float32 can add.
    bound = step / 2 + 2**bits * (step * 2.0**-24 + 2.0**-149) + magnitude * 2.0**-23
    assert (np.abs(restored.astype(np.float64) - tokens) <= bound).all()


def test_matches_the_papers_formula_where_zero_is_outside_the_range():
    tokens = np.random.default_rng(1).uniform(0.5, 2, size=(4, 96, 72)).astype(np.float32)
    symbols, z, s = quantize(tokens, 6)
    assert z == tokens.min()
    assert s == np.float32((np.float64(tokens.max()) - np.float64(tokens.min())) / 63)
    assert symbols.min() == 0
    assert symbols.max() == 63
    np.testing.assert_allclose(dequantize(symbols, z, s), symbols * np.float64(s) + z, atol=1e-6)


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, 20, elements=st.floats(-1e6, 1e6, width=32)), st.integers(2, 8))
def test_zero_comes_back_as_zero_where_the_range_includes_it(tokens, bits):
    tokens[0], tokens[1], tokens[2] = 0, -1, 1
    symbols, z, s = quantize(tokens, bits)
    # z is a multiple of s up to the rounding of both to float32.
    assert abs(dequantize(symbols, z, s)[0]) <= 2**bits * np.float64(s) * 2.0**-23
    assert z <= tokens.min()


@settings(max_examples=50, deadline=None)
@given(finite, st.integers(2, 8))
def test_constant_tokens_come_back_exactly(value, bits):
    tokens = np.full((2, 3), value, np.float32)
    symbols, z, s = quantize(tokens, bits)
    assert s == 0
    assert not symbols.any()
    assert np.array_equal(dequantize(symbols, z, s), tokens)


@pytest.mark.parametrize("bits", range(2, 9))
def test_all_of_float32_does_not_overflow(bits):
    tokens = np.array([-LARGEST, 0, LARGEST], np.float32)
    symbols, z, s = quantize(tokens, bits)
    restored = dequantize(symbols, z, s)
    assert np.isfinite(restored).all()
    assert restored[0] == tokens[0]
    assert symbols[2] == 2**bits - 1
    assert restored[2] == pytest.approx(LARGEST, rel=1e-5)


def test_the_smallest_range_does_not_divide_by_zero():
    tokens = np.array([0, 1e-45], np.float32)
    symbols, _, s = quantize(tokens, 8)
    assert s == 0
    assert not symbols.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(np.array([0, bad], np.float32), 6)


@pytest.mark.parametrize("bits", [1, 9])
def test_refuses_other_bit_counts(bits):
    with pytest.raises(ValueError, match="2 to 8"):
        quantize(np.zeros(3, np.float32), bits)


def test_dequantizing_is_pinned_to_the_bit():
    z, s = np.float32(-1.7), np.float32(0.0437)
    restored = dequantize(np.array([0, 1, 31, 32, 63, 255], np.uint8), z, s)
    assert restored.view(np.uint32).tolist() == [3218708890, 3218342308, 3199257389, 3197791060, 1065798650, 1092032659]
