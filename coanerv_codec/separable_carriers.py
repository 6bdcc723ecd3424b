"""The exact fast evaluation of the carrier decoder (see `separable.py` for the idea).

Its attention does not depend on time, so retrieval costs one product per head for all frames together; time enters with the
last factor of the carriers, which is folded into the layers that paint:

    [num | den][h] = [V | 1][h] [(C+1) x N]  @  (Ey[h] * Ex[h]) [N x pixels]
    m              = (sum_h num/den) * wave_y * wave_x                                       [C x pixels]
    pixel(t)       = W diag(wave_t) m + MLP(diag(wave_t) m) + 1/2                            all t in one product each

Shapes: N tokens, H heads, C carriers, w x h pixels and T frames of a block, P = pixels of one pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coanerv_codec.axis_factors import axis_factors
from coanerv_codec.carriers import CarrierDecoder
from coanerv_codec.positions import encode_axis


class Cell(NamedTuple):
    """One cell's tokens, and what they fold into together with the weights."""

    tokens: Tensor  # [N,d]
    keys: Tensor  # [H,N,4k_s]: the logit is keys @ gamma
    values: Tensor  # [H,C+1,N]: the values and the row of ones
    dtype: torch.dtype  # of the matrix products


def fold(decoder: CarrierDecoder, tokens: Tensor, dtype: torch.dtype) -> list[Cell]:
    """Fold W_Q and the scale into the keys: tokens [B,N,d] -> B cells."""
    key, value = decoder.keys_values(tokens)
    keys = key @ (decoder.query.weight * decoder.scale).unflatten(0, (decoder.config.decoder_heads, -1))  # [B,H,N,4k_s]
    values = torch.cat([value.mT, torch.ones_like(value.mT[:, :, :1])], dim=2)
    return [Cell(*parts, dtype) for parts in zip(tokens, keys, values, strict=True)]


def decode_passes(
    decoder: CarrierDecoder, cell: Cell, x: Tensor, y: Tensor, t: Tensor, out: Tensor, rows: int
) -> Tensor:
    """Decode a cell at x [w], y [h], t [T] into out [T,3,h,w], `rows` rows of pixels a pass; largest 1/den of each pass."""
    gamma = [encode_axis(u, decoder.w_s).T for u in (x, y)]
    ex, ey = axis_factors([k @ g for k, g in zip(cell.keys.chunk(2, dim=-1), gamma, strict=True)])
    ex, values = ex.to(cell.dtype), cell.values.to(cell.dtype)
    wave_x, wave_y, wave_t = (decoder.wave(axis, u).T for axis, u in enumerate((x, y, t)))
    # Time's factor goes into the layers' matrices: [T*3,C] and [T*hidden,C].
    linear, first = (
        (layer.weight[None] * wave_t.T[:, None]).flatten(0, 1) for layer in (decoder.linear, decoder.mlp[0])
    )
    largest = []
    for top in range(0, len(y), rows):
        row = slice(top, min(top + rows, len(y)))
        factor = (ey[:, :, row, None].to(cell.dtype) * ex[:, :, None, :]).flatten(2)  # [H,N,P]
        product = torch.bmm(values, factor)  # [H,C+1,P]
        den = product[:, -1:] if cell.dtype == torch.float32 else factor.float().sum(1, keepdim=True)
        inverse = den.reciprocal()
        largest.append(inverse.amax())
        m = (product[:, :-1] * inverse).sum(0)  # [C,P]
        m *= (wave_y[:, row, None] * wave_x[:, None, :]).flatten(1)
        h = first @ m
        h = h.view(len(t), -1, h.shape[1]) + decoder.mlp[0].bias[:, None]  # [T,hidden,P]
        for layer in decoder.mlp[1:]:
            h = layer.weight @ functional.silu(h, inplace=True) + layer.bias[:, None]
        pixels = h + (linear @ m).view_as(h) + (decoder.linear.bias[:, None] + 0.5)
        out[:, :, row] = pixels.unflatten(2, (-1, len(x)))
    return torch.stack(largest)
