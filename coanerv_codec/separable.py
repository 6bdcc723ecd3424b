"""The exact fast engine: the decoder's attention over a product grid, without an exponential per pixel.

The query is linear in gamma(x, y, t), and gamma is one block per axis, so a logit is a sum of one term per axis and its
exponential a product of one factor per axis:

    exp(logit[h,n](x,y,t)) = Ex[h,n,x] * Ey[h,n,y] * Et[h,n,t]

Three small tables replace Q K^T and the softmax's exponentials. The output projection and the first MLP layer are
linear, so they fold into the values (V') once per cell; a row of ones beside them gives the softmax's denominator:

    [num | den][h] = (Et[h] * [V' | 1][h]) [(hidden+1)*T x N]  @  (Ey[h] * Ex[h]) [N x pixels]
    hidden         = sum_h num/den + bias;   pixel = W_2 SiLU(hidden) + b_2 + 1/2

Nearly all of the arithmetic is that one product per head. A clip's frames are stacked on the value side, so what is
built per pixel serves all of them; pixels lie along the contiguous axis, so all that is element-wise runs in order.

Shapes: N tokens, H heads, w x h pixels and T frames of a block, P = pixels of one pass, 6k the width of gamma.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coanerv_codec.model import Decoder, encode_axis
from coanerv_codec.reference import decode_block

# No factor is above 1, so a product that underflows is off by at most 1e-38, and down to this denominator the sum over
# all tokens is as exact as float32 allows. Below it the bounds on the logits are too loose: see `_retry`.
FLOOR = 1e-25
SMALLEST = 64  # queries; a block that fails and is no larger goes to the reference engine
CPU_PASS = 1024  # pixels per pass: large enough for the products, small enough that the rest stays in the caches
FRAMES = 8  # per pass: enough to share the per-pixel factors, and keeps the value table small
ROWS = 512  # of pixels per block, which bounds the tables


class Cell(NamedTuple):
    """One cell's tokens, and what they fold into together with the weights."""

    tokens: Tensor  # [N,d]
    keys: Tensor  # [H,N,6k]: the logit is keys @ gamma
    values: Tensor  # [H,hidden+1,N]: V' and the row of ones
    dtype: torch.dtype  # of the matrix products


def decode_separable(
    decoder: Decoder, tokens: Tensor, x: Tensor, y: Tensor, t: Tensor, tile: int, dtype: torch.dtype
) -> Tensor:
    """Tokens [B,N,d], x [B,W], y [B,H], t [T] -> pixels [B,T,H,W,3], a view of planes [B,T,3,H,W]."""
    pixels = tile * tile if tokens.is_cuda else min(tile * tile, CPU_PASS)
    out = tokens.new_empty(len(tokens), len(t), 3, y.shape[1], x.shape[1])
    for b, cell in enumerate(fold(decoder, tokens, dtype)):
        for part in _split(x.shape[1], pixels, y.shape[1], ROWS, len(t), FRAMES):
            _decode_part(decoder, cell, x[b], y[b], t, part, out[b], pixels)
    return out.permute(0, 1, 3, 4, 2)


def fold(decoder: Decoder, tokens: Tensor, dtype: torch.dtype) -> list[Cell]:
    """Fold W_Q and the scale into the keys, W_O and W_1 into the values: tokens [B,N,d] -> B cells."""
    config = decoder.config
    heads = (config.decoder_heads, config.decoder_head_dim)
    key, value = decoder.keys_values(tokens)
    keys = key @ (decoder.query.weight * decoder.scale).unflatten(0, heads)  # [B,H,N,6k]
    folded = (decoder.mlp[0].weight @ decoder.out.weight).unflatten(1, heads).transpose(0, 1)  # [H,hidden,d_h]
    values = folded @ value.mT  # [B,H,hidden,N]
    values = torch.cat([values, torch.ones_like(values[:, :, :1])], dim=2)
    return [Cell(*parts, dtype) for parts in zip(tokens, keys, values, strict=True)]


Part = tuple[slice, slice, slice]  # of x, y, t


def _split(width: int, w: int, height: int, h: int, frames: int, f: int) -> list[Part]:
    """Cut a grid into parts of about equal size, at most w x h x f each."""

    def cuts(length: int, most: int) -> list[slice]:
        count = math.ceil(length / most)
        return [slice(i * length // count, (i + 1) * length // count) for i in range(count)]

    return [(a, b, c) for c in cuts(frames, f) for b in cuts(height, h) for a in cuts(width, w)]


def _decode_part(
    decoder: Decoder, cell: Cell, x: Tensor, y: Tensor, t: Tensor, part: Part, out: Tensor, pixels: int
) -> None:
    """Write one part of the grid into out [T,3,H,W], and again, more carefully, the passes that were not exact."""
    x, y, t = (u[cut] for u, cut in zip((x, y, t), part, strict=True))
    out = out[part[2], :, part[1], part[0]]
    rows = min(len(y), max(1, pixels // len(x)))
    passes = _decode_passes_batched if x.is_cuda else _decode_passes
    largest = passes(decoder, _tables(decoder, cell, x, y, t), out, rows)
    # NaN must fail too, hence not `largest > ...`. One look for all passes: on a GPU each look waits.
    for i in (~(largest <= 1 / FLOOR)).nonzero().flatten().tolist():
        _retry(decoder, cell, x, y[i * rows : (i + 1) * rows], t, out[:, :, i * rows : (i + 1) * rows])


def _retry(decoder: Decoder, cell: Cell, x: Tensor, y: Tensor, t: Tensor, out: Tensor) -> None:
    """Decode pixels again whose best logit lies far below the bound: smaller parts have tighter bounds."""
    w, h, frames = len(x), len(y), len(t)
    if w * h * frames <= SMALLEST:
        out.copy_(decode_block(decoder, cell.tokens, x, y, t).permute(0, 3, 1, 2))
        return
    for part in _split(w, math.ceil(w / 2), h, math.ceil(h / 2), frames, math.ceil(frames / 2)):
        _decode_part(decoder, cell, x, y, t, part, out, w * h)


class Tables(NamedTuple):
    """What all pixels of a part are computed from."""

    ex: Tensor  # [H,N,w], factor of the softmax's weights
    ey: Tensor  # [H,N,h]
    et: Tensor  # [H,T,N]
    values: Tensor  # [H,(hidden+1)*T,N]: [V' | 1] times Et
    shift: tuple[Tensor, Tensor] | None  # with gamma_skip [hidden,w] and [hidden,h], whose sum is added to hidden


def _tables(decoder: Decoder, cell: Cell, x: Tensor, y: Tensor, t: Tensor) -> Tables:
    """Build the tables for x [w], y [h], t [T]; matrix products will be in the cell's dtype."""
    gamma = [encode_axis(u, w).T for u, w in ((x, decoder.w_s), (y, decoder.w_s), (t, decoder.w_t))]
    sizes = [len(g) for g in gamma]
    ex, ey, et = _factors([k @ g for k, g in zip(cell.keys.split(sizes, dim=-1), gamma, strict=True)])
    et = et.mT.contiguous().to(cell.dtype)

    bias = (decoder.mlp[0].weight @ decoder.out.bias + decoder.mlp[0].bias)[:, None]  # [hidden,1 or T]
    shift = None
    if decoder.skip is not None:
        skip = decoder.skip.weight.split(sizes, dim=-1)
        shift_x, shift_y, shift_t = (w @ g for w, g in zip(skip, gamma, strict=True))
        shift, bias = (shift_x, shift_y), bias + shift_t
    values = cell.values[:, :, None] * et[:, None]  # [H,hidden+1,T,N]
    # A head's weights sum to one, so what is added to the first head's values arrives unchanged.
    values[0, :-1] += bias[..., None] * et[0]
    return Tables(ex, ey, et, values.flatten(1, 2).to(cell.dtype), shift)


def _decode_passes(decoder: Decoder, tables: Tables, out: Tensor, rows: int) -> Tensor:
    """Decode a part into out [T,3,h,w], `rows` rows of pixels a pass; return the largest 1/den of each pass."""
    ex, ey, et, values, shift = tables
    (heads, frames, n), width = et.shape, ex.shape[2]
    hidden = values.shape[1] // frames - 1
    # One pass's memory, used by all of them: fresh memory would cost more than some of the arithmetic.
    factors, products = (et.new_empty(size * rows * width) for size in (heads * n, (hidden + 1) * frames))
    totals, inverses = (out.new_empty(size * rows * width) for size in (hidden * frames, heads * frames))
    largest = []
    for top in range(0, ey.shape[2], rows):
        row = slice(top, min(top + rows, ey.shape[2]))
        h = row.stop - row.start
        p = h * width
        factor = factors[: heads * n * p].view(heads, n, p)
        product = products[: (hidden + 1) * frames * p].view(hidden + 1, frames, p)
        total = totals[: hidden * frames * p].view(hidden, frames, p)
        inverse = inverses[: heads * frames * p].view(heads, frames, p)
        torch.mul(ey[:, :, row, None], ex[:, :, None, :], out=factor.view(heads, n, h, width))
        for head in range(heads):
            torch.mm(values[head], factor[head], out=product.view(-1, p))
            # bf16 does for the numerators, but what divides them is summed in fp32, from the same rounded factors.
            den = product[-1] if et.dtype == torch.float32 else et[head].float() @ factor[head].float()
            torch.reciprocal(den, out=inverse[head])
            if head:
                total.addcmul_(product[:-1], inverse[head])
            elif shift is None:
                torch.mul(product[:-1], inverse[head], out=total)
            else:
                plane = (shift[1][:, row, None] + shift[0][:, None, :]).view(hidden, 1, p)
                torch.addcmul(plane, product[:-1], inverse[head], out=total)
        largest.append(inverse.amax())
        z = total.view(hidden, -1)
        for layer in decoder.mlp[1:]:
            z = torch.addmm(layer.bias[:, None], layer.weight, functional.silu(z, inplace=True))
        out[:, :, row] = z.add_(0.5).view(3, frames, h, width).transpose(0, 1)
    return torch.stack(largest)


def _decode_passes_batched(decoder: Decoder, tables: Tables, out: Tensor, rows: int) -> Tensor:
    """`_decode_passes` for a GPU: all heads in one product, few launches, and memory that is not counted in caches."""
    ex, ey, et, values, shift = tables
    frames, width = et.shape[1], ex.shape[2]
    hidden = values.shape[1] // frames - 1
    largest = []
    for top in range(0, ey.shape[2], rows):
        row = slice(top, min(top + rows, ey.shape[2]))
        factor = (ey[:, :, row, None] * ex[:, :, None, :]).flatten(2).to(et.dtype)  # [H,N,P]
        product = torch.bmm(values, factor).unflatten(1, (hidden + 1, frames))
        den = product[:, -1] if et.dtype == torch.float32 else et.float() @ factor.float()
        inverse = den.reciprocal()  # [H,T,P]
        largest.append(inverse.amax())
        z = (product[:, :-1] * inverse[:, None]).sum(0)  # [hidden,T,P]
        if shift is not None:
            z += (shift[1][:, row, None] + shift[0][:, None, :]).flatten(1)[:, None]
        z = z.flatten(1)
        for layer in decoder.mlp[1:]:
            z = torch.addmm(layer.bias[:, None], layer.weight, functional.silu(z))
        out[:, :, row] = z.add_(0.5).unflatten(1, (frames, -1, width)).transpose(0, 1)
    return torch.stack(largest)


def _factors(logits: list[Tensor]) -> list[Tensor]:
    """Logits per axis [H,N,w], [H,N,h], [H,N,T] -> their exponentials, scaled so that no factor is above one.

    The scale is one per head, so it cancels in num/den. Each factor is relative to its token's maximum along the axis;
    what that took from a token, relative to the token that lost least, goes into the last factor.
    """
    tops = [a.amax(-1, keepdim=True) for a in logits]
    ex, ey, et = (torch.exp(a - top) for a, top in zip(logits, tops, strict=True))
    bound = sum(tops)  # [H,N,1], no logit of a token is above it
    return [ex, ey, et * torch.exp(bound - bound.amax(1, keepdim=True))]
