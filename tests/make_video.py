"""Real video files for the tests, made with PyAV: any codec, pixel format, timing and tags, with sound and subtitles.

make_video("clip.mp4", frames=10, rotation=90, audio=True)
"""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

# File name extension to the encoder used unless one is named, and the muxer's options.
CONTAINERS = {
    ".mp4": ("libx264", {"movie_timescale": "15360"}),
    ".ts": ("libx264", {}),
    ".mkv": ("ffv1", {"allow_raw_vfw": "1"}),
    ".y4m": ("rawvideo", {}),
}

LUMA_WEIGHTS = {1: (0.2126, 0.0722), 6: (0.299, 0.114), 9: (0.2627, 0.0593)}


def make_video(
    path: str | Path,
    *,
    width: int = 64,
    height: int = 48,
    frames: int = 10,
    codec: str | None = None,
    pixel_format: str = "yuv420p",
    time_base: Fraction = Fraction(1, 15360),
    pts: Sequence[int] | None = None,
    pictures: Sequence[Sequence[np.ndarray]] | None = None,
    color: tuple[int, int, int, int, int] = (0, 2, 2, 2, 0),
    aspect: Fraction | None = None,
    rotation: int = 0,
    metadata: dict[str, str] | None = None,
    audio: bool = False,
    subtitle: str | None = None,
    options: dict[str, str] | None = None,
) -> Path:
    """Write a video; `pictures` are its planes, [rows, bytes] each, else it is a moving pattern.

    `color` is range, matrix, primaries, transfer, chroma location; `rotation` is clockwise; `subtitle` is a codec name.
    """
    path = Path(path)
    default, container_options = CONTAINERS[path.suffix]
    codec = codec or default
    step = round(Fraction(1, 30) / time_base)
    with av.open(str(path), "w", container_options=container_options) as out:
        video = out.add_stream(
            codec,
            rate=30,
            width=width,
            height=height,
            pix_fmt=pixel_format,
            time_base=time_base,
            options={"chroma_sample_location": str(color[4]), **(options or {})},
        )
        context = video.codec_context
        context.color_range, context.colorspace, context.color_primaries, context.color_trc = color[:4]
        context.sample_aspect_ratio = aspect or 0
        if rotation:
            video.set_display_rotation(-rotation)
        sound = out.add_stream("aac", rate=48000, layout="stereo") if audio else None
        text = out.add_stream(subtitle) if subtitle else None
        if text:
            text.codec_context.subtitle_header = ASS_HEADER
            text.codec_context.open()
            text.time_base = Fraction(1, 1000)
        out.metadata.update(metadata or {})
        for number in range(frames if pictures is None else len(pictures)):
            frame = av.VideoFrame(width, height, pixel_format)
            frame.pts = pts[number] if pts is not None else number * step
            frame.time_base = time_base
            fill(frame, pictures[number] if pictures is not None else None, number)
            out.mux(video.encode(frame))
        if text:
            for number in range(2):
                content = f"line {number}".encode()
                packet = av.Packet(len(content).to_bytes(2, "big") + content if subtitle == "mov_text" else content)
                packet.stream, packet.time_base = text, Fraction(1, 1000)
                packet.pts = packet.dts = 100 * number
                packet.duration = 90
                out.mux(packet)
        if sound:
            tone = np.sin(np.arange(48000 * frames // 30) / 20).astype(np.float32)
            samples = av.AudioFrame.from_ndarray(np.stack([tone, tone]), format="fltp", layout="stereo")
            samples.sample_rate, samples.pts = 48000, 0
            out.mux(sound.encode(samples))
            out.mux(sound.encode(None))
        out.mux(video.encode(None))
    return path


def fill(frame: av.VideoFrame, planes: Sequence[np.ndarray] | None, number: int) -> None:
    """Copy planes into a frame, or draw smooth waves that move with the frame number."""
    for index, plane in enumerate(frame.planes):
        rows = np.frombuffer(plane, np.uint8).reshape(plane.height, -1)
        if planes is not None:
            samples = np.ascontiguousarray(planes[index])
            samples = samples.view(np.uint8).reshape(len(samples), -1)
            rows[:, : samples.shape[1]] = samples
        else:
            y, x = np.mgrid[: rows.shape[0], : rows.shape[1]]
            rows[:] = 128 + 60 * np.sin(x / 9 + number / 3 + index) * np.cos(y / 7 - number / 5)


def color_bars(width: int, height: int) -> np.ndarray:
    """The eight classic bars with a grey ramp under them, RGB in [0, 1], float [H, W, 3]."""
    bars = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 1], [0, 1, 0], [1, 0, 1], [1, 0, 0], [0, 0, 1], [0, 0, 0]], float)
    image = np.repeat(bars, width // 8, axis=0)[None].repeat(height, axis=0)
    image[height // 2 :] = np.linspace(0, 1, width)[None, :, None]
    return image


def rgb_to_planes(rgb: np.ndarray, matrix: int, full: bool, depth: int = 8) -> list[np.ndarray]:
    """RGB in [0, 1] to Y, Cb, Cr planes [H, W], straight from the standards."""
    kr, kb = LUMA_WEIGHTS[matrix]
    red, green, blue = np.moveaxis(rgb, -1, 0)
    luma = kr * red + (1 - kr - kb) * green + kb * blue
    cb, cr = (blue - luma) / (2 - 2 * kb), (red - luma) / (2 - 2 * kr)
    step = 2 ** (depth - 8)
    if full:
        planes = [luma * (2**depth - 1), cb * (2**depth - 1) + 128 * step, cr * (2**depth - 1) + 128 * step]
    else:
        planes = [(219 * luma + 16) * step, (224 * cb + 128) * step, (224 * cr + 128) * step]
    return [np.rint(p).clip(0, 2**depth - 1).astype(np.uint8 if depth == 8 else "<u2") for p in planes]


def decoded_planes(path: str | Path, pixel_format: str | None = None) -> list[list[np.ndarray]]:
    """The planes of every frame as FFmpeg decodes them, 8-bit [rows, bytes]."""
    result = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            assert pixel_format is None or frame.format.name == pixel_format
            step = 4 if frame.format.name == "bgr0" else 3 if frame.format.name == "rgb24" else 1
            result.append(
                [np.frombuffer(p, np.uint8).reshape(p.height, -1)[:, : p.width * step].copy() for p in frame.planes]
            )
    return result


ASS_HEADER = b"""[Script Info]
ScriptType: v4.00+

[V4+ Styles]
Format: Name, Fontname, Fontsize, PrimaryColour, SecondaryColour, OutlineColour, BackColour, Bold, Italic, Underline, \
StrikeOut, ScaleX, ScaleY, Spacing, Angle, BorderStyle, Outline, Shadow, Alignment, MarginL, MarginR, MarginV, Encoding
Style: Default,Arial,16,&Hffffff,&Hffffff,&H0,&H0,0,0,0,0,100,100,0,0,1,1,0,2,10,10,10,1

[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
"""
