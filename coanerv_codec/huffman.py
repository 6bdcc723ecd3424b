"""Canonical Huffman coding of uint8 symbols: code lengths, their table in the file, packing and unpacking.

dahuffman builds the code; only its lengths are kept, and codewords are assigned canonically (shorter first, then by
symbol), so that the lengths alone describe the code. Bits are packed most significant first; the last byte is padded
with zeros. An alphabet of one symbol takes no bits at all.
"""

import threading
from typing import NamedTuple

import numpy as np
from dahuffman import HuffmanCodec

from coanerv_codec.errors import FormatError

MAX_LENGTH = 15  # a code length fits a nibble
DOUBLINGS = 4  # unpacking takes 2^4 symbols in each step of its one sequential loop


class Scratch(threading.local):
    """Arrays that unpacking works in, window by window, one set per thread.

    They are kept because new ones would cost more in page faults than the work that is done in them.
    """

    def __init__(self, window_bytes: int):
        self.window_bytes = window_bytes
        self.positions = np.arange(8 * window_bytes + MAX_LENGTH)
        self.ahead = np.empty(8 * window_bytes, np.intp)
        self.jumps = np.empty((DOUBLINGS + 1, 8 * window_bytes + MAX_LENGTH), np.intp)


SCRATCH = Scratch(window_bytes=4096)


class Code(NamedTuple):
    """Code lengths of the symbols first, first + 1, ...; 0 marks an unused symbol. A lone symbol has lengths (0,)."""

    first: int
    lengths: tuple[int, ...]

    @property
    def last(self) -> int:
        """The highest symbol of the alphabet."""
        return self.first + len(self.lengths) - 1


def build_code(frequencies: np.ndarray) -> Code:
    """The Huffman code for symbol counts [at most 256], no code longer than MAX_LENGTH."""
    used = np.flatnonzero(frequencies)
    first, last = int(used[0]), int(used[-1])
    if first == last:
        return Code(first, (0,))
    counts = {int(symbol): int(frequencies[symbol]) for symbol in used}
    while True:
        # Naming an existing symbol as end-of-file keeps dahuffman from adding one of its own.
        table = HuffmanCodec.from_frequencies(counts, eof=first).get_code_table()
        if max(length for length, _ in table.values()) <= MAX_LENGTH:
            break
        counts = {symbol: (count + 1) // 2 for symbol, count in counts.items()}
    return Code(first, tuple(table[symbol][0] if symbol in table else 0 for symbol in range(first, last + 1)))


def table_bytes(code: Code) -> bytes:
    """The code as stored: first symbol, last symbol, then a nibble per length (none for a lone symbol)."""
    if len(code.lengths) == 1:
        return bytes((code.first, code.first))
    nibbles = np.array((*code.lengths, 0)[: len(code.lengths) + len(code.lengths) % 2], np.uint8)
    return bytes((code.first, code.last)) + (nibbles[0::2] << 4 | nibbles[1::2]).tobytes()


def read_table(data: bytes, start: int) -> tuple[Code, int]:
    """The code stored in `data` from `start` on, and where it ends. Refuses every table that is not a complete code."""
    if len(data) < start + 2:
        raise FormatError("a Huffman table is cut short")
    first, last = data[start], data[start + 1]
    if first == last:
        return Code(first, (0,)), start + 2
    if first > last:
        raise FormatError(f"a Huffman table runs from symbol {first} back to {last}")
    count = last - first + 1
    end = start + 2 + (count + 1) // 2
    if len(data) < end:
        raise FormatError("a Huffman table is cut short")
    packed = np.frombuffer(data, np.uint8, end - start - 2, start + 2)
    nibbles = np.stack((packed >> 4, packed & 15), axis=1).ravel()
    if nibbles[count:].any():
        raise FormatError("a Huffman table has a non-zero padding nibble")
    lengths = tuple(nibbles[:count].tolist())
    if not (lengths[0] and lengths[-1]):
        raise FormatError("a Huffman table is wider than the symbols it uses")
    if sum(2 ** (MAX_LENGTH - length) for length in lengths if length) != 2**MAX_LENGTH:
        raise FormatError("a Huffman table is not a complete prefix code")
    return Code(first, lengths), end


def pack(symbols: np.ndarray, code: Code) -> bytes:
    """Code uint8 symbols [n], all of them in the code's alphabet."""
    if len(code.lengths) == 1 or symbols.size == 0:
        return b""
    codeword, length = np.zeros(256, np.uint64), np.zeros(256, np.uint64)
    used, used_lengths, codewords = _canonical(code)
    codeword[used], length[used] = codewords, used_lengths

    # Join runs of four codes: at most 60 bits, so that a joined word touches at most two 64-bit words of output.
    padded = np.zeros(-(-symbols.size // 4) * 4, np.uint8)
    padded[: symbols.size] = symbols
    words, widths = codeword[padded].reshape(-1, 4), length[padded].reshape(-1, 4)
    widths.ravel()[symbols.size :] = 0
    words.ravel()[symbols.size :] = 0
    joined = words[:, 0]
    for i in range(1, 4):
        joined = joined << widths[:, i] | words[:, i]
    width = widths.sum(axis=1, dtype=np.uint64)
    end = np.cumsum(width, dtype=np.uint64)
    total = int(end[-1])
    start = end - width

    word, offset = (start >> np.uint64(6)).astype(np.intp), start & np.uint64(63)
    overhang = offset + width - np.minimum(offset + width, np.uint64(64))  # bits that belong to the next output word
    head = joined >> overhang << (np.uint64(64) - offset - (width - overhang))
    out = np.zeros(total // 64 + 2, np.uint64)
    runs = np.flatnonzero(np.diff(word, prepend=-1))
    out[word[runs]] = np.bitwise_or.reduceat(head, runs)
    spilled = np.flatnonzero(overhang)  # at most one joined word crosses into each output word
    out[word[spilled] + 1] |= joined[spilled] << (np.uint64(64) - overhang[spilled])
    return out.astype(">u8").tobytes()[: -(-total // 8)]


def unpack(data: bytes, count: int, code: Code) -> np.ndarray:
    """Decode exactly `count` symbols (uint8 [count]) that fill `data` to its last byte.

    Every bit position of a window is looked up as if a code started there, which gives the jump from each position to
    the next. Doubling the jumps makes the one sequential walk short; the positions between follow by going back down.
    """
    if len(code.lengths) == 1:
        if data:
            raise FormatError("a segment of one repeated symbol has bytes left over")
        return np.full(count, code.first, np.uint8)
    size = 8 * len(data)
    if count > size:  # every code has at least one bit
        raise FormatError("coded symbols run out before their count is reached")
    symbol_at, length_at = _lookup(code)
    depth = max(code.lengths)
    padded = np.frombuffer(data + bytes(2), np.uint8)
    shifts = 24 - depth - (SCRATCH.positions[: min(size, 8 * SCRATCH.window_bytes)] & 7)

    symbols = np.empty(count, np.uint8)
    done = start = 0
    while done < count:
        base = start >> 3
        window = padded[base : base + SCRATCH.window_bytes + 2].astype(np.intp)
        bits = 8 * (window.size - 2)
        if bits <= 0:
            raise FormatError("coded symbols run out before their count is reached")
        ahead = SCRATCH.ahead[:bits]
        ahead.reshape(-1, 8)[:] = (window[:-2] << 16 | window[1:-1] << 8 | window[2:])[:, None]
        ahead >>= shifts[:bits]
        ahead &= 2**depth - 1
        jumps = SCRATCH.jumps[:, : bits + MAX_LENGTH]  # jumps[k]: from each position over 2^k codes
        length_at.take(ahead, out=jumps[0, :bits], mode="clip")  # nothing to clip: the mode is the fastest
        jumps[0, bits:] = 0  # positions beyond the window lead to themselves
        jumps[0] += SCRATCH.positions[: bits + MAX_LENGTH]
        for k in range(DOUBLINGS):
            jumps[k].take(jumps[k], out=jumps[k + 1], mode="clip")
        far = memoryview(jumps[DOUBLINGS])
        at, walk = start & 7, []
        while at < bits:
            walk.append(at)
            at = far[at]
        starts = np.array(walk)
        for k in reversed(range(DOUBLINGS)):
            starts = np.stack((starts, jumps[k].take(starts, mode="clip")), axis=-1).ravel()
        found = min(int(np.searchsorted(starts, bits)), count - done)
        symbols[done : done + found] = symbol_at.take(ahead.take(starts[:found]))
        done += found
        start = 8 * base + int(jumps[0, starts[found - 1]])

    if start > size:
        raise FormatError("coded symbols run out before their count is reached")
    if size - start >= 8:
        raise FormatError("a segment has bytes left over after its last symbol")
    if data[-1] & (1 << (size - start)) - 1:
        raise FormatError("a segment has non-zero padding bits")
    return symbols


def _canonical(code: Code) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symbols, code lengths and codewords of the used symbols, in canonical order."""
    lengths = np.array(code.lengths)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    lengths = lengths[order]
    spans = 1 << (MAX_LENGTH - lengths)  # how many MAX_LENGTH-bit words begin with each code
    return order + code.first, lengths, (np.cumsum(spans) - spans) >> (MAX_LENGTH - lengths)


def _lookup(code: Code) -> tuple[np.ndarray, np.ndarray]:
    """For every word of max(lengths) bits: the symbol whose code it begins with (uint8), and that code's length."""
    symbols, lengths, _ = _canonical(code)
    spans = 1 << (int(lengths[-1]) - lengths)
    return np.repeat(symbols.astype(np.uint8), spans), np.repeat(lengths, spans)
