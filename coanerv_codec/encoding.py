"""Encoding: video -> clips of F frames -> cells -> tokens -> symbols -> a `.coa` stream, one clip in memory at a time."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import BinaryIO

import numpy as np
import torch

from coanerv_codec.bank import DEFAULT_CODER, encode_bank
from coanerv_codec.cells import DEFAULT_OVERLAP, Layout, cut_row, find_motion, fixed_layout, plan_layout
from coanerv_codec.checkpoint import Checkpoint
from coanerv_codec.config import Config
from coanerv_codec.container import Writer
from coanerv_codec.errors import CheckpointError, InputError
from coanerv_codec.model import Encoder
from coanerv_codec.quantizer import quantize
from coanerv_codec.records import Header, Metadata
from coanerv_codec.refine import refine_clip
from coanerv_codec.video import Frame, Packet, VideoInfo

# Cells go through the encoder in batches of one fixed size, so that the same video gives the same bytes however it is cut.
CELL_BATCH = 4

# Packets are written after so many even if the clip is not complete, since 8 frames may last for hours.
PACKET_BATCH = 256


@dataclass(frozen=True)
class EncodeOptions:
    """How to encode. `cells` fixes columns x rows ((1, 1) is `--fit`); None covers the picture with native cells."""

    bits: int = 6
    cells: tuple[int, int] | None = None
    overlap: int = DEFAULT_OVERLAP
    frames: int | None = None  # stop after so many
    refine: int = 0  # steps of token optimisation per cell
    refine_from: str = "encoder"  # or "random", the paper's standalone protocol
    motion: bool = True  # cells move with what they show
    coder: str = DEFAULT_CODER  # or "huffman", the paper's


@dataclass(frozen=True)
class EncodeProgress:
    """Told after every clip (while refining, after every few cells) and once more when the file is complete."""

    frames: int
    bytes: int
    seconds_of_video: float
    refined_db: float = 0.0  # what refining gained, mean of the clips so far


def choose_layout(info: VideoInfo, config: Config, options: EncodeOptions) -> Layout:
    """Return the cells that cover this video's pictures."""
    if options.cells is None:
        return plan_layout(info.width, info.height, config.cell, options.overlap)
    try:
        return fixed_layout(info.width, info.height, *options.cells, options.overlap)
    except ValueError as error:
        columns, rows = options.cells
        raise InputError(
            f"a {info.width}x{info.height} picture cannot be covered by {columns}x{rows} cells that overlap by "
            f"{options.overlap} pixels; use fewer cells or a smaller --overlap"
        ) from error


def make_header(info: VideoInfo, layout: Layout, checkpoint: Checkpoint) -> Header:
    """Collect what the file says about the video and about the decoder it needs."""
    config = checkpoint.model.config
    return Header(
        checkpoint=checkpoint.name,
        checkpoint_sha256=checkpoint.decoder_sha256,
        frames_per_clip=config.frames,
        tokens=config.tokens,
        token_dim=config.token_dim,
        cell_size=config.cell,
        width=info.width,
        height=info.height,
        columns=layout.x.count,
        rows=layout.y.count,
        overlap=max(layout.x.overlap, layout.y.overlap),
        time_base=info.time_base,
        frame_duration=info.frame_duration,
        frame_rate=info.rate or 0,
        sample_aspect_ratio=info.sample_aspect_ratio or 0,
        rotation=info.rotation,
        flip=info.flip,
        chroma=info.chroma,
        bit_depth=info.bit_depth,
        alpha=info.alpha,
        scan=info.scan,
        color_range=info.color.range,
        matrix=info.color.matrix,
        primaries=info.color.primaries,
        transfer=info.color.transfer,
        chroma_location=info.color.chroma_location,
    )


@torch.inference_mode()
def encode_cells(encoder: Encoder, cells: Iterable[np.ndarray]) -> np.ndarray:
    """Cells [F,3,S,S] float32 in [0,1] -> tokens [cells,N,d] float32, through the encoder in batches of one size."""
    device = encoder.queries.device
    tokens, cells = [], iter(cells)
    while batch := list(islice(cells, CELL_BATCH)):
        padded = batch + batch[-1:] * (CELL_BATCH - len(batch))
        tokens.append(
            encoder(torch.stack([torch.from_numpy(cell) for cell in padded]).to(device))[: len(batch)].cpu().numpy()
        )
    found = np.concatenate(tokens)
    if not np.isfinite(found).all():
        raise CheckpointError(
            "the checkpoint's encoder gives values that are not finite; use another with --checkpoint"
        )
    return found


def encode_clip(encoder: Encoder, frames: np.ndarray, layout: Layout) -> np.ndarray:
    """One clip [F,3,H,W] uint8 -> the tokens of all its cells [cells,N,d]."""
    rows = (cut_row(frames, layout, row, encoder.config.cell) for row in range(layout.y.count))
    # Batches go across rows: a row need not be a multiple of one, and filling up costs as much as real cells.
    return widen_switches(encode_cells(encoder, chain.from_iterable(rows)), encoder.config.amplitudes)


def widen_switches(tokens: np.ndarray, amplitudes: int) -> np.ndarray:
    """Tokens [cells,N,d] whose switches no quantizer rounds to zero: only their signs count, so their size is free.

    With the fewest bits a step is half of the range. Where amplitudes have one sign, their switches make the range a third
    larger, and have to be more than half of that step.
    """
    stored, switches = np.split(tokens, [amplitudes], axis=-1)
    least = np.float32(0.34) * (stored.max() - stored.min())
    return np.concatenate([stored, np.sign(switches) * np.maximum(np.abs(switches), least)], axis=-1)


def encode_moving(
    encoder: Encoder, frames: np.ndarray, layout: Layout, motion: bool = True
) -> tuple[np.ndarray, Layout]:
    """One clip [F,3,H,W] uint8 -> the tokens of all its cells [cells,N,d], and the layout in which these move."""
    if motion:
        layout = find_motion(frames, layout, encoder.config.cell)
    return encode_clip(encoder, frames, layout), layout


def gather_clips(
    items: Iterable[Frame | Packet], frames: int, limit: int | None
) -> Iterator[tuple[list[Frame], list[Packet]]]:
    """Group what a reader yields into clips of `frames` frames (the last may be shorter) and the packets seen meanwhile.

    Where packets are many they come before their clip is complete, with an empty list of frames.
    """
    clip: list[Frame] = []
    packets: list[Packet] = []
    count = 0
    for item in items:
        if isinstance(item, Packet):
            packets.append(item)
            if len(packets) == PACKET_BATCH:
                yield [], packets
                packets = []
            continue
        clip.append(item)
        count += 1
        if len(clip) == frames:
            yield clip, packets
            clip, packets = [], []
        if count == limit:
            break
    if clip or packets:
        yield clip, packets


def encode_video(
    info: VideoInfo,
    items: Iterable[Frame | Packet],
    file: BinaryIO,
    checkpoint: Checkpoint,
    options: EncodeOptions = EncodeOptions(),
    progress: Callable[[EncodeProgress], None] = lambda p: None,
) -> Header:
    """Encode frames and packets into `file`, front to back; memory holds one clip whatever the length."""
    model = checkpoint.model
    layout = choose_layout(info, model.config, options)
    header = make_header(info, layout, checkpoint)
    writer = Writer(file, header)
    if info.metadata:
        writer.metadata(Metadata(tuple(sorted(info.metadata.items()))))
    if info.track:
        writer.metadata(Metadata(tuple(sorted(info.track.items())), "video"))
    for stream in info.streams:
        writer.stream(stream)
    done, clips, started, elapsed, gained = 0, 0, None, 0, 0.0

    def tell(share: float = 0.0) -> None:
        """Report what is done, with this share of the clip at hand."""
        frames = done + int(share * len(clip))
        progress(EncodeProgress(frames, writer.offset, float(elapsed), gained / max(1, clips)))

    for clip, packets in gather_clips(items, model.config.frames, options.frames):
        if packets:
            writer.packets(packets)
        if not clip:
            continue
        pictures = [frame.yuv for frame in clip]
        pictures += pictures[-1:] * (model.config.frames - len(clip))  # the last clip is padded, and trimmed at decode
        frames = np.stack(pictures)
        tokens, moving = encode_moving(model.encoder, frames, layout, options.motion)
        if options.refine:
            tokens, before, after = refine_clip(
                model.decoder,
                frames,
                moving,
                tokens,
                options.bits,
                options.refine,
                options.refine_from,
                tell,
            )
            gained += 10 * math.log10(max(before, 1e-10) / max(after, 1e-10))
        symbols, z, s = quantize(tokens, options.bits)
        bank = encode_bank(symbols, options.bits, z, s, options.coder, model.config.hints)
        writer.clip([frame.pts for frame in clip], clip[-1].duration, bank, moving.velocities, moving.shakes)
        done, clips = done + len(clip), clips + 1
        started = clip[0].pts if started is None else started
        elapsed = (clip[-1].pts + clip[-1].duration - started) * info.time_base
        tell()
    if not done:
        raise InputError("the source has no video frames")
    writer.finish()
    tell()
    return header
