"""The exact fast evaluation of the paper's decoder (see `separable.py` for the idea).

The output projection and the first MLP layer are linear, so they fold into the values (V') once per cell; a row of ones beside
them gives the softmax's denominator:

    [num | den][h] = (Et[h] * [V' | 1][h]) [(hidden+1)*T x N]  @  (Ey[h] * Ex[h]) [N x pixels]
    hidden         = sum_h num/den + bias;   pixel = W_2 SiLU(hidden) + b_2 + 1/2

A clip's frames are stacked on the value side, so what is built per pixel serves all of them; pixels lie along the
contiguous axis, so all that is element-wise runs in order.

Shapes: N tokens, H heads, w x h pixels and T frames of a block, P = pixels of one pass, 6k the width of gamma.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coanerv_codec.axis_factors import axis_factors
from coanerv_codec.decoder import Decoder
from coanerv_codec.positions import encode_axis

# No factor is above 1, so a product that underflows is off by at most 1e-38, and down to this denominator the sum over
# all tokens is as exact as float32 allows. Below it the bounds on the logits are too loose: see `separable._retry`.
FLOOR = 1e-25
FRAMES = 8  # per pass: enough to share the per-pixel factors, and keeps the value table small
CPU_PASS = 1024  # pixels per pass: large enough for the products, small enough that the rest stays in the caches


class Cell(NamedTuple):
    """One cell's tokens, and what they fold into together with the weights."""

    tokens: Tensor  # [N,d]
    keys: Tensor  # [H,N,6k]: the logit is keys @ gamma
    values: Tensor  # [H,hidden+1,N]: V' and the row of ones
    dtype: torch.dtype  # of the matrix products


def fold(decoder: Decoder, tokens: Tensor, dtype: torch.dtype) -> Cell:
    """Fold W_Q and the scale into the keys, W_O and W_1 into the values of a cell's tokens [N,d]."""
    config = decoder.config
    heads = (config.decoder_heads, config.decoder_head_dim)
    key, value = (part[0] for part in decoder.keys_values(tokens[None]))
    keys = key @ (decoder.query.weight * decoder.scale).unflatten(0, heads)  # [H,N,6k]
    folded = (decoder.mlp[0].weight @ decoder.out.weight).unflatten(1, heads).transpose(0, 1)  # [H,hidden,d_h]
    values = folded @ value.mT  # [H,hidden,N]
    values = torch.cat([values, torch.ones_like(values[:, :1])], dim=1)
    return Cell(tokens, keys, values, dtype)


def decode_passes(decoder: Decoder, cell: Cell, x: Tensor, y: Tensor, t: Tensor, out: Tensor, rows: int) -> list[int]:
    """Decode a cell at x [w], y [h], t [T] into out [T,3,h,w], `rows` rows of pixels a pass.

    Returns the numbers of the passes whose denominators came out too small to be exact.
    """
    passes = _decode_passes_batched if x.is_cuda else _decode_passes
    largest = passes(decoder, tables_of(decoder, cell, x, y, t), out, rows)
    # NaN must fail too, hence not `largest > ...`. One look for all passes: on a GPU each look waits.
    return (~(largest <= 1 / FLOOR)).nonzero().flatten().tolist()


class Tables(NamedTuple):
    """What all pixels of a part are computed from."""

    ex: Tensor  # [H,N,w], factor of the softmax's weights
    ey: Tensor  # [H,N,h]
    et: Tensor  # [H,T,N]
    values: Tensor  # [H,(hidden+1)*T,N]: [V' | 1] times Et


def tables_of(decoder: Decoder, cell: Cell, x: Tensor, y: Tensor, t: Tensor) -> Tables:
    """Build the tables for x [w], y [h], t [T]; matrix products will be in the cell's dtype."""
    gamma = [encode_axis(u, w).T for u, w in ((x, decoder.w_s), (y, decoder.w_s), (t, decoder.w_t))]
    sizes = [len(g) for g in gamma]
    ex, ey, et = axis_factors([k @ g for k, g in zip(cell.keys.split(sizes, dim=-1), gamma, strict=True)])
    et = et.mT.contiguous().to(cell.dtype)

    bias = (decoder.mlp[0].weight @ decoder.out.bias + decoder.mlp[0].bias)[:, None]  # [hidden,1]
    values = cell.values[:, :, None] * et[:, None]  # [H,hidden+1,T,N]
    # A head's weights sum to one, so what is added to the first head's values arrives unchanged.
    values[0, :-1] += bias[..., None] * et[0]
    return Tables(ex, ey, et, values.flatten(1, 2).to(cell.dtype))


def _decode_passes(decoder: Decoder, tables: Tables, out: Tensor, rows: int) -> Tensor:
    """Decode a part into out [T,3,h,w], `rows` rows of pixels a pass; return the largest 1/den of each pass."""
    ex, ey, et, values = tables
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
            den = product[-1] if et.dtype != torch.bfloat16 else et[head].float() @ factor[head].float()
            torch.reciprocal(den, out=inverse[head])
            if head:
                total.addcmul_(product[:-1], inverse[head])
            else:
                torch.mul(product[:-1], inverse[head], out=total)
        largest.append(inverse.amax())
        z = total.view(hidden, -1)
        for layer in decoder.mlp[1:]:
            z = torch.addmm(layer.bias[:, None], layer.weight, functional.silu(z, inplace=True))
        out[:, :, row] = z.add_(0.5).view(3, frames, h, width).transpose(0, 1)
    return torch.stack(largest)


def _decode_passes_batched(decoder: Decoder, tables: Tables, out: Tensor, rows: int) -> Tensor:
    """`_decode_passes` for a GPU: all heads in one product, few launches, and memory that is not counted in caches."""
    ex, ey, et, values = tables
    frames, width = et.shape[1], ex.shape[2]
    hidden = values.shape[1] // frames - 1
    largest = []
    for top in range(0, ey.shape[2], rows):
        row = slice(top, min(top + rows, ey.shape[2]))
        factor = (ey[:, :, row, None] * ex[:, :, None, :]).flatten(2).to(et.dtype)  # [H,N,P]
        product = torch.bmm(values, factor).unflatten(1, (hidden + 1, frames))
        den = product[:, -1] if et.dtype != torch.bfloat16 else et.float() @ factor.float()
        inverse = den.reciprocal()  # [H,T,P]
        largest.append(inverse.amax())
        z = (product[:, :-1] * inverse[:, None]).sum(0)  # [hidden,T,P]
        z = z.flatten(1)
        for layer in decoder.mlp[1:]:
            z = torch.addmm(layer.bias[:, None], layer.weight, functional.silu(z))
        out[:, :, row] = z.add_(0.5).unflatten(1, (frames, -1, width)).transpose(0, 1)
    return torch.stack(largest)
