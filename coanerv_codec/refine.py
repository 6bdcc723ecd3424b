"""Token refinement: optimise a clip's tokens through the frozen decoder, from where the encoder put them.

The paper's standalone token optimisation, but started by the encoder, through the quantizer's rounding, and kept only where it
pays. The tokens stay within the range they had, so that the quantizer's step does not grow.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coanerv_codec.cells import Layout, cut_row
from coanerv_codec.engine import decode_grid
from coanerv_codec.model import AnyDecoder
from coanerv_codec.positions import cell_positions, frame_times
from coanerv_codec.quantizer import dequantize, quantize
from coanerv_codec.rate import amplitudes_modes, estimated_bits
from coanerv_codec.rounding import quantized

LEARNING_RATE = 0.05  # in units of the tokens' standard deviation, which differs widely between decoders
POSITIONS = 1024  # asked per cell and step, each in all frames
CELLS = 4  # optimised together
RATE_LAMBDA = 0.04  # weight of the rate beside the error, as in training
RANDOM_SCALE = 0.35  # standard deviation of random initial tokens, in the same units


class Refined(NamedTuple):
    """Refined tokens [cells,N,d], and the mean squared error over all cells with the encoder's tokens and with these."""

    tokens: np.ndarray
    before: float
    after: float


def refine_clip(
    decoder: AnyDecoder,
    frames: np.ndarray,
    layout: Layout,
    tokens: np.ndarray,
    bits: int,
    steps: int,
    start: str = "encoder",
    progress: Callable[[float], None] = lambda share: None,
) -> Refined:
    """Frames [F,3,H,W] uint8, tokens [cells,N,d] -> better tokens, never worse once quantized (unless started at random).

    `progress` is told what share of the cells is done.
    """
    generator = torch.Generator().manual_seed(0)  # the same clip gives the same bytes
    stored, switches = np.split(
        tokens, [decoder.config.amplitudes], axis=-1
    )  # these have no gradient and stay as they are
    initial, spread = tokens, float(stored.std())
    if start == "random":
        stored = RANDOM_SCALE * spread * torch.randn(stored.shape, generator=generator).numpy()
        initial = np.concatenate([stored, switches], axis=-1)
    parts, rate = [], LEARNING_RATE * spread
    for first, cells in _cells(frames, layout, decoder.config.cell):
        last = first + len(cells)
        parts.append(_refine_cells(decoder, cells, initial[first:last], _span(tokens), rate, bits, steps, generator))
        progress(last / layout.cells)
    refined = np.concatenate(parts)
    before, after = (quantized_error(decoder, frames, layout, candidate, bits) for candidate in (tokens, refined))
    if start == "encoder" and after >= before:
        return Refined(tokens, before, before)
    return Refined(refined, before, after)


def quantized_error(decoder: AnyDecoder, frames: np.ndarray, layout: Layout, tokens: np.ndarray, bits: int) -> float:
    """Return the mean squared error over all pixels of all cells, with tokens as a file would hold them."""
    symbols, z, s = quantize(tokens, bits)
    stored = dequantize(symbols, z, s)
    config, device = decoder.config, decoder.base.device
    axis, t = cell_positions(config.cell)[: config.cell, 0].to(device), frame_times(config.frames).to(device)
    total = 0.0
    for first, cells in _cells(frames, layout, config.cell):
        for cell, bank in zip(cells, stored[first : first + len(cells)], strict=True):
            pixels = decode_grid(decoder, torch.from_numpy(bank).to(device)[None], axis[None], axis[None], t)[0]
            target = torch.from_numpy(cell).to(device).permute(0, 2, 3, 1)
            total += (pixels.clamp(0, 1) - target).square().mean().item()
    return total / layout.cells


def _cells(frames: np.ndarray, layout: Layout, side: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the clip's cells a few at a time: the number of the first, and cells [n,F,3,S,S] float32."""
    for row in range(layout.y.count):
        cells = cut_row(frames, layout, row, side)
        for first in range(0, len(cells), CELLS):
            yield row * layout.x.count + first, cells[first : first + CELLS]


def _span(tokens: np.ndarray) -> tuple[float, float]:
    return float(tokens.min()), float(tokens.max())


def _refine_cells(
    decoder: AnyDecoder,
    cells: np.ndarray,
    tokens: np.ndarray,
    span: tuple[float, float],
    learning_rate: float,
    bits: int,
    steps: int,
    generator: torch.Generator,
) -> np.ndarray:
    """Cells [n,F,3,S,S], tokens [n,N,d] -> tokens [n,N,d] after `steps` steps of Adam, the rate falling to zero."""
    config, device = decoder.config, decoder.base.device
    xy, t = cell_positions(config.cell).to(device), frame_times(config.frames).to(device)
    pixels = torch.from_numpy(cells).to(device).flatten(3).transpose(2, 3)  # [n,F,S*S,3]
    free = torch.from_numpy(tokens).to(device).clone().requires_grad_()
    quantizer_step = torch.tensor((span[1] - span[0]) / (2**bits - 2), device=device)
    optimizer = torch.optim.Adam([free], lr=learning_rate)
    with torch.enable_grad():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = learning_rate * (1 - step / steps)
            asked = torch.randint(len(xy), (POSITIONS,), generator=generator).to(device)
            stored = quantized(free, quantizer_step)
            predicted: Tensor = decoder.at(stored, xy[asked].expand(len(free), -1, -1), t)
            error = (predicted - pixels[:, :, asked]).square().mean((1, 2, 3)).add(1e-8).sqrt()
            rate = estimated_bits(*amplitudes_modes(free, config), quantizer_step.expand(len(free), 1, 1))
            optimizer.zero_grad()
            # Adam does not care for the scale of a cell's loss, so cells optimised together do not disturb each other.
            (error + RATE_LAMBDA * rate / (len(xy) * len(t))).sum().backward()
            optimizer.step()
            with torch.no_grad():
                free.clamp_(*span)
    return free.detach().cpu().numpy()
