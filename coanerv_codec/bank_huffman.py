"""Coder 1, the paper's: the d channels are sorted into at most 16 classes of like statistics, each with its own Huffman code.

`docs/format.md` has the layout; `bank.py` writes and reads what all coders have in common.
"""

from typing import NamedTuple

import numpy as np

from coanerv_codec import fields, huffman

MAX_CLASSES = 16


class Coded(NamedTuple):
    """A parsed but still coded bank; class_of is [d], codes and segments have one entry per class."""

    class_of: np.ndarray
    codes: list[huffman.Code]
    segments: list[bytes]

    @property
    def symbol_bytes(self) -> int:
        """Bytes that hold symbols; the others hold tables."""
        return sum(map(len, self.segments))


def encode(symbols: np.ndarray, bits: int) -> tuple[int, bytes]:
    """The low nibble of the bank's second byte, and all that follows z and s, for symbols [cells, N, d]."""
    channels = np.ascontiguousarray(symbols.reshape(-1, symbols.shape[-1]).T)  # [d, cells * N]
    histograms = np.stack([np.bincount(channel, minlength=2**bits) for channel in channels])  # [d, 2^bits]
    class_of = _choose_classes(histograms)
    classes = int(class_of.max()) + 1
    codes = [huffman.build_code(histograms[class_of == i].sum(axis=0)) for i in range(classes)]
    segments = [huffman.pack(channels[class_of == i].ravel(), code) for i, code in enumerate(codes)]
    parts = [_pack_map(class_of, classes)]
    parts += [huffman.table_bytes(code) for code in codes]
    parts += [fields.varint(len(segment)) for segment in segments]
    return classes - 1, b"".join(parts + segments)


def parse(read: fields.Fields, bits: int, nibble: int, shape: tuple[int, int, int]) -> Coded:
    """Everything but the symbols themselves, checked."""
    classes = nibble + 1
    class_of = _read_map(read, shape[-1], classes)
    codes = []
    for _ in range(classes):
        code, read.at = huffman.read_table(read.data, read.at)
        if code.last >= 2**bits:
            raise read.error(f"symbol {code.last} does not fit {bits} bits")
        codes.append(code)
    sizes = [read.varint(len(read.data), "a segment's length") for _ in range(classes)]
    segments = [read.take(size) for size in sizes]
    read.end()
    return Coded(class_of, codes, segments)


def decode(coded: Coded, bits: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The symbols, uint8 [cells, N, d]."""
    cells, tokens, d = shape
    channels = np.empty((d, cells * tokens), np.uint8)
    for i, (code, segment) in enumerate(zip(coded.codes, coded.segments, strict=True)):
        members = np.flatnonzero(coded.class_of == i)
        decoded = huffman.unpack(segment, members.size * cells * tokens, code)
        channels[members] = decoded.reshape(members.size, -1)
    return np.ascontiguousarray(channels.T).reshape(shape)


def _map_width(classes: int) -> int:
    """Bits per channel in the class map."""
    return (classes - 1).bit_length()


def _pack_map(class_of: np.ndarray, classes: int) -> bytes:
    """The class of each channel, as few bits each as there are classes, most significant bit first."""
    width = _map_width(classes)
    bits = class_of[:, None] >> np.arange(width)[::-1] & 1
    return np.packbits(bits.astype(np.uint8)).tobytes()


def _read_map(read: fields.Fields, d: int, classes: int) -> np.ndarray:
    width = _map_width(classes)
    bits = np.unpackbits(np.frombuffer(read.take((d * width + 7) // 8), np.uint8))
    if bits[d * width :].any():
        raise read.error("the class map has non-zero padding bits")
    class_of = bits[: d * width].reshape(d, width) @ (1 << np.arange(width)[::-1])
    if np.unique(class_of).tolist() != list(range(classes)):
        raise read.error(f"the class map does not use exactly the classes 0 to {classes - 1}")
    return class_of


def _choose_classes(histograms: np.ndarray) -> np.ndarray:
    """The class of each channel [d]: the cheapest cut of the channels, sorted by entropy, into contiguous runs."""
    d = len(histograms)
    order = np.argsort(_code_bits(histograms), kind="stable")
    costs = np.full((d + 1, d + 1), np.inf)  # costs[i, j]: bits of one class of the sorted channels i to j - 1
    running = np.concatenate((np.zeros_like(histograms[:1]), np.cumsum(histograms[order], axis=0)))
    for i in range(d):
        merged = running[i + 1 :] - running[i]
        costs[i, i + 1 :] = _code_bits(merged) + _table_bits(merged)

    best = costs[0]  # best[j]: cheapest cost of the first j channels in so many classes
    cuts = []
    cheapest, chosen = best[d], 1
    for classes in range(2, min(MAX_CLASSES, d) + 1):
        options = best[:, None] + costs  # [start of the last class, end of the last class]
        cuts.append(options.argmin(axis=0))
        best = options.min(axis=0)
        total = best[d] + d * _map_width(classes)
        if total < cheapest:
            cheapest, chosen = total, classes

    class_of = np.zeros(d, np.intp)
    end = d
    for i in range(chosen - 1, 0, -1):
        start = cuts[i - 1][end]
        class_of[order[start:end]] = i
        end = start
    return class_of


def _code_bits(histograms: np.ndarray) -> np.ndarray:
    """Estimate what a Huffman code spends on counts [..., symbols]: entropy, at least a bit each, 0 if all are same."""
    total = histograms.sum(axis=-1)
    logs = np.log2(histograms, out=np.zeros(histograms.shape), where=histograms > 0)
    entropy = total * np.log2(total) - (histograms * logs).sum(axis=-1)
    return np.where((histograms > 0).sum(axis=-1) > 1, np.maximum(entropy, total), 0.0)


def _table_bits(histograms: np.ndarray) -> np.ndarray:
    """Bits of the Huffman tables for counts [..., symbols], with their segments' lengths (about two bytes)."""
    used = histograms > 0
    span = used.shape[-1] - used.argmax(axis=-1) - used[..., ::-1].argmax(axis=-1)
    return 32 + np.where(span > 1, 8 * ((span + 1) // 2), 0)
