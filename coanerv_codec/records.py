"""What the chunks of a `.coa` file hold: one frozen dataclass per kind of record, each to payload bytes and back.

Reading checks every field against the limits before anything is allocated from it. `docs/format.md` has the layouts.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from coanerv_codec.fields import Fields, blob, fraction, signed, text, varint

MAJOR, MINOR = 1, 0

CHROMA = ("unknown", "gray", "420", "422", "444", "440", "411", "410", "rgb")
SCAN = ("progressive", "tff", "bff")
KINDS = ("audio", "subtitle", "data", "attachment")
SCOPES = ("file", "video")
MAX_VELOCITY = 2**16  # of a cell, in 1/8 pixel per frame
KEY, CORRUPT, DISCARD, DISPOSABLE = 1, 2, 4, 8  # packet flags

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Limits:
    """What a reader accepts at most. The defaults hold days of 8K video; raise them for more."""

    side: int = 16_384  # width and height in pixels
    pixels: int = 2**26  # width * height
    clip_frames: int = 256  # F
    tokens: int = 65_536  # N
    token_dim: int = 4_096  # d
    cell_size: int = 4_096  # S
    cells: int = 65_536  # columns * rows
    symbols: int = 2**26  # cells * N * d, the values of one clip
    clips: int = 2**20
    frames: int = 2**24
    chunk_bytes: int = 2**26
    memory: int = 2**32  # bytes to decode one clip: its pictures and tokens, and packets that wait for the first clip
    text_bytes: int = 65_536
    pairs: int = 1_024  # key/value pairs in one record
    streams: int = 64
    packets: int = 65_536  # in one chunk
    metadata_bytes: int = 2**24  # all meta chunks together
    concealed: int = 65_536  # frames that a decoder makes up for one gap
    damages: int = 10_000  # places that a reader skips before it gives a file up


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a decoder must know before the first clip, and what the source video was like."""

    checkpoint: str
    checkpoint_sha256: bytes
    frames_per_clip: int  # F
    tokens: int  # N, per cell
    token_dim: int  # d
    cell_size: int  # S, the checkpoint's native cell in pixels
    width: int
    height: int
    columns: int = 1
    rows: int = 1
    overlap: int = 0  # pixels shared by neighbouring cells
    time_base: Fraction  # seconds per tick
    frame_duration: int = 0  # nominal, in ticks; 0 = unknown
    frame_rate: Fraction = Fraction(0)  # nominal, frames per second, which ticks may not express; 0 = unknown
    sample_aspect_ratio: Fraction = Fraction(0)  # 0 = unknown
    rotation: int = 0  # degrees clockwise to turn the picture for display, after the flip
    flip: bool = False  # mirror left and right for display
    chroma: str = "unknown"  # of the source, one of CHROMA
    bit_depth: int = 8  # of the source
    alpha: bool = False  # the source had an alpha channel (not stored)
    scan: str = "progressive"  # of the source, one of SCAN
    color_range: int = 0  # 0 unspecified, 1 limited, 2 full
    matrix: int = 2  # ISO/IEC 23091-2 code points; 2 = unspecified
    primaries: int = 2
    transfer: int = 2
    chroma_location: int = 0  # 0 unspecified, else 1 + the chroma sample location type
    minor: int = MINOR  # format minor version

    @property
    def bank_shape(self) -> tuple[int, int, int]:
        """Shape of a clip's token bank: [cells, N, d]."""
        return self.columns * self.rows, self.tokens, self.token_dim

    @property
    def clip_memory(self) -> int:
        """Bytes that decoding a clip takes: 7 for each pixel of its pictures, 16 for each symbol, 400 for each token.

        Beside those that are decoded, pictures wait for the clip before or after to be cross-faded. Coder 2 takes at most 10
        for each symbol, and 200 for each token; as many again for orders of tokens it remembers.
        """
        cells, tokens, _ = self.bank_shape
        pictures = 7 * self.frames_per_clip * self.width * self.height
        return pictures + 16 * math.prod(self.bank_shape) + 400 * cells * tokens


@dataclass(frozen=True)
class ClipRecord:
    """Up to F consecutive frames: their timestamps in ticks, and their coded token bank."""

    number: int
    first_frame: int
    pts: tuple[int, ...]
    last_duration: int
    bank: bytes = field(repr=False)
    velocities: tuple[tuple[int, int], ...] = ()  # of each cell, (vx, vy) in 1/8 pixel per frame; () if none has one
    shakes: tuple[tuple[int, bytes], ...] = ()  # the cells that shake, by number, with a byte per frame (`cells.py`)


@dataclass(frozen=True, kw_only=True)
class StreamInfo:
    """An audio, subtitle, data or attachment stream whose packets are kept untouched. Names are FFmpeg's."""

    index: int
    kind: str
    codec: str
    time_base: Fraction
    disposition: int = 0
    language: str = ""
    bit_rate: int = 0
    sample_rate: int = 0
    channels: int = 0
    delay: int = 0  # ticks of encoder priming to drop at the start
    layout: str = ""
    extradata: bytes = field(default=b"", repr=False)
    parameters: Pairs = ()  # further codec parameters a muxer needs, such as ("frame_size", "1024")
    metadata: Pairs = ()


@dataclass(frozen=True, kw_only=True)
class Packet:
    """One packet of a stream, timestamps in the stream's ticks."""

    stream: int
    pts: int | None
    dts: int | None
    duration: int
    flags: int = 0
    data: bytes = field(repr=False)
    side_data: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Metadata:
    """Key/value pairs of the whole file or of its video stream."""

    pairs: Pairs
    scope: str = "file"


class IndexEntry(NamedTuple):
    """Where a clip is and what it holds."""

    number: int
    offset: int
    first_frame: int
    frames: int
    pts: int


def header_bytes(header: Header) -> bytes:
    """The payload of HEAD."""
    flags = header.rotation // 90 | header.flip << 2 | header.alpha << 3 | SCAN.index(header.scan) << 4
    return b"".join(
        (
            bytes((MAJOR, header.minor, flags)),
            text(header.checkpoint),
            header.checkpoint_sha256,
            *map(varint, (header.frames_per_clip, header.tokens, header.token_dim, header.cell_size)),
            *map(varint, (header.width, header.height, header.columns, header.rows, header.overlap)),
            fraction(header.time_base),
            varint(header.frame_duration),
            fraction(header.frame_rate),
            fraction(header.sample_aspect_ratio),
            bytes((CHROMA.index(header.chroma), header.bit_depth)),
            bytes((header.color_range, header.matrix, header.primaries, header.transfer, header.chroma_location)),
        )
    )


def read_header(payload: bytes, limits: Limits) -> Header:
    """The header in a HEAD payload."""
    read = Fields(payload, "HEAD")
    major, minor = read.byte(), read.byte()
    if major != MAJOR:
        raise read.error(
            f"this is format {major}.{minor}; this coanerv reads {MAJOR}.x: get the one that reads {major}.x"
        )
    flags = read.byte()
    if flags >> 6:
        raise read.error("reserved flag bits are set")
    header = Header(
        minor=minor,
        rotation=90 * (flags & 3),
        flip=bool(flags & 4),
        alpha=bool(flags & 8),
        scan=_name(read, SCAN, flags >> 4, "scan order"),
        checkpoint=read.text(255, "the checkpoint's name"),
        checkpoint_sha256=read.take(32),
        frames_per_clip=_positive(read, limits.clip_frames, "frames per clip", "clip_frames"),
        tokens=_positive(read, limits.tokens, "tokens", "tokens"),
        token_dim=_positive(read, limits.token_dim, "the token dimension", "token_dim"),
        cell_size=_positive(read, limits.cell_size, "the cell size", "cell_size"),
        width=_positive(read, limits.side, "the width", "side"),
        height=_positive(read, limits.side, "the height", "side"),
        columns=_positive(read, limits.cells, "the number of columns", "cells"),
        rows=_positive(read, limits.cells, "the number of rows", "cells"),
        overlap=read.varint(limits.side, "the overlap", "side"),
        time_base=_time_base(read),
        frame_duration=read.varint(2**31 - 1, "the frame duration"),
        frame_rate=read.fraction("the frame rate"),
        sample_aspect_ratio=read.fraction("the sample aspect ratio"),
        chroma=_name(read, CHROMA, read.byte(), "chroma format"),
        bit_depth=read.byte(),
        color_range=read.byte(),
        matrix=read.byte(),
        primaries=read.byte(),
        transfer=read.byte(),
        chroma_location=read.byte(),
    )
    read.end()
    cells, tokens, d = header.bank_shape
    if cells > limits.cells or cells * tokens * d > limits.symbols:
        raise read.error(
            f"{cells} cells of {tokens}x{d} values: more than {limits.cells} cells (limit cells) or "
            f"{limits.symbols} values (limit symbols)"
        )
    if header.width * header.height > limits.pixels:
        raise read.error(f"{header.width}x{header.height} pixels are more than {limits.pixels} (limit pixels)")
    if header.clip_memory > limits.memory:
        raise read.error(
            f"a clip of {header.frames_per_clip} frames of {header.width}x{header.height} takes {header.clip_memory} bytes "
            f"to decode, more than {limits.memory} (limit memory)"
        )
    for count, side in ((header.columns, header.width), (header.rows, header.height)):
        # At most two cells may overlap along an axis, and no cell may be empty.
        if count > side or (count > 1 and (count + 1) * header.overlap > side):
            raise read.error(f"{count} cells with {header.overlap} pixels of overlap do not fit {side} pixels")
    if not 1 <= header.bit_depth <= 32:
        raise read.error(f"bit depth {header.bit_depth} is not 1 to 32")
    if header.color_range > 2 or header.chroma_location > 6:
        raise read.error("the colour range or chroma location is unknown")
    return header


def clip_bytes(clip: ClipRecord, frame_duration: int) -> bytes:
    """The payload of CLIP."""
    deltas = [after - before for before, after in zip(clip.pts, clip.pts[1:], strict=False)]
    even = frame_duration > 0 and all(delta == frame_duration for delta in deltas)
    usual = frame_duration > 0 and clip.last_duration == frame_duration
    flags = even | usual << 1 | bool(clip.velocities) << 2 | bool(clip.shakes) << 3
    parts = [varint(clip.number), varint(clip.first_frame), varint(len(clip.pts)), bytes((flags,))]
    parts += [signed(clip.pts[0])]
    parts += [] if even else map(varint, deltas)
    parts += [] if usual else [varint(clip.last_duration)]
    parts += [motion_bytes(clip)]
    return b"".join((*parts, clip.bank))


def motion_bytes(clip: ClipRecord) -> bytes:
    """The part of a CLIP payload that says how cells move."""
    velocities = b"".join(signed(part) for velocity in clip.velocities for part in velocity)
    parts, after = [varint(len(clip.shakes))] if clip.shakes else [], 0
    for cell, shake in clip.shakes:
        parts += [varint(cell - after), shake]
        after = cell + 1
    return velocities + b"".join(parts)


def read_clip(payload: bytes, header: Header, limits: Limits) -> ClipRecord:
    """The clip in a CLIP payload; its bank is left coded."""
    read = Fields(payload, "CLIP")
    number = read.varint(limits.clips - 1, "the clip number", "clips")
    first_frame = read.varint(limits.frames - 1, "the first frame", "frames")
    frames = _positive(read, header.frames_per_clip, "the number of frames")
    if first_frame + frames > limits.frames:
        raise read.error(f"frame {first_frame + frames - 1} is beyond {limits.frames} frames (limit frames)")
    flags = read.byte()
    if flags >> 4 or (flags & 3 and not header.frame_duration):
        raise read.error(
            "reserved flag bits are set, or a nominal duration is referred to that the header does not give"
        )
    pts = [read.signed()]
    for _ in range(frames - 1):
        pts.append(pts[-1] + (header.frame_duration if flags & 1 else _positive(read, 2**63, "a frame's duration")))
    last_duration = header.frame_duration if flags & 2 else read.varint(2**63 - 1, "the last frame's duration")
    if pts[-1] + last_duration >= 2**63:
        raise read.error("timestamps run beyond 64 bits")
    velocities = ()
    if flags & 4:
        velocities = tuple((_velocity(read), _velocity(read)) for _ in range(header.columns * header.rows))
        if not any(map(any, velocities)):
            raise read.error("it says that cells move, but none does")
    shakes = tuple(_shakes(read, header)) if flags & 8 else ()
    return ClipRecord(number, first_frame, tuple(pts), last_duration, read.take(read.left), velocities, shakes)


def _velocity(read: Fields) -> int:
    value = read.signed()
    if abs(value) > MAX_VELOCITY:
        raise read.error(f"a velocity of {value / 8:.0f} pixels per frame, more than {MAX_VELOCITY // 8}")
    return value


def _shakes(read: Fields, header: Header) -> Iterator[tuple[int, bytes]]:
    cells, after = header.columns * header.rows, 0
    for _ in range(_positive(read, cells, "the number of cells that shake")):
        cell = after + read.varint(cells - 1 - after, "a cell that shakes")
        shake = read.take(header.frames_per_clip)
        if not any(shake):
            raise read.error(f"it says that cell {cell} shakes, but it does not")
        yield cell, shake
        after = cell + 1


def stream_bytes(stream: StreamInfo) -> bytes:
    """The payload of strm."""
    return b"".join(
        (
            varint(stream.index),
            bytes((KINDS.index(stream.kind),)),
            text(stream.codec),
            fraction(stream.time_base),
            varint(stream.disposition),
            text(stream.language),
            *map(varint, (stream.bit_rate, stream.sample_rate, stream.channels, stream.delay)),
            text(stream.layout),
            blob(stream.extradata),
            _pairs_bytes(stream.parameters),
            _pairs_bytes(stream.metadata),
        )
    )


def read_stream(payload: bytes, limits: Limits) -> StreamInfo:
    """The stream description in a strm payload."""
    read = Fields(payload, "strm")
    stream = StreamInfo(
        index=read.varint(limits.streams - 1, "the stream index", "streams"),
        kind=_name(read, KINDS, read.byte(), "stream kind"),
        codec=read.text(limits.text_bytes, "the codec's name"),
        time_base=_time_base(read),
        disposition=read.varint(),
        language=read.text(limits.text_bytes, "the language"),
        bit_rate=read.varint(),
        sample_rate=read.varint(),
        channels=read.varint(),
        delay=read.varint(),
        layout=read.text(limits.text_bytes, "the channel layout"),
        extradata=read.blob(limits.chunk_bytes, "the extradata"),
        parameters=_read_pairs(read, limits),
        metadata=_read_pairs(read, limits),
    )
    read.end()
    return stream


def packets_bytes(packets: Sequence[Packet]) -> bytes:
    """The payload of pckt. Timestamps are told from where the stream's previous packet in the chunk ended."""
    parts = [varint(len(packets))]
    expected: dict[int, tuple[int, int]] = {}
    for packet in packets:
        start, usual = expected.get(packet.stream, (0, 0))
        timed, ordered, extra = packet.pts is not None, packet.dts is not None, bool(packet.side_data)
        parts += [varint(packet.stream), bytes((packet.flags | timed << 4 | ordered << 5 | extra << 6,))]
        if timed:
            parts.append(signed(packet.pts - start))
            start = packet.pts
        if ordered:
            parts.append(signed(packet.dts - start))
        parts.append(signed(packet.duration - usual))
        expected[packet.stream] = start + packet.duration, packet.duration
        if extra:
            parts.append(varint(len(packet.side_data)))
            parts += [text(name) + blob(data) for name, data in packet.side_data]
        parts.append(blob(packet.data))
    return b"".join(parts)


def read_packets(payload: bytes, limits: Limits) -> list[Packet]:
    """The packets in a pckt payload."""
    read = Fields(payload, "pckt")
    packets = []
    expected: dict[int, tuple[int, int]] = {}
    for _ in range(_positive(read, limits.packets, "the number of packets", "packets")):
        stream = read.varint(limits.streams - 1, "the stream index", "streams")
        start, usual = expected.get(stream, (0, 0))
        flags = read.byte()
        if flags >> 7:
            raise read.error("reserved flag bits are set")
        pts = start = start + read.signed() if flags & 16 else start
        dts = start + read.signed() if flags & 32 else None
        duration = usual + read.signed()
        if not (duration >= 0 and all(-(2**63) <= value < 2**63 for value in (pts, dts or 0, pts + duration))):
            raise read.error("timestamps run beyond 64 bits, or a duration is negative")
        expected[stream] = start + duration, duration
        names = range(_positive(read, limits.pairs, "the number of side data", "pairs")) if flags & 64 else ()
        side_data = tuple(
            (read.text(limits.text_bytes, "a side data name"), read.blob(limits.chunk_bytes, "side data"))
            for _ in names
        )
        packets.append(
            Packet(
                stream=stream,
                pts=pts if flags & 16 else None,
                dts=dts,
                duration=duration,
                flags=flags & 15,
                data=read.blob(limits.chunk_bytes, "a packet"),
                side_data=side_data,
            )
        )
    read.end()
    return packets


def metadata_bytes(metadata: Metadata) -> bytes:
    """The payload of meta."""
    return bytes((SCOPES.index(metadata.scope),)) + _pairs_bytes(metadata.pairs)


def read_metadata(payload: bytes, limits: Limits) -> Metadata:
    """The metadata in a meta payload."""
    read = Fields(payload, "meta")
    scope = _name(read, SCOPES, read.byte(), "metadata scope")
    metadata = Metadata(_read_pairs(read, limits), scope)
    read.end()
    return metadata


class IndexBytes:
    """Grows the payload of indx clip by clip, a few bytes each."""

    def __init__(self) -> None:
        self.count, self._offset, self._pts, self._entries = 0, 0, 0, bytearray()

    def add(self, offset: int, frames: int, pts: int) -> None:
        """Note the next clip."""
        self._entries += varint(offset - self._offset) + varint(frames) + signed(pts - self._pts)
        self.count, self._offset, self._pts = self.count + 1, offset, pts

    def payload(self) -> bytes:
        """The payload for the clips so far."""
        return varint(self.count) + self._entries


def read_index(payload: bytes, limits: Limits) -> list[IndexEntry]:
    """The entries of an indx payload."""
    read = Fields(payload, "indx")
    count = read.varint(limits.clips, "the number of clips", "clips")
    entries = []
    offset = frame = pts = 0
    for number in range(count):
        offset += read.varint()
        frames = _positive(read, limits.clip_frames, "the number of frames", "clip_frames")
        pts += read.signed()
        entries.append(IndexEntry(number, offset, frame, frames, pts))
        frame += frames
    read.end()
    return entries


def _positive(read: Fields, limit: int, name: str, raised_by: str = "") -> int:
    value = read.varint(limit, name, raised_by)
    if value == 0:
        raise read.error(f"{name} is 0")
    return value


def _time_base(read: Fields) -> Fraction:
    value = read.fraction("the time base")
    if value == 0:
        raise read.error("the time base is 0")
    return value


def _name(read: Fields, names: Sequence[str], code: int, what: str) -> str:
    if code >= len(names):
        raise read.error(f"{what} {code} is unknown")
    return names[code]


def _pairs_bytes(pairs: Iterable[tuple[str, str]]) -> bytes:
    pairs = tuple(pairs)
    return varint(len(pairs)) + b"".join(text(key) + text(value) for key, value in pairs)


def _read_pairs(read: Fields, limits: Limits) -> Pairs:
    count = read.varint(limits.pairs, "the number of pairs", "pairs")
    return tuple((read.text(limits.text_bytes, "a key"), read.text(limits.text_bytes, "a value")) for _ in range(count))
