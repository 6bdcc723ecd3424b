"""Rate and distortion next to x264 and SVT-AV1: the same frames at several settings, complete files, one measure.

Everybody is compared in 4:2:0, which the others code in: the mean squared error over all samples of all three planes, as PSNR.
The pictures come from a source that was compressed before, so no curve says what a codec does to a camera's signal.
"""

import io
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path

import av
import numpy as np

from coanerv_codec.checkpoint import Checkpoint
from coanerv_codec.container import Reader
from coanerv_codec.decoding import make_view
from coanerv_codec.encoding import EncodeOptions, encode_video
from coanerv_codec.errors import InputError
from coanerv_codec.playing import decode_items
from coanerv_codec.records import ClipRecord
from coanerv_codec.video import Frame, VideoInfo, open_video

OURS = "coanerv"
BITS = (8, 7, 6, 5, 4, 3)


@dataclass(frozen=True)
class Rival:
    """A codec to compare with: FFmpeg's name of the encoder, its options, and a range of quality that covers ours."""

    encoder: str
    options: dict[str, str]
    qualities: tuple[int, ...]
    key_frames: bool = False  # one at the beginning of each of our clips, so that it can be entered where ours can

    def alone(self, frames: int) -> dict[str, str]:
        """Return the options for a key frame every so many frames, and no others."""
        return {"g": str(frames), "sc_threshold": "0"}


_X264 = Rival("libx264", {"preset": "medium"}, (20, 24, 28, 32, 36, 40))
# Presets that people use for files, and what is left of x264's lead where pictures far apart may not be predicted either.
OTHERS = {
    "libx264": _X264,
    "libx264, clips alone": replace(_X264, key_frames=True),
    "libsvtav1": Rival("libsvtav1", {"preset": "6", "svtav1-params": "lp=2"}, (25, 33, 41, 49, 57, 63)),
}


@dataclass(frozen=True)
class Point:
    """One codec at one setting: what the frames took, and what came back."""

    codec: str
    setting: str
    bytes: int
    bits_per_pixel: float
    psnr: float
    encode_fps: float
    decode_fps: float


def read_source(path: Path, count: int) -> tuple[VideoInfo, list[Frame]]:
    """Return the first `count` frames of a video, cut to even sides as 4:2:0 needs them."""
    with open_video(path, audio=False) as video:
        frames = list(islice((item for item in video if isinstance(item, Frame)), count))
        info = video.info
    if not frames:
        raise InputError(f"{path} has no video frames")
    height, width = (n - n % 2 for n in frames[0].yuv.shape[1:])
    if not width or not height:
        raise InputError(f"{path}: a picture of {info.width}x{info.height} is too small to compare in 4:2:0")
    plain = VideoInfo(width, height, info.time_base, frame_duration=info.frame_duration, rate=info.rate)
    return plain, [Frame(f.pts, f.duration, np.ascontiguousarray(f.yuv[:, :height, :width])) for f in frames]


def compare(path: Path, checkpoint: Checkpoint, count: int, note: Callable[[Point], None]) -> list[Point]:
    """Code the first `count` frames of a video with every codec at every setting; `note` is told each point."""
    info, frames = read_source(path, count)
    pictures = [_subsampled(frame.yuv) for frame in frames]
    source = [_samples(picture) for picture in pictures]
    points = []
    for codec, setting, code in _runs(info, frames, pictures, checkpoint):
        size, result, encoded, decoded = code()
        if len(result) != len(source):
            raise InputError(f"{codec} gave {len(result)} frames back for {len(source)}")
        error = np.mean([np.square(a.astype(np.float32) - b).mean() for a, b in zip(source, result, strict=True)])
        psnr = -10 * math.log10(max(float(error), 1e-3) / 255**2)
        bits_per_pixel = 8 * size / (len(frames) * info.width * info.height)
        speeds = len(frames) / encoded, len(frames) / decoded
        points.append(Point(codec, setting, size, bits_per_pixel, psnr, *speeds))
        note(points[-1])
    return points


Coded = tuple[int, list[np.ndarray], float, float]  # bytes, samples of each frame, seconds of encoding and of decoding


def _runs(
    info: VideoInfo, frames: list[Frame], pictures: list[av.VideoFrame], checkpoint: Checkpoint
) -> Iterator[tuple[str, str, Callable[[], Coded]]]:
    for bits in BITS:
        yield OURS, f"{bits} bits", lambda bits=bits: _code_ours(info, frames, checkpoint, bits)
    for name, rival in OTHERS.items():
        if rival.encoder not in av.codecs_available:
            raise InputError(f"this build of PyAV has no {rival.encoder} to compare with; install the one from PyPI")
        options = rival.options | (rival.alone(checkpoint.model.config.frames) if rival.key_frames else {})
        for crf in rival.qualities:
            settings = {**options, "crf": str(crf)}
            yield name, f"crf {crf}", lambda e=rival.encoder, s=settings: _code_other(e, s, info, pictures)


def _code_ours(info: VideoInfo, frames: list[Frame], checkpoint: Checkpoint, bits: int) -> Coded:
    file = io.BytesIO()
    began = time.perf_counter()
    encode_video(info, frames, file, checkpoint, EncodeOptions(bits=bits))
    encoded = time.perf_counter()
    reader = Reader(io.BytesIO(file.getvalue()))
    clips = (item for item in reader if isinstance(item, ClipRecord))
    view = make_view(info.width, info.height)
    result = [frame.yuv for frame in decode_items(clips, reader.header, checkpoint, view)]
    decoded = time.perf_counter()
    samples = [_samples(_subsampled(picture)) for picture in result]
    return file.getbuffer().nbytes, samples, encoded - began, decoded - encoded


def _code_other(name: str, options: dict[str, str], info: VideoInfo, pictures: list[av.VideoFrame]) -> Coded:
    os.environ.setdefault("SVT_LOG", "1")  # errors only
    file = io.BytesIO()
    began = time.perf_counter()
    with av.open(file, "w", format="mp4") as container:
        rate = Fraction(info.rate or 25)
        stream = container.add_stream(name, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = info.width, info.height, "yuv420p"
        for number, picture in enumerate(pictures):
            picture.pts, picture.time_base = number, 1 / rate
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    encoded = time.perf_counter()
    with av.open(io.BytesIO(file.getvalue())) as container:
        result = list(container.decode(video=0))
    decoded = time.perf_counter()
    return file.getbuffer().nbytes, [_samples(picture) for picture in result], encoded - began, decoded - encoded


def _subsampled(yuv: np.ndarray) -> av.VideoFrame:
    """Model YUV [3,H,W] uint8 -> a frame in 4:2:0, values as they are."""
    return av.VideoFrame.from_ndarray(yuv, format="yuv444p").reformat(format="yuv420p")


def _samples(picture: av.VideoFrame) -> np.ndarray:
    """All samples of a 4:2:0 frame, [H*3/2,W] uint8."""
    return picture.to_ndarray(format="yuv420p")


def average(tables: Sequence[list[Point]]) -> list[Point]:
    """Merge the points of several videos: the mean of everything, setting by setting."""
    merged = []
    for points in zip(*tables, strict=True):
        means = {
            name: float(np.mean([getattr(p, name) for p in points]))
            for name in ("bits_per_pixel", "psnr", "encode_fps", "decode_fps")
        }
        merged.append(Point(points[0].codec, points[0].setting, round(np.mean([p.bytes for p in points])), **means))
    return merged


def rate_difference(points: list[Point], codec: str, anchor: str) -> float | None:
    """Return how many more bytes a codec takes than another at equal PSNR, on average: 0.5 is half as many again.

    The mean over the PSNRs that both reach of the logarithm of the ratio, between points by straight lines (a plain
    Bjontegaard delta rate). None where they have no PSNR in common.
    """
    curves = []
    for name in (codec, anchor):
        some = sorted((p.psnr, math.log(p.bytes)) for p in points if p.codec == name)
        curves.append(([p for p, _ in some], [b for _, b in some]))
    low, high = max(c[0][0] for c in curves), min(c[0][-1] for c in curves)
    if low >= high:
        return None
    at = np.linspace(low, high, 200)
    ours, theirs = (np.interp(at, *curve) for curve in curves)
    return math.expm1(float((ours - theirs).mean()))
