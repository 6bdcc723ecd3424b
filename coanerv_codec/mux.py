"""Output through an encoder and a container: MP4, MOV, Matroska, WebM.

Keeps the source's timestamps, size, aspect ratio, orientation, colour tags and metadata, and copies its audio and
subtitle packets.
"""

import math
import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from coanerv_codec.color import ColorTags, from_model
from coanerv_codec.errors import OutputError
from coanerv_codec.raw_video import yuv_kind
from coanerv_codec.records import KEY, Packet, StreamInfo
from coanerv_codec.stream_copy import add_copied_stream
from coanerv_codec.video import Frame, VideoInfo, display_matrix

# File name extension to FFmpeg's muxer and the encoder used unless one is named.
CONTAINERS = {
    ".mp4": ("mp4", "libx264"),
    ".m4v": ("mp4", "libx264"),
    ".mov": ("mov", "libx264"),
    ".mkv": ("matroska", "libx264"),
    ".webm": ("webm", "libvpx-vp9"),
}

# Constant quality close to transparent, at a speed that keeps up with decoding, and no chatter on standard error.
ENCODER_OPTIONS = {
    # As good as preset medium at crf 17, in a fifth of its time: decoding needs the cores itself. Twice the bytes.
    "libx264": {"crf": "14", "preset": "superfast"},
    "libx265": {"crf": "18", "x265-params": "log-level=error"},
    "libvpx-vp9": {"crf": "20", "row-mt": "1", "cpu-used": "4"},
    "libsvtav1": {"crf": "20", "preset": "8"},
}

# Metadata that MP4 has its own place for; any other key needs QuickTime's free-form tags.
MP4_KEYS = {
    "album", "album_artist", "artist", "comment", "composer", "copyright", "creation_time", "date", "description",
    "episode_id", "genre", "grouping", "lyrics", "network", "show", "synopsis", "title", "track",
}  # fmt: skip

CHOICES = "libx264, libx265, libvpx-vp9 or libsvtav1"

PIXEL_FORMATS = {"420": "yuv420p", "422": "yuv422p", "444": "yuv444p"}


class ContainerSink:
    """Frames through an encoder, packets as they are, into a container file."""

    def __init__(self, temporary: Path, path: Path, info: VideoInfo, encoder: str | None, crf: int | None) -> None:
        muxer, default_encoder = CONTAINERS[path.suffix.lower()]
        encoder = encoder or default_encoder
        self.files = {temporary: path}
        self.warnings: list[str] = []
        self._info = info
        self._pixel_format, self._chroma, self._color = self._choose_format(encoder)
        # The encoder need not pass durations on.
        self._durations: dict[int, int] = {}
        self._start: int | None = None
        self._end = 0
        self._first_dts = 0
        self._held: av.Packet | None = None

        self._matroska = muxer in ("matroska", "webm")
        if self._matroska and (info.time_base * 1000).denominator > 1:
            self.warnings.append("Matroska and WebM keep time in milliseconds: timestamps are rounded")
        self._container = av.open(f"file:{temporary}", "w", format=muxer, container_options=_muxer_options(muxer, info))
        try:
            self._video = self._add_video(encoder, crf)
            self._copied = {stream.index: (stream, self._add_copied(stream, path.suffix)) for stream in info.streams}
            self._container.metadata.update(info.metadata)
            self._video.metadata.update(info.track)
            self._container.start_encoding()
        except BaseException:
            self._container.close()
            raise

    def write(self, item: Frame | Packet) -> None:
        """Encode a frame or copy a packet."""
        if isinstance(item, Packet):
            self._copy(item)
            return
        self._start = item.pts if self._start is None else self._start
        self._end = item.pts + item.duration
        self._durations[item.pts] = item.duration
        frame = av.VideoFrame(self._info.width, self._info.height, self._pixel_format)
        frame.pts, frame.time_base = item.pts, self._info.time_base
        frame.duration = item.duration
        for plane, samples in zip(frame.planes, self._planes(item.yuv), strict=True):
            np.frombuffer(plane, np.uint8).reshape(plane.height, -1)[:, : samples.shape[1]] = samples
        self._mux(self._video.encode(frame))

    def finish(self) -> None:
        """Flush the encoder and write the index."""
        self._mux(self._video.encode(None))
        if self._held:
            if not self._matroska:
                # MP4 takes the sum of the decoding intervals for the length; the last one makes up for reordering.
                self._held.duration = max(1, self._end - self._start - (self._held.dts - self._first_dts))
            self._container.mux(self._held)
        self._container.close()

    def discard(self) -> None:
        """Close the file as it is."""
        self._container.close()

    def _choose_format(self, encoder: str) -> tuple[str, str, ColorTags]:
        """Pixel format, chroma format and colour tags: the source's own as far as the encoder can."""
        info = self._info
        try:
            codec = av.Codec(encoder, "w")
        except ValueError as error:
            raise OutputError(f"there is no encoder {encoder!r}; choose {CHOICES}") from error
        if codec.type != "video":
            raise OutputError(f"{encoder} does not encode video; choose {CHOICES}")
        if encoder == "ffv1" and info.chroma in ("gray", "rgb"):
            return {"gray": "gray", "rgb": "bgr0"}[info.chroma], info.chroma, info.color
        chroma, color = yuv_kind(info)
        supported = {pixel_format.name for pixel_format in codec.video_formats or ()}
        if chroma == "gray":
            chroma = "420"
        elif info.chroma == "rgb" or PIXEL_FORMATS[chroma] not in supported:
            chroma = "420"
            self.warnings.append("colour is written at half resolution (4:2:0), which every player can show")
        odd = info.width % 2 or (info.height % 2 and chroma == "420")
        if odd and chroma != "444" and codec.canonical_name in ("h264", "hevc"):
            chroma = "444"
            self.warnings.append(f"{info.width}x{info.height} is odd: written as 4:4:4, which some players cannot show")
        if PIXEL_FORMATS[chroma] not in supported:
            raise OutputError(f"{encoder} cannot write {PIXEL_FORMATS[chroma]}; choose libx264 or libvpx-vp9")
        return PIXEL_FORMATS[chroma], chroma, color

    def _add_video(self, encoder: str, crf: int | None) -> av.VideoStream:
        info = self._info
        options = dict(ENCODER_OPTIONS.get(encoder, {}))
        if crf is not None:
            options["crf"] = str(crf)
        if self._chroma == "420":
            options["chroma_sample_location"] = str(self._color.chroma_location)
        if encoder == "libsvtav1":
            os.environ.setdefault("SVT_LOG", "1")
        try:
            stream = self._container.add_stream(
                encoder,
                rate=info.rate or Fraction(25),
                options=options,
                width=info.width,
                height=info.height,
                pix_fmt=self._pixel_format,
                time_base=info.time_base,
            )
        except ValueError as error:
            raise OutputError(f"{self._container.format.name} cannot hold {encoder} video; choose another") from error
        codec = stream.codec_context
        # PyAV cannot give the aspect ratio to the Matroska muxer, only to encoders, and other codecs have no place for it.
        aspectless = self._matroska and codec.codec.canonical_name not in ("h264", "hevc")
        if aspectless and (info.sample_aspect_ratio or 1) != 1:
            self.warnings.append("its sample aspect ratio is lost with this encoder; write .mp4, or .mkv with libx264")
        codec.sample_aspect_ratio = info.sample_aspect_ratio or 0
        codec.color_range, codec.colorspace = self._color.range, self._color.matrix
        codec.color_primaries, codec.color_trc = self._color.primaries, self._color.transfer
        if info.rotation or info.flip:
            stream.set_display_matrix(display_matrix(info.rotation, info.flip))
        try:
            codec.open()
        except av.FFmpegError as error:
            raise OutputError(f"{encoder} refuses {info.width}x{info.height} video with {options}") from error
        return stream

    def _add_copied(self, stream: StreamInfo, extension: str) -> av.stream.Stream | None:
        copied = add_copied_stream(self._container, stream)
        if copied is None:
            self.warnings.append(f"{extension} cannot hold its {stream.codec} {stream.kind} stream, which is dropped")
        return copied

    def _planes(self, yuv: np.ndarray) -> list[np.ndarray]:
        """The rows of every plane of the encoder's pixel format, uint8 [rows, bytes]."""
        if self._info.chroma == "gray":
            grey = from_model(yuv, "gray", self._color)
            if self._pixel_format == "gray":
                return grey
            _, cb, cr = from_model(yuv, self._chroma, self._color)
            return [*grey, np.full_like(cb, 128), np.full_like(cr, 128)]
        planes = from_model(yuv, self._chroma, self._color)
        if self._pixel_format == "bgr0":
            red, green, blue = planes
            return [np.stack([blue, green, red, np.zeros_like(red)], axis=-1).reshape(len(red), -1)]
        return planes

    def _mux(self, packets: list[av.Packet]) -> None:
        """Write encoded packets but for the last, which waits for the next or for `finish`."""
        for packet in packets:
            packet.duration = self._durations.pop(packet.pts, packet.duration)
            if self._held:
                self._container.mux(self._held)
            else:
                self._first_dts = packet.dts
            self._held = packet

    def _copy(self, item: Packet) -> None:
        info, stream = self._copied[item.stream]
        # Where no text is shown MP4 has empty packets, which its muxer writes by itself.
        if stream is None or (info.codec == "mov_text" and item.data == b"\0\0"):
            return
        packet = av.Packet(item.data)
        packet.stream = stream
        packet.time_base = info.time_base
        packet.pts, packet.dts, packet.duration = item.pts, item.dts, item.duration
        packet.is_keyframe = bool(item.flags & KEY)
        self._container.mux(packet)


def _muxer_options(muxer: str, info: VideoInfo) -> dict[str, str]:
    """For MP4 and MOV: clocks on which every timestamp is exact, and room for any metadata."""
    if muxer in ("matroska", "webm"):
        return {}
    options = {"video_track_timescale": str(info.time_base.denominator)}
    # The offset of a track's start is kept on the clock of the whole file.
    common = math.lcm(*(stream.time_base.denominator for stream in (info, *info.streams)))
    options["movie_timescale"] = str(common if common < 2**31 else info.time_base.denominator)
    if not MP4_KEYS.issuperset(info.metadata):
        options["movflags"] = "use_metadata_tags"
    return options
