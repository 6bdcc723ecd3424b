"""The exact fast evaluation of the carrier decoder.

Attention is a product of one along x and one along y, and so is each carrier's wave, so on a grid the sum over all tokens is
done along x once for the whole grid, and then along y, where a pass of a few rows of pixels needs only the few rows of tokens
whose windows reach it. It does not depend on time, so it serves all frames of a clip. Carriers of the same harmonic in time
share their factor in time, so the painting layers, too, are applied once for all frames, harmonic by harmonic.

    s_c[hj,x] = wave_x(c,x) sum_i a_h(i,x) v_c[h,j,i]                                        [C x HJ x w]
    m_c[y,x]  = sum_hj wave_y(c,y) a_h(j,y) s_c[hj,x]                                        [C x pixels]
    g_k       = [W_1; W] restricted to the carriers with harmonic k in t  @  m               [(hidden+3) x pixels]
    pixel(t)  = MLP's later layers of sum_k wave_t(k, t) g_k, plus the linear part of the sum

Shapes: H heads, I columns and J rows of tokens, C carriers, K harmonics in t, w x h pixels and T frames of a block.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coanerv_codec.carriers import CarrierDecoder

# Attention below this becomes zero: the weights of a pixel add up to one, so it is lost in float32's rounding of the sum.
TINY = 1e-12
CPU_PASS = 2048  # pixels per pass: large enough for the products, small enough that the rest stays in the caches


class Cell(NamedTuple):
    """What a cell's tokens say of the carriers, which are sorted by their harmonic in t."""

    values: Tensor  # [H,C,J,I]
    order: Tensor  # [C], carriers as sorted
    counts: list[int]  # of carriers per harmonic, the first of which is 0
    dtype: torch.dtype  # of the products over tokens


def fold(decoder: CarrierDecoder, tokens: Tensor, dtype: torch.dtype) -> Cell:
    """Read the values of a cell's tokens [N,d]."""
    harmonics = decoder.harmonics[:, 2].abs()
    order = harmonics.argsort(stable=True)
    # The factor of harmonic 0 is one, so it takes the biases: it is there even if no carrier has it.
    counts = torch.cat([harmonics.new_zeros(1), harmonics]).unique(return_counts=True)[1].tolist()
    counts[0] -= 1
    gx, gy, _ = decoder.config.grid
    values = decoder.values(tokens[None])[0][..., order].mT.unflatten(-1, (gy, gx))
    return Cell(values.contiguous(), order, counts, dtype)


def decode_passes(
    decoder: CarrierDecoder, cell: Cell, x: Tensor, y: Tensor, t: Tensor, out: Tensor, rows: int
) -> list[int]:
    """Decode a cell at x [w], y [h], t [T] into out [T,3,h,w], `rows` rows of pixels a pass; none needs to be done again."""
    sums, along_y, wave_y = sum_along_x(decoder, cell, x), attention(decoder, 1, y), waves(decoder, cell, 1, y)
    painter = painter_of(decoder, cell, t)
    carriers, frames, width = len(wave_y), len(t), len(x)
    # One pass's memory, used by all of them: fresh memory would cost more than some of the arithmetic.
    sizes = (carriers, painter.wave_t.shape[1] * len(painter.bias), frames * len(painter.bias))
    buffers = [out.new_empty(size * rows * width) for size in sizes]
    for top, (first, last) in zip(range(0, len(y), rows), rows_needed(along_y, rows), strict=True):
        row = slice(top, min(top + rows, len(y)))
        pixels = (row.stop - row.start) * width
        m, g, z = (b[: size * pixels].view(size, pixels) for b, size in zip(buffers, sizes, strict=True))
        weights = along_y[row, :, first:last].flatten(1) * wave_y[:, row, None]  # [C,h,HJ']
        near = sums[:, :, first:last].flatten(1, 2)  # [C,HJ',w]
        if near.dtype == m.dtype:
            torch.bmm(weights, near, out=m.view(carriers, -1, width))
        else:
            m.view(carriers, -1, width).copy_(weights.to(near.dtype) @ near)
        out[:, :, row] = _paint(painter, m, g, z).view(frames, 3, -1, width)
    return []


def attention(decoder: CarrierDecoder, axis: int, u: Tensor) -> Tensor:
    """Attention along an axis at coordinates u [n]: [n,H,count]."""
    return functional.threshold(decoder.attend(axis, u), TINY, 0.0)


def waves(decoder: CarrierDecoder, cell: Cell, axis: int, u: Tensor) -> Tensor:
    """Values of the sorted carriers along an axis at coordinates u [n]: [C,n]."""
    return decoder.wave(axis, u)[:, cell.order].T.contiguous()


def sum_along_x(decoder: CarrierDecoder, cell: Cell, x: Tensor) -> Tensor:
    """Sum every row of tokens for all x [w], times the carriers' factor along x: [C,H,J,w], in the dtype of products."""
    along_x = attention(decoder, 0, x).permute(1, 2, 0)[:, None]  # [H,1,I,w]
    sums = (cell.values @ along_x).transpose(0, 1)  # [C,H,J,w]
    return (sums * waves(decoder, cell, 0, x)[:, None, None]).to(cell.dtype)


def rows_needed(along_y: Tensor, rows: int) -> list[tuple[int, int]]:
    """Return for each pass the first row of tokens that counts in it, and the one behind the last: [h,H,J]."""
    counts = functional.pad(along_y.amax(1).T, (0, -len(along_y) % rows)).unflatten(1, (-1, rows)).amax(2) != 0  # [J,P]
    numbers = torch.arange(len(counts), device=counts.device)[:, None]
    first = torch.where(counts, numbers, len(counts) - 1).amin(0)
    last = torch.where(counts, numbers + 1, 1).amax(0)
    return torch.stack([first, last], 1).tolist()


class Painter(NamedTuple):
    """The layers that paint, split by the carriers' harmonics in time."""

    first: list[Tensor]  # per harmonic [hidden+3,C_k]: the MLP's first layer, below it the linear one
    bias: Tensor  # [hidden+3,1]
    wave_t: Tensor  # [T,K]
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


def _paint(painter: Painter, m: Tensor, g: Tensor, z: Tensor) -> Tensor:
    """Carriers m [C,P] -> pixels [T,3,P]; g [K*(hidden+3),P] and z [T*(hidden+3),P] are memory to work in."""
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
