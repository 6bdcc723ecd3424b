"""Reading a video: its frames as model YUV with exact timestamps, its audio and subtitle packets untouched.

`open_video` gives a `VideoReader`: `.info` describes the source, iterating gives `Frame`s in display order and, between
them, `Packet`s as they are demuxed. Memory is bounded: one packet and two frames at a time. What could not be kept as
it was is said in `.warnings`, which is complete when the iteration ends.
"""

import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Self

import av
import numpy as np

from coanerv_codec.color import FULL, ColorTags, color_warnings, to_model
from coanerv_codec.errors import InputError
from coanerv_codec.records import CORRUPT, DISCARD, DISPOSABLE, KEY, Packet, StreamInfo

# Written by a muxer about itself, not by the author about the content.
CONTAINER_KEYS = {"major_brand", "minor_version", "compatible_brands", "encoder", "duration"}

# FFmpeg would decode a text file as a terminal recording.
NOT_VIDEO = {"tty"}

# FFmpeg's field orders that show the bottom field first.
BOTTOM_FIRST = {3, 4}

# What HDR10 says about the display and the light levels of its mastering, as FFmpeg names it.
MASTERING = {"MASTERING_DISPLAY_METADATA", "CONTENT_LIGHT_LEVEL", "DYNAMIC_HDR_PLUS", "DOVI_METADATA"}

# How many packets `open_video` may look at to find the first of every audio stream.
PROBE_PACKETS = 256

# Pixel formats whose planes are taken as they are; all others are first repacked (not converted) into one of these.
PLANAR = re.compile(r"(?:yuv[aj]?(?P<yuv>420|422|444)p|(?P<gray>gray)|(?P<rgb>gbra?p))(?P<depth>9|1\d)?(?:le)?")


@dataclass(frozen=True)
class VideoInfo:
    """What a source says about itself. Times are in ticks of `time_base`; None, 0 or the empty string is unknown.

    The picture is as stored: for display it is first mirrored left to right if `flip`, then turned clockwise by
    `rotation` degrees. `chroma` is "420", "422", "444", "gray" or "rgb", `scan` also "tff" or "bff" (interlaced).
    `track` is the metadata of the video stream itself.
    """

    width: int
    height: int
    time_base: Fraction
    frame_duration: int = 0
    rate: Fraction | None = None
    sample_aspect_ratio: Fraction | None = None
    rotation: int = 0
    flip: bool = False
    chroma: str = "420"
    bit_depth: int = 8
    alpha: bool = False
    scan: str = "progressive"
    color: ColorTags = field(default_factory=ColorTags)
    frames: int | None = None
    duration: Fraction | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    track: dict[str, str] = field(default_factory=dict)
    streams: tuple[StreamInfo, ...] = ()


@dataclass(frozen=True, eq=False)
class Frame:
    """One picture in model YUV, uint8 [3, H, W], shown from `pts` for `duration` ticks."""

    pts: int
    duration: int
    yuv: np.ndarray


def open_video(path: str | Path, audio: bool = True) -> "VideoReader":
    """Open a video file, or standard input for "-"; without `audio` no other streams are read."""
    return VideoReader(path, audio)


class VideoReader:
    """An open source: `.info`, `.warnings`, and once through it `Frame`s and `Packet`s."""

    def __init__(self, path: str | Path, audio: bool) -> None:
        self.warnings: list[str] = []
        self._name = "standard input" if str(path) == "-" else str(path)
        self._file = Path(path) if str(path) != "-" and Path(path).is_file() else None
        self._size = self._file.stat().st_size if self._file else 0
        self._container = _open_container(path, self._name)
        try:
            self._start(audio)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the source."""
        self._container.close()

    def __iter__(self) -> Iterator[Frame | Packet]:
        """Frames in display order, each with the time to the next one as duration, and packets as they come."""
        previous = None
        for item in self._items:
            if isinstance(item, Packet):
                yield item
                continue
            self._check_frame(item)
            pts = self._timestamp(item, previous)
            if previous:
                yield replace(previous, duration=pts - previous.pts)
            previous = Frame(pts, item.duration or self.info.frame_duration, self._convert(item))
            self._count += 1
        previous = replace(previous, duration=self._last_duration(previous))
        yield previous
        self._check_complete((previous.pts + previous.duration) * self.info.time_base)

    def _start(self, audio: bool) -> None:
        """Choose the streams, read up to the first frame, and describe the source."""
        self._video = self._choose_video()
        self._video.thread_type = "AUTO"
        copied = self._choose_copied() if audio else []
        self._copied = {stream.index: number for number, stream in enumerate(copied)}
        self._adts_filters: dict[int, av.bitstream.BitStreamFilterContext | None] = {}
        self._adts_config: dict[int, bytes] = {}
        self._packets = self._count = self._damaged = 0
        self._end_of_all = Fraction(0)

        packets = self._demux()
        probed, starts = [], {}
        waiting = {stream.index for stream in copied if stream.type == "audio"}
        while waiting and len(probed) < PROBE_PACKETS and (packet := next(packets, None)):
            probed.append(packet)
            starts.setdefault(packet.stream.index, packet.pts or 0)
            waiting.discard(packet.stream.index)
        items = self._decode(chain(probed, packets))

        head = []
        while not head or isinstance(head[-1], Packet):
            item = next(items, None)
            if item is None:
                raise InputError(f"{self._name}: no frame can be decoded; the file is empty or damaged")
            head.append(item)
        self._items = chain(head, items)
        streams = tuple(self._describe_stream(stream, starts.get(stream.index, 0)) for stream in copied)
        self.info = self._describe(head[-1], streams)

    def _choose_video(self) -> av.VideoStream:
        moving = [s for s in self._container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
        if not moving:
            raise InputError(f"{self._name}: there is no video stream in it; give a file that holds video")
        chosen = next((s for s in moving if s.disposition & av.stream.Disposition.default), moving[0])
        if chosen.codec_context is None:
            raise InputError(f"{self._name}: its video codec is not known to this build of FFmpeg; convert it first")
        if len(moving) > 1:
            self.warnings.append(f"only one of {len(moving)} video streams is read")
        return chosen

    def _choose_copied(self) -> list[av.stream.Stream]:
        copied = []
        for stream in self._container.streams:
            if stream.type in ("audio", "subtitle") and stream.codec_context is not None:
                copied.append(stream)
            elif stream.type != "video":
                self.warnings.append(f"{stream.type} stream {stream.index} is not kept")
        if self._container.chapters():
            self.warnings.append("chapters are not kept")
        return copied

    def _demux(self) -> Iterator[av.Packet]:
        """All packets of the container; an error ends them like the end of the file, with a warning."""
        try:
            for packet in self._container.demux():
                yield from self._without_adts(packet)
        except (av.FFmpegError, OSError) as error:
            self.warnings.append(f"reading stopped early: {_reason(error)}; what was read until there is used")
            # The frames still inside the decoder.
            flush = av.Packet()
            flush.stream = self._video
            yield flush

    def _without_adts(self, packet: av.Packet) -> list[av.Packet]:
        """AAC of broadcast streams repeats its parameters in every packet; files want them once, as extradata."""
        stream = packet.stream
        if stream.type != "audio" or stream.index not in self._copied or not packet.size:
            return [packet]
        if stream.index not in self._adts_filters:
            framed = stream.codec_context.codec.canonical_name == "aac" and not stream.codec_context.extradata
            adts = av.bitstream.BitStreamFilterContext("aac_adtstoasc", stream) if framed else None
            self._adts_filters[stream.index] = adts
        if not self._adts_filters[stream.index]:
            return [packet]
        try:
            packets = self._adts_filters[stream.index].filter(packet)
        except av.FFmpegError:
            self._damaged += 1
            return []
        for packet in packets:
            packet.stream, packet.time_base = stream, stream.time_base
            if packet.has_sidedata("new_extradata"):
                self._adts_config[stream.index] = bytes(packet.get_sidedata("new_extradata"))
        return packets

    def _decode(self, packets: Iterator[av.Packet]) -> Iterator[av.VideoFrame | Packet]:
        for packet in packets:
            if packet.pts is not None:
                self._end_of_all = max(self._end_of_all, (packet.pts + (packet.duration or 0)) * packet.time_base)
            index = packet.stream.index
            if index == self._video.index:
                self._packets += packet.size > 0
                self._damaged += packet.is_corrupt
                try:
                    frames = packet.decode()
                except av.FFmpegError:
                    self._damaged += 1
                else:
                    yield from frames
            elif index in self._copied and packet.size:
                yield _copy_packet(packet, self._copied[index])

    def _describe(self, frame: av.VideoFrame, streams: tuple[StreamInfo, ...]) -> VideoInfo:
        """The source's description, from its streams and its first frame."""
        video, container = self._video, self._container
        _, chroma, depth = _planes(frame)
        color = _color_tags(frame, _chroma_location(video))
        self.warnings += color_warnings(color, chroma, depth)
        if MASTERING & {side_data.type.name for side_data in frame.side_data}:
            self.warnings.append("HDR mastering data (display, light levels) is not kept")
        alpha = any(component.is_alpha for component in frame.format.components)
        if alpha:
            self.warnings.append("transparency is dropped")
        scan = "progressive"
        if frame.interlaced_frame:
            scan = "bff" if video.codec_context.field_order in BOTTOM_FIRST else "tff"
            self.warnings.append("interlaced video is treated as progressive; deinterlace it first for better quality")
        rotation, flip = self._orientation(frame)
        rate = video.average_rate or video.guessed_rate
        frame_duration = round(1 / (rate * video.time_base)) if rate else 0
        if video.duration:
            duration = video.duration * video.time_base
        else:
            duration = Fraction(container.duration, av.time_base) if container.duration else None
        return VideoInfo(
            width=frame.width,
            height=frame.height,
            time_base=video.time_base,
            frame_duration=frame_duration or frame.duration or 0,
            rate=rate or None,
            sample_aspect_ratio=video.sample_aspect_ratio or None,
            rotation=rotation,
            flip=flip,
            chroma=chroma,
            bit_depth=depth,
            alpha=alpha,
            scan=scan,
            color=color,
            frames=video.frames or None,
            duration=duration,
            metadata={k: v for k, v in container.metadata.items() if k.lower() not in CONTAINER_KEYS},
            track=_track(video),
            streams=streams,
        )

    def _describe_stream(self, stream: av.stream.Stream, start: int) -> StreamInfo:
        codec = stream.codec_context
        audio = stream.type == "audio"
        language = stream.language or ""
        title = _title(stream)
        return StreamInfo(
            index=self._copied[stream.index],
            kind=stream.type,
            codec=codec.codec.canonical_name,
            time_base=stream.time_base,
            disposition=int(stream.disposition),
            language="" if language == "und" else language,
            bit_rate=codec.bit_rate or 0,
            sample_rate=codec.sample_rate if audio else 0,
            channels=codec.channels if audio else 0,
            layout=codec.layout.name if audio else "",
            delay=max(0, -start) if audio else 0,
            extradata=self._adts_config.get(stream.index, codec.extradata or b""),
            metadata=(("title", title),) if title else (),
        )

    def _orientation(self, frame: av.VideoFrame) -> tuple[int, bool]:
        """Rotation (clockwise) and flip from the display matrix."""
        for side_data in frame.side_data:
            if side_data.type.name == "DISPLAYMATRIX":
                matrix = np.frombuffer(side_data, np.int32)[[0, 1, 3, 4]] / 65536
                for orientation in ORIENTATIONS:
                    if np.allclose(matrix, _turn(*orientation), atol=1e-3):
                        return orientation
                self.warnings.append("its display matrix is not a right-angled rotation and is dropped")
        return 0, False

    def _check_frame(self, frame: av.VideoFrame) -> None:
        if (frame.width, frame.height) != (self.info.width, self.info.height):
            raise InputError(
                f"{self._name}: the picture size changes from {self.info.width}x{self.info.height} to "
                f"{frame.width}x{frame.height} after {self._count} frames; cut or scale it to one size first"
            )

    def _timestamp(self, frame: av.VideoFrame, previous: Frame | None) -> int:
        """The frame's pts; a missing or repeated one is set right, since frames must follow one another."""
        if previous is None:
            return frame.pts or 0
        if frame.pts is None:
            self._warn_once("some frames have no timestamp; theirs are interpolated")
            return previous.pts + (previous.duration or 1)
        if frame.pts <= previous.pts:
            self._warn_once("some timestamps do not increase; they are moved to follow the frame before")
            return previous.pts + 1
        return frame.pts

    def _last_duration(self, last: Frame) -> int:
        """Up to the end of the stream where the container knows it; packet durations are in decoding order."""
        if self.info.frames == self._count and self._video.duration:
            until_end = (self._video.start_time or 0) + self._video.duration - last.pts
            if until_end > 0:
                return until_end
        return last.duration

    def _convert(self, frame: av.VideoFrame) -> np.ndarray:
        planes, chroma, depth = _planes(frame)
        return to_model(planes, chroma, _color_tags(frame, self.info.color.chroma_location), depth)

    def _check_complete(self, end: Fraction) -> None:
        """Say so if the source, whose last frame ends at `end` seconds, holds less than it announces."""
        if self._damaged:
            self.warnings.append(f"{self._damaged} damaged packets; pictures or sounds may be missing or wrong")
        if self._file and self._file.exists() and self._file.stat().st_size < self._size:
            self.warnings.append("the file became shorter while it was read; its end may be missing")
        if self._video.frames:
            announced = len(self._video.index_entries)  # unlike the number of frames, without what an edit list skips
            if self._packets < announced:
                self.warnings.append(f"the file is cut short: {self._packets} of {announced} frames are there")
        elif "matroska" in self._container.format.name and self._container.duration:
            begin = Fraction(self._container.start_time or 0, av.time_base)
            missing = begin + Fraction(self._container.duration, av.time_base) - max(self._end_of_all, end)
            if missing > 3 * self.info.frame_duration * self.info.time_base:
                self.warnings.append(f"the file is cut short: its last {float(missing):.2f} seconds are missing")

    def _warn_once(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)


def display_matrix(rotation: int, flip: bool) -> list[int]:
    """FFmpeg's 3x3 display matrix, row by row in fixed point, for an orientation as in `VideoInfo`."""
    a, b, c, d = (65536 * entry for entry in _turn(rotation, flip))
    return [a, b, 0, c, d, 0, 0, 0, 1 << 30]


ORIENTATIONS = [(rotation, flip) for flip in (False, True) for rotation in (0, 90, 180, 270)]


def _turn(rotation: int, flip: bool) -> tuple[int, int, int, int]:
    """(a, b, c, d): the picture's point (x, y), y downwards, is shown at (ax + cy, bx + dy)."""
    cos, sin = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[rotation]
    mirror = -1 if flip else 1
    return mirror * cos, mirror * sin, -sin, cos


def _open_container(path: str | Path, name: str) -> av.container.InputContainer:
    if str(path) == "-" and sys.stdin is None:
        raise InputError("standard input is closed; name a file")
    file = sys.stdin.buffer if str(path) == "-" else f"file:{path}"
    try:
        # Playlists may point anywhere; only local files are followed. Metadata in odd encodings is no reason to fail.
        container = av.open(file, options={"protocol_whitelist": "file,pipe"}, metadata_errors="replace")
    except (av.FFmpegError, OSError) as error:
        raise InputError(f"{name}: cannot be read as a video: {_reason(error)}") from error
    if container.format.name in NOT_VIDEO:
        container.close()
        raise InputError(f"{name}: is a text file, not a video")
    return container


def _title(stream: av.stream.Stream) -> str:
    """A track's title. FFmpeg reads it as "name" from the MP4 files into which it writes it as "title"."""
    return stream.metadata.get("title") or stream.metadata.get("name") or ""


def _track(stream: av.stream.Stream) -> dict[str, str]:
    """What the author says about the video track; most of the rest a muxer wrote about itself."""
    language = stream.metadata.get("language", "und")
    return {k: v for k, v in (("title", _title(stream)), ("language", language)) if v not in ("", "und")}


def _copy_packet(packet: av.Packet, stream: int) -> Packet:
    flags = (
        KEY * packet.is_keyframe
        | CORRUPT * packet.is_corrupt
        | DISCARD * packet.is_discard
        | DISPOSABLE * packet.is_disposable
    )
    duration = packet.duration or 0
    return Packet(stream=stream, pts=packet.pts, dts=packet.dts, duration=duration, flags=flags, data=bytes(packet))


def _planes(frame: av.VideoFrame) -> tuple[list[np.ndarray], str, int]:
    """The frame's component planes as views, its chroma format, and bits per sample (see `color.to_model`)."""
    match = PLANAR.fullmatch(frame.format.name)
    if not match:
        frame = frame.reformat(format=_nearest_planar(frame.format))
        match = PLANAR.fullmatch(frame.format.name)
    depth = int(match["depth"] or 8)
    dtype = np.dtype(np.uint8 if depth == 8 else "<u2")
    planes = []
    for plane in frame.planes[: 1 if match["gray"] else 3]:
        rows = np.frombuffer(plane, dtype).reshape(plane.height, -1)
        planes.append(rows[:: -1 if plane.line_size < 0 else 1, : plane.width])
    if match["rgb"]:
        green, blue, red = planes
        return [red, green, blue], "rgb", depth
    return planes, match["yuv"] or "gray", depth


def _nearest_planar(pixel_format: av.VideoFormat) -> str:
    """The format of `PLANAR` that holds the same samples (rare chroma grids such as 4:1:1 are taken to 4:4:4)."""
    bits = max(component.bits for component in pixel_format.components)
    if pixel_format.is_rgb or pixel_format.has_palette or pixel_format.is_bayer:
        return "gbrp" if bits <= 8 else "gbrp16le"
    depth = "" if bits <= 8 else f"{bits}le" if bits in (10, 12, 16) else "16le"
    if len(pixel_format.components) < 3:
        return f"gray{depth}"
    grid = {(2, 2): "420", (2, 1): "422"}.get((4 // pixel_format.chroma_width(4), 4 // pixel_format.chroma_height(4)))
    return f"yuv{grid or '444'}p{depth}"


def _color_tags(frame: av.VideoFrame, location: int) -> ColorTags:
    full = frame.format.name.startswith("yuvj")
    return ColorTags(
        range=FULL if full else int(frame.color_range),
        matrix=int(frame.colorspace),
        primaries=int(frame.color_primaries),
        transfer=int(frame.color_trc),
        chroma_location=location,
    )


def _chroma_location(stream: av.VideoStream) -> int:
    """Where the chroma samples lie. PyAV does not say, but Matroska stores it: its muxer is asked for a header."""
    header = io.BytesIO()
    with av.open(header, "w", format="matroska", options={"allow_raw_vfw": "1"}) as probe:
        try:
            probe.add_stream_from_template(stream, opaque=True)
            probe.start_encoding()
        except (av.FFmpegError, ValueError):
            return 0  # a codec Matroska cannot hold; none of those has a chroma location
    # ChromaSitingHorz and ChromaSitingVert: 1 is on the luma sample (left, top), 2 is half-way.
    siting = re.search(rb"\x55\xb7\x81(.)\x55\xb8\x81(.)", header.getvalue(), re.DOTALL)
    if not siting:
        return 0
    return {(1, 2): 1, (2, 2): 2, (1, 1): 3, (2, 1): 4}.get((siting[1][0], siting[2][0]), 0)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
