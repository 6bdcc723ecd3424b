"""Decoding a clip: symbols -> tokens -> coordinate queries cell by cell -> blended frames.

What is asked is a `View`, positions along x and y, and moments t in the clip: 0 is its first frame, 1 would be the frame after
its last. A whole picture, a crop, another size or frame rate are asked alike, and cost in proportion to their pixels.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coanerv_codec.bank import decode_bank
from coanerv_codec.cells import Axis, Layout, fixed_layout
from coanerv_codec.checkpoint import Checkpoint
from coanerv_codec.container import DEFAULT_LIMITS
from coanerv_codec.engine import decode_grids
from coanerv_codec.errors import CheckpointError, CoanervError, FormatError
from coanerv_codec.model import AnyDecoder
from coanerv_codec.quantizer import dequantize
from coanerv_codec.records import ClipRecord, Header, Limits


@dataclass(frozen=True)
class EngineOptions:
    """How pixels are computed; docs/format.md says how little that changes a picture."""

    engine: str = "separable"
    tile: int = 64
    precision: str = "fp32"


@dataclass(frozen=True, eq=False)
class View:
    """Where the picture is asked: positions in source pixels, x [W'] and y [H'], increasing, any real numbers."""

    x: np.ndarray
    y: np.ndarray


def make_view(
    width: int,
    height: int,
    size: tuple[int, int] | None = None,
    crop: tuple[int, int, int, int] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> View:
    """Return the view of a crop (left, top, width, height) of a picture, at a size (width, height)."""
    left, top, crop_width, crop_height = crop or (0, 0, width, height)
    inside = left >= 0 and top >= 0 and left + crop_width <= width and top + crop_height <= height
    if not inside or crop_width < 1 or crop_height < 1:
        raise CoanervError(
            f"the crop {left},{top},{crop_width},{crop_height} is not inside the {width}x{height} picture"
        )
    out_width, out_height = size or (crop_width, crop_height)
    if max(out_width, out_height) > limits.side or out_width * out_height > limits.pixels:
        raise CoanervError(
            f"{out_width}x{out_height} is too large: a picture has at most {limits.side} pixels along a side (limit side) and "
            f"{limits.pixels} in all (limit pixels)"
        )
    return View(_positions(left, crop_width, out_width), _positions(top, crop_height, out_height))


def _positions(first: int, length: int, count: int) -> np.ndarray:
    """Centres of `count` equal parts of the pixels first .. first + length - 1 (the pixels themselves at native size)."""
    return first + (np.arange(count) + 0.5) * length / count - 0.5


def layout_of(header: Header, clip: ClipRecord | None = None) -> Layout:
    """Return the cells of a file's pictures, as they move in a clip."""
    try:
        layout = fixed_layout(header.width, header.height, header.columns, header.rows, header.overlap)
        return replace(layout, velocities=clip.velocities, shakes=clip.shakes) if clip else layout
    except ValueError as error:
        raise FormatError(f"the header's cells do not fit its picture: {error}") from error


def check_checkpoint(header: Header, checkpoint: Checkpoint) -> None:
    """Refuse a decoder other than the one the file was made for: the picture would be noise."""
    config = checkpoint.model.config
    if header.checkpoint_sha256 != checkpoint.decoder_sha256:
        raise CheckpointError(
            f"the file needs checkpoint {header.checkpoint!r} (decoder {header.checkpoint_sha256.hex()[:16]}), but "
            f"{checkpoint.name!r} has decoder {checkpoint.decoder_sha256.hex()[:16]}; give the right one with --checkpoint"
        )
    named = (header.frames_per_clip, header.tokens, header.token_dim, header.cell_size)
    if named != (config.frames, config.tokens, config.token_dim, config.cell):
        raise FormatError("the header's token geometry is not that of the checkpoint it names; the file is damaged")


def clip_tokens(clip: ClipRecord, header: Header) -> np.ndarray:
    """Return a clip's tokens [cells,N,d] float32: the same on every machine."""
    symbols, _, z, s = decode_bank(clip.bank, header.bank_shape)
    return dequantize(symbols, z, s)


@dataclass(frozen=True, eq=False)
class Share:
    """The part of a view that one cell takes part in: indices first .. first + len - 1 along an axis."""

    cell: int
    first: int
    positions: np.ndarray
    weights: np.ndarray


def _shares(axis: Axis, positions: np.ndarray) -> list[Share]:
    """Return the shares of the positions along an axis, cell by cell, without cells that the view does not touch."""
    shares = []
    for i in range(axis.count):
        weights = axis.weights(i, positions)
        touched = np.flatnonzero(weights)
        if len(touched):
            first, last = int(touched[0]), int(touched[-1]) + 1
            shares.append(Share(i, first, positions[first:last], weights[first:last]))
    return shares


def decode_cells(
    decoder: AnyDecoder, tokens: np.ndarray, layout: Layout, view: View, t: np.ndarray, options: EngineOptions
) -> Iterator[Tensor]:
    """Tokens [cells,N,d], moments t [T] -> the pixels [T,3,h,w] of each cell that the view touches, row by row.

    On a CPU each thread decodes cells of its own, where there are enough of them: threads that share an operation wait for each
    other after it, and for long where other programs want the cores, too.
    """
    device = decoder.base.device

    def decode(y: Share, x: Share) -> Tensor:
        number = y.cell * layout.x.count + x.cell
        parts = _together(layout, number, decoder.config.frames, x, y, t)
        grids = [tuple(torch.from_numpy(u).to(device) for u in (p.x, p.y, t[p.moments])) for p in parts]
        cell = torch.from_numpy(tokens[number]).to(device)
        planes = decode_grids(decoder, cell, grids, **asdict(options))
        if len(parts) == 1 and len(parts[0].x) == len(x.positions) and len(parts[0].y) == len(y.positions):
            return planes[0]
        pixels = planes[0].new_empty(len(t), 3, len(y.positions), len(x.positions))
        for part, plane in zip(parts, planes, strict=True):
            for moment, left, top, frame in zip(part.moments, part.left, part.top, plane, strict=True):
                pixels[moment] = frame[:, top : top + len(y.positions), left : left + len(x.positions)]
        return pixels

    cells = list(product(_shares(layout.y, view.y), _shares(layout.x, view.x)))
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or 2 * len(cells) <= threads:
        yield from (decode(*cell) for cell in cells)
        return
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        ahead: deque[Future[Tensor]] = deque()
        for cell in cells:
            ahead.append(pool.submit(decode, *cell))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class Part(NamedTuple):
    """Moments at which a cell is asked on one grid: coordinates x and y, and where each moment's pixels begin in it."""

    moments: list[int]
    x: np.ndarray
    y: np.ndarray
    left: list[int]
    top: list[int]


def _together(layout: Layout, number: int, frames: int, x: Share, y: Share, t: np.ndarray) -> list[Part]:
    """Return the grids on which a cell is asked: one if it stands still, else one for moments that differ by whole pixels.

    The decoder retrieves once for all moments of a grid, so a few moments on a slightly larger one are cheaper than each alone.
    """
    axes, shares, reaches = (layout.x, layout.y), (x, y), layout.reach(number, frames)
    shifts = layout.path(number, t * np.float64(frames), frames)  # [T,2], pixels
    groups: dict[tuple[int, ...], list[int]] = {}
    at_once = not layout.moves(number)
    lattice = all((np.diff(share.positions) == 1).all() for share in shares)
    for moment, shift in enumerate(shifts):
        phase = (moment,)
        if lattice or at_once:
            # Not those that are far apart, so that a grid is never much larger than what is asked.
            far = (shift - shifts.min(0)) // [max(len(share.positions) // 4, 8) for share in shares]
            phase = (*np.rint(shift * 1024).astype(int) % 1024, *far)
        groups.setdefault(phase, []).append(moment)
    parts = []
    for moments in groups.values():
        steps = np.rint(shifts[moments] - shifts[moments[0]]).astype(int)  # [moments,2]
        most = steps.max(0)
        starts = most - steps
        grid = []
        for axis, share, shift, extra, furthest, distance in zip(
            axes, shares, shifts[moments[0]], starts.max(0), most, reaches, strict=True
        ):
            positions = share.positions - shift - furthest
            positions = np.concatenate([positions, positions[-1] + 1 + np.arange(extra)])
            grid.append(axis.coordinates(share.cell, positions, distance))
        parts.append(Part(moments, *grid, *starts.T.tolist()))
    return parts


STRIP_BYTES = 2**27  # of floating point that a row of cells may take


def decode_clip(
    decoder: AnyDecoder,
    tokens: np.ndarray,
    layout: Layout,
    view: View,
    t: np.ndarray,
    options: EngineOptions = EngineOptions(),
) -> np.ndarray:
    """Tokens [cells,N,d] of a clip, moments t [T] (0 is the first frame, (F - 1) / F the last) -> frames [T,3,H',W'] uint8.

    Works through rows of cells; besides the frames only one such row is in memory as floating point. Where cells are so
    large that this is too much (`--fit` at 4K), the picture is decoded in parts.
    """
    cuda = decoder.base.device.type == "cuda"
    out = torch.empty(len(t), 3, len(view.y), len(view.x), dtype=torch.uint8, pin_memory=cuda)
    _decode_view(decoder, tokens, layout, view, np.asarray(t, np.float32), options, out)
    if cuda:  # the frames travel through pinned memory while the next are computed
        torch.cuda.synchronize()
    return out.numpy()


def _decode_view(
    decoder: AnyDecoder,
    tokens: np.ndarray,
    layout: Layout,
    view: View,
    t: np.ndarray,
    options: EngineOptions,
    out: Tensor,
) -> None:
    """Decode a view into out [T,3,H',W'] uint8."""
    columns, rows = _shares(layout.x, view.x), _shares(layout.y, view.y)
    height = max(len(row.weights) for row in rows)
    if height > 1 and 12 * len(t) * height * len(view.x) > STRIP_BYTES:
        half = len(view.y) // 2
        for part in (slice(None, half), slice(half, None)):
            _decode_view(decoder, tokens, layout, View(view.x, view.y[part]), t, options, out[:, :, part])
        return
    device = decoder.base.device
    strip, done = torch.empty(len(t), 3, 0, len(view.x), device=device), 0  # what is finished down to row `done`
    ends = [row.first for row in rows[1:]] + [len(view.y)]
    decoded = decode_cells(decoder, tokens, layout, view, t, options)
    for y, end in zip(rows, ends, strict=True):
        # What a row of cells shares with the one above is in both; 0.5 is for rounding.
        new = torch.full((len(t), 3, len(y.weights) - strip.shape[2], len(view.x)), 0.5, device=device)
        strip = torch.cat([strip, new], dim=2)
        for x, part in zip(columns, decoded, strict=False):
            weights = torch.from_numpy(255 * y.weights[:, None] * x.weights).to(device)
            strip[..., x.first : x.first + len(x.weights)].addcmul_(part, weights)
        out[:, :, done:end].copy_(strip[:, :, : end - done].clamp_(0, 255), non_blocking=True)
        strip, done = strip[:, :, end - done :], end


@torch.inference_mode()
def query_points(
    decoder: AnyDecoder, tokens: np.ndarray, layout: Layout, x: np.ndarray, y: np.ndarray, t: np.ndarray
) -> np.ndarray:
    """Evaluate single points of a clip: x, y in source pixels and t as in `decode_clip`, each [Q] -> YUV [Q,3] float32."""
    device = decoder.base.device
    out = np.zeros((len(x), 3), np.float32)
    frames = decoder.config.frames
    for row in range(layout.y.count):
        down = layout.y.weights(row, y)
        for column in range(layout.x.count):
            weights = down * layout.x.weights(column, x)
            here = np.flatnonzero(weights)
            if len(here):
                number = row * layout.x.count + column
                along_x, along_y = layout.reach(number, frames)
                moved_x, moved_y = layout.path(number, t[here] * np.float64(frames), frames).T
                q = [
                    layout.x.coordinates(column, x[here] - moved_x, along_x),
                    layout.y.coordinates(row, y[here] - moved_y, along_y),
                    t[here].astype(np.float32),
                ]
                cell = torch.from_numpy(tokens[number]).to(device)
                pixels = decoder(cell[None], torch.from_numpy(np.stack(q, axis=-1)).to(device))[0].cpu().numpy()
                out[here] += weights[here, None] * pixels
    return out
