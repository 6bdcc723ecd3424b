"""Token banks: exact round trips for any class structure, a sound choice of classes, and refusal of everything else."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coanerv_codec import bank
from coanerv_codec.bank import decode_bank, encode_bank, parse_bank
from coanerv_codec.errors import FormatError


def plausible(cells=2, tokens=24, d=12, bits=6, seed=0):
    """Laplacian symbols whose spread differs by channel; the first channel is dead."""
    rng = np.random.default_rng(seed)
    scales = np.linspace(0, 6, d)
    symbols = np.rint(2 ** (bits - 1) + rng.laplace(0, 1, (cells, tokens, d)) * scales)
    return symbols.clip(0, 2**bits - 1).astype(np.uint8)


@st.composite
def banks(draw):
    bits = draw(st.integers(2, 8))
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 40)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    widths = rng.integers(1, 2**bits + 1, shape[-1]) if draw(st.booleans()) else np.ones(shape[-1], int)
    starts = (rng.random(shape[-1]) * (2**bits + 1 - widths)).astype(int)
    symbols = (starts + (rng.random(shape) * widths).astype(int)).astype(np.uint8)
    return symbols, bits


@settings(max_examples=80, deadline=None)
@given(banks(), st.floats(-(2.0**90), 2.0**90, width=32), st.floats(0, 2.0**90, width=32))
def test_round_trip_is_exact(case, z, s):
    symbols, bits = case
    decoded = decode_bank(encode_bank(symbols, bits, z, s), symbols.shape)
    assert np.array_equal(decoded[0], symbols)
    assert decoded[0].dtype == np.uint8
    assert decoded[1:] == (bits, z, s)


@pytest.mark.parametrize("classes", [1, 2, 3, 5, 16])
def test_every_number_of_classes(classes, monkeypatch):
    symbols = plausible(d=37)
    assignment = np.random.default_rng(classes).permutation(np.arange(37) % classes)
    monkeypatch.setattr(bank, "_choose_classes", lambda histograms: assignment)
    data = encode_bank(symbols, 6, -1, 0.5)
    assert np.array_equal(decode_bank(data, symbols.shape)[0], symbols)
    assert np.array_equal(parse_bank(data, 37).class_of, assignment)


def test_dead_channels_cost_nothing_but_their_table():
    symbols = np.full((4, 96, 72), 17, np.uint8)
    data = encode_bank(symbols, 6, 0, 0)
    assert len(data) == 10 + 2 + 1  # fixed part, table, segment length
    assert np.array_equal(decode_bank(data, symbols.shape)[0], symbols)


def test_classes_pay():
    symbols = plausible(4, 96, 72)
    chosen = encode_bank(symbols, 6, -1, 0.5)
    parsed = parse_bank(chosen, 72)
    assert len(parsed.codes) > 1
    histogram = np.bincount(symbols.ravel(), minlength=64)
    single = bank.huffman.pack(symbols.ravel(), bank.huffman.build_code(histogram))
    assert len(chosen) < 0.95 * len(single)


def test_the_choice_is_the_best_of_all_cuts():
    histograms = np.stack([np.bincount(c, minlength=64) for c in plausible(1, 300, 6).reshape(-1, 6).T])

    def price(class_of):
        merged = np.stack([histograms[class_of == i].sum(axis=0) for i in range(class_of.max() + 1)])
        map_bits = 6 * int(class_of.max()).bit_length()
        return (bank._code_bits(merged) + bank._table_bits(merged)).sum() + map_bits

    order = np.argsort(bank._code_bits(histograms), kind="stable")
    every_cut = []
    for cuts in range(2**5):
        class_of = np.empty(6, int)
        class_of[order] = np.cumsum([0, *(cuts >> i & 1 for i in range(5))])
        every_cut.append(price(class_of))
    assert price(bank._choose_classes(histograms)) == pytest.approx(min(every_cut))


def test_encoding_is_deterministic():
    symbols = plausible(4, 96, 72)
    assert encode_bank(symbols, 6, -1, 0.5) == encode_bank(symbols.copy(), 6, -1, 0.5)


def test_symbols_beyond_the_bits_are_a_bug_of_the_caller():
    with pytest.raises(ValueError, match="below"):
        encode_bank(np.full((1, 2, 3), 64, np.uint8), 6, 0, 1)


def corrupt(data, at, value):
    return data[:at] + bytes([value]) + data[at + 1 :]


def test_every_wrong_field_is_refused():
    symbols = plausible()
    data = encode_bank(symbols, 6, -1, 0.5)
    parsed = parse_bank(data, 12)
    assert len(parsed.codes) > 1
    nan, inf = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))
    for wrong, problem in [
        (b"", "too early"),
        (corrupt(data, 0, 9), "coder 9 is unknown"),
        (corrupt(data, 1, data[1] & 15 | 0x10), "1 bits per symbol"),
        (corrupt(data, 1, data[1] & 15 | 0x90), "9 bits per symbol"),
        (corrupt(data, 1, data[1] & 15 | 0x20), "does not fit 2 bits"),
        (data[:2] + nan + data[6:], "finite"),
        (data[:6] + inf + data[10:], "finite"),
        (data[:6] + struct.pack("<f", -1) + data[10:], "finite"),
        (data[:6] + struct.pack("<f", 3e38) + data[10:], "finite"),
        (data[:10] + bytes(len(data) - 10), "does not use exactly"),
        (data + b"\0", "left over"),
        (data[:-1], "too early"),
    ]:
        with pytest.raises(FormatError, match=problem):
            decode_bank(wrong, symbols.shape)


def test_the_class_maps_padding_is_checked():
    symbols = np.zeros((1, 4, 3), np.uint8)
    symbols[:, :, 2] = 1
    two = struct.pack("<BBff", 1, 6 << 4 | 1, 0, 1) + b"%c" + b"\0\0" + b"\1\1" + b"\0\0"
    assert np.array_equal(decode_bank(two.replace(b"%c", b"\x20"), symbols.shape)[0], symbols)
    with pytest.raises(FormatError, match="padding"):
        decode_bank(two.replace(b"%c", b"\x21"), symbols.shape)


@pytest.mark.parametrize("other", [(2, 24, 11), (2, 25, 12), (1, 24, 12), (2, 24, 13)])
def test_another_shape_is_refused(other):
    data = encode_bank(plausible(), 6, -1, 0.5)
    with pytest.raises(FormatError):
        decode_bank(data, other)


def test_truncated_anywhere():
    symbols = plausible()
    data = encode_bank(symbols, 6, -1, 0.5)
    for end in range(len(data)):
        with pytest.raises(FormatError):
            decode_bank(data[:end], symbols.shape)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutations_decode_to_sound_symbols_or_one_error(data):
    symbols = plausible()
    coded = bytearray(encode_bank(symbols, 6, -1, 0.5))
    for _ in range(data.draw(st.integers(1, 3))):
        coded[data.draw(st.integers(0, min(len(coded) - 1, 80)))] = data.draw(st.integers(0, 255))
    try:
        decoded, bits, z, s = decode_bank(bytes(coded), symbols.shape)
    except FormatError:
        return
    assert decoded.shape == symbols.shape
    assert decoded.max() < 2**bits
    assert np.isfinite([z, s]).all()
