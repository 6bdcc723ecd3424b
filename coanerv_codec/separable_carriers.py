"""The exact fast evaluation of the carrier decoder (see `separable.py` for the idea).

Attention does not depend on time, so retrieval serves all frames of a clip, and since the denominators of all pixels are one
small product of the tables, they can go into the weights: all heads' tokens are summed in one product. Carriers of the same
harmonic in time share their factor in time, so the painting layers, too, are applied once for all frames, harmonic by
harmonic. And windows are narrow: a pass of a few rows sums only the tokens that can matter to it (`needed_tokens`).

    den[h]    = Ey[h]^T Ex[h]                                                               [h x w]
    m         = [V_1 .. V_H] [C x HN]  @  (Ey * Ex / den) [HN x pixels]  * wave_y * wave_x  [C x pixels]
    g_j       = [W_1; W] restricted to the carriers with harmonic j in t  @  m              [(hidden+3) x pixels]
    pixel(t)  = MLP's later layers of sum_j wave_t(j, t) g_j, plus the linear part of the sum

Shapes: N tokens, H heads, C carriers, J harmonics in t, w x h pixels and T frames of a block, P = pixels of one pass.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coanerv_codec.axis_factors import axis_factors
from coanerv_codec.carriers import CarrierDecoder
from coanerv_codec.positions import encode_axis

# Factors below this become zero: a product of two others is a normal number (denormal ones cost a hundred times more).
TINY = 1.1e-19
# So down to this denominator what is lost, at most N * TINY, is below float32's rounding of the sum.
FLOOR = 1e-10
STEEPEST = 1.1  # slope of SiLU, rounded up
CPU_PASS = 4096  # pixels per pass: large enough for the products, small enough that the rest stays in the caches


class Cell(NamedTuple):
    """One cell's tokens, and what they fold into together with the weights. Carriers are sorted by their harmonic in t."""

    tokens: Tensor  # [N,d]
    keys: Tensor  # [H,N,4k_s], double: the logit is keys @ gamma
    values: Tensor  # [C,HN]
    order: Tensor  # [C], carriers as sorted
    counts: list[int]  # of carriers per harmonic, the first of which is 0
    dtype: torch.dtype  # of the product with the tokens


def fold(decoder: CarrierDecoder, tokens: Tensor, dtype: torch.dtype) -> Cell:
    """Fold W_Q and the scale into the keys of a cell's tokens [N,d]."""
    key, value = (part[0] for part in decoder.keys_values(tokens[None]))
    # Logits of narrow windows are large numbers that nearly cancel: in double precision up to their exponential.
    query = (decoder.query.weight.double() * decoder.scale).unflatten(0, (decoder.config.decoder_heads, -1))
    keys = key.double() @ query  # [H,N,4k_s]
    harmonics = decoder.harmonics[:, 2].abs()
    order = harmonics.argsort(stable=True)
    # The factor of harmonic 0 is one, so it takes the biases: it is there even if no carrier has it.
    counts = torch.cat([harmonics.new_zeros(1), harmonics]).unique(return_counts=True)[1].tolist()
    counts[0] -= 1
    values = value.flatten(0, 1).T[order].contiguous()  # [C,HN]
    return Cell(tokens, keys, values, order, counts, dtype)


def decode_passes(
    decoder: CarrierDecoder, cell: Cell, x: Tensor, y: Tensor, t: Tensor, out: Tensor, rows: int, max_error: float
) -> Tensor:
    """Decode a cell at x [w], y [h], t [T] into out [T,3,h,w], `rows` rows of pixels a pass; largest 1/den of each pass."""
    tables, painter = tables_of(decoder, cell, x, y), painter_of(decoder, cell, t)
    if x.is_cuda:
        _decode_passes_batched(tables, painter, out, rows)
    else:
        needed = needed_tokens(decoder, cell, tables, rows, max_error) if max_error else None
        _decode_passes(tables, painter, out, rows, needed)
    return _by_pass(tables.inverse.amax(2), rows).amax(0)


def _by_pass(rows_of: Tensor, rows: int) -> Tensor:
    """Return the largest value in each pass: [...,h], not negative -> [...,passes]."""
    return functional.pad(rows_of, (0, -rows_of.shape[-1] % rows)).unflatten(-1, (-1, rows)).amax(-1)


class Tables(NamedTuple):
    """What the carriers' amplitudes in a part are computed from."""

    ex: Tensor  # [H,N,w], factor of the softmax's weights
    ey: Tensor  # [H,N,h]
    inverse: Tensor  # [H,h,w], 1/den
    values: Tensor  # [C,HN], in the dtype of the product
    wave_x: Tensor  # [C,w]
    wave_y: Tensor  # [C,h]


def tables_of(decoder: CarrierDecoder, cell: Cell, x: Tensor, y: Tensor) -> Tables:
    """Build the tables for x [w], y [h]."""
    gamma = [encode_axis(u.double(), decoder.w_s).T for u in (x, y)]
    factors = axis_factors([k @ g for k, g in zip(cell.keys.chunk(2, dim=-1), gamma, strict=True)])
    ex, ey = (functional.threshold(f.to(cell.values.dtype), TINY, 0.0) for f in factors)
    inverse = (ey.mT @ ex).reciprocal_()
    wave_x, wave_y = (decoder.wave(axis, u)[:, cell.order].T.contiguous() for axis, u in enumerate((x, y)))
    return Tables(ex, ey, inverse, cell.values.to(cell.dtype), wave_x, wave_y)


class Painter(NamedTuple):
    """The layers that paint, split by the carriers' harmonics in time."""

    first: list[Tensor]  # per harmonic [hidden+3,C_j]: the MLP's first layer, below it the linear one
    bias: Tensor  # [hidden+3,1]
    wave_t: Tensor  # [T,J]
    layers: list[tuple[Tensor, Tensor | None]]  # the MLP's later ones; the bias of the last is in `bias`


def painter_of(decoder: CarrierDecoder, cell: Cell, t: Tensor) -> Painter:
    """Prepare the layers for the times t [T]."""
    linear, mlp = decoder.linear, decoder.mlp
    first = torch.cat([mlp[0].weight, linear.weight])[:, cell.order].split(cell.counts, dim=1)
    bias = torch.cat([mlp[0].bias, linear.bias + mlp[-1].bias + 0.5])[:, None]
    starts = list(accumulate(cell.counts[:-1]))
    wave_t = torch.cat([torch.ones_like(t)[:, None], decoder.wave(2, t)[:, cell.order[starts]]], dim=1)
    layers = [(layer.weight, layer.bias[:, None]) for layer in mlp[1:-1]] + [(mlp[-1].weight, None)]
    return Painter([w.contiguous() for w in first], bias, wave_t, layers)


# --- which tokens a pass needs --------------------------------------------------------------------------------------


def painter_gain(decoder: CarrierDecoder) -> Tensor:
    """Return how far a pixel moves at most, in any channel, when an amplitude moves by one: [C,3]."""
    gain = decoder.mlp[0].weight.abs()
    for layer in decoder.mlp[1:]:
        gain = layer.weight.abs() @ gain * STEEPEST
    return (gain + decoder.linear.weight.abs()).T


def needed_tokens(decoder: CarrierDecoder, cell: Cell, tables: Tables, rows: int, max_error: float) -> Tensor:
    """Return which tokens each pass must sum, bool [passes,H,N]: the others change no pixel by more than max_error in all.

    The largest weight of a token in a pass is at most the product of its largest factors and of the largest 1/den, which
    includes all tokens. A carrier's waves are within one, so its amplitude moves by that weight times the value, and the
    pixel by the painter's gain times that.
    """
    weight = tables.ex.amax(2, keepdim=True) * _by_pass(tables.ey, rows)  # [H,N,passes]
    weight *= _by_pass(tables.inverse.amax(2), rows)[:, None]
    gain = painter_gain(decoder)[cell.order].T @ cell.values.abs()  # [3,HN]
    bound = weight * gain.amax(0).view(*weight.shape[:2], 1)
    bound, token = bound.flatten(0, 1).T.sort(1)  # [passes,HN]
    # NaN, where a denominator is zero, must not drop anything.
    needed = ~(bound.cumsum(1) <= max_error)
    return torch.zeros_like(needed).scatter_(1, token, needed).unflatten(1, tables.ex.shape[:2])


# --- the passes -----------------------------------------------------------------------------------------------------


def _decode_passes(tables: Tables, painter: Painter, out: Tensor, rows: int, needed: Tensor | None) -> None:
    """Decode a part into out [T,3,h,w], `rows` rows of pixels a pass, from the tokens that are needed (None: all)."""
    ex, ey, inverse, values, wave_x, wave_y = tables
    (heads, n, width), frames, carriers = ex.shape, len(out), len(values)
    ex, ey = ex.flatten(0, 1), ey.flatten(0, 1)
    counts = None if needed is None else needed.sum(2).tolist()  # of tokens per pass and head
    most = heads * n if counts is None else max(map(sum, counts))
    # One pass's memory, used by all of them: fresh memory would cost more than some of the arithmetic.
    sizes = (most, carriers, painter.wave_t.shape[1] * len(painter.bias), frames * len(painter.bias))
    factors, *buffers = (out.new_empty(size, rows * width) for size in sizes)
    for i, top in enumerate(range(0, ey.shape[1], rows)):
        row = slice(top, min(top + rows, ey.shape[1]))
        h = row.stop - row.start
        x, y, v, count = ex, ey[:, row], values, [n] * heads
        if needed is not None:
            index = needed[i].flatten().nonzero().flatten()
            x, y, v, count = x[index], y[index], v[:, index], counts[i]
        factor = factors.flatten()[: len(x) * h * width].view(len(x), h, width)
        torch.mul(y[:, :, None], x[:, None], out=factor)
        for part, scale in zip(factor.split(count), inverse[:, row], strict=True):
            part *= scale
        m, g, z = (b.flatten()[: len(b) * h * width].view(len(b), -1) for b in buffers)
        if v.dtype == factor.dtype:
            torch.mm(v, factor.flatten(1), out=m)
        else:
            m.copy_(v @ factor.flatten(1).to(v.dtype))
        waves = m.view(carriers, h, width)
        waves *= wave_y[:, row, None]
        waves *= wave_x[:, None]
        out[:, :, row] = _paint(painter, m, g, z).view(frames, 3, h, width)


def _paint(painter: Painter, m: Tensor, g: Tensor, z: Tensor) -> Tensor:
    """Carriers m [C,P] -> pixels [T,3,P]; g [J*(hidden+3),P] and z [T*(hidden+3),P] are memory to work in."""
    frames, sums = painter.wave_t.shape
    start = 0
    for first, total in zip(painter.first, g.chunk(sums), strict=True):
        part = m[start : start + first.shape[1]]
        if start:
            torch.mm(first, part, out=total)
        else:
            torch.addmm(painter.bias, first, part, out=total)
        start += first.shape[1]
    torch.mm(painter.wave_t, g.view(sums, -1), out=z.view(frames, -1))
    z = z.view(frames, -1, z.shape[1])
    hidden, pixels = z[:, :-3], z[:, -3:]
    for weight, bias in painter.layers:
        functional.silu(hidden, inplace=True)
        hidden = torch.baddbmm(pixels if bias is None else bias, weight.expand(frames, -1, -1), hidden)
    return hidden


def _decode_passes_batched(tables: Tables, painter: Painter, out: Tensor, rows: int) -> None:
    """`_decode_passes` for a GPU: all tokens, as choosing would make it wait, and fresh memory, which is cheap there."""
    ex, ey, inverse, values, wave_x, wave_y = tables
    frames, wide = len(out), painter.wave_t.shape[1] * len(painter.bias)
    for top in range(0, ey.shape[2], rows):
        row = slice(top, min(top + rows, ey.shape[2]))
        factor = (ey[:, :, row, None] * (ex[:, :, None] * inverse[:, None, row])).to(values.dtype)
        m = (values @ factor.flatten(0, 1).flatten(1)).float().unflatten(1, factor.shape[2:])
        m = (m * (wave_y[:, row, None] * wave_x[:, None])).flatten(1)
        g, z = (m.new_empty(size, m.shape[1]) for size in (wide, frames * len(painter.bias)))
        out[:, :, row] = _paint(painter, m, g, z).unflatten(2, factor.shape[2:])
