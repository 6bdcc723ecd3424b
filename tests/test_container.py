"""The `.coa` file: round trips, streaming, seeking, every truncation, every flipped bit, limits, versions, goldens."""

import contextlib
import hashlib
import io
import json
import re
import runpy
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coanerv_codec import records
from coanerv_codec.bank import HUFFMAN, Hints, decode_bank, encode_bank, parse_bank
from coanerv_codec.container import (
    FRAMING,
    SIGNATURE,
    TAIL,
    ClipRecord,
    Header,
    Limits,
    Metadata,
    Packet,
    Reader,
    StreamInfo,
    Writer,
    chunk_bytes,
)
from coanerv_codec.errors import FormatError
from coanerv_codec.fields import Fields, signed, varint
from coanerv_codec.quantizer import dequantize
from coanerv_codec.summary import summary
from coanerv_codec.token_order import passes

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
golden_script = runpy.run_path(str(GOLDEN / "make.py"))
describe = golden_script["describe"]
HEADER = Header(
    checkpoint="base-0123abcd",
    checkpoint_sha256=bytes(range(32)),
    frames_per_clip=4,
    tokens=3,
    token_dim=2,
    cell_size=128,
    width=64,
    height=48,
    time_base=Fraction(1, 30000),
    frame_duration=1001,
    frame_rate=Fraction(30000, 1001),
)
AUDIO = StreamInfo(index=0, kind="audio", codec="aac", time_base=Fraction(1, 48000), sample_rate=48000, channels=2)
PACKETS = [Packet(stream=0, pts=1024 * i, dts=1024 * i, duration=1024, flags=1, data=b"sound%d" % i) for i in range(2)]


class Pipe(io.RawIOBase):
    """Bytes that can only be read once, in uneven pieces."""

    def __init__(self, data):
        self._file, self._reads = io.BytesIO(data), 0

    def readable(self):
        return True

    def seekable(self):
        return False

    def read(self, size=-1):
        self._reads += 1
        return self._file.read(size if size < 0 else min(size, 1 + self._reads % 7 * 100))


class WriteOnly(io.RawIOBase):
    """A sink that can only be written to."""

    def __init__(self):
        self.data = bytearray()

    def writable(self):
        return True

    def write(self, data):
        self.data += data
        return len(data)


def some_bank(seed, header=HEADER, **options):
    symbols = np.random.default_rng(seed).integers(0, 4, header.bank_shape).astype(np.uint8)
    return encode_bank(symbols, 2, -1.0, 0.5, **options)


def write(*steps, header=HEADER, finish=True):
    """A file with what the steps (functions of the writer) put in."""
    file = WriteOnly()
    writer = Writer(file, header)
    for step in steps:
        step(writer)
    if finish:
        writer.finish()
    return bytes(file.data)


SHAKE = bytes((0x78, 0, 0xF3, 0x20))


def clip(number, frames=4, velocities=(), shakes=(), **options):
    times = [1001 * (4 * number + i) for i in range(frames)]
    return lambda writer: writer.clip(times, 1001, some_bank(number, **options), velocities, shakes)


def small_file():
    """Three clips, each with what the others lack: coder 2, its switches and rows and a cell that moves and shakes, coder 1."""
    return write(
        lambda writer: writer.metadata(Metadata((("title", "x"),))),
        lambda writer: writer.stream(AUDIO),
        clip(0),
        lambda writer: writer.packets(PACKETS),
        clip(1, velocities=((records.MAX_VELOCITY, -3),), shakes=((0, SHAKE),), hints=Hints(1, (0,))),
        clip(2, frames=3, velocities=((0, 1),), coder=HUFFMAN),
    )


def layout(data):
    """(offset, kind, end) of each chunk of an intact file."""
    at, found = len(SIGNATURE), []
    while at < len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        found.append((at, kind.decode(), at + length + FRAMING))
        at += length + FRAMING
    return found


def clips_of(reader):
    return {item.number: item for item in reader if isinstance(item, ClipRecord)}


def rebuilt(data, change):
    """The file with its chunks (a list of [kind, payload]) changed, all CRCs right."""
    chunks = [[kind.encode(), data[start + 8 : end - 4]] for start, kind, end in layout(data)]
    change(chunks)
    return SIGNATURE + b"".join(chunk_bytes(*chunk) for chunk in chunks)


# --- fields and records


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1))
def test_varints_round_trip_in_their_shortest_form(number, other):
    read = Fields(varint(number) + signed(other), "test")
    assert (read.varint(), read.signed()) == (number, other)
    read.end()
    assert len(varint(number)) == max(1, -(-number.bit_length() // 7))


@pytest.mark.parametrize(
    ("data", "problem"),
    [(b"", "too early"), (b"\x80", "too early"), (b"\x80\x00", "longer than it needs"), (b"\xff" * 11, "10 bytes"),
     (b"\xff" * 9 + b"\x02", "more than")],
)  # fmt: skip
def test_wrong_varints_are_refused(data, problem):
    with pytest.raises(FormatError, match=problem):
        Fields(data, "test").varint()


short = st.text(max_size=12)
pairs = st.lists(st.tuples(short, short), max_size=3).map(tuple)
ticks = st.integers(-(2**61), 2**61)
fractions = st.builds(Fraction, st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1))
headers = st.builds(
    Header,
    checkpoint=short,
    checkpoint_sha256=st.binary(min_size=32, max_size=32),
    frames_per_clip=st.integers(1, 256),
    tokens=st.integers(1, 200),
    token_dim=st.integers(1, 100),
    cell_size=st.integers(1, 4096),
    width=st.integers(100, 16384),
    height=st.integers(100, 16384),
    columns=st.integers(1, 9),
    rows=st.integers(1, 9),
    overlap=st.integers(0, 10),
    time_base=fractions,
    frame_duration=st.integers(0, 2**31 - 1),
    frame_rate=st.just(Fraction(0)) | fractions,
    sample_aspect_ratio=st.just(Fraction(0)) | fractions,
    rotation=st.sampled_from((0, 90, 180, 270)),
    flip=st.booleans(),
    chroma=st.sampled_from(records.CHROMA),
    bit_depth=st.integers(1, 32),
    alpha=st.booleans(),
    scan=st.sampled_from(records.SCAN),
    color_range=st.integers(0, 2),
    matrix=st.integers(0, 255),
    primaries=st.integers(0, 255),
    transfer=st.integers(0, 255),
    chroma_location=st.integers(0, 6),
)
streams = st.builds(
    StreamInfo,
    index=st.integers(0, 63),
    kind=st.sampled_from(records.KINDS),
    codec=short,
    time_base=fractions,
    disposition=st.integers(0, 2**32),
    language=short,
    bit_rate=st.integers(0, 2**40),
    sample_rate=st.integers(0, 2**20),
    channels=st.integers(0, 64),
    delay=st.integers(0, 10000),
    layout=short,
    extradata=st.binary(max_size=20),
    parameters=pairs,
    metadata=pairs,
)
packets = st.builds(
    Packet,
    stream=st.integers(0, 2),
    pts=st.none() | ticks,
    dts=st.none() | ticks,
    duration=st.integers(0, 2**61),
    flags=st.integers(0, 15),
    data=st.binary(max_size=20),
    side_data=st.lists(st.tuples(short, st.binary(max_size=5)), max_size=2).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(headers)
def test_headers_round_trip(header):
    # Single fields go to their limits; all of them at once are beyond the two that bound their products.
    limits = Limits(pixels=2**28, memory=2**40)
    assert records.read_header(records.header_bytes(header), limits) == header


@settings(max_examples=60, deadline=None)
@given(streams, pairs, st.sampled_from(records.SCOPES))
def test_streams_and_metadata_round_trip(stream, texts, scope):
    assert records.read_stream(records.stream_bytes(stream), Limits()) == stream
    metadata = Metadata(texts, scope)
    assert records.read_metadata(records.metadata_bytes(metadata), Limits()) == metadata


@settings(max_examples=60, deadline=None)
@given(st.lists(packets, min_size=1, max_size=6))
def test_packets_round_trip(batch):
    assert records.read_packets(records.packets_bytes(batch), Limits()) == batch


@settings(max_examples=100, deadline=None)
@given(ticks, st.lists(st.integers(1, 2**50), max_size=3), st.integers(0, 2**40), st.sampled_from((0, 1, 1001)))
def test_any_timestamps_round_trip(first, deltas, last, nominal):
    header = replace(HEADER, frame_duration=nominal)
    pts = tuple(np.cumsum([first, *deltas]).tolist())
    data = write(lambda writer: writer.clip(pts, last, b"bank"), header=header)
    (record,) = Reader(io.BytesIO(data))
    assert record == ClipRecord(0, 0, pts, last, b"bank")


def test_even_times_take_a_byte_per_field():
    even = ClipRecord(0, 0, (0, 1001, 2002, 3003), 1001, b"")
    assert len(records.clip_bytes(even, 1001)) == 5
    steady = records.packets_bytes(PACKETS * 2)
    assert len(steady) < sum(len(packet.data) for packet in PACKETS * 2) + 8 * 4


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120), st.sampled_from(("header", "clip", "stream", "packets", "metadata", "index")))
def test_any_payload_is_a_record_or_a_format_error(payload, name):
    read = getattr(records, f"read_{name}")
    with contextlib.suppress(FormatError):
        read(payload, HEADER, Limits()) if name == "clip" else read(payload, Limits())


# --- whole files


def test_everything_comes_back_in_order_from_a_file_and_from_a_pipe():
    data = small_file()
    for file in (io.BytesIO(data), Pipe(data)):
        reader = Reader(file)
        assert reader.header == HEADER
        items = list(reader)
        assert [type(item) for item in items] == [Metadata, StreamInfo, ClipRecord, list, ClipRecord, ClipRecord]
        assert items[1] == AUDIO
        assert items[3] == PACKETS
        assert items[5] == ClipRecord(2, 8, (8008, 9009, 10010), 1001, some_bank(2, coder=HUFFMAN), ((0, 1),))
        assert reader.complete
        assert reader.damage == []


def test_random_access_and_iteration_do_not_disturb_each_other():
    data = small_file()
    reader = Reader(io.BytesIO(data))
    in_order = []
    for item in reader:
        in_order.append(item)
        assert reader.clip(2).first_frame == 8
        assert reader.clip(0).pts == (0, 1001, 2002, 3003)
    assert in_order == list(Reader(io.BytesIO(data)))
    assert [entry[2:] for entry in reader.index()] == [(0, 4, 0), (4, 4, 4004), (8, 3, 8008)]
    with pytest.raises(FormatError, match="no clip 3"):
        reader.clip(3)


def test_a_file_without_clips():
    reader = Reader(io.BytesIO(write()))
    assert list(reader) == []
    assert reader.complete
    assert reader.index() == []


def test_an_unfinished_file_is_read_up_to_its_last_clip():
    data = write(clip(0), clip(1), finish=False)
    reader = Reader(io.BytesIO(data))
    found = []
    with pytest.raises(FormatError, match="truncated"):
        found.extend(reader)
    assert [item.number for item in found] == [0, 1]
    reader = Reader(io.BytesIO(data), on_damage="skip")
    assert list(clips_of(reader)) == [0, 1]
    assert not reader.complete
    assert reader.damage[0].frames is None
    assert [entry.number for entry in reader.index()] == [0, 1]
    assert reader.clip(1) == found[1]


def test_the_small_file_has_one_of_each():
    reader = Reader(io.BytesIO(small_file()))
    clips = clips_of(reader).values()
    banks = [parse_bank(record.bank, reader.header.bank_shape) for record in clips]
    assert [bank.coder for bank in banks] == ["contexts", "contexts", "huffman"]
    assert banks[1].coded.model.switches
    assert banks[1].coded.model.row
    assert [bool(record.velocities) for record in clips] == [False, True, True]
    assert [record.shakes for record in clips] == [(), ((0, SHAKE),), ()]


@pytest.mark.parametrize("open_file", [io.BytesIO, Pipe])
def test_truncated_at_every_byte(open_file):
    data = small_file()
    whole = clips_of(Reader(io.BytesIO(data)))
    ends = [end for _, kind, end in layout(data) if kind == "CLIP"]
    head_end = layout(data)[0][2]
    for size in range(len(data)):
        expected = {number: whole[number] for number in range(sum(end <= size for end in ends))}
        found = []
        with pytest.raises(FormatError):
            found.extend(Reader(open_file(data[:size])))
        assert {item.number: item for item in found if isinstance(item, ClipRecord)} == expected
        if size < head_end:
            with pytest.raises(FormatError):
                Reader(open_file(data[:size]), on_damage="skip")
            continue
        reader = Reader(open_file(data[:size]), on_damage="skip")
        assert clips_of(reader) == expected
        assert reader.damage
        assert not reader.complete


@pytest.mark.parametrize("open_file", [io.BytesIO, Pipe])
def test_every_flipped_bit_is_found_and_costs_its_own_clip_only(open_file):
    data = small_file()
    whole = clips_of(Reader(io.BytesIO(data)))
    places = [(0, "SIGN", len(SIGNATURE)), *layout(data)]
    numbers = {start: i for i, (start, _, _) in enumerate(place for place in places if place[1] == "CLIP")}
    for start, kind, end in places:
        lost = {numbers[start]} if kind == "CLIP" else set()
        for bit in range(8 * start, 8 * end):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 0x80 >> bit % 8
            with pytest.raises(FormatError) as caught:
                list(Reader(open_file(flipped)))
            if open_file is Pipe and kind in ("SIGN", "HEAD"):
                with pytest.raises(FormatError):
                    Reader(open_file(flipped), on_damage="skip")
                continue
            if open_file is io.BytesIO and lost:
                assert f"(clip {numbers[start]}, frames {4 * numbers[start]}-" in str(caught.value)
            reader = Reader(open_file(flipped), on_damage="skip")
            assert clips_of(reader) == {number: record for number, record in whole.items() if number not in lost}
            assert reader.complete == (kind != "TAIL")
            assert reader.damage[0].offset in (start, start + len(SIGNATURE))
            assert {number for damage in reader.damage for number in damage.clips} == lost
            assert {frame for damage in reader.damage for frame in damage.frames} == {
                4 * number + i for number in lost for i in range(len(whole[number].pts))
            }


def test_random_access_names_the_damaged_clip_and_reads_the_others():
    data = bytearray(small_file())
    start, _, end = [place for place in layout(data) if place[1] == "CLIP"][1]
    data[(start + end) // 2] ^= 1
    reader = Reader(io.BytesIO(data))
    assert reader.clip(0).number == 0
    assert reader.clip(2).number == 2
    with pytest.raises(FormatError, match=r"CRC-32 does not match \(clip 1, frames 4-7\)"):
        reader.clip(1)


def test_a_lost_index_is_made_anew():
    data = bytearray(small_file())
    start = next(start for start, kind, _ in layout(data) if kind == "indx")
    data[start + 9] ^= 1
    with pytest.raises(FormatError, match="indx chunk"):
        Reader(io.BytesIO(data)).index()
    reader = Reader(io.BytesIO(data), on_damage="skip")
    assert reader.index() == Reader(io.BytesIO(small_file())).index()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_damage_gives_sound_clips_or_one_error(data):
    original = small_file()
    whole = clips_of(Reader(io.BytesIO(original)))
    start = data.draw(st.integers(0, len(original)))
    end = data.draw(st.integers(start, min(len(original), start + 200)))
    damaged = original[:start] + data.draw(st.binary(max_size=60)) + original[end:]
    for open_file in (io.BytesIO, Pipe):
        try:
            reader = Reader(open_file(damaged), on_damage="skip")
            found = clips_of(reader)
        except FormatError:
            continue
        assert found.items() <= whole.items()
        assert damaged == original or reader.damage


def test_packets_of_a_lost_stream_are_reported_and_the_rest_kept():
    other = replace(AUDIO, index=1)
    mixed = [*PACKETS, replace(PACKETS[0], stream=1)]
    data = bytearray(
        write(
            lambda writer: writer.stream(AUDIO),
            lambda writer: writer.stream(other),
            lambda writer: writer.packets(mixed),
        )
    )
    data[layout(data)[1][0] + 10] ^= 1
    with pytest.raises(FormatError, match="strm chunk"):
        list(Reader(io.BytesIO(data)))
    reader = Reader(io.BytesIO(data), on_damage="skip")
    assert list(reader) == [other, [mixed[2]]]
    assert any("2 packets" in damage.reason for damage in reader.damage)


def test_not_a_coa_file():
    for start, problem in [
        (b"", "empty"),
        (b"\x00\x00\x00 ftypisom", "not a .coa file"),
        (SIGNATURE.replace(b"\r\n", b"\n") + b"\0", "text-mode"),
        (SIGNATURE.replace(b"\x8b", b"\x0b"), "text-mode"),
        (b"\xc2" + SIGNATURE, "text-mode"),
    ]:
        for mode in ("stop", "skip"):
            with pytest.raises(FormatError, match=problem):
                Reader(io.BytesIO(start), on_damage=mode)


# --- rules that hold even when every CRC is right


def move(old, new):
    return lambda chunks: chunks.insert(new, chunks.pop(old))


HOSTILE = {
    "HEAD is not first": (move(0, 1), "begin with a HEAD"),
    "second HEAD": (lambda chunks: chunks.insert(2, chunks[0]), "second"),
    "clips out of order": (move(5, 6), "missing"),
    "clip twice": (lambda chunks: chunks.insert(4, chunks[3]), "follows frame 3"),
    "clip removed": (lambda chunks: chunks.pop(5), "clips 1 to 1 are missing"),
    "last clip removed": (lambda chunks: chunks.pop(6), "does not list"),
    "packets removed": (lambda chunks: chunks.pop(4), "does not list"),
    "stream twice": (lambda chunks: chunks.insert(3, chunks[2]), "described twice"),
    "packets before their stream": (move(4, 2), "not described"),
    "index removed": (lambda chunks: chunks.pop(7), "where it is not"),
    "clip after the index": (move(6, 7), "does not list"),
    "metadata after the index": (move(1, 7), "does not list"),
    "another header copy": (lambda chunks: chunks[8].__setitem__(1, b"x"), "not a copy"),
    "TAIL twice": (lambda chunks: chunks.append(chunks[-1]), "goes on after it"),
    "TAIL too long": (lambda chunks: chunks[-1].__setitem__(1, bytes(25)), "holds 25 bytes"),
    "TAIL of 10^12 frames": (lambda chunks: chunks[-1].__setitem__(1, TAIL.pack(3, 10**12, 0)), "TAIL"),
    "unknown critical chunk": (lambda chunks: chunks.insert(3, [b"WAVE", b""]), "WAVE chunk .* newer coanerv"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_broken_rules_are_refused(case):
    change, problem = HOSTILE[case]
    with pytest.raises(FormatError, match=problem):
        list(Reader(io.BytesIO(rebuilt(small_file(), change))))


@pytest.mark.parametrize("case", HOSTILE)
def test_broken_rules_never_yield_wrong_clips(case):
    data = rebuilt(small_file(), HOSTILE[case][0])
    whole = clips_of(Reader(io.BytesIO(small_file())))
    try:
        reader = Reader(io.BytesIO(data), on_damage="skip")
        found = clips_of(reader)
    except FormatError:
        return
    assert found.items() <= whole.items()
    assert reader.damage


@pytest.mark.parametrize(
    "bank", [b"", b"\x07", some_bank(1)[:-1], some_bank(1) + b"\0"], ids=["none", "coder", "short", "long"]
)
def test_a_bank_that_cannot_be_read_costs_its_own_clip(bank):
    def broken(writer):
        writer.clip([4004, 5005, 6006, 7007], 1001, bank)

    data = write(clip(0), broken, clip(2))
    reader = Reader(io.BytesIO(data), on_damage="skip")
    assert [item.number for item in reader if isinstance(item, ClipRecord)] == [0, 2]
    (damage,) = reader.damage
    assert (damage.clips, damage.frames) == (range(1, 2), range(4, 8))


def test_an_unknown_critical_chunk_is_refused_in_skip_mode_too():
    data = rebuilt(small_file(), lambda chunks: chunks.insert(3, [b"WAVE", b""]))
    with pytest.raises(FormatError, match="WAVE"):
        list(Reader(io.BytesIO(data), on_damage="skip"))


def with_header(header_payload):
    return SIGNATURE + chunk_bytes(b"HEAD", header_payload)


def test_a_later_minor_version_with_an_unknown_ancillary_chunk_is_read():
    def extend(chunks):
        chunks[0][1] = chunks[8][1] = bytes([1, 7]) + chunks[0][1][2:]
        size = len(chunk_bytes(b"xtra", b"new"))
        chunks.insert(1, [b"xtra", b"new"])
        entries = records.read_index(chunks[8][1], Limits())
        index = records.IndexBytes()
        for entry in entries:
            index.add(entry.offset + size, entry.frames, entry.pts)
        chunks[8][1] = index.payload()
        clips, frames, offset = TAIL.unpack(chunks[10][1])
        chunks[10][1] = TAIL.pack(clips, frames, offset + size)

    reader = Reader(io.BytesIO(rebuilt(small_file(), extend)))
    assert clips_of(reader) == clips_of(Reader(io.BytesIO(small_file())))
    assert reader.header.minor == 7
    assert reader.complete


def test_a_later_major_version_is_refused_in_a_clear_sentence():
    payload = b"\x02" + records.header_bytes(HEADER)[1:]
    with pytest.raises(FormatError, match=r"format 2\.0; this coanerv reads 1\.x"):
        Reader(io.BytesIO(with_header(payload)))


def test_reserved_bits_are_refused():
    payload = bytearray(records.header_bytes(HEADER))
    payload[2] |= 0x40
    with pytest.raises(FormatError, match="reserved"):
        Reader(io.BytesIO(with_header(bytes(payload))))
    record = bytearray(records.clip_bytes(ClipRecord(0, 0, (0,), 1001, b""), 1001))
    record[3] |= 16
    with pytest.raises(FormatError, match="reserved"):
        records.read_clip(bytes(record), HEADER, Limits())
    batch = bytearray(records.packets_bytes(PACKETS))
    batch[2] |= 0x80
    with pytest.raises(FormatError, match="reserved"):
        records.read_packets(bytes(batch), Limits())


def test_times_must_increase():
    for times in ([5, 5], [5, 4]):
        with pytest.raises(FormatError):
            write(lambda writer, times=times: writer.clip(times, 1, b""))
    with pytest.raises(FormatError, match="not after"):
        write(clip(0), lambda writer: writer.clip([3003], 1, b""))
    early = records.clip_bytes(ClipRecord(1, 4, (3003,), 1, b""), 1001)
    data = rebuilt(write(clip(0), clip(1)), lambda chunks: chunks[2].__setitem__(1, early))
    with pytest.raises(FormatError, match="not after 3003"):
        list(Reader(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("width", 16_385), ("height", 0), ("frames_per_clip", 257), ("tokens", 10**6), ("token_dim", 10**6),
     ("columns", 65), ("rows", 49), ("overlap", 10**5), ("time_base", Fraction(0)), ("bit_depth", 0),
     ("color_range", 3), ("chroma_location", 7), ("checkpoint", "x" * 256), ("cell_size", 5000)],
)  # fmt: skip
def test_headers_beyond_a_limit_are_neither_read_nor_written(field, value):
    header = replace(HEADER, **{field: value})
    with pytest.raises(FormatError):
        Reader(io.BytesIO(with_header(records.header_bytes(header))))
    with pytest.raises(FormatError):
        Writer(WriteOnly(), header)


def test_cells_that_overlap_too_much_are_refused():
    fits = replace(HEADER, columns=3, overlap=16)
    assert records.read_header(records.header_bytes(fits), Limits()) == fits
    with pytest.raises(FormatError, match="do not fit"):
        records.read_header(records.header_bytes(replace(fits, overlap=17)), Limits())


@pytest.mark.parametrize(
    ("shape", "row", "bits"),
    [
        ((1, 2**16, 1), 256, 8),
        ((1, 2**16, 1), 0, 8),
        ((64, 256, 4), 16, 8),
        ((1, 96, 1024), 8, 8),
        ((2**14, 4, 2), 2, 4),
    ],
)
def test_decoding_a_bank_takes_no_more_memory_than_the_limit_counts(shape, row, bits):
    """Coder 2 once took twelve times as much where tokens are short."""
    cells, tokens, d = shape
    header = replace(HEADER, columns=cells, width=cells, height=1, frames_per_clip=1, tokens=tokens, token_dim=d)
    symbols = np.random.default_rng(0).integers(0, 2**bits, shape).astype(np.uint8)
    bank = encode_bank(symbols, bits, -128.0, 1.0, hints=Hints(row, tuple(range(min(d, 3)))))
    passes.cache_clear()
    tracemalloc.start()
    try:
        found, _, z, s = decode_bank(bank, shape)
        dequantize(found, z, s)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < header.clip_memory + 2**22  # tables have one size, whatever the bank's
    assert (found == symbols).all()


def test_limits_can_be_raised():
    header = replace(HEADER, width=20_000)
    payload = records.header_bytes(header)
    with pytest.raises(FormatError, match="width is 20000, more than 16384"):
        Reader(io.BytesIO(with_header(payload)))
    assert Reader(io.BytesIO(with_header(payload)), Limits(side=20_000)).header == header


def test_a_tiny_file_cannot_announce_a_huge_one():
    start = with_header(records.header_bytes(HEADER))
    huge_clip = varint(0) + varint(10**12) + varint(1) + b"\3" + signed(0)
    huge_index = varint(10**12) + b"\1\1\1"
    for ending, problem in [
        (chunk_bytes(b"TAIL", TAIL.pack(10**11, 10**12, len(start))), "TAIL"),
        (chunk_bytes(b"CLIP", huge_clip), "first frame is 1000000000000"),
        (chunk_bytes(b"indx", huge_index), "number of clips is 1000000000000"),
        (b"CLIP" + struct.pack("<I", 2**32 - 1) + bytes(50), "beyond the limit"),
        (chunk_bytes(b"pckt", varint(10**12) + bytes(20)), "number of packets"),
        (chunk_bytes(b"meta", b"\0" + varint(10**12)), "number of pairs"),
        (chunk_bytes(b"strm", varint(0) + b"\0" + varint(10**12)), "length of the codec's name"),
    ]:
        data = start + ending
        assert len(data) < 200
        with pytest.raises(FormatError, match=problem):
            list(Reader(io.BytesIO(data)))
    tail = chunk_bytes(b"indx", huge_index)
    data = start + tail + chunk_bytes(b"TAIL", TAIL.pack(10**12, 10**12, len(start)))
    with pytest.raises(FormatError, match="number of clips"):
        Reader(io.BytesIO(data)).index()


@pytest.mark.parametrize("offset", [10**6, 2**63, 2**64 - 1])
def test_an_index_cannot_point_beyond_the_file(offset):
    start = with_header(records.header_bytes(HEADER))
    index = chunk_bytes(b"indx", varint(1) + varint(offset) + varint(1) + signed(0))
    data = start + index + chunk_bytes(b"TAIL", TAIL.pack(1, 1, len(start)))
    with pytest.raises(FormatError, match="beyond itself"):
        Reader(io.BytesIO(data)).clip(0)


def test_resynchronising_a_hostile_file_is_bounded():
    class Counting(io.BytesIO):
        count = 0

        def read(self, size=-1):
            data = super().read(size)
            Counting.count += len(data)
            return data

    limits = Limits(chunk_bytes=2**16)
    bait = (b"CLIP" + struct.pack("<I", 2**16 - 64)) * 2**15  # every 8 bytes a chunk of 64 KiB seems to start
    reader = Reader(Counting(with_header(records.header_bytes(HEADER)) + bait), limits, on_damage="skip")
    assert list(reader) == []
    assert not reader.complete
    assert Counting.count < 2**20


# --- writer, summary, goldens, document


def test_the_writer_stores_exactly_or_refuses():
    with pytest.raises(ValueError, match="exactly"):
        write(lambda writer: writer.packets([replace(PACKETS[0], flags=16)]))
    with pytest.raises(FormatError, match="not described"):
        write(lambda writer: writer.packets(PACKETS))
    with pytest.raises(FormatError, match="described twice"):
        write(*[lambda writer: writer.stream(AUDIO)] * 2)
    with pytest.raises(FormatError, match="number of packets is 0"):
        write(lambda writer: writer.packets([]))
    with pytest.raises(FormatError, match="beyond"):
        Writer(WriteOnly(), HEADER, Limits(chunk_bytes=100)).clip([0], 1, bytes(101))


def test_summary_accounts_for_every_byte():
    data = small_file()
    report = summary(io.BytesIO(data))
    assert json.loads(json.dumps(report)) == report
    assert sum(report["bytes"].values()) == len(data)
    assert report["bytes"]["damaged"] == 0
    assert (report["clips"], report["frames"], report["packets"]) == (3, 11, 2)
    assert report["duration"] == pytest.approx(11 * 1001 / 30000)
    assert report["tokens"]["bits"] == [2]
    assert report["complete"]
    assert summary(Pipe(data)) == report


def test_summary_lists_damage():
    data = bytearray(small_file())
    start, _, end = [place for place in layout(data) if place[1] == "CLIP"][1]
    data[start + 20] ^= 1
    report = summary(io.BytesIO(data))
    assert sum(report["bytes"].values()) == len(data)
    assert report["bytes"]["damaged"] == end - start
    assert report["damage"][0]["clips"] == [1, 2]
    assert report["damage"][0]["frames"] == [4, 8]


def test_overhead_of_ten_seconds_is_under_two_percent():
    header = replace(HEADER, frames_per_clip=8, tokens=96, token_dim=72, columns=2, rows=2, width=256, height=256)
    rng = np.random.default_rng(0)
    scales = np.exp(rng.normal(0.7, 0.7, 72))

    def one_clip(number):
        symbols = np.rint(32 + rng.laplace(0, 1, header.bank_shape) * scales).clip(0, 63).astype(np.uint8)
        times = [1001 * frame for frame in range(8 * number, min(8 * number + 8, 300))]
        return lambda writer: writer.clip(times, 1001, encode_bank(symbols, 6, -1.0, 0.03))

    sizes = summary(io.BytesIO(write(*map(one_clip, range(38)), header=header)))["bytes"]
    assert sum(sizes.values()) < 1.02 * sizes["symbols"]


EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_files_decode_to_what_they_always_did(name):
    data = (GOLDEN / f"{name}.coa").read_bytes()
    expected = EXPECTED[name]
    assert hashlib.sha256(data).hexdigest() == expected["sha256"], "a golden file was changed: restore it"
    found = describe(data)
    assert found["tokens_sha256"] == expected["tokens_sha256"]
    for got, wanted in zip([found["header"], *found["items"]], [expected["header"], *expected["items"]], strict=True):
        assert wanted.items() <= got.items()


def test_every_golden_file_is_expected():
    assert {path.stem for path in GOLDEN.glob("*.coa")} == set(EXPECTED)


def test_golden_files_are_not_made_again_unless_told_so(tmp_path, capsys):
    make = golden_script["main"]
    for path in GOLDEN.iterdir():
        if path.suffix in (".coa", ".json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    name = "v1.0-flat-2bit"
    changed = tmp_path / f"{name}.coa"
    changed.write_bytes(b"changed")
    make([], tmp_path)
    assert changed.read_bytes() == b"changed"
    assert "made" not in capsys.readouterr().out
    changed.unlink()
    with pytest.raises(SystemExit, match=f"{name}.coa is in expected.json but not there"):
        make([], tmp_path)
    assert not changed.exists()
    make(["--replace", name], tmp_path)
    # What the writer makes today is what it made at the release, byte by byte.
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_that_is_nothing_but_damage_is_given_up():
    bad = chunk_bytes(b"meta", b"\x09")
    data = with_header(records.header_bytes(HEADER)) + bad * 50
    reader = Reader(io.BytesIO(data), Limits(damages=20), on_damage="skip")
    with pytest.raises(FormatError, match="damaged in more than 20 places"):
        list(reader)
    assert len(reader.damage) <= 20


def test_metadata_is_limited_in_all():
    one = records.metadata_bytes(Metadata((("key", "x" * 100),)))
    data = with_header(records.header_bytes(HEADER)) + chunk_bytes(b"meta", one) * 5
    reader = Reader(io.BytesIO(data), Limits(metadata_bytes=4 * len(one)))
    assert [next(iter(reader)) for _ in range(4)]
    with pytest.raises(FormatError, match="limit metadata_bytes"):
        next(iter(reader))


def test_the_documents_example_is_a_whole_file():
    document = (ROOT / "docs" / "format.md").read_text()
    example = document.split("## Worked example")[1]
    rows = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?)+)", example, re.MULTILINE)
    data = bytes.fromhex("".join(rows))
    reader = Reader(io.BytesIO(data))
    items = list(reader)
    assert reader.complete
    (only,) = items
    symbols, bits, z, s = decode_bank(only.bank, reader.header.bank_shape)
    assert symbols.tolist() == [[[0, 3], [1, 3], [0, 3], [2, 3]]]
    assert (bits, z, s) == (2, -1.0, 0.5)
    assert only.pts == (0, 1)


def test_the_documents_limits_are_the_codes():
    document = (ROOT / "docs" / "format.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| ([\d ]+) \|", document, re.MULTILINE))
    assert {name: int(value.replace(" ", "")) for name, value in table.items()} == vars(Limits())


def test_the_format_needs_neither_torch_nor_av():
    modules = "bank, container, fields, huffman, quantizer, records, summary"
    program = f"import sys; from coanerv_codec import {modules}; sys.exit(bool({{'torch', 'av'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
