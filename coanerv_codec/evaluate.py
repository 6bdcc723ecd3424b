"""Evaluation over a folder: quality in normalised YUV as the paper measures it, against the bytes of real files.

Protocol: the first F frames of each video, the centre square of `side` pixels (a smaller video is first enlarged to it),
encoded into a complete `.coa` in memory, decoded from those bytes, every pixel compared.
"""

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from coanerv_codec.bank import DEFAULT_CODER, encode_bank
from coanerv_codec.cells import DEFAULT_OVERLAP, Axis, Layout, plan_layout, sampling_matrix
from coanerv_codec.checkpoint import Checkpoint
from coanerv_codec.container import Reader, Writer
from coanerv_codec.decoding import clip_tokens, decode_clip, layout_of, make_view
from coanerv_codec.encoding import encode_moving, make_header
from coanerv_codec.errors import InputError
from coanerv_codec.metrics import ms_ssim, psnr, ssim
from coanerv_codec.quantizer import quantize
from coanerv_codec.refine import refine_clip
from coanerv_codec.video import Frame, VideoInfo, open_video


@dataclass(frozen=True)
class Score:
    """One clip at one number of bits."""

    name: str
    bits: int
    bytes: int
    psnr: float
    ssim: float
    ms_ssim: float


@dataclass(frozen=True)
class EvaluateOptions:
    """What to measure."""

    bits: tuple[int, ...] = (8, 7, 6, 5, 4)
    side: int = 256
    overlap: int = DEFAULT_OVERLAP
    refine: int = 0
    motion: bool = True
    coder: str = DEFAULT_CODER


def read_clip(path: Path, frames: int, side: int) -> np.ndarray | None:
    """Return the first frames' centre square [F,3,side,side] uint8, or None if the video is too short."""
    with open_video(path, audio=False) as video:
        pictures = [f.yuv for f in islice((i for i in video if isinstance(i, Frame)), frames)]
    if len(pictures) < frames:
        return None
    clip = np.stack(pictures)
    height, width = clip.shape[2:]
    if min(height, width) < side:
        scale = side / min(height, width)
        clip = _resize(clip, max(side, round(width * scale)), max(side, round(height * scale)))
        height, width = clip.shape[2:]
    top, left = (height - side) // 2, (width - side) // 2
    return clip[:, :, top : top + side, left : left + side]


def _resize(clip: np.ndarray, width: int, height: int) -> np.ndarray:
    """Resize [F,3,H,W] uint8."""
    _, vertical = sampling_matrix(Axis(clip.shape[2], 1, 0), 0, height)
    _, horizontal = sampling_matrix(Axis(clip.shape[3], 1, 0), 0, width)
    resized = vertical @ clip.astype(np.float32) @ horizontal.T
    return np.clip(resized + 0.5, 0, 255).astype(np.uint8)


def code_clip(
    clip: np.ndarray, tokens: np.ndarray, checkpoint: Checkpoint, bits: int, layout: Layout, coder: str = DEFAULT_CODER
) -> tuple[int, np.ndarray]:
    """Store a clip's tokens in a complete file and decode that: returns its bytes and the frames [F,3,H,W] uint8."""
    frames, _, height, width = clip.shape
    info = VideoInfo(width, height, Fraction(1, 25), frame_duration=1, rate=Fraction(25))
    file = io.BytesIO()
    writer = Writer(file, make_header(info, layout, checkpoint))
    symbols, z, s = quantize(tokens, bits)
    bank = encode_bank(symbols, bits, z, s, coder, checkpoint.model.config.hints)
    writer.clip(range(frames), 1, bank, layout.velocities, layout.shakes)
    writer.finish()
    reader = Reader(io.BytesIO(file.getvalue()))
    record = reader.clip(0)
    stored = clip_tokens(record, reader.header)
    t = np.arange(frames) / checkpoint.model.config.frames
    return file.tell(), decode_clip(
        checkpoint.model.decoder, stored, layout_of(reader.header, record), make_view(width, height), t
    )


def evaluate(
    files: list[Path],
    checkpoint: Checkpoint,
    options: EvaluateOptions,
    keep: Callable[[Score, np.ndarray, np.ndarray], None] = lambda score, source, result: None,
) -> Iterator[Score]:
    """Score every file at every number of bits; `keep` sees source and result of each (for pictures)."""
    config = checkpoint.model.config
    for path in files:
        clip = read_clip(path, config.frames, options.side)
        if clip is None:
            continue
        layout = plan_layout(options.side, options.side, config.cell, options.overlap)
        tokens, layout = encode_moving(checkpoint.model.encoder, clip, layout, options.motion)
        for bits in options.bits:
            better = tokens
            if options.refine:
                better = refine_clip(checkpoint.model.decoder, clip, layout, tokens, bits, options.refine).tokens
            size, result = code_clip(clip, better, checkpoint, bits, layout, options.coder)
            a, b = (torch.from_numpy(x).float() / 255 for x in (clip, result))
            score = Score(path.name, bits, size, psnr(a, b), ssim(a, b), ms_ssim(a, b))
            keep(score, clip, result)
            yield score


def average(scores: list[Score]) -> list[dict[str, float]]:
    """Return the mean over clips for each number of bits, best first; PSNR is the mean of the clips' PSNRs."""
    if not scores:
        raise InputError("no video is long enough to evaluate")
    rows = []
    for bits in sorted({s.bits for s in scores}, reverse=True):
        some = [s for s in scores if s.bits == bits]
        names = ("bytes", "psnr", "ssim", "ms_ssim")
        means = {
            n: sum(min(asdict(s)[n], 100.0) if n == "psnr" else asdict(s)[n] for s in some) / len(some) for n in names
        }
        rows.append({"bits": bits, "clips": len(some), **{k: None if math.isnan(v) else v for k, v in means.items()}})
    return rows
