"""The context model of coder 2: how likely each symbol of a token bank is, given the symbols coded before it.

Symbols are coded channel by channel, and within a channel in two passes (or five) over a chessboard of tokens. What is
coded is the residual u = symbol - level - prediction modulo 2^b; small magnitudes are likely. How small, a class says:

    class = M[mode][channel]      stored: the mean magnitude of u, in half octaves
          + activity              of the token and its neighbours so far, as a multiple of what M says, in half octaves

Each class has a table of frequencies, which begins as a two-sided geometric distribution of the class's mean and counts
what it meets. A token's mode is told by `switches`, bits that are coded first. Everything here is integers, so that every
machine finds the same frequencies. `walk` is written once: with a `Writer` it encodes, with a `Reader` it decodes.
"""

from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import numpy as np

from coanerv_codec.errors import FormatError
from coanerv_codec.rans import SLOTS, Packer, Unpacker
from coanerv_codec.token_order import Pass, passes, predict

CLASSES = 30  # class k has the mean magnitude 2^((k - 14) / 2)
DEAD = 0  # as a mean: all residuals are zero, nothing is coded
MIDDLE = 14  # the class of mean 1
MEANS = 32  # means are coded modulo this
UNIT = 16  # a magnitude as large as its mean
CEILING = 16 * UNIT  # and the largest that counts
RECIPROCALS = np.array([isqrt(1 << 38 - k) for k in range(CLASSES)])  # 2^12 / mean of class k
RATIOS = np.array([isqrt(isqrt(1 << 2 * j + 31)) for j in range(-8, 9)])  # 2^8 * 2^((2j - 1) / 4)
OWN, NEAR = 8, 16  # weights of a token's size in another channel, and of a neighbour's in this one
MEMORY = 4  # activity loses 1/16 with each channel
START = OWN * UNIT
WEIGHT, COUNT = 1 << 14, 32  # sum of a table's counts at the start, and what a symbol adds


class Model(NamedTuple):
    """What a bank says about its symbols; switches are (channel, low level, high level), smooth channels are predicted."""

    bits: int
    level: int
    row: int  # tokens in a row of the grid, 0: no neighbours
    switches: tuple[tuple[int, int, int], ...] = ()
    smooth: tuple[int, ...] = ()
    spread: int = 0  # class of the table for the means


class Tables:
    """Counts of symbols in classes [classes, symbols], and the bounds of their intervals [classes, symbols + 1]."""

    def __init__(self, counts: np.ndarray):
        self.counts = counts.astype(np.int64)
        self.bounds = np.zeros((len(counts), counts.shape[1] + 1), np.int64)
        self._divide(np.arange(len(counts)))

    def learn(self, classes: np.ndarray, symbols: np.ndarray) -> None:
        """Count symbols [n] of classes [n]."""
        width = self.counts.shape[1]
        seen = np.bincount(classes * width + symbols, minlength=self.counts.size).reshape(-1, width)
        changed = seen.any(axis=1).nonzero()[0]
        self.counts[changed] += COUNT * seen[changed]
        self._divide(changed)

    def _divide(self, classes: np.ndarray) -> None:
        """Share SLOTS out in proportion to the counts: at least 1 to each symbol, to symbol 0 what rounding leaves."""
        counts = self.counts[classes]
        shares = counts * (SLOTS - counts.shape[1])
        shares //= counts.sum(axis=1, keepdims=True)
        shares += 1
        shares[:, 0] += SLOTS - shares.sum(axis=1)
        self.bounds[classes, 1:] = shares.cumsum(axis=1)


class Writer:
    """Turns symbols into intervals for a packer."""

    def __init__(self) -> None:
        self.packer = Packer()

    def code(self, tables: Tables, classes: np.ndarray, symbols: np.ndarray) -> np.ndarray:
        """Write symbols [n] of classes [n], and return them."""
        bounds = tables.bounds
        starts = bounds[classes, symbols]
        self.packer.put(starts, bounds[classes, symbols + 1] - starts)
        return symbols


class Reader:
    """Reads symbols from an unpacker."""

    def __init__(self, unpacker: Unpacker):
        self.unpacker = unpacker

    def code(self, tables: Tables, classes: np.ndarray, symbols: None) -> np.ndarray:
        """Return the next symbols [n], of classes [n]."""
        return self.unpacker.take(tables.bounds, classes)


@lru_cache
def geometric(symbols: int) -> np.ndarray:
    """The counts that tables begin with [CLASSES, symbols]: geometric in the distance from 0 modulo `symbols`."""
    counts = []
    for k in range(CLASSES):
        ratio = isqrt((1 << 32) + (1 << 46 - k)) - isqrt(1 << 46 - k)  # 2^16 (sqrt(1 + 1 / mean^2) - 1 / mean)
        weights = [1 << 32]
        for _ in range(symbols // 2):
            weights.append(weights[-1] * ratio >> 16)
        both = [weights[min(u, symbols - u)] for u in range(symbols)]
        counts.append([weight * WEIGHT // sum(both) for weight in both])
    return np.array(counts, np.int64)


class Given(NamedTuple):
    """What an encoder knows beforehand: symbols [d, T], modes [T], means [modes, d]."""

    symbols: np.ndarray
    modes: np.ndarray
    means: np.ndarray


def walk(model: Model, shape: tuple[int, int, int], coder: Writer | Reader, given: Given | None = None) -> np.ndarray:
    """Code a bank of `shape` [cells, N, d], T = cells * N; `given` when writing. Returns the symbols, uint8 [d, T]."""
    cells, tokens, d = shape
    board, lattice = passes(cells, tokens, model.row)
    modes = _code_modes(model, lattice, cells * tokens, coder, given)
    means = _code_means(model, d, coder, given)
    tables = Tables(geometric(1 << model.bits))
    activity, expected = np.full(cells * tokens, START), START
    symbols = np.empty((d, cells * tokens), np.uint8)
    smooth_channels = set(model.smooth)
    for c in np.argsort(-means.sum(axis=0), kind="stable").tolist():
        level = levels(model, modes, c)
        if not means[:, c].any():
            symbols[c] = level
            continue
        smooth = c in smooth_channels
        target = None if given is None else given.symbols[c]
        context = Context(level, means[modes, c], activity, expected)
        symbols[c], sizes = _code_channel(lattice if smooth else board, smooth, context, tables, coder, target)
        activity += OWN * sizes - (activity >> MEMORY)
        expected += OWN * UNIT - (expected >> MEMORY)
    return symbols


class Context(NamedTuple):
    """What is known of a channel's tokens: level, mean and activity [T], and the activity of an average token."""

    level: np.ndarray
    mean: np.ndarray
    activity: np.ndarray
    expected: int


def _code_channel(
    order: list[Pass],
    smooth: bool,
    context: Context,
    tables: Tables,
    coder: Writer | Reader,
    target: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The symbols [T] of one channel, and the sizes [T] of their residuals in UNITs of the mean."""
    count, mask = len(context.mean), tables.counts.shape[1] - 1
    values, sizes = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)  # the last is for absent neighbours
    met = []
    for part in order:
        tokens = part.tokens
        level, mean = context.level[tokens], context.mean[tokens]
        activity, expected = context.activity[tokens], context.expected
        if len(part.neighbours):
            activity += NEAR * sizes[part.neighbours].sum(axis=0)
            expected = expected + NEAR * UNIT * part.known
        classes = mean + RATIOS.searchsorted((activity << 8) // expected, "right") - 9
        classes = np.minimum(np.maximum(classes, 0), CLASSES - 1)
        offset = level + predict(values, part) if smooth else level
        u = None if target is None else target[tokens] - offset & mask
        alive = mean.nonzero()[0]
        if alive.size == tokens.size:
            u = coder.code(tables, classes, u)
            met.append((classes, u))
        else:
            classes = classes[alive]
            met.append((classes, coder.code(tables, classes, None if u is None else u[alive])))
            u = np.zeros(tokens.size, np.int64)
            u[alive] = met[-1][1]
        values[tokens] = (u + offset & mask) - level
        size = np.minimum(u, mask + 1 - u) * RECIPROCALS[mean] >> 8
        sizes[tokens] = np.where(mean == DEAD, UNIT, np.minimum(size, CEILING))
    tables.learn(*map(np.concatenate, zip(*met, strict=True)))
    return values[:-1] + context.level, sizes[:-1]


def levels(model: Model, modes: np.ndarray, channel: int) -> np.ndarray:
    """The level [T] that stands for zero: in a switch channel it follows the switch."""
    for i, (switch, low, high) in enumerate(model.switches):
        if switch == channel:
            return np.where(modes >> i & 1, high, low)
    return np.full(len(modes), model.level)


def _code_modes(
    model: Model, lattice: list[Pass], count: int, coder: Writer | Reader, given: Given | None
) -> np.ndarray:
    """The mode of each token [T]: a bit per switch, in the context of the earlier bits and of its neighbours' bits."""
    modes = np.zeros(count, np.int64)
    for i in range(len(model.switches)):
        # Class 9 * earlier bits + 4 + set - unset neighbours; the more are set, the likelier is another.
        likely = np.tile(np.arange(1, 10), 1 << i)
        tables = Tables(16 * np.stack((10 - likely, likely), axis=1))
        bit = np.zeros(count + 1, np.int64)
        for part in lattice:
            classes = 9 * modes[part.tokens] + 4 + 2 * bit[part.neighbours].sum(axis=0) - part.known
            bit[part.tokens] = coder.code(tables, classes, None if given is None else given.modes[part.tokens] >> i & 1)
            tables.learn(classes, bit[part.tokens])
        modes += bit[:-1] << i
    return modes


def _code_means(model: Model, d: int, coder: Writer | Reader, given: Given | None) -> np.ndarray:
    """M [modes, d], as differences along the channels of each mode."""
    tables = Tables(geometric(MEANS)[model.spread : model.spread + 1])
    means = np.empty((1 << len(model.switches), d), np.int64)
    classes = np.zeros(d, np.int64)
    for m in range(len(means)):
        steps = coder.code(tables, classes, None if given is None else mean_steps(given.means[m]) % MEANS)
        tables.learn(classes, steps)
        means[m] = (MIDDLE + np.cumsum(steps)) % MEANS
    if means.max() >= CLASSES:
        raise FormatError(f"token bank: mean {means.max()}, not 0 to {CLASSES - 1}")
    return means


def mean_steps(means: np.ndarray) -> np.ndarray:
    """What is coded of the means of a mode, or of several [..., d]."""
    return np.diff(means, prepend=MIDDLE)
