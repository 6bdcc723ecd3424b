"""Token banks: exact round trips with both coders, a sound choice of classes, and refusal of everything else."""

import hashlib
import struct

import numpy as np
import plain_contexts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coanerv_codec import bank_contexts, contexts, rans
from coanerv_codec import bank_huffman as bank
from coanerv_codec.bank import CODERS, CONTEXTS, HUFFMAN, Hints, decode_bank, encode_bank, parse_bank
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
    channels = st.sets(st.integers(0, shape[-1] - 1), max_size=3)
    return symbols, bits, Hints(draw(st.integers(0, 6)), tuple(sorted(draw(channels))))


@settings(max_examples=200, deadline=None)
@given(
    banks(), st.floats(-(2.0**90), 2.0**90, width=32), st.floats(0, 2.0**90, width=32), st.sampled_from(sorted(CODERS))
)
def test_round_trip_is_exact(case, z, s, coder):
    symbols, bits, hints = case
    coded = encode_bank(symbols, bits, z, s, coder, hints)
    assert parse_bank(coded, symbols.shape).coder == coder
    decoded = decode_bank(coded, symbols.shape)
    assert np.array_equal(decoded[0], symbols)
    assert decoded[0].dtype == np.uint8
    assert decoded[1:] == (bits, z, s)


@pytest.mark.parametrize("classes", [1, 2, 3, 5, 16])
def test_every_number_of_classes(classes, monkeypatch):
    symbols = plausible(d=37)
    assignment = np.random.default_rng(classes).permutation(np.arange(37) % classes)
    monkeypatch.setattr(bank, "_choose_classes", lambda histograms: assignment)
    data = encode_bank(symbols, 6, -1, 0.5, HUFFMAN)
    assert np.array_equal(decode_bank(data, symbols.shape)[0], symbols)
    assert np.array_equal(parse_bank(data, symbols.shape).coded.class_of, assignment)


def test_dead_channels_cost_nothing_but_their_table():
    symbols = np.full((4, 96, 72), 17, np.uint8)
    data = encode_bank(symbols, 6, 0, 0, HUFFMAN)
    assert len(data) == 10 + 2 + 1  # fixed part, table, segment length
    assert np.array_equal(decode_bank(data, symbols.shape)[0], symbols)


def test_classes_pay():
    symbols = plausible(4, 96, 72)
    chosen = encode_bank(symbols, 6, -1, 0.5, HUFFMAN)
    parsed = parse_bank(chosen, symbols.shape).coded
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


@pytest.mark.parametrize("coder", CODERS)
def test_encoding_is_deterministic(coder):
    symbols = plausible(4, 96, 72)
    assert encode_bank(symbols, 6, -1, 0.5, coder) == encode_bank(symbols.copy(), 6, -1, 0.5, coder)


def test_symbols_beyond_the_bits_are_a_bug_of_the_caller():
    with pytest.raises(ValueError, match="below"):
        encode_bank(np.full((1, 2, 3), 64, np.uint8), 6, 0, 1)
    with pytest.raises(ValueError, match="coder must be"):
        encode_bank(np.zeros((1, 2, 3), np.uint8), 6, 0, 1, "zip")


def corrupt(data, at, value):
    return data[:at] + bytes([value]) + data[at + 1 :]


def test_every_wrong_field_is_refused():
    symbols = plausible()
    data = encode_bank(symbols, 6, -1, 0.5, HUFFMAN)
    parsed = parse_bank(data, symbols.shape).coded
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


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("other", [(2, 24, 11), (2, 25, 12), (1, 24, 12), (2, 24, 13)])
def test_another_shape_is_refused(other, coder):
    data = encode_bank(plausible(), 6, -1, 0.5, coder)
    with pytest.raises(FormatError):
        decode_bank(data, other)


@pytest.mark.parametrize("coder", CODERS)
def test_truncated_anywhere(coder):
    symbols = tokens_with_modes(2, 24, 12)
    data = encode_bank(symbols, 6, -1, 1 / 32, coder, Hints(6, (11,)))
    for end in range(len(data)):
        with pytest.raises(FormatError):
            decode_bank(data[:end], symbols.shape)


@pytest.mark.parametrize("coder", CODERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutations_decode_to_sound_symbols_or_one_error(coder, data):
    symbols = tokens_with_modes(2, 24, 12)
    coded = bytearray(encode_bank(symbols, 6, -1, 1 / 32, coder, Hints(6, (11,))))
    for _ in range(data.draw(st.integers(1, 3))):
        coded[data.draw(st.integers(0, min(len(coded) - 1, 80)))] = data.draw(st.integers(0, 255))
    try:
        decoded, bits, z, s = decode_bank(bytes(coded), symbols.shape)
    except FormatError:
        return
    assert decoded.shape == symbols.shape
    assert decoded.max() < 2**bits
    assert np.isfinite([z, s]).all()


# Coder 2.


def tokens_with_modes(cells=4, tokens=96, d=72, row=6, bits=6):
    """Symbols as `base` has them, from integers alone: a smooth channel, activity by token, and a mode that comes last."""
    n = np.arange(cells * tokens * d, dtype=np.uint64)
    noise = (n * n * np.uint64(2654435761) + n * np.uint64(40503) >> np.uint64(13)) % np.uint64(1 << 16)
    noise = noise.astype(np.int64).reshape(cells, tokens, d) - 32768
    y, x = np.divmod(np.arange(tokens), row)
    mode = (x + y // 2) % 5 > 2
    activity = 1 + (x * y)[:, None] % 4
    spread = 2 + np.where(mode[:, None], np.arange(d), d - np.arange(d))
    values = noise * noise // 32768 * np.sign(noise) * activity * 2 // (spread * 4096)
    values[..., 0] = 2 * x - y + values[..., 0] // 4
    values[..., -1] = np.where(mode, 7, -6)
    half = 1 << bits - 1
    return (values + half).clip(0, 2 * half - 1).astype(np.uint8)


@pytest.mark.parametrize(
    ("shape", "bits", "hints", "sha256"),
    [
        ((2, 24, 12), 6, Hints(6, (11,)), "7d27dcf5364bcc149619daec1a28cf71"),
        ((1, 24, 12), 4, Hints(), "6ef47929e37dba39a748a76725154c9c"),
        ((3, 24, 9), 8, Hints(4, (0, 3, 5, 8)), "9748599953959d0b43406d4eaa027f18"),
        ((40, 96, 40), 6, Hints(6, (39,)), "66c7ccf86dcde8c09047eb534ee008d3"),
    ],
)
def test_the_coded_form_never_changes(shape, bits, hints, sha256):
    """Banks of fixed integers, with one lane and with many: a file of today decodes for ever."""
    symbols = tokens_with_modes(*shape, bits=bits)
    data = encode_bank(symbols, bits, -1, 2.0 ** (1 - bits), CONTEXTS, hints)
    assert np.array_equal(decode_bank(data, shape)[0], symbols)
    assert np.array_equal(np.array(plain_contexts.decode(data, shape)).T.reshape(shape), symbols)
    assert hashlib.sha256(data).hexdigest()[:32] == sha256


@settings(max_examples=25, deadline=None)
@given(banks())
def test_a_reader_made_from_the_text_alone_agrees(case):
    symbols, bits, hints = case
    data = encode_bank(symbols, bits, -1, 2.0 ** (1 - bits), CONTEXTS, hints)
    assert np.array_equal(np.array(plain_contexts.decode(data, symbols.shape)).T.reshape(symbols.shape), symbols)


def test_contexts_pay():
    symbols = tokens_with_modes()
    sizes = [
        len(encode_bank(symbols, 6, -1, 1 / 32, *how))
        for how in [(CONTEXTS, Hints(6, (71,))), (CONTEXTS, Hints(6)), (CONTEXTS,), (HUFFMAN,)]
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.9 * sizes[-1]


def test_smooth_channels_and_switches_are_found():
    model = parse_bank(encode_bank(tokens_with_modes(), 6, -1, 1 / 32, hints=Hints(6, (71,))), (4, 96, 72)).coded.model
    assert model.switches == ((71, 26, 39),)
    assert 0 in model.smooth
    assert model.level == 32


@pytest.mark.parametrize("value", [0, 17, 63])
@pytest.mark.parametrize(("z", "s"), [(0, 0), (-1, 1 / 32), (5, 1)])
def test_equal_symbols_cost_nothing(value, z, s):
    symbols = np.full((4, 96, 72), value, np.uint8)
    data = encode_bank(symbols, 6, z, s, CONTEXTS, Hints(8, (71,)))
    assert len(data) == 10 + 3
    assert np.array_equal(decode_bank(data, symbols.shape)[0], symbols)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 40), (1, 40, 1), (5, 1, 1), (1, 7, 3)])
def test_odd_shapes(shape):
    for hints in (Hints(), Hints(1), Hints(7, (0,)), Hints(40)):
        for z in (-1.0, 3.0, -300.0):  # zero is a level, below all tokens, above all
            symbols = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
            assert np.array_equal(decode_bank(encode_bank(symbols, 8, z, 1.0, CONTEXTS, hints), shape)[0], symbols)


def test_a_bank_of_too_many_tokens_is_huffman_coded(monkeypatch):
    symbols = plausible()
    contexts_bank = encode_bank(symbols, 6, -1, 0.5)
    monkeypatch.setattr(bank_contexts, "MAX_TOKENS", 47)
    assert encode_bank(symbols, 6, -1, 0.5) == encode_bank(symbols, 6, -1, 0.5, HUFFMAN)
    with pytest.raises(FormatError, match="48 tokens"):
        decode_bank(contexts_bank, symbols.shape)


def test_every_wrong_field_of_contexts_is_refused():
    symbols = tokens_with_modes(2, 24, 12)
    data = encode_bank(symbols, 6, -1, 1 / 32, CONTEXTS, Hints(6, (11,)))
    model = parse_bank(data, symbols.shape).coded.model
    assert model.row == 6
    assert model.smooth[0] == 0
    spread = 10 + 5 + 1 + len(model.smooth)
    assert data[spread] == model.spread
    two = data[:1] + bytes([data[1] + 1]) + data[2:15]
    for wrong, problem in [
        (corrupt(data, 1, data[1] | 8), "9 switches"),
        (corrupt(data, 10, 64), "level 64 does not fit"),
        (corrupt(data, 11, 25), "tokens in a row is 25"),
        (corrupt(data, 11, 5), "rows of 5"),
        (corrupt(data, 12, 12), "switch channel is 12"),
        (corrupt(data, 13, 64), "level 64 does not fit"),
        (two + data[12:], "do not ascend"),
        (corrupt(data, 15, 13), "smooth channels is 13"),
        (corrupt(data, 16, 12), "smooth channel 12 of 12"),
        (corrupt(data, spread, 30), "spread 30"),
        (data[: spread + 1], "has no symbols"),
        (data[: spread + 3], "states"),
        (data + b"\0", "states"),
        (data + b"\0\0", "left over"),
        (data[:-2], "run out"),
        (data + bytes(2000), "at most"),
        (data[: spread + 1] + bytes(4) + data[spread + 5 :], "too small"),
    ]:
        with pytest.raises(FormatError, match=problem):
            decode_bank(wrong, symbols.shape)


def test_a_mean_out_of_range_is_refused():
    shape, model = (1, 2, 1), contexts.Model(6, 3, 0, spread=14)
    for mean, problem in ((29, None), (30, "mean 30")):
        writer, given = contexts.Writer(), contexts.Given(np.array([[3, 4]]), np.zeros(2, int), np.array([[29]]))
        contexts.walk(model, shape, writer, given)
        if mean == 30:
            writer = contexts.Writer()
            tables = contexts.Tables(contexts.geometric(32)[14:15])
            writer.code(tables, np.zeros(1, int), np.array([30 - 14]))
        data = struct.pack("<BBff", 2, 6 << 4, 0, 1) + bytes([3, 0, 14]) + writer.packer.finish(1)
        if problem:
            with pytest.raises(FormatError, match=problem):
                decode_bank(data, shape)
        else:
            assert decode_bank(data, shape)[0].ravel().tolist() == [3, 4]


def test_every_flipped_bit_is_found_or_harmless():
    """Damage behind the fields: all lanes must end where they began, which chance hardly allows."""
    symbols = tokens_with_modes(1, 12, 8, row=4)
    data = encode_bank(symbols, 6, -1, 1 / 32, CONTEXTS, Hints(4, (7,)))
    start = len(data) - parse_bank(data, symbols.shape).coded.symbol_bytes
    missed = 0
    for at in range(8 * len(data)):
        wrong = corrupt(data, at // 8, data[at // 8] ^ 1 << at % 8)
        try:
            decoded = decode_bank(wrong, symbols.shape)[0]
        except FormatError:
            continue
        assert decoded.shape == symbols.shape
        missed += at >= 8 * start
    assert missed <= 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 64]), st.lists(st.integers(1, 300), max_size=5))
def test_rans_alone(seed, lanes, blocks):
    rng = np.random.default_rng(seed)
    packer, known = rans.Packer(), []
    for size in blocks:
        alphabets, symbols = rng.integers(1, 5), rng.integers(2, 256)
        frequencies = 1 + rng.multinomial(rans.SLOTS - symbols, rng.dirichlet(np.full(symbols, 0.1)), alphabets)
        bounds = np.concatenate((np.zeros((alphabets, 1), int), frequencies.cumsum(axis=1)), axis=1)
        rows, values = rng.integers(0, alphabets, size), rng.integers(0, symbols, size)
        packer.put(bounds[rows, values], frequencies[rows, values])
        known.append((bounds, rows, values))
    data = packer.finish(lanes)
    unpacker = rans.Unpacker(data, lanes, sum(blocks))
    for bounds, rows, values in known:
        assert np.array_equal(unpacker.take(bounds, rows), values)
    unpacker.end()
    assert len(data) <= 4 * lanes + 2 * sum(blocks)


def test_rans_takes_as_many_bits_as_it_should():
    rng = np.random.default_rng(0)
    symbols = (rng.random(50_000) < 0.02).astype(int)
    bounds = np.array([[0, rans.SLOTS * 49 // 50, rans.SLOTS]])
    packer = rans.Packer()
    starts = bounds[0, symbols]
    packer.put(starts, bounds[0, symbols + 1] - starts)
    ideal = -np.log2((bounds[0, symbols + 1] - starts) / rans.SLOTS).sum() / 8
    assert len(packer.finish(1)) < 1.01 * ideal + 4


@pytest.mark.parametrize(
    ("symbols", "lanes"), [(1, 1), (2**17 - 1, 1), (2**17, 64), (2**18 - 1, 64), (2**18, 128), (2**26, 256)]
)
def test_lanes(symbols, lanes):
    assert rans.lanes_for(symbols) == lanes
