"""Initial values with which `base` starts as a lapped cosine transform: a working codec before the first training step.

Attention starts as narrow windows about the tokens' anchors that add up to one, the values as amplitudes of the carriers,
and the encoder's linear analysis as the dual of that: the amplitudes that reproduce the clip best. Everything that is not
linear starts at or near zero. Nothing here changes the architecture (docs/training.md tells what it gave).
"""

import math
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor

from coanerv_codec.analysis import MARGIN, SCALE, Analysis, window_starts
from coanerv_codec.carriers import CarrierDecoder
from coanerv_codec.config import Config
from coanerv_codec.errors import CoanervError
from coanerv_codec.model import Encoder

# Of the heads' windows (a Gaussian's sigma), in units of the token grid; only the first head's is used at first.
WIDTHS = (0.32, 0.6, 0.45)
DC_GAIN = 0.3  # of the mean's token: it has by far the widest range, and the range sets the quantizer's step for all
RESIDUAL_GAIN = 0.05  # of what the transformers add: an optimizer's step must stay small beside tokens of about 0.1
CONTENT_GAIN = 1.2  # of the layers that read tokens: their values are small, about 0.1


class Wave(NamedTuple):
    """A carrier of one channel (0 Y, 1 U, 2 V) with its harmonics."""

    channel: int
    x: int
    y: int
    t: int


class Taste(NamedTuple):
    """What a mode prefers: cost = fx^power + fy^power + time ft^rise + u or v in chroma; cycles in 32 pixels, 16 frames."""

    power: float
    time: float
    rise: float
    u: float
    v: float

    def cost(self, wave: Wave, sizes: tuple[float, float, float]) -> float:
        """Return how little a wave matters to blocks of this mode."""
        fx, fy, ft = (unit * j / size for unit, j, size in zip((16, 16, 8), wave[1:], sizes, strict=True))
        moving = self.time * ft**self.rise if wave.t else 0.0
        return round(fx**self.power + fy**self.power + moving + (0.0, self.u, self.v)[wave.channel], 6)


# From still to moving. Fits to cosine transforms of video, its blocks split into as many sets as there are modes so that the
# best 70 or 71 waves of each set keep most of it (tests/fit_tastes.py).
TASTES = {
    2: (Taste(0.8, 6.0, 0.3, 5.6, 5.8), Taste(0.9, 0.25, 1.4, 3.2, 3.5)),
    4: (
        Taste(1.0, 93.56, 0.07, 8.9, 9.34),
        Taste(0.9, 3.95, 1.07, 6.07, 5.89),
        Taste(1.0, 0.97, 1.56, 5.49, 5.04),
        Taste(1.21, 0.67, 0.84, 4.64, 3.96),
    ),
}


def choose_waves(config: Config) -> tuple[list[Wave], list[list[int]]]:
    """Return the C waves that natural video needs most, and for each mode the numbers of those its amplitudes stand for."""
    sizes = (config.cell / config.grid[0], config.cell / config.grid[1], config.frames / config.grid[2])
    ranges = [range(max(1, math.floor(0.9 * size))) for size in sizes[:2]] + [range(max(1, math.floor(sizes[2])))]
    waves = [Wave(channel, *j) for channel in range(3) for j in product(*ranges)]
    if config.modes not in TASTES:
        raise CoanervError(f"there is no start for {config.modes} modes, only for {' and '.join(map(str, TASTES))}")
    orders = [sorted(waves, key=lambda w, taste=taste: (taste.cost(w, sizes), w)) for taste in TASTES[config.modes]]
    values = config.amplitudes
    chosen = dict.fromkeys(wave for order in orders for wave in order[:values])
    if not max(values, len(chosen)) <= config.carriers <= len(waves):
        raise CoanervError(
            f"{config.carriers} carriers do not suit a token grid of {config.grid}, which needs {max(values, len(chosen))} "
            f"and has waves for {len(waves)}"
        )
    for group in zip(*(order[values:] for order in orders), strict=True):
        chosen |= dict.fromkeys(group if len(chosen) < config.carriers else ())
    waves = list(chosen)[: config.carriers]
    return waves, [[waves.index(wave) for wave in order[:values]] for order in orders]


def anchors(count: int, size: int) -> Tensor:
    """Return the coordinates [count] of the tokens' anchors along an axis of `size` pixels, float64."""
    return ((torch.arange(count, dtype=torch.float64) + 0.5) * (size / count) - 0.5) / (size - 1)


def windows(count: int, size: int, width: float) -> Tensor:
    """Return what one head's attention gives the tokens along an axis, [count,size]: columns add up to one."""
    x = torch.arange(size, dtype=torch.float64) / (size - 1)
    return torch.softmax(
        concentration(count, size, width) * torch.cos(math.pi * (x - anchors(count, size)[:, None])), 0
    )


def concentration(count: int, size: int, width: float) -> float:
    """Return kappa for which kappa cos(pi delta) falls off like a Gaussian whose sigma is `width` token distances."""
    return (math.pi * width * (size / count) / (size - 1)) ** -2


def amplitude(harmonic: int) -> float:
    """Return the factor that gives a cosine the energy of a constant."""
    return math.sqrt(2) if harmonic else 1.0


def dual(count: int, size: int, harmonics: int, window: Tensor) -> Tensor:
    """Return analysis functions [count,harmonics,size]: least squares amplitudes of the windowed cosines along an axis."""
    local = (torch.arange(size, dtype=torch.float64) + 0.5) * (count / size) - torch.arange(count)[
        :, None
    ]  # [count,size]
    j = torch.arange(harmonics)[None, :, None]
    gains = torch.tensor([amplitude(i) for i in range(harmonics)])[None, :, None]
    synthesis = window[:, None] * gains * torch.cos(math.pi * j * local[:, None])  # [count,harmonics,size]
    return torch.linalg.pinv(synthesis.flatten(0, 1).T).unflatten(0, (count, harmonics))


def start_analysis(analysis: Analysis, waves: list[Wave], modes: list[list[int]]) -> None:
    """Let value k of a token be the amplitude of its mode's wave k."""
    config = analysis.config
    duals = []
    for axis, count in ((1, config.grid[0]), (2, config.grid[1])):
        harmonics = 1 + max(wave[axis] for wave in waves)
        duals.append(dual(count, config.cell, harmonics, windows(count, config.cell, WIDTHS[0])))
    still = dual(1, config.frames, config.frames, torch.ones(1, config.frames, dtype=torch.float64))[0]  # [j,F]
    py, px = analysis.phases
    for phase, (row, column) in enumerate(product(range(py), range(px))):
        # A token in the middle of the cell that has this phase stands for all of them.
        iy, ix = (
            p + n * ((count // 2 - p) // n) for p, n, count in ((row, py, config.grid[1]), (column, px, config.grid[0]))
        )
        for k, number in enumerate(chain.from_iterable(modes)):
            weight = _analysis_function(config, waves[number], duals, still, iy, ix)
            analysis.weight[phase, :, k] = weight.float() / SCALE


def _analysis_function(config: Config, wave: Wave, duals: list[Tensor], still: Tensor, iy: int, ix: int) -> Tensor:
    """Return the weights of a token's window [inputs] that give the amplitude of a wave."""
    full, half = (
        [_cut(duals[axis][i, wave[1 + axis]], config.grid[axis], i, chroma) for axis, i in ((1, iy), (0, ix))]
        for chroma in (False, True)
    )
    parts = [
        torch.zeros(config.frames, channels, len(y), len(x), dtype=torch.float64)
        for channels, (y, x) in ((1, full), (2, half))
    ]
    function = gain(wave) * torch.einsum("f,y,x->fyx", still[wave.t], *(half if wave.channel else full))
    parts[min(wave.channel, 1)][:, max(wave.channel - 1, 0)] = function
    return torch.cat([part.flatten() for part in parts])


def gain(wave: Wave) -> float:
    """Return the scale of a wave's token value."""
    return DC_GAIN if wave == (0, 0, 0, 0) else 1.0


def _cut(function: Tensor, count: int, i: int, chroma: bool) -> Tensor:
    """Cut token i's window out of an analysis function [size]; in half resolution a sample stands for two pixels."""
    size, margin = len(function), MARGIN
    if chroma:
        function, size, margin = function.view(-1, 2).sum(1), size // 2, MARGIN // 2
    starts, width, _ = window_starts(count, size)
    return torch.nn.functional.pad(function, (margin, margin + width))[starts[i] :][: width + 2 * margin]


def start_encoder_direct(
    encoder: Encoder, waves: list[Wave], modes: list[list[int]], generator: torch.Generator
) -> None:
    """Let the tokens be the analysis alone; the token former starts with what it sees and says next to nothing."""
    start_analysis(encoder.analysis, waves, modes)
    encoder.see.weight.normal_(0.0, CONTENT_GAIN, generator=generator)
    encoder.see.bias.zero_()
    encoder.norm.weight.fill_(RESIDUAL_GAIN)
    encoder.project.weight.mul_(0.1)
    encoder.project.bias.zero_()


def set_waves(decoder: CarrierDecoder, waves: list[Wave]) -> None:
    """Give the decoder its carriers: part of what it computes, whatever the other values start as."""
    decoder.harmonics.copy_(torch.tensor([wave[1:] for wave in waves]))


def start_carriers(
    decoder: CarrierDecoder, waves: list[Wave], modes: list[list[int]], generator: torch.Generator
) -> None:
    """Let attention be narrow windows, and the first head's values the amplitudes of the carriers."""
    set_waves(decoder, waves)
    decoder.mix.weight.normal_(0.0, CONTENT_GAIN, generator=generator)
    decoder.mix.bias.zero_()
    decoder.norm.weight.fill_(RESIDUAL_GAIN)
    _start_windows(decoder, generator)
    for layer in (decoder.mixed_value, decoder.linear, decoder.mlp[-1]):
        layer.weight.zero_()
        layer.bias.zero_()
    for c, wave in enumerate(waves):
        decoder.linear.weight[wave.channel, c] = 1.0
    decoder.value.weight.zero_()
    for weight, numbers in zip(decoder.value.weight.chunk(len(modes)), modes, strict=True):
        for k, c in enumerate(numbers):
            weight[c, k] = math.prod(amplitude(j) for j in waves[c][1:]) / gain(waves[c])


def _start_windows(decoder: CarrierDecoder, generator: torch.Generator) -> None:
    """Set query and key_base so that head h's logits are kappa_x cos(pi (x - x_n)) + kappa_y cos(pi (y - y_n))."""
    config, k_s, d_h = decoder.config, decoder.config.spatial_frequencies, decoder.config.decoder_head_dim
    decoder.query.weight.normal_(0.0, 0.02, generator=generator)
    decoder.key_base.normal_(0.0, 0.02, generator=generator)
    decoder.key.weight.normal_(0.0, 0.02, generator=generator)
    y, x = torch.meshgrid(anchors(config.grid[1], config.cell), anchors(config.grid[0], config.cell), indexing="ij")
    encoded = decoder.gamma(torch.stack([x, y], -1).reshape(-1, 2).float())  # [N,4k_s]
    for head in range(config.decoder_heads):
        for row in range(4):  # sin x, cos x, sin y, cos y of the lowest frequency
            axis = row // 2
            kappa = concentration(config.grid[axis], config.cell, WIDTHS[head % len(WIDTHS)])
            strength = math.sqrt(kappa / decoder.scale)
            decoder.query.weight[head * d_h + row] = 0.0
            decoder.query.weight[head * d_h + row, row * k_s] = strength
            decoder.key_base[:, head * d_h + row] = strength * encoded[:, row * k_s]
            decoder.key.weight[head * d_h + row] = 0.0  # content does not move the windows at first
