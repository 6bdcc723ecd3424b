"""Canonical Huffman codes: exact round trips, optimal lengths, and every way a table or a segment can be wrong."""

import numpy as np
import pytest
from dahuffman import HuffmanCodec
from hypothesis import given, settings
from hypothesis import strategies as st

from coanerv_codec import huffman
from coanerv_codec.errors import FormatError
from coanerv_codec.huffman import Code, build_code, pack, read_table, table_bytes, unpack


def code_for(symbols):
    return build_code(np.bincount(symbols, minlength=256))


def laplacian(n, scale, seed=0):
    return np.clip(np.rint(np.random.default_rng(seed).laplace(32, scale, n)), 0, 63).astype(np.uint8)


def slow_unpack(data, count, code):
    """Bit by bit, as a check on the fast one."""
    book, word = {}, 0
    ordered = sorted((length, code.first + i) for i, length in enumerate(code.lengths) if length)
    for (length, symbol), (following, _) in zip(ordered, [*ordered[1:], ordered[-1]], strict=True):
        book[length, word] = symbol
        word = (word + 1) << (following - length)
    out, value, size = [], 0, 0
    for bit in np.unpackbits(np.frombuffer(data, np.uint8)):
        value, size = value << 1 | int(bit), size + 1
        if (size, value) in book and len(out) < count:
            out.append(book[size, value])
            value = size = 0
    return np.array(out, np.uint8)


symbol_arrays = st.one_of(
    st.binary(min_size=1, max_size=600),
    st.builds(lambda s, n: bytes([s]) * n, st.integers(0, 255), st.integers(1, 600)),
    st.builds(lambda pool, n, seed: bytes(np.random.default_rng(seed).choice(pool, n).astype(np.uint8)),
              st.lists(st.integers(0, 255), min_size=1, max_size=4), st.integers(1, 3000), st.integers(0, 99)),
).map(lambda data: np.frombuffer(data, np.uint8))  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(symbol_arrays)
def test_round_trip_is_exact(symbols):
    code = code_for(symbols)
    stored = table_bytes(code)
    assert read_table(stored, 0) == (code, len(stored))
    data = pack(symbols, code)
    assert np.array_equal(unpack(data, symbols.size, code), symbols)


@pytest.mark.parametrize("window_bytes", [16, 31, 8192])
@pytest.mark.parametrize("scale", [0.3, 2, 9])
def test_windows_do_not_show(window_bytes, scale, monkeypatch):
    monkeypatch.setattr(huffman, "SCRATCH", huffman.Scratch(window_bytes))
    symbols = laplacian(3001, scale)
    code = code_for(symbols)
    data = pack(symbols, code)
    assert np.array_equal(unpack(data, symbols.size, code), symbols)
    assert np.array_equal(slow_unpack(data, symbols.size, code), symbols)


def test_a_long_segment():
    symbols = laplacian(300_000, 4)
    code = code_for(symbols)
    assert np.array_equal(unpack(pack(symbols, code), symbols.size, code), symbols)


def test_one_symbol_takes_no_bits():
    symbols = np.full(1000, 7, np.uint8)
    code = code_for(symbols)
    assert code == Code(7, (0,))
    assert table_bytes(code) == b"\x07\x07"
    assert pack(symbols, code) == b""
    assert np.array_equal(unpack(b"", 1000, code), symbols)


def test_as_short_as_dahuffmans_own_code():
    symbols = laplacian(20_000, 3)
    table = HuffmanCodec.from_frequencies(dict(zip(*np.unique(symbols, return_counts=True), strict=True)), eof=32)
    bits = sum(table.get_code_table()[symbol][0] for symbol in symbols.tolist())
    assert len(pack(symbols, code_for(symbols))) == -(-bits // 8)


def test_lengths_are_bounded_however_skewed_the_counts_are():
    fibonacci = [1, 1]
    while len(fibonacci) < 60:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    frequencies = np.zeros(256, np.int64)
    frequencies[100:160] = fibonacci
    code = build_code(frequencies)
    assert max(code.lengths) <= huffman.MAX_LENGTH
    assert read_table(table_bytes(code), 0)[0] == code
    symbols = np.arange(100, 160, dtype=np.uint8).repeat(50)
    assert np.array_equal(unpack(pack(symbols, code), symbols.size, code), symbols)


def test_canonical_codewords_are_pinned():
    assert pack(np.array([5, 6, 7, 8, 5], np.uint8), Code(5, (1, 2, 3, 3))) == bytes([0b01011011, 0b10000000])


def nibbles(first, last, *lengths):
    padded = [*lengths, 0] if len(lengths) % 2 else lengths
    return bytes([first, last, *(a << 4 | b for a, b in zip(padded[::2], padded[1::2], strict=True))])


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (b"", "cut short"),
        (b"\x05", "cut short"),
        (nibbles(5, 8, 1, 2, 3, 3)[:-1], "cut short"),
        (nibbles(9, 8, 1, 1), "back to 8"),
        (nibbles(5, 8, 1, 2, 3, 4), "complete prefix code"),  # under-subscribed
        (nibbles(5, 8, 1, 1, 3, 3), "complete prefix code"),  # over-subscribed
        (nibbles(5, 8, 1, 1, 0, 0), "wider than"),
        (nibbles(5, 8, 0, 0, 1, 1), "wider than"),
        (nibbles(5, 7, 1, 2, 2)[:-1] + b"\x21", "padding nibble"),
    ],
)
def test_wrong_tables_are_refused(stored, problem):
    with pytest.raises(FormatError, match=problem):
        read_table(stored, 0)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_a_complete_code_or_an_error(stored):
    try:
        code, end = read_table(stored, 0)
    except FormatError:
        return
    assert table_bytes(code) == stored[:end]


def test_wrong_segments_are_refused():
    symbols = np.array([5, 6, 7, 8, 5], np.uint8)
    code = Code(5, (1, 2, 3, 3))
    data = pack(symbols, code)  # 10 bits
    for wrong, count, problem in [
        (data[:-1], 5, "run out"),
        (b"", 5, "run out"),
        (data, 17, "run out"),
        (b"\xff", 3, "run out"),  # the third code starts in the byte but ends beyond it
        (data + b"\0", 5, "left over"),
        (data, 2, "left over"),
        (data[:-1] + b"\x81", 5, "non-zero padding"),
    ]:
        with pytest.raises(FormatError, match=problem):
            unpack(wrong, count, code)
    with pytest.raises(FormatError, match="left over"):
        unpack(b"\0", 5, Code(5, (0,)))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 2500), st.integers(0, 3))
def test_any_bytes_decode_exactly_or_are_refused(data, count, which):
    code = [Code(0, (1, 1)), Code(5, (1, 2, 3, 3)), Code(0, (6,) * 64), code_for(laplacian(5000, 3))][which]
    try:
        symbols = unpack(data, count, code)
    except FormatError:
        return
    assert pack(symbols, code) == data  # what is accepted is the one encoding of what it means
