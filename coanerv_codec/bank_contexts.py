"""Coder 2: what an encoder chooses for the context model of `contexts.py`, and where a bank keeps it.

Chosen are the level that stands for zero, which channels are switches and which are smooth, and the means of all channels.
`docs/format.md` has the layout; `bank.py` writes and reads what all coders have in common.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from coanerv_codec import contexts, fields
from coanerv_codec.contexts import CLASSES, MIDDLE, Given, Model, levels, mean_steps
from coanerv_codec.rans import Unpacker, lanes_for
from coanerv_codec.token_order import Pass, passes, predict

MAX_TOKENS = 1 << 20  # in a bank: bounds the memory that contexts take
MAX_SWITCHES = 4
# About the bits it takes to tell that a mean is the same as the channel before, that it is not, and each half octave of it.
STAY, TELL, TELL_MORE = 0.3, 2.5, 1.5
WORTH = 28  # a channel is smooth where prediction saves about so many nats


class Hints(NamedTuple):
    """What an encoder knows of its tokens: how many stand in a row of a grid (0: unknown), and which channels are modes.

    The values of a mode channel are of two kinds, below and above zero, and the other channels depend on which.
    """

    row: int = 0
    switches: tuple[int, ...] = ()


NO_HINTS = Hints()


class Coded(NamedTuple):
    """A parsed but still coded bank; without data all symbols are the model's level."""

    model: Model
    data: bytes

    @property
    def symbol_bytes(self) -> int:
        """Bytes that hold symbols (and the means, which are coded with them)."""
        return len(self.data)


def encode(symbols: np.ndarray, bits: int, z: float, s: float, hints: Hints) -> tuple[int, bytes]:
    """The low nibble of the bank's second byte, and all that follows z and s, for symbols [cells, N, d]."""
    model, given = _choose(symbols, bits, _zero_level(symbols, bits, z, s), hints)
    if (symbols == model.level).all():
        return 0, bytes((model.level, 0, 0))
    writer = contexts.Writer()
    contexts.walk(model, symbols.shape, writer, given)
    parts = [bytes((model.level,)), fields.varint(model.row)]
    parts += [fields.varint(channel) + bytes((low, high)) for channel, low, high in model.switches]
    if model.row:
        gaps = np.diff(model.smooth, prepend=-1) - 1
        parts += map(fields.varint, (len(model.smooth), *gaps.tolist()))
    parts += [bytes((model.spread,)), writer.packer.finish(lanes_for(symbols.size))]
    return len(model.switches), b"".join(parts)


def parse(read: fields.Fields, bits: int, nibble: int, shape: tuple[int, int, int]) -> Coded:
    """Everything but the symbols themselves, checked."""
    cells, tokens, d = shape
    if cells * tokens > MAX_TOKENS:
        raise read.error(f"{cells * tokens} tokens, more than the {MAX_TOKENS} that coder 2 can take")
    if nibble > MAX_SWITCHES:
        raise read.error(f"{nibble} switches, more than {MAX_SWITCHES}")

    def symbol() -> int:
        value = read.byte()
        if value >> bits:
            raise read.error(f"level {value} does not fit {bits} bits")
        return value

    level = symbol()
    row = read.varint(tokens, "tokens in a row")
    if row and tokens % row:
        raise read.error(f"{tokens} tokens do not stand in rows of {row}")
    switches = tuple((read.varint(d - 1, "a switch channel"), symbol(), symbol()) for _ in range(nibble))
    if any(a[0] >= b[0] for a, b in pairwise(switches)):
        raise read.error("switch channels do not ascend")
    smooth, channel = [], -1
    for _ in range(read.varint(d, "smooth channels") if row else 0):
        channel += 1 + read.varint(d, "a smooth channel")
        if channel >= d:
            raise read.error(f"smooth channel {channel} of {d}")
        smooth.append(channel)
    spread = read.byte()
    if spread >= CLASSES:
        raise read.error(f"spread {spread}, not 0 to {CLASSES - 1}")
    model = Model(bits, level, row, switches, tuple(smooth), spread)
    if not read.left and model != Model(bits, level, 0):
        raise read.error("has no symbols, but says how they are coded")
    return Coded(model, read.take(read.left))


def decode(coded: Coded, bits: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The symbols, uint8 [cells, N, d]."""
    cells, tokens, d = shape
    if not coded.data:
        return np.full(shape, coded.model.level, np.uint8)
    count = cells * tokens * (d + len(coded.model.switches)) + (d << len(coded.model.switches))
    unpacker = Unpacker(coded.data, lanes_for(cells * tokens * d), count)
    channels = contexts.walk(coded.model, shape, contexts.Reader(unpacker))
    unpacker.end()
    return np.ascontiguousarray(channels.T).reshape(shape)


def _zero_level(symbols: np.ndarray, bits: int, z: float, s: float) -> int:
    """The symbol that stands for tokens of zero, or the commonest one if none does or if there is but one."""
    level = -z / s if s > 0 else -1.0
    if 0 <= level < 2**bits - 0.5 and symbols.min() < symbols.max():
        return round(level)
    return int(np.bincount(symbols.ravel()).argmax())


def _choose(symbols: np.ndarray, bits: int, zero: int, hints: Hints) -> tuple[Model, Given]:
    """The model for symbols [cells, N, d] whose level `zero` stands for zero, and all that coding them needs."""
    cells, tokens, d = symbols.shape
    row = hints.row if hints.row and tokens % hints.row == 0 else 0
    channels = np.ascontiguousarray(symbols.reshape(-1, d).T).astype(np.int64)  # [d, T]
    modes = np.zeros(cells * tokens, np.int64)
    switches = []
    for channel in hints.switches:
        high = channels[channel] > zero
        if high.all() or not high.any():
            continue  # not worth a bit per token
        modes += high.astype(np.int64) << len(switches)
        sides = (channels[channel][side] for side in (~high, high))
        switches.append((channel, *(int(np.bincount(side).argmax()) for side in sides)))
    model = Model(bits, zero, row, tuple(switches))

    values = np.zeros((d, cells * tokens + 1), np.int64)  # the last token is for absent neighbours
    values[:, :-1] = channels - np.stack([levels(model, modes, c) for c in range(d)])
    residuals = values[:, :-1].copy()
    if row:
        lattice = passes(cells, tokens, row)[1]
        predicted = _residuals(values, lattice)
        plain, better = (abs(r).sum(axis=1) * 10 + cells * tokens for r in (residuals, predicted))
        smooth = np.flatnonzero(plain * (cells * tokens) > better * (cells * tokens + WORTH))
        residuals[smooth] = predicted[smooth]
        model = model._replace(smooth=tuple(smooth.tolist()))

    size = 1 << bits
    magnitudes = np.minimum(residuals % size, -residuals % size)
    of_mode = (np.arange(1 << len(switches))[:, None] == modes).astype(np.int64)  # [modes, T]
    means = _cheapest_means(of_mode @ magnitudes.T, of_mode.sum(axis=1))
    spread = int(_class_of(np.abs(mean_steps(means)).sum(), means.size))
    return model._replace(spread=spread), Given(channels, modes, means)


def _residuals(values: np.ndarray, lattice: list[Pass]) -> np.ndarray:
    """What is left of values [d, T + 1] after prediction, [d, T]."""
    left = np.empty_like(values[:, :-1])
    for part in lattice:
        left[:, part.tokens] = values[:, part.tokens] - predict(values, part)
    return left


def _cheapest_means(totals: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Means [modes, d] for `counts` [modes] magnitudes that add up to totals [modes, d]: those that cost least, told and used.

    A mean that is a little off costs the symbols less than telling it where there are few of them, so the path of least
    cost along the channels is taken.
    """
    classes = np.arange(CLASSES)
    mean = 2.0 ** ((classes - MIDDLE) / 2)
    used = counts[:, None, None] * np.log2(1 + 2 * mean) + totals[..., None] * np.log2(
        1 + 1 / mean
    )  # [modes, d, classes]
    used[..., 0] = np.where(totals > 0, np.inf, 0.0)
    steps = np.abs(classes[:, None] - classes)
    told = np.where(steps, TELL + TELL_MORE * steps, STAY)  # [from, to]
    cost, origins = told[MIDDLE] + used[:, 0], []
    for channel in range(1, totals.shape[1]):
        paths = cost[:, :, None] + told  # [modes, from, to]
        origins.append(paths.argmin(axis=1))
        cost = np.take_along_axis(paths, origins[-1][:, None], 1)[:, 0] + used[:, channel]
    means = np.empty(totals.shape, np.int64)
    means[:, -1] = cost.argmin(axis=1)
    for channel in range(totals.shape[1] - 1, 0, -1):
        means[:, channel - 1] = np.take_along_axis(origins[channel - 1], means[:, channel, None], 1)[:, 0]
    return means


def _class_of(total: np.ndarray, count: int) -> np.ndarray:
    """The class whose mean is nearest to total / count, 0 where that is 0."""
    with np.errstate(divide="ignore"):
        nearest = np.rint(2 * np.log2(total / count)) + MIDDLE
    return np.where(total > 0, nearest.clip(1, CLASSES - 1), 0).astype(np.int64)
