"""The `.coa` file: chunks with a CRC-32 each, written front to back, read front to back or by clip.

A chunk is a type (four letters, the first upper case if a reader must know it), the payload's length, the payload and a
CRC-32 over all three. What payloads hold is in `records.py`; `docs/format.md` is the specification.
"""

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, Literal, NamedTuple

from coanerv_codec import records
from coanerv_codec.bank import decode_bank
from coanerv_codec.errors import FormatError
from coanerv_codec.records import ClipRecord, Header, IndexEntry, Limits, Metadata, Packet, StreamInfo

__all__ = [
    "ClipRecord",
    "Damage",
    "Header",
    "IndexEntry",
    "Limits",
    "Metadata",
    "Packet",
    "Reader",
    "StreamInfo",
    "Writer",
]

SIGNATURE = b"\x8bCOA\r\n\x1a\n"
FRAMING = 12  # bytes of a chunk beside its payload
TAIL = struct.Struct("<QQQ")  # clips, frames, offset of the index
HEADER_COPY_SEARCH = 4096  # the copy of the header and TAIL lie within this many bytes of the file's end
RESYNC = re.compile(rb"CLIP|TAIL|head|indx|meta|pckt|strm")
READ_SIZE = 2**20
DEFAULT_LIMITS = Limits()

Item = ClipRecord | StreamInfo | list[Packet] | Metadata


@dataclass(frozen=True)
class Damage:
    """Something a reader had to skip, and the clips and frames it cost; None is an unknown number, up to the end."""

    offset: int
    reason: str
    clips: range | None = range(0)
    frames: range | None = range(0)


class Chunk(NamedTuple):
    """A chunk whose CRC holds."""

    offset: int
    kind: bytes
    payload: bytes


class UnknownChunkError(FormatError):
    """A critical chunk that this version does not know: not damage, so never skipped."""


class HopelessError(FormatError):
    """A file with more damage than is worth skipping."""


def chunk_bytes(kind: bytes, payload: bytes) -> bytes:
    """A whole chunk."""
    body = kind + struct.pack("<I", len(payload)) + payload
    return body + struct.pack("<I", zlib.crc32(body))


class Writer:
    """Writes a `.coa` file front to back; the file object need not be seekable. Without `finish` a file is truncated.

    Whatever is written is read back first, so that nothing a reader would refuse gets into a file.
    """

    def __init__(self, file: BinaryIO, header: Header, limits: Limits = DEFAULT_LIMITS):
        self.header, self.limits = header, limits
        self._file, self._offset = file, 0
        self._clips = self._frames = 0
        self._pts = -(2**63)  # of the last frame
        self._streams: set[int] = set()
        self._index = records.IndexBytes()
        self._head = records.header_bytes(header)
        if records.read_header(self._head, limits) != header:
            raise ValueError(f"the header cannot be stored exactly: {header}")
        self._write(SIGNATURE)
        self._chunk(b"HEAD", self._head)

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        return self._offset

    def metadata(self, metadata: Metadata) -> None:
        """Write key/value pairs."""
        payload = records.metadata_bytes(metadata)
        records.read_metadata(payload, self.limits)
        self._chunk(b"meta", payload)

    def stream(self, stream: StreamInfo) -> None:
        """Describe a stream, before any of its packets."""
        payload = records.stream_bytes(stream)
        records.read_stream(payload, self.limits)
        if stream.index in self._streams:
            raise FormatError(f"stream {stream.index} is described twice")
        self._streams.add(stream.index)
        self._chunk(b"strm", payload)

    def packets(self, packets: Sequence[Packet]) -> None:
        """Write a batch of at least one packet."""
        payload = records.packets_bytes(packets)
        if records.read_packets(payload, self.limits) != list(packets):
            raise ValueError("packets cannot be stored exactly: unknown flags?")
        if not {packet.stream for packet in packets} <= self._streams:
            raise FormatError("packets are of a stream that was not described before")
        self._chunk(b"pckt", payload)

    def clip(
        self,
        pts: Sequence[int],
        last_duration: int,
        bank: bytes,
        velocities: tuple[tuple[int, int], ...] = (),
        shakes: tuple[tuple[int, bytes], ...] = (),
    ) -> None:
        """Write the next clip: strictly increasing timestamps of its 1 to F frames, its coded bank, how its cells move."""
        clip = ClipRecord(self._clips, self._frames, tuple(pts), last_duration, bank, velocities, shakes)
        payload = records.clip_bytes(clip, self.header.frame_duration)
        records.read_clip(payload, self.header, self.limits)
        if pts[0] <= self._pts:
            raise FormatError(f"clip {self._clips} begins at {pts[0]}, not after the frame before, at {self._pts}")
        self._pts = pts[-1]
        self._index.add(self._offset, len(pts), pts[0])
        self._chunk(b"CLIP", payload)
        self._clips += 1
        self._frames += len(pts)

    def finish(self) -> None:
        """Write the index, a copy of the header and TAIL. The file object is left open."""
        index_offset = self._offset
        self._chunk(b"indx", self._index.payload())
        self._chunk(b"head", self._head)
        self._chunk(b"TAIL", TAIL.pack(self._clips, self._frames, index_offset))

    def _chunk(self, kind: bytes, payload: bytes) -> None:
        if len(payload) > self.limits.chunk_bytes:
            raise FormatError(f"a {kind.decode()} chunk of {len(payload)} bytes is beyond {self.limits.chunk_bytes}")
        self._write(chunk_bytes(kind, payload))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._offset += len(data)


class Source:
    """A window that moves forward over a file; seeks before each read if the file can, so that sources can share it."""

    def __init__(self, file: BinaryIO, offset: int = 0):
        self.file, self.offset, self.window = file, offset, bytearray()
        self._seekable = file.seekable()

    def fill(self, count: int) -> bool:
        """Have at least `count` bytes in the window; False if the file ends before."""
        while len(self.window) < count:
            if self._seekable:
                self.file.seek(self.offset + len(self.window))
            # In pieces, so that memory follows what is there and not what a length field says.
            piece = self.file.read(min(count - len(self.window), READ_SIZE))
            if not piece:
                return False
            self.window += piece
        return True

    def drop(self, count: int) -> None:
        """Move the window's start forward."""
        del self.window[:count]
        self.offset += count

    def holds_chunk(self, at: int, length: int) -> bool:
        """Whether the chunk that starts `at` bytes into the window, all there, has the CRC it says."""
        end = at + length + FRAMING
        with memoryview(self.window) as window:
            return zlib.crc32(window[at : end - 4]) == struct.unpack_from("<I", window, end - 4)[0]

    def chunk(self, limits: Limits) -> Chunk:
        """Read the chunk at the window's start; on FormatError the window has not moved."""
        if not self.fill(8):
            where = f"inside a chunk that starts at byte {self.offset}" if self.window else f"at byte {self.offset}"
            raise FormatError(f"the file is truncated {where}")
        kind, (length,) = bytes(self.window[:4]), struct.unpack_from("<I", self.window, 4)
        if not kind.isalpha():
            raise FormatError(f"damage at byte {self.offset}: no chunk starts here")
        where = f"{kind.decode()} chunk at byte {self.offset}"
        if length > limits.chunk_bytes:
            raise FormatError(
                f"{where}: its length of {length} is beyond the limit of {limits.chunk_bytes} (limit chunk_bytes)"
            )
        if not self.fill(length + FRAMING):
            raise FormatError(f"{where}: the file is truncated inside it")
        if not self.holds_chunk(0, length):
            raise FormatError(f"{where}: damaged, its CRC-32 does not match")
        chunk = Chunk(self.offset, kind, bytes(self.window[8 : 8 + length]))
        self.drop(length + FRAMING)
        return chunk


class Reader:
    """Reads a `.coa` file: iterate for its records in order (also from a pipe), or take clips by number.

    With on_damage="stop" the first damage raises FormatError, after all that came before it. With "skip" the reader
    goes on at the next intact chunk and lists in `damage` what was lost. `complete` says whether TAIL was reached.
    """

    def __init__(self, file: BinaryIO, limits: Limits = DEFAULT_LIMITS, on_damage: Literal["stop", "skip"] = "stop"):
        self.limits, self.on_damage = limits, on_damage
        self.damage: list[Damage] = []
        self.streams: dict[int, StreamInfo] = {}
        self.complete = False
        self._file, self._source = file, Source(file)
        self._clips = self._frames = 0  # numbers the next clip should have
        self._pts = -(2**63)  # of the last frame
        self._pending: list[tuple[Damage, bytes]] = []  # damage whose cost shows at the next clip, and its chunk type
        self._seen = records.IndexBytes()
        self._index_offset: int | None = None
        self._index: dict[int, IndexEntry] | None = None
        self._scan_budget = 4 * limits.chunk_bytes
        self._metadata_bytes = 0
        self._head = self._open()
        self.header = records.read_header(self._head, limits)

    @property
    def seekable(self) -> bool:
        """Whether clips can be taken by number."""
        return self._file.seekable()

    def __iter__(self) -> Iterator[Item]:
        return (item for _, item in self.chunks() if item is not None)

    def chunks(self) -> Iterator[tuple[Chunk, Item | None]]:
        """The file's intact chunks in order after HEAD, each with its record if it holds one."""
        while not self.complete:
            offset = self._source.offset
            kind = b""
            try:
                chunk = self._source.chunk(self.limits)
                kind = chunk.kind
                item = self._accept(chunk)
            except (UnknownChunkError, HopelessError):
                raise
            except FormatError as error:
                kind = kind or bytes(self._source.window[:4])
                if self.on_damage == "stop":
                    raise FormatError(f"{error}{self._cost(offset, kind)}") from None
                self._pending.append((self._damage(offset, error), kind))
                if self._source.offset == offset and not self._resync():
                    break
                continue
            yield chunk, item
        if not self.complete:
            known = self._index_offset is not None  # then no clip can be missing at the end
            self._settle(self.offset, *((self._clips, self._frames) if known else (None, None)))

    @property
    def offset(self) -> int:
        """How far into the file iteration has come."""
        return self._source.offset

    def index(self) -> list[IndexEntry]:
        """All clips of a seekable file; in skip mode a lost index is made anew from the clips that are there."""
        if self._index is None:
            try:
                entries = self._stored_index()
            except FormatError:
                if self.on_damage == "stop":
                    raise
                entries = self._found_index()
            self._index = {entry.number: entry for entry in entries}
        return list(self._index.values())

    def clip(self, number: int) -> ClipRecord:
        """Clip `number` of a seekable file, without reading the others."""
        self.index()
        entry = self._index.get(number)
        if entry is None:
            raise FormatError(f"there is no clip {number} in this file")
        frames = f"clip {number}, frames {entry.first_frame}-{entry.first_frame + entry.frames - 1}"
        try:
            chunk = Source(self._file, entry.offset).chunk(self.limits)
            clip = records.read_clip(chunk.payload, self.header, self.limits) if chunk.kind == b"CLIP" else None
        except FormatError as error:
            raise FormatError(f"{error} ({frames})") from None
        if clip is None or entry != (clip.number, entry.offset, clip.first_frame, len(clip.pts), clip.pts[0]):
            raise FormatError(f"the index points at byte {entry.offset} for a clip that is not there ({frames})")
        return clip

    def _open(self) -> bytes:
        """Read the signature and HEAD; in skip mode take the copy at the file's end if they are damaged."""
        try:
            if not self._source.fill(len(SIGNATURE)) or self._source.window != SIGNATURE:
                raise FormatError(_signature_problem(bytes(self._source.window)))
            self._source.drop(len(SIGNATURE))
            chunk = self._source.chunk(self.limits)
            if chunk.kind != b"HEAD":
                raise FormatError("this .coa file does not begin with a HEAD chunk")
            return chunk.payload
        except FormatError as error:
            head = self._header_copy() if self.on_damage == "skip" and self._file.seekable() else None
            if head is None:
                raise
            self.damage.append(Damage(self._source.offset, f"{error}; the copy at the file's end was used"))
            self._resync()
            return head

    def _header_copy(self) -> bytes | None:
        start = max(0, self._file.seek(0, 2) - HEADER_COPY_SEARCH)
        end = Source(self._file, start)
        end.fill(HEADER_COPY_SEARCH)
        at = end.window.rfind(b"head")
        if at < 0:
            return None
        try:
            return Source(self._file, start + at).chunk(self.limits).payload
        except FormatError:
            return None

    def _accept(self, chunk: Chunk) -> Item | None:
        """Check a chunk against what came before it, and read its record."""
        kind, payload = chunk.kind, chunk.payload
        if self._index_offset is not None and kind in (b"CLIP", b"pckt", b"strm", b"meta", b"indx"):
            raise FormatError(f"{kind.decode()} chunk at byte {chunk.offset}: comes after the index")
        try:
            match kind:
                case b"CLIP":
                    return self._accept_clip(chunk)
                case b"strm":
                    stream = records.read_stream(payload, self.limits)
                    if stream.index in self.streams:
                        raise FormatError(f"strm: stream {stream.index} is described twice")
                    self.streams[stream.index] = stream
                    return stream
                case b"pckt":
                    return self._accept_packets(chunk)
                case b"meta":
                    self._metadata_bytes += len(payload)
                    if self._metadata_bytes > self.limits.metadata_bytes:
                        raise FormatError(
                            f"meta: metadata beyond {self.limits.metadata_bytes} bytes (limit metadata_bytes)"
                        )
                    return records.read_metadata(payload, self.limits)
                case b"indx":
                    self._accept_index(chunk)
                case b"head":
                    if payload != self._head:
                        raise FormatError("head: is not a copy of the header")
                case b"TAIL":
                    self._accept_tail(chunk)
                case b"HEAD":
                    raise FormatError("HEAD: the file has a second one")
                case _ if kind[:1].isupper():
                    raise UnknownChunkError(
                        f"{kind.decode()} chunk at byte {chunk.offset}: unknown and needed to decode this file "
                        f"(format {records.MAJOR}.{self.header.minor}); get a newer coanerv"
                    )
        except (UnknownChunkError, HopelessError):
            raise
        except FormatError as error:
            raise FormatError(f"chunk at byte {chunk.offset}: {error}") from None
        return None

    def _accept_clip(self, chunk: Chunk) -> ClipRecord:
        clip = records.read_clip(chunk.payload, self.header, self.limits)
        if not self._can_follow(clip.number, clip.first_frame):
            raise FormatError(
                f"CLIP: clip {clip.number} from frame {clip.first_frame} follows frame {self._frames - 1}"
            )
        if clip.pts[0] <= self._pts:
            raise FormatError(f"CLIP: clip {clip.number} begins at {clip.pts[0]}, not after {self._pts}")
        if self.on_damage == "skip":
            decode_bank(
                clip.bank, self.header.bank_shape
            )  # a bank that cannot be read costs its own clip, like any damage
        self._settle(chunk.offset, clip.number, clip.first_frame)
        self._clips, self._frames, self._pts = clip.number + 1, clip.first_frame + len(clip.pts), clip.pts[-1]
        self._seen.add(chunk.offset, len(clip.pts), clip.pts[0])
        return clip

    def _accept_packets(self, chunk: Chunk) -> list[Packet]:
        packets = records.read_packets(chunk.payload, self.limits)
        known = [packet for packet in packets if packet.stream in self.streams]
        if len(known) < len(packets):
            error = FormatError(f"pckt: {len(packets) - len(known)} packets are of streams not described before")
            if self.on_damage == "stop":
                raise error
            self.damage.append(self._damage(chunk.offset, error))
        return known

    def _accept_index(self, chunk: Chunk) -> None:
        entries = records.read_index(chunk.payload, self.limits)
        if self._whole() and chunk.payload != self._seen.payload():
            raise FormatError("indx: does not list the clips that are there")
        self._accept_totals(chunk, len(entries), sum(entry.frames for entry in entries))
        self._index_offset = chunk.offset

    def _accept_tail(self, chunk: Chunk) -> None:
        if len(chunk.payload) != TAIL.size:
            raise FormatError(f"TAIL: holds {len(chunk.payload)} bytes, not {TAIL.size}")
        clips, frames, index_offset = TAIL.unpack(chunk.payload)
        if self._whole() and index_offset != self._index_offset:
            raise FormatError(f"TAIL: says that the index is at byte {index_offset}, where it is not")
        self._accept_totals(chunk, clips, frames)
        if self._source.fill(1):
            error = FormatError("TAIL: the file goes on after it")
            if self.on_damage == "stop":
                raise error
            self.damage.append(Damage(self._source.offset, str(error)))
        self.complete = True

    def _accept_totals(self, chunk: Chunk, clips: int, frames: int) -> None:
        """Check the number of clips and frames that indx or TAIL gives, which shows what is missing at the end."""
        name = chunk.kind.decode()
        if clips > self.limits.clips or frames > self.limits.frames:
            raise FormatError(
                f"{name}: {clips} clips and {frames} frames are more than {self.limits.clips} (limit clips) "
                f"or {self.limits.frames} (limit frames)"
            )
        if not self._can_follow(clips, frames):
            raise FormatError(f"{name}: {clips} clips, {frames} frames; there are {self._clips} and {self._frames}")
        self._settle(chunk.offset, clips, frames)
        self._clips, self._frames = clips, frames

    def _can_follow(self, clip: int, frame: int) -> bool:
        """Whether clip number `clip` may begin at frame number `frame`; clips between may have been lost."""
        missing, gap = clip - self._clips, frame - self._frames
        return missing >= 0 and missing <= gap <= missing * self.header.frames_per_clip

    def _whole(self) -> bool:
        """Whether nothing has been skipped so far."""
        return not (self.damage or self._pending)

    def _settle(self, offset: int, clip: int | None, frame: int | None) -> None:
        """Note the damage before `offset`, now that the next clip and frame there (None: unknown) show what it cost."""
        if clip is not None and clip > self._clips and not self._pending:
            error = FormatError(f"clips {self._clips} to {clip - 1} are missing")
            if self.on_damage == "stop":
                raise error
            self._pending.append((self._damage(offset, error), b"CLIP"))
        kinds = [kind for _, kind in self._pending]
        blamed = kinds.index(b"CLIP") if b"CLIP" in kinds else 0
        for i, (damage, _) in enumerate(self._pending):
            if i == blamed:
                clips = None if clip is None else range(self._clips, clip)
                frames = None if frame is None else range(self._frames, frame)
                damage = replace(damage, clips=clips, frames=frames)
            self.damage.append(damage)
        self._pending.clear()

    def _damage(self, offset: int, error: FormatError) -> Damage:
        """Something to skip; a file that is nothing but damage is given up, or its list would fill the memory."""
        if len(self.damage) + len(self._pending) >= self.limits.damages:
            raise HopelessError(f"damaged in more than {self.limits.damages} places (limit damages): {error}")
        return Damage(offset, str(error))

    def _cost(self, offset: int, kind: bytes) -> str:
        """Which frames the damage at `offset` costs, as the end of a message."""
        if self._file.seekable():
            try:
                for entry in self._stored_index():
                    if entry.offset == offset:
                        return (
                            f" (clip {entry.number}, frames {entry.first_frame}-{entry.first_frame + entry.frames - 1})"
                        )
            except FormatError:
                pass  # no index to ask: say what is known without it
        return f" (clip {self._clips}, from frame {self._frames} on)" if kind == b"CLIP" else ""

    def _resync(self) -> bool:
        """Move to the next intact chunk of a known type; False if there is none."""
        source = self._source
        source.drop(1)
        at = 0
        while True:
            match = RESYNC.search(source.window, at)
            if match:
                at = match.start()
                if self._chunk_within(at):
                    source.drop(at)
                    return True
                if self._scan_budget < 0:
                    return False
                at += 1
                continue
            source.drop(max(0, len(source.window) - 3))  # a type may straddle two reads
            at = 0
            before = len(source.window)
            source.fill(READ_SIZE)
            if len(source.window) == before:
                return False

    def _chunk_within(self, at: int) -> bool:
        """Whether an intact chunk starts `at` bytes into the window. Failures count against a budget.

        Without it, a file made of chunk beginnings with large lengths would take time quadratic in its size.
        """
        source = self._source
        if not source.fill(at + FRAMING):
            return False
        (length,) = struct.unpack_from("<I", source.window, at + 4)
        if length > self.limits.chunk_bytes or not source.fill(at + length + FRAMING):
            return False
        if source.holds_chunk(at, length):
            return True
        self._scan_budget -= length + FRAMING
        return False

    def _stored_index(self) -> list[IndexEntry]:
        """The index that TAIL, at the file's end, points at."""
        tail_offset = self._file.seek(0, 2) - TAIL.size - FRAMING
        try:
            tail = Source(self._file, max(0, tail_offset)).chunk(self.limits)
        except FormatError:
            tail = None
        if tail is None or tail.kind != b"TAIL" or len(tail.payload) != TAIL.size:
            raise FormatError("the file does not end in a TAIL chunk: it is truncated, or damaged there")
        clips, frames, index_offset = TAIL.unpack(tail.payload)
        if index_offset >= tail_offset:
            raise FormatError(f"TAIL: says that the index is at byte {index_offset}, beyond itself")
        chunk = Source(self._file, index_offset).chunk(self.limits)
        if chunk.kind != b"indx":
            raise FormatError(f"TAIL: says that the index is at byte {index_offset}, where it is not")
        entries = records.read_index(chunk.payload, self.limits)
        if (len(entries), sum(entry.frames for entry in entries)) != (clips, frames):
            raise FormatError("indx: does not list as many clips and frames as TAIL says")
        if entries and entries[-1].offset >= index_offset:
            raise FormatError(f"indx: lists a clip at byte {entries[-1].offset}, beyond itself")
        return entries

    def _found_index(self) -> list[IndexEntry]:
        """An index of the clips that a walk through the whole file finds."""
        return [
            IndexEntry(item.number, chunk.offset, item.first_frame, len(item.pts), item.pts[0])
            for chunk, item in Reader(self._file, self.limits, "skip").chunks()
            if isinstance(item, ClipRecord)
        ]


def _signature_problem(start: bytes) -> str:
    """Why a file that starts like this is not a `.coa` file."""
    if start[1:4] == b"COA" or start.startswith(b"\xc2\x8bCOA"):
        return (
            "the signature of this .coa file is damaged, as by a text-mode or 7-bit transfer: copy it again as binary"
        )
    return "this is not a .coa file" if start else "the file is empty"
