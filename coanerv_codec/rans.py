"""Interleaved rANS: integers that stand for intervals of 2^14, packed into 16-bit words by several states at once.

A symbol of frequency f whose interval begins at c takes a state x to (x div f) * 2^14 + x mod f + c. States are kept in
[2^16, 2^32) by moving 16-bit words out and in. Symbols come in blocks; the symbols of a block go to the lanes 0, 1, ...
in turn, so that numpy does one step of all lanes at a time. (Few symbols have one lane, in a plain loop.) The packer works
backwards, so that the unpacker, which may choose each block's frequencies from what it has read before, works forwards.
`docs/format.md` has the layout.
"""

from bisect import bisect_right

import numpy as np

from coanerv_codec.errors import FormatError

PRECISION = 14  # bits of a probability
SLOTS = 1 << PRECISION
LOW = 1 << 16  # the least state, and the one that every lane begins and ends with
MIN_LANES, MAX_LANES = 64, 256  # where there are more than one
FEW = 1 << 17  # fewer symbols go to one lane: a plain loop is then as fast, and a lane takes about two bytes


def lanes_for(symbols: int) -> int:
    """How many lanes so many symbols go to, a power of two."""
    if symbols < FEW:
        return 1
    return min(max(1 << (symbols // 2048).bit_length() - 1, MIN_LANES), MAX_LANES)


class Packer:
    """Takes blocks of intervals, gives the bytes."""

    def __init__(self) -> None:
        self._blocks: list[tuple[np.ndarray, np.ndarray]] = []

    def put(self, starts: np.ndarray, frequencies: np.ndarray) -> None:
        """Add a block of symbols, int64 [n] each: where their intervals of SLOTS begin and how long they are."""
        self._blocks.append((starts, frequencies))

    def finish(self, lanes: int) -> bytes:
        """All blocks packed: the lanes' states, then the words in the order in which they are read."""
        if lanes == 1:
            state, words = self._finish_one()
        else:
            state, words = self._finish_lanes(lanes)
        return state.astype("<u4").tobytes() + words[::-1].astype("<u2").tobytes()

    def _finish_one(self) -> tuple[np.ndarray, np.ndarray]:
        x, words = LOW, []
        for starts, frequencies in reversed(self._blocks):
            for start, f in zip(starts[::-1].tolist(), frequencies[::-1].tolist(), strict=True):
                if x >= f << 32 - PRECISION:
                    words.append(x & 0xFFFF)
                    x >>= 16
                x += x // f * (SLOTS - f) + start
        return np.array([x]), np.array(words, np.int64)

    def _finish_lanes(self, lanes: int) -> tuple[np.ndarray, np.ndarray]:
        state, words = np.full(lanes, LOW, np.int64), [np.empty(0, np.int64)]
        for starts, frequencies in reversed(self._blocks):
            limits, gaps = frequencies << 32 - PRECISION, SLOTS - frequencies
            for at in range((len(starts) - 1) // lanes * lanes, -1, -lanes):
                f = frequencies[at : at + lanes]
                x = state[: len(f)]
                full = (x >= limits[at : at + lanes]).nonzero()[0]
                if full.size:
                    moved = x[full]
                    words.append(moved[::-1] & 0xFFFF)  # all words are turned round at the end
                    x[full] = moved >> 16
                quotient = x // f
                quotient *= gaps[at : at + lanes]
                x += quotient
                x += starts[at : at + lanes]
        return state, np.concatenate(words)


class Unpacker:
    """Gives the symbols of one block after another."""

    def __init__(self, data: bytes, lanes: int, most: int):
        """`most` is the most symbols that will be read: none takes more than a word."""
        if len(data) < 4 * lanes or len(data) % 2 or len(data) > 4 * lanes + 2 * most:
            raise FormatError(
                f"token bank: {len(data)} bytes are not the states (lanes: {lanes}) and at most {most} words"
            )
        self._state = np.frombuffer(data, "<u4", lanes).astype(np.int64)
        self._words = np.frombuffer(data, "<u2", offset=4 * lanes).astype(np.int64)
        self._list = self._words.tolist() if lanes == 1 else []
        self._at = 0
        if (self._state < LOW).any():
            raise FormatError("token bank: a state of the coded symbols is too small")

    def take(self, bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The next block, int64 [n]: symbol i is of the alphabet whose intervals are row rows[i] of `bounds`.

        bounds [alphabets, symbols + 1] begin with 0 and end with SLOTS.
        """
        return self._take_lanes(bounds, rows) if len(self._state) > 1 else self._take_one(bounds, rows)

    def _take_one(self, bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
        order = rows.tolist()
        lines = {row: bounds[row].tolist() for row in set(order)}
        x, at, words, found = int(self._state[0]), self._at, self._list, []
        mask, shift, low = SLOTS - 1, PRECISION, LOW  # local names are faster
        try:
            for row in order:
                line = lines[row]
                slot = x & mask
                if slot < line[1]:  # symbol 0 is the commonest
                    symbol = 0
                    x = line[1] * (x >> shift) + slot
                else:
                    symbol = bisect_right(line, slot) - 1
                    start = line[symbol]
                    x = (line[symbol + 1] - start) * (x >> shift) + slot - start
                if x < low:
                    x = x << 16 | words[at]
                    at += 1
                found.append(symbol)
        except IndexError:
            raise FormatError("token bank: coded symbols run out before their count is reached") from None
        self._state[0], self._at = x, at
        return np.array(found, np.int64)

    def _take_lanes(self, bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
        alphabets, width = bounds.shape
        # All alphabets on one line, each SLOTS long: one search finds the symbol whatever its alphabet.
        line = (bounds + (np.arange(alphabets) << PRECISION)[:, None]).ravel()
        lengths = line[1:] - line[:-1]
        offsets = rows << PRECISION
        found = np.empty(len(rows), np.int64)
        state, words, at, lanes = self._state, self._words, self._at, len(self._state)
        for begin in range(0, len(rows), lanes):
            offset = offsets[begin : begin + lanes]
            x = state[: len(offset)]
            slot = x & SLOTS - 1
            slot += offset
            place = line.searchsorted(slot, "right")
            place -= 1
            found[begin : begin + lanes] = place
            slot -= line.take(place)
            x >>= PRECISION
            x *= lengths.take(place)
            x += slot
            low = (x < LOW).nonzero()[0]
            if low.size:
                more = words[at : at + low.size]
                at += low.size
                if more.size < low.size:
                    raise FormatError("token bank: coded symbols run out before their count is reached")
                x[low] = x[low] << 16 | more
        self._at = at
        return found - rows * width

    def end(self) -> None:
        """Check that the last symbol has been read: what was packed first is LOW in every lane."""
        if self._at != len(self._words):
            raise FormatError("token bank: coded symbols have words left over after the last one")
        if (self._state != LOW).any():
            raise FormatError("token bank: coded symbols do not end where they began: they are damaged")
