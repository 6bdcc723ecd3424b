"""The exact fast engine: the decoder's attention over a product grid, without an exponential per pixel.

The query is linear in gamma(x, y, t), and gamma is one block per axis, so a logit is a sum of one term per axis and its
exponential a product of one factor per axis:

    exp(logit[h,n](x,y,t)) = Ex[h,n,x] * Ey[h,n,y] * Et[h,n,t]

Small tables replace Q K^T and the softmax's exponentials, and what is left is one matrix product per head. How the rest of a
decoder is folded around it is in `separable_paper.py`, and in `separable_carriers.py`, whose attention is a product itself;
here a grid is cut into passes, and passes that came out inexact are done again in smaller pieces.
"""

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from coanerv_codec import separable_carriers, separable_paper
from coanerv_codec.carriers import CarrierDecoder
from coanerv_codec.model import AnyDecoder
from coanerv_codec.reference import decode_block

SMALLEST = 64  # queries; a block that fails and is no larger goes to the reference engine
SIDE = 512  # pixels along a side of a block, which bounds the tables


Cell = separable_paper.Cell | separable_carriers.Cell


def decode_separable(
    decoder: AnyDecoder,
    tokens: Tensor,
    grids: Sequence[tuple[Tensor, Tensor, Tensor]],
    tile: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Tokens [N,d] of a cell, grids of x [W], y [H], t [T] -> planes [T,3,H,W] of each grid."""
    pixels = tile * tile if tokens.is_cuda else min(tile * tile, _kernel(decoder).CPU_PASS)
    cell = _kernel(decoder).fold(decoder, tokens, dtype)
    planes = []
    for x, y, t in grids:
        out = tokens.new_empty(len(t), 3, len(y), len(x))
        for part in _split(len(x), min(pixels, SIDE), len(y), SIDE, len(t), _kernel(decoder).FRAMES):
            _decode_part(decoder, cell, x, y, t, part, out, pixels)
        planes.append(out)
    return planes


def _kernel(decoder: AnyDecoder) -> ModuleType:
    return separable_carriers if isinstance(decoder, CarrierDecoder) else separable_paper


Part = tuple[slice, slice, slice]  # of x, y, t


def _split(width: int, w: int, height: int, h: int, frames: int, f: int) -> list[Part]:
    """Cut a grid into parts of about equal size, at most w x h x f each."""

    def cuts(length: int, most: int) -> list[slice]:
        count = math.ceil(length / most)
        return [slice(i * length // count, (i + 1) * length // count) for i in range(count)]

    return [(a, b, c) for c in cuts(frames, f) for b in cuts(height, h) for a in cuts(width, w)]


def _decode_part(
    decoder: AnyDecoder,
    cell: Cell,
    x: Tensor,
    y: Tensor,
    t: Tensor,
    part: Part,
    out: Tensor,
    pixels: int,
) -> None:
    """Write one part of the grid into out [T,3,H,W], and again, more carefully, the passes that were not exact."""
    x, y, t = (u[cut] for u, cut in zip((x, y, t), part, strict=True))
    out = out[part[2], :, part[1], part[0]]
    rows = min(len(y), max(1, pixels // len(x)))
    for i in _kernel(decoder).decode_passes(decoder, cell, x, y, t, out, rows):
        cut = slice(i * rows, (i + 1) * rows)
        _retry(decoder, cell, x, y[cut], t, out[:, :, cut])


def _retry(decoder: AnyDecoder, cell: Cell, x: Tensor, y: Tensor, t: Tensor, out: Tensor) -> None:
    """Decode pixels again whose best logit lies far below the bound: smaller parts have tighter bounds."""
    w, h, frames = len(x), len(y), len(t)
    if w * h * frames <= SMALLEST:
        out.copy_(decode_block(decoder, cell.tokens, x, y, t).permute(0, 3, 1, 2))
        return
    for part in _split(w, math.ceil(w / 2), h, math.ceil(h / 2), frames, math.ceil(frames / 2)):
        _decode_part(decoder, cell, x, y, t, part, out, w * h)
