"""Output without a codec: Y4M (raw video for pipes and other tools) and numbered PNG pictures."""

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np

from coanerv_codec.atomic import temporary_beside
from coanerv_codec.color import FULL, ColorTags, effective_matrix, from_model, yuv_to_rgb
from coanerv_codec.records import Packet
from coanerv_codec.video import Frame, VideoInfo

# Y4M names 4:2:0 by its chroma location: left, center, top left.
Y4M_420 = {1: "420mpeg2", 2: "420jpeg", 3: "420paldv"}


class Y4mSink:
    """Frames as Y4M to an open binary file."""

    def __init__(self, file: BinaryIO, info: VideoInfo, files: dict[Path, Path]) -> None:
        self.files = files
        self.warnings: list[str] = []
        self._file = file
        self._info = info
        self._chroma, self._color = yuv_kind(info)
        if self._chroma == "420" and self._color.chroma_location not in Y4M_420:
            self._color = replace(self._color, chroma_location=1)
        self._rate = info.rate or (1 / (info.frame_duration * info.time_base) if info.frame_duration else Fraction(25))
        self._steady = True
        file.write(self._header())

    def write(self, item: Frame | Packet) -> None:
        """Write a frame; packets have no place here."""
        if isinstance(item, Packet):
            return
        # A tenth is more than what rounding to milliseconds does to 60 frames a second.
        self._steady &= abs(item.duration * self._info.time_base * self._rate - 1) < Fraction(1, 10)
        self._file.write(b"FRAME\n")
        for plane in from_model(item.yuv, self._chroma, self._color):
            self._file.write(np.ascontiguousarray(plane))

    def finish(self) -> None:
        """Flush, and say what was lost."""
        self._file.flush()
        info, color = self._info, self._info.color
        lost = {
            "the variable frame timing": not self._steady,
            "rotation": info.rotation or info.flip,
            "colour tags": (color.matrix, color.primaries, color.transfer) != (2, 2, 2),
            "audio and subtitles": info.streams,
            "metadata": info.metadata or info.track,
        }
        if any(lost.values()):
            self.warnings.append(f"Y4M cannot carry {', '.join(what for what, is_lost in lost.items() if is_lost)}")
        self.discard()

    def discard(self) -> None:
        """Close the file, unless it is standard output."""
        if self.files:
            self._file.close()

    def _header(self) -> bytes:
        aspect = self._info.sample_aspect_ratio or Fraction(0)
        chroma = {"420": Y4M_420.get(self._color.chroma_location), "gray": "mono"}.get(self._chroma, self._chroma)
        return (
            f"YUV4MPEG2 W{self._info.width} H{self._info.height} F{self._rate.numerator}:{self._rate.denominator} Ip "
            f"A{aspect.numerator}:{aspect.denominator if aspect else 0} "
            f"C{chroma} XCOLORRANGE={'FULL' if self._color.range == FULL else 'LIMITED'}\n"
        ).encode()


class PngSink:
    """Frames as RGB pictures: `name.png` gives name_00001.png and on, `name%03d.png` counts in its own way."""

    def __init__(self, path: Path, overwrite: bool, info: VideoInfo) -> None:
        self.files: dict[Path, Path] = {}
        self.warnings: list[str] = []
        self._path = path
        self._overwrite = overwrite
        self._info = info
        temporary_beside(self._numbered(1), overwrite)  # refuse at once what would be refused at the first frame

    def write(self, item: Frame | Packet) -> None:
        """Write a frame to a file of its own; packets have no place here."""
        if isinstance(item, Packet):
            return
        target = self._numbered(len(self.files) + 1)
        temporary = temporary_beside(target, self._overwrite)
        self.files[temporary] = target
        temporary.write_bytes(png_bytes(yuv_to_rgb(item.yuv)))

    def finish(self) -> None:
        """Say what was lost."""
        lost = {"rotation": self._info.rotation or self._info.flip, "audio and subtitles": self._info.streams}
        names = ["timestamps", *(what for what, is_lost in lost.items() if is_lost)]
        self.warnings.append(f"pictures cannot carry {', '.join(names)}")

    def discard(self) -> None:
        """Nothing is open between frames."""

    def _numbered(self, number: int) -> Path:
        name = self._path.name
        if not re.search(r"%0?\d*d", name):
            name = f"{self._path.stem}_%05d{self._path.suffix}"
        return self._path.with_name(re.sub(r"%0?(\d*)d", lambda width: f"{number:0{width[1] or 1}d}", name))


def yuv_kind(info: VideoInfo) -> tuple[str, ColorTags]:
    """The chroma format and tags to write a source in as YUV: its own; RGB becomes 4:4:4 and anything rare 4:2:0."""
    if info.chroma == "rgb":
        return "444", replace(info.color, range=1, matrix=effective_matrix(info.color, info.height), chroma_location=0)
    return (info.chroma if info.chroma in ("gray", "422", "444") else "420"), info.color


def png_bytes(rgb: np.ndarray) -> bytes:
    """RGB, uint8 [H, W, 3], as a PNG file."""
    encoder = av.CodecContext.create("png", "w")
    encoder.height, encoder.width = rgb.shape[:2]
    encoder.pix_fmt = "rgb24"
    encoder.framerate = 1
    encoder.thread_count = 1
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
    return b"".join(bytes(packet) for packet in (*encoder.encode(frame), *encoder.encode(None)))
