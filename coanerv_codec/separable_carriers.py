"""The exact fast evaluation of the carrier decoder.

Attention is a product of one along x and one along y, and so is each carrier's wave, so on a grid the sum over all tokens is
done along x once for the whole grid, and then along y, where a pass of a few rows of pixels needs only the few rows of tokens
whose windows reach it. It does not depend on time, so it serves all frames of a clip. Carriers of the same harmonic in time
share their factor in time, so the painting layers, too, are applied once for all frames, harmonic by harmonic. For one or two
frames (of a cell that moves) it is cheaper to multiply the layers by the factors: one large product instead of many.

    s_c[jh,x] = wave_x(c,x) sum_i a_h(i,x) v_c[j,h,i]                                        [C x JH x w]
    m_c[y,x]  = sum_jh wave_y(c,y) a_h(j,y) s_c[jh,x]                                        [C x pixels]
    g_k       = [W_1; W] restricted to the carriers with harmonic k in t  @  m               [(hidden+3) x pixels]
    pixel(t)  = MLP's later layers of sum_k wave_t(k, t) g_k, plus the linear part of the sum

Products may be in bfloat16. Then the carriers that are flat (no wave in x, y or t), which hold most of what a pixel is, are
still in float32, and so are all sums.

Shapes: H heads, I columns and J rows of tokens, C carriers, K harmonics in t, O outputs of the first layers (hidden + 3), w x h
pixels and T frames of a block, P pixels of a pass.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coanerv_codec.carriers import CarrierDecoder

# Attention below this becomes zero: the weights of a pixel add up to one, so it is lost in float32's rounding of the sum.
TINY = 1e-12
FEW = 2  # frames for which the painting layers are multiplied by the factors in time
FRAMES = 16  # per pass: more than a clip and what is asked beyond its ends, so that attention is evaluated once for all
CPU_PASS = 2048  # pixels per pass: large enough for the products, small enough that the rest stays in the caches


class Cell(NamedTuple):
    """What a cell's tokens say of the carriers, which are sorted by their harmonic in t, the flat ones first."""

    values: Tensor  # [H,C,J,I]
    order: Tensor  # [C], carriers as sorted
    counts: list[int]  # of carriers per harmonic, the first of which is 0
    flat: int  # carriers without a wave
    dtype: torch.dtype  # of the products with all others


def fold(decoder: CarrierDecoder, tokens: Tensor, dtype: torch.dtype) -> Cell:
    """Read the values of a cell's tokens [N,d]."""
    harmonics = decoder.harmonics[:, 2].abs()
    waving = decoder.harmonics.any(1)
    order = (2 * harmonics + waving).argsort(stable=True)
    # The factor of harmonic 0 is one, so it takes the biases: it is there even if no carrier has it.
    counts = torch.cat([harmonics.new_zeros(1), harmonics]).unique(return_counts=True)[1].tolist()
    counts[0] -= 1
    gx, gy, _ = decoder.config.grid
    values = decoder.values(tokens[None])[0][..., order].mT.unflatten(-1, (gy, gx))
    return Cell(values.contiguous(), order, counts, len(order) - int(waving.sum()), dtype)


def decode_passes(
    decoder: CarrierDecoder, cell: Cell, x: Tensor, y: Tensor, t: Tensor, out: Tensor, rows: int
) -> list[int]:
    """Decode a cell at x [w], y [h], t [T] into out [T,3,h,w], `rows` rows of pixels a pass; none needs to be done again."""
    sums, wave_y = sum_along_x(decoder, cell, x), waves(decoder, cell, 1, y)
    along_y = attention(decoder, 1, y)
    needed, along_y = rows_needed(along_y, rows), along_y.mT  # [h,J,H]
    painter = painter_of(decoder, cell, t)
    frames, width = len(t), len(x)
    split = [cell.flat, len(sums) - cell.flat]
    groups = [part.to(dtype) for part, dtype in zip(sums.split(split), (sums.dtype, cell.dtype), strict=True)]
    # One pass's memory, used by all of them: fresh memory would cost more than some of the arithmetic.
    kinds = [(len(group), group.dtype) for group in groups] + [(size, out.dtype) for size in painter.sizes]
    buffers = [out.new_empty(size * rows * width, dtype=dtype) for size, dtype in kinds]
    for top, (first, last) in zip(range(0, len(y), rows), needed, strict=True):
        row = slice(top, min(top + rows, len(y)))
        height = row.stop - row.start
        pixels = height * width
        *m, g, z = (b[: size * pixels].view(size, pixels) for b, (size, _) in zip(buffers, kinds, strict=True))
        weights = along_y[row, first:last].flatten(1) * wave_y[:, row, None]  # [C,h,J'H]
        for weight, group, waved in zip(weights.split(split), groups, m, strict=True):
            near = group[:, first:last].flatten(1, 2)  # [.,J'H,w], a view
            torch.bmm(weight.to(near.dtype), near, out=waved.view(len(group), height, width))
        out[:, :, row] = _paint(painter, *m, g, z, frames).view(frames, 3, height, width)
    return []


def attention(decoder: CarrierDecoder, axis: int, u: Tensor) -> Tensor:
    """Attention along an axis at coordinates u [n]: [n,H,count]."""
    return functional.threshold(decoder.attend(axis, u), TINY, 0.0)


def waves(decoder: CarrierDecoder, cell: Cell, axis: int, u: Tensor) -> Tensor:
    """Values of the sorted carriers along an axis at coordinates u [n]: [C,n]."""
    return decoder.wave(axis, u)[:, cell.order].T.contiguous()


def sum_along_x(decoder: CarrierDecoder, cell: Cell, x: Tensor) -> Tensor:
    """Sum every row of tokens for all x [w], times the carriers' factor along x: [C,J,H,w]."""
    along_x = attention(decoder, 0, x).permute(1, 2, 0)[:, None]  # [H,1,I,w]
    sums = (cell.values @ along_x).permute(1, 2, 0, 3)
    # Laid out so that the rows of tokens which a pass needs are a view.
    return torch.mul(sums, waves(decoder, cell, 0, x)[:, None, None], out=sums.new_empty(sums.shape))


def rows_needed(along_y: Tensor, rows: int) -> list[tuple[int, int]]:
    """Return for each pass the first row of tokens that counts in it, and the one behind the last: [h,H,J]."""
    counts = functional.pad(along_y.amax(1).T, (0, -len(along_y) % rows)).unflatten(1, (-1, rows)).amax(2) != 0  # [J,P]
    numbers = torch.arange(len(counts), device=counts.device)[:, None]
    first = torch.where(counts, numbers, len(counts) - 1).amin(0)
    last = torch.where(counts, numbers + 1, 1).amax(0)
    return torch.stack([first, last], 1).tolist()


class Painter(NamedTuple):
    """The layers that paint, the first ones split by the carriers' harmonics in time: those of one harmonic share their factor.

    For FEW frames there is little to share, and the factors are multiplied into the first layers: O in the shapes is then T*O.
    """

    flat: Tensor  # [O,flat]: the MLP's first layer, below it the linear one, for the flat carriers
    first: list[Tensor]  # the same per harmonic for the others [O,C_k], or for all of them at once
    bias: Tensor  # [O,1]
    wave_t: Tensor | None  # [T,K]
    layers: list[tuple[Tensor, Tensor | None]]  # the MLP's later ones; the bias of the last is in `bias`

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers per pixel that the first layers give, before and after they are summed over harmonics."""
        if self.wave_t is None:
            return 0, len(self.bias)
        return len(self.first) * len(self.bias), len(self.wave_t) * len(self.bias)


def painter_of(decoder: CarrierDecoder, cell: Cell, t: Tensor) -> Painter:
    """Prepare the layers for the times t [T]."""
    linear, mlp = decoder.linear, decoder.mlp
    first = torch.cat([mlp[0].weight, linear.weight])[:, cell.order]  # [O,C]
    bias = torch.cat([mlp[0].bias, linear.bias + mlp[-1].bias + 0.5])[:, None]
    layers = [(layer.weight, layer.bias[:, None]) for layer in mlp[1:-1]] + [(mlp[-1].weight, None)]
    waves_t = decoder.wave(2, t)[:, cell.order]  # [T,C]
    counts, wave_t = [len(cell.order) - cell.flat], None
    if len(t) <= FEW:
        first, bias = (first * waves_t[:, None]).flatten(0, 1), bias.repeat(len(t), 1)
    else:
        starts = list(accumulate(cell.counts[:-1]))
        wave_t = torch.cat([torch.ones_like(t)[:, None], waves_t[:, starts]], dim=1)
        counts = [cell.counts[0] - cell.flat, *cell.counts[1:]]
    flat, *parts = first.split([cell.flat, *counts], dim=1)
    return Painter(flat.contiguous(), [part.to(cell.dtype).contiguous() for part in parts], bias, wave_t, layers)


def _paint(painter: Painter, flat: Tensor, m: Tensor, g: Tensor, z: Tensor, frames: int) -> Tensor:
    """Flat carriers and the others [.,P] -> pixels [T,3,P]; g and z, of the painter's sizes times P, are memory to work in."""
    sums = z if painter.wave_t is None else g
    totals = sums.view(len(painter.first), -1, sums.shape[1])
    parts = m.split([part.shape[1] for part in painter.first])
    torch.addmm(painter.bias, painter.flat, flat, out=totals[0])
    for number, (weights, part, total) in enumerate(zip(painter.first, parts, totals, strict=True)):
        if part.dtype == total.dtype:
            torch.addmm(total, weights, part, beta=int(not number), out=total)
        elif number:
            total.copy_(weights @ part)
        else:
            total += weights @ part
    if painter.wave_t is not None:
        torch.mm(painter.wave_t, totals.flatten(1), out=z.view(frames, -1))
    z = z.view(frames, -1, z.shape[1])
    hidden, pixels = z[:, :-3], z[:, -3:]
    for weight, bias in painter.layers:
        functional.silu(hidden, inplace=True)
        hidden = torch.baddbmm(pixels if bias is None else bias, weight.expand(frames, -1, -1), hidden)
    return hidden
