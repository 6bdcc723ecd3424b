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
from coanerv_codec.positions import encode_axis

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
    """What a mode prefers: cost = slant fx^power + fy^power / slant + time ft^rise + u or v in chroma.

    Frequencies are in cycles in 32 pixels, 16 frames.
    """

    power: float
    slant: float
    time: float
    rise: float
    u: float
    v: float

    def cost(self, wave: Wave, sizes: tuple[float, float, float]) -> float:
        """Return how little a wave matters to blocks of this mode."""
        fx, fy, ft = (unit * j / size for unit, j, size in zip((16, 16, 8), wave[1:], sizes, strict=True))
        moving = self.time * ft**self.rise if wave.t else 0.0
        still = self.slant * fx**self.power + fy**self.power / self.slant
        return round(still + moving + (0.0, self.u, self.v)[wave.channel], 6)


# From still to moving. Fits to cosine transforms of video, its blocks split into as many sets as there are modes so that the
# best waves of each set keep most of it (tests/fit_tastes.py).
TASTES = {
    2: (Taste(0.8, 1.0, 6.0, 0.3, 5.6, 5.8), Taste(0.9, 1.0, 0.25, 1.4, 3.2, 3.5)),
    8: (
        Taste(0.54, 1.03, 39.63, 0.61, 3.8, 4.01),
        Taste(1.07, 1.44, 104.17, 0.24, 8.96, 8.54),
        Taste(0.63, 0.77, 2.93, 0.81, 1.75, 1.79),
        Taste(0.94, 0.99, 2.35, 1.89, 6.48, 6.82),
        Taste(0.86, 1.42, 0.97, 1.77, 5.04, 5.08),
        Taste(1.18, 0.87, 0.66, 1.84, 6.23, 6.59),
        Taste(1.17, 1.14, 0.28, 1.56, 4.42, 4.47),
        Taste(0.84, 0.99, 0.24, 0.1, 2.58, 2.58),
    ),
}


def choose_waves(config: Config) -> tuple[list[Wave], list[list[list[int]]]]:
    """Return the C waves that natural video needs most, and the numbers of those in each set, in three parts."""
    sizes = (config.cell / config.grid[0], config.cell / config.grid[1], config.frames / config.grid[2])
    ranges = [range(max(1, math.floor(0.9 * size))) for size in sizes[:2]] + [range(max(1, math.floor(sizes[2])))]
    waves = [Wave(channel, *j) for channel in range(3) for j in product(*ranges)]
    orders = [sorted(waves, key=lambda w, taste=taste: (taste.cost(w, sizes), w)) for taste in TASTES[config.sets]]
    values = 3 * (config.amplitudes // 2)  # of a set, which a token has room for if its partner lends
    chosen = dict.fromkeys(wave for order in orders for wave in order[:values])
    if not max(values, len(chosen)) <= config.carriers <= len(waves):
        raise CoanervError(
            f"{config.carriers} carriers do not suit a token grid of {config.grid}, which needs {max(values, len(chosen))} "
            f"and has waves for {len(waves)}"
        )
    for group in zip(*(order[values:] for order in orders), strict=True):
        chosen |= dict.fromkeys(group if len(chosen) < config.carriers else ())
    waves = list(chosen)[: config.carriers]
    numbers = [[waves.index(wave) for wave in order[:values]] for order in orders]
    half = config.amplitudes // 2
    parts = [_align([some[first : first + half] for some in numbers]) for first in range(0, values, half)]
    return waves, [list(of_set) for of_set in zip(*parts, strict=True)]


def _align(sets: list[list[int]]) -> list[list[int]]:
    """Order each set so that a wave stands at the same place in all sets that have it, as far as that is possible.

    The entropy coder compares a token with its neighbours place by place, whatever their modes.
    """
    placed: list[list[int | None]] = [[None] * len(numbers) for numbers in sets]
    homes = {c: [p for p, numbers in zip(placed, sets, strict=True) if c in numbers] for c in chain.from_iterable(sets)}
    left = []
    for c in sorted(homes, key=lambda c: -len(homes[c])):
        free = [k for k in range(len(sets[0])) if all(p[k] is None for p in homes[c])]
        if not free:
            left.append(c)
        for p in homes[c] if free else ():
            p[free[0]] = c
    for c in left:
        for p in homes[c]:
            p[p.index(None)] = c
    return placed


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


def start_analysis(analysis: Analysis, waves: list[Wave], sets: list[list[list[int]]]) -> None:
    """Let the analysis find the amplitudes of the waves."""
    config = analysis.config
    duals = []
    for axis, count in ((1, config.grid[0]), (2, config.grid[1])):
        harmonics = 1 + max(wave[axis] for wave in waves)
        duals.append(dual(count, config.cell, harmonics, windows(count, config.cell, WIDTHS[0])))
    still = dual(1, config.frames, config.frames, torch.ones(1, config.frames, dtype=torch.float64))[0]  # [j,F]
    spaces = _functions_of_space(waves)
    for found, functions in zip(spaces, (analysis.luma, analysis.chroma), strict=True):
        if len(found) > functions.shape[-1]:
            raise CoanervError(
                f"the carriers have {len(spaces[0])} functions of space in luma and {len(spaces[1])} in chroma; "
                "luma_functions and chroma_functions must be at least as many"
            )
    py, px = analysis.phases
    for phase, (row, column) in enumerate(product(range(py), range(px))):
        # A token in the middle of the cell that has this phase stands for all of them.
        iy, ix = (
            p + n * ((count // 2 - p) // n) for p, n, count in ((row, py, config.grid[1]), (column, px, config.grid[0]))
        )
        for found, functions in zip(spaces, (analysis.luma, analysis.chroma), strict=True):
            for k, (channel, jx, jy) in enumerate(found):
                y, x = (
                    _cut(duals[axis][i, j], config.grid[axis], i, bool(channel))
                    for axis, i, j in ((1, iy, jy), (0, ix, jx))
                )
                function = torch.outer(y, x).flatten() / (config.frames * SCALE)
                target = functions[phase, :, k].view(2 if channel else 1, -1)
                target[max(channel - 1, 0)] = function.float()
    for c, wave in enumerate(waves):
        analysis.time[c] = gain(wave) * config.frames * still[wave.t].float()
    set_functions(analysis, waves, sets)


def _functions_of_space(waves: list[Wave]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return what the waves are in space, (channel, x, y): those of luma and those of chroma."""
    luma, chroma = (dict.fromkeys(w[:3] for w in waves if bool(w.channel) == half) for half in (False, True))
    return list(luma), list(chroma)


def set_functions(analysis: Analysis, waves: list[Wave], sets: list[list[list[int]]]) -> None:
    """Tell the analysis which function of space each carrier has, and which carriers each set, whatever its weights."""
    luma, chroma = _functions_of_space(waves)
    first = analysis.config.luma_functions
    numbers = [first + chroma.index(w[:3]) if w.channel else luma.index(w[:3]) for w in waves]
    analysis.space_of.copy_(torch.tensor(numbers))
    analysis.sets.copy_(torch.tensor(sets))


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
    encoder: Encoder, waves: list[Wave], sets: list[list[list[int]]], generator: torch.Generator
) -> None:
    """Let the tokens be the analysis alone; the token former starts with what it sees and says next to nothing."""
    start_analysis(encoder.analysis, waves, sets)
    encoder.see.weight.normal_(0.0, CONTENT_GAIN, generator=generator)
    encoder.see.bias.zero_()
    encoder.norm.weight.fill_(RESIDUAL_GAIN)
    encoder.project.weight.mul_(0.1)
    encoder.project.bias.zero_()


def set_waves(decoder: CarrierDecoder, waves: list[Wave], sets: list[list[list[int]]]) -> None:
    """Give the decoder its carriers: part of what it computes, whatever the other values start as."""
    decoder.harmonics.copy_(torch.tensor([wave[1:] for wave in waves]))
    decoder.sets.copy_(torch.tensor(sets))


def start_carriers(
    decoder: CarrierDecoder, waves: list[Wave], sets: list[list[list[int]]], generator: torch.Generator
) -> None:
    """Let attention be narrow windows, and the first head's values the amplitudes of the carriers."""
    set_waves(decoder, waves, sets)
    decoder.mix.weight.normal_(0.0, CONTENT_GAIN, generator=generator)
    decoder.mix.bias.zero_()
    decoder.norm.weight.fill_(RESIDUAL_GAIN)
    _start_windows(decoder)
    for layer in (decoder.mixed_value, decoder.linear, decoder.mlp[-1]):
        layer.weight.zero_()
        layer.bias.zero_()
    for c, wave in enumerate(waves):
        decoder.linear.weight[wave.channel, c] = 1.0
    decoder.value.weight.zero_()
    for c, wave in enumerate(waves):
        decoder.value.weight[c, c] = math.prod(amplitude(j) for j in wave[1:]) / gain(wave)


def _start_windows(decoder: CarrierDecoder) -> None:
    """Set the keys so that head h's logits are kappa_x cos(pi (x - x_n)) along x, and the same along y."""
    config, k_s = decoder.config, decoder.config.spatial_frequencies
    for axis, key in enumerate((decoder.key_x, decoder.key_y)):
        key.zero_()
        encoded = encode_axis(anchors(config.grid[axis], config.cell).float(), decoder.w_s)  # [count,2k_s]
        for head, of_head in enumerate(key):
            kappa = concentration(config.grid[axis], config.cell, WIDTHS[head % len(WIDTHS)])
            for row in (0, k_s):  # sine and cosine of the lowest frequency
                of_head[:, row] = kappa / decoder.scale * encoded[:, row]
