"""What cutting a video into cells and clips does to it: the error on cell borders, the quality ladder, flicker.

Pictures differ from place to place by far more than a border does. So the error on borders is measured on pixels that
are compared with themselves: the same pictures are coded several times, each time with the grid of cells shifted by a part
of a cell, and every pixel that lies on a border in one grid and inside a cell in another counts once as each.
"""

import io
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coanerv_codec.cells import DEFAULT_OVERLAP, Axis, Layout, fixed_layout, plan_layout
from coanerv_codec.checkpoint import Checkpoint
from coanerv_codec.color import yuv_to_rgb
from coanerv_codec.container import Reader
from coanerv_codec.decoding import make_view
from coanerv_codec.encoding import EncodeOptions, encode_moving, encode_video
from coanerv_codec.errors import InputError
from coanerv_codec.evaluate import code_clip
from coanerv_codec.playing import decode_items
from coanerv_codec.records import ClipRecord
from coanerv_codec.video import Frame, VideoInfo, open_video

OVERLAPS = (0, 4, 8, 16)
LADDER_BITS = (8, 6, 4)
NEAR = 4  # pixels on either side of a border that count as on it
SHIFTS = 4  # grids, each shifted by a further quarter of a cell


def read_frames(path: Path, count: int) -> np.ndarray:
    """Return the first `count` frames of a video (fewer if it ends), [n,3,H,W] uint8."""
    with open_video(path, audio=False) as video:
        return np.stack([f.yuv for f in islice((i for i in video if isinstance(i, Frame)), count)])


def code(clip: np.ndarray, checkpoint: Checkpoint, bits: int, layout: Layout) -> tuple[int, np.ndarray]:
    """Encode and decode one clip [F,3,H,W] uint8: returns the bytes of its file and the frames that come back."""
    tokens, moving = encode_moving(checkpoint.model.encoder, clip, layout)
    return code_clip(clip, tokens, checkpoint, bits, moving)


def code_video(frames: np.ndarray, checkpoint: Checkpoint, bits: int) -> np.ndarray:
    """Encode and decode a whole video [n,3,H,W] uint8: the frames that come back."""
    width, height = _size(frames)
    info = VideoInfo(width, height, Fraction(1, 25), frame_duration=1, rate=Fraction(25))
    file = io.BytesIO()
    source = (Frame(number, 1, frame) for number, frame in enumerate(frames))
    encode_video(info, source, file, checkpoint, EncodeOptions(bits=bits))
    reader = Reader(io.BytesIO(file.getvalue()))
    clips = (item for item in reader if isinstance(item, ClipRecord))
    view = make_view(width, height)
    return np.stack([frame.yuv for frame in decode_items(clips, reader.header, checkpoint, view)])


class BorderError(NamedTuple):
    """PSNR of the same pixels on borders and inside cells; and of the steps to their neighbours, where a line would show."""

    border: float
    inside: float
    border_step: float
    inside_step: float


def border_error(clip: np.ndarray, checkpoint: Checkpoint, bits: int, overlap: int) -> BorderError:
    """Code a clip [F,3,H,W] uint8 under shifted grids and compare what is on borders with what is inside cells."""
    height, width = clip.shape[2:]
    step = checkpoint.model.config.cell - overlap
    offsets = [number * step // SHIFTS for number in range(SHIFTS)]
    columns, rows = ((side - offsets[-1] - overlap) // step for side in (width, height))
    if min(columns, rows) < 1 or columns * rows < 2:
        raise InputError(f"a {width}x{height} picture is too small to shift a grid of cells that overlap by {overlap}")
    layout = fixed_layout(columns * step + overlap, rows * step + overlap, columns, rows, overlap)
    border = _near(layout.y, range(1, rows))[:, None] | _near(layout.x, range(1, columns))
    edge = _near(layout.y, (0, rows))[:, None] | _near(layout.x, (0, columns))
    kinds = np.stack([border & ~edge, ~border & ~edge])  # [2,h,w]
    sums, counts = np.zeros((2, 2, height, width, 2))  # of: border or inside, y, x, value or step
    for offset in offsets:
        place = np.s_[offset : offset + layout.y.length, offset : offset + layout.x.length]
        source = clip[:, :, *place]
        _, result = code(source, checkpoint, bits, layout)
        errors = np.stack([_squared_error(source, result).mean((0, 1)), _step_error(source, result)], axis=-1)
        sums[:, *place] += kinds[..., None] * errors
        counts[:, *place] += kinds[..., None]
    both = (counts > 0).all((0, 3))
    (border, border_step), (inside, inside_step) = (sums[:, both] / counts[:, both]).mean(1)
    return BorderError(*map(_decibel, (border, inside, border_step, inside_step)))


def overlap_table(clip: np.ndarray, checkpoint: Checkpoint, bits: int) -> list[dict]:
    """What each overlap costs and hides. `near` and `rest` are plain: other pixels, so other content, on either side."""
    rows = []
    for overlap in OVERLAPS:
        errors = border_error(clip, checkpoint, bits, overlap)
        layout = plan_layout(*_size(clip), checkpoint.model.config.cell, overlap)
        size, result = code(clip, checkpoint, bits, layout)
        error = _squared_error(clip, result).mean((0, 1))
        near = _near(layout.y, range(1, layout.y.count))[:, None] | _near(layout.x, range(1, layout.x.count))
        plain = {"psnr": error.mean(), "near": error[near].mean(), "rest": error[~near].mean()}
        rows.append(
            {"overlap": overlap, "bytes": size, **{k: _decibel(v) for k, v in plain.items()}, **errors._asdict()}
        )
    return rows


def ladder_table(clip: np.ndarray, checkpoint: Checkpoint) -> list[dict]:
    """Quality against bytes from one cell for the whole picture up to native cells, at several numbers of bits."""
    width, height = _size(clip)
    native = plan_layout(width, height, checkpoint.model.config.cell)
    half = fixed_layout(width, height, (native.x.count + 1) // 2, (native.y.count + 1) // 2, DEFAULT_OVERLAP)
    rows = []
    for name, layout in (("--fit", fixed_layout(width, height, 1, 1, 0)), ("half", half), ("default", native)):
        tokens, moving = encode_moving(checkpoint.model.encoder, clip, layout)
        for bits in LADDER_BITS:
            size, result = code_clip(clip, tokens, checkpoint, bits, moving)
            psnr = _decibel(_squared_error(clip, result).mean())
            rows.append({"cells": name, "bits": bits, "bytes": size, "psnr": psnr})
    return rows


def time_table(frames: np.ndarray, checkpoint: Checkpoint, bits: int) -> list[dict]:
    """By position in the clip: PSNR of the frames and of their change since the frame before, also of clips not cross-faded.

    At position 0 the frame before is the last of another clip: that is where flicker would show.
    """
    length = checkpoint.model.config.frames
    frames = frames[: len(frames) // length * length]
    layout = plan_layout(*_size(frames), checkpoint.model.config.cell)
    clips = np.split(frames, len(frames) // length)
    alone = np.concatenate([code(clip, checkpoint, bits, layout)[1] for clip in clips])
    change = np.diff(frames.astype(np.int16), axis=0)
    rows = [{"position": position} for position in range(length)]
    for result, name in ((alone, " alone"), (code_video(frames, checkpoint, bits), "")):
        errors = _squared_error(frames, result).mean((1, 2, 3))
        flicker = _squared_error(change, np.diff(result.astype(np.int16), axis=0)).mean(
            (1, 2, 3)
        )  # of frames 1, 2, ...
        for position, row in enumerate(rows):
            row[f"psnr{name}"] = _decibel(errors[position::length].mean())
            row[f"change{name}"] = _decibel(flicker[(position - 1) % length :: length].mean())
    return rows


def average(tables: Sequence[list[dict]]) -> list[dict]:
    """Merge the same table of several videos: numbers that were measured are averaged."""
    measured = ("bytes", "psnr", "change", "psnr alone", "change alone", *BorderError._fields)
    return [
        {key: sum(r[key] for r in rows) / len(rows) if key in measured else rows[0][key] for key in rows[0]}
        for rows in zip(*tables, strict=True)
    ]


def seam_picture(clip: np.ndarray, checkpoint: Checkpoint, bits: int, side: int = 96, zoom: int = 3) -> np.ndarray:
    """RGB of the part where four cells meet: source, no overlap, default overlap, left to right, enlarged."""
    panels = [clip]
    for overlap in (0, DEFAULT_OVERLAP):
        layout = plan_layout(*_size(clip), checkpoint.model.config.cell, overlap)
        panels.append(code(clip, checkpoint, bits, layout)[1])
    left, top = (
        min(max(0, round(axis.start(axis.count // 2)) - side // 2), max(0, axis.length - side))
        for axis in (layout.x, layout.y)
    )
    middle = len(clip) // 2
    parts = [yuv_to_rgb(frames[middle])[top : top + side, left : left + side] for frames in panels]
    gap = np.full((len(parts[0]), 2, 3), 255, np.uint8)
    row = np.concatenate([parts[0], gap, parts[1], gap, parts[2]], axis=1)
    return row.repeat(zoom, axis=0).repeat(zoom, axis=1)


def _size(clip: np.ndarray) -> tuple[int, int]:
    """Width and height of frames [...,H,W]."""
    return clip.shape[-1], clip.shape[-2]


def _near(axis: Axis, borders: Sequence[int]) -> np.ndarray:
    """Which pixels of an axis are near the borders between cells i - 1 and i (the middles of their overlaps), bool [n]."""
    positions = np.arange(axis.length)
    near = np.zeros(axis.length, bool)
    for i in borders:
        outer = {0: -0.5, axis.count: axis.length - 0.5}
        near |= abs(positions - outer.get(i, axis.start(i) + (axis.overlap - 1) / 2)) < NEAR
    return near


def _squared_error(source: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Of code values, in units of their range."""
    return ((result.astype(np.float32) - source) / 255) ** 2


def _step_error(source: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Squared error of the steps from a pixel's left and upper neighbours, mean over [F,3]: [H,W]."""
    error = (result.astype(np.float32) - source) / 255
    steps = [np.diff(error, axis=axis, prepend=error.take([0], axis)) ** 2 for axis in (2, 3)]
    return ((steps[0] + steps[1]) / 2).mean((0, 1))


def _decibel(error: float) -> float:
    return float(-10 * np.log10(max(error, 1e-10)))
