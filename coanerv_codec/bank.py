"""One clip's token bank to bytes and back.

A bank is the quantized tokens of a clip: symbols [cells, N, d] (uint8) with the quantizer's bits, z and s. The d
channels are sorted into at most 16 classes of like statistics, each with its own Huffman code. `docs/format.md` has the
layout.
"""

import struct
from typing import NamedTuple

import numpy as np

from coanerv_codec import fields, huffman
from coanerv_codec.quantizer import MAX_BITS, MIN_BITS, largest_token

HUFFMAN = 1  # the only coder of format 1.0
MAX_CLASSES = 16


class Bank(NamedTuple):
    """A parsed but still coded bank; class_of is [d], codes and segments have one entry per class."""

    bits: int
    z: float
    s: float
    class_of: np.ndarray
    codes: list[huffman.Code]
    segments: list[bytes]


def encode_bank(symbols: np.ndarray, bits: int, z: float, s: float) -> bytes:
    """Code the symbols [cells, N, d], all below 2^bits, of a clip quantized with z and s."""
    if symbols.dtype != np.uint8 or symbols.max() >> bits:
        raise ValueError(f"symbols must be uint8 below 2^{bits}")
    channels = np.ascontiguousarray(symbols.reshape(-1, symbols.shape[-1]).T)  # [d, cells * N]
    histograms = np.stack([np.bincount(channel, minlength=2**bits) for channel in channels])  # [d, 2^bits]
    class_of = _choose_classes(histograms)
    classes = int(class_of.max()) + 1
    codes = [huffman.build_code(histograms[class_of == i].sum(axis=0)) for i in range(classes)]
    segments = [huffman.pack(channels[class_of == i].ravel(), code) for i, code in enumerate(codes)]
    parts = [struct.pack("<BBff", HUFFMAN, bits << 4 | classes - 1, z, s), _pack_map(class_of, classes)]
    parts += [huffman.table_bytes(code) for code in codes]
    parts += [fields.varint(len(segment)) for segment in segments]
    return b"".join(parts + segments)


def decode_bank(data: bytes, shape: tuple[int, int, int]) -> tuple[np.ndarray, int, float, float]:
    """Symbols (uint8, `shape` = [cells, N, d]), bits, z and s of a coded bank; FormatError if anything is amiss."""
    bank = parse_bank(data, shape[-1])
    cells, tokens, d = shape
    channels = np.empty((d, cells * tokens), np.uint8)
    for i, (code, segment) in enumerate(zip(bank.codes, bank.segments, strict=True)):
        members = np.flatnonzero(bank.class_of == i)
        decoded = huffman.unpack(segment, members.size * cells * tokens, code)
        channels[members] = decoded.reshape(members.size, -1)
    return np.ascontiguousarray(channels.T).reshape(shape), bank.bits, bank.z, bank.s


def parse_bank(data: bytes, d: int) -> Bank:
    """Everything of a bank of d channels but the symbols themselves, checked."""
    read = fields.Fields(data, "token bank")
    coder = read.byte()
    if coder != HUFFMAN:
        raise read.error(f"coder {coder} is unknown; a newer coanerv may read it")
    packed = read.byte()
    bits, classes = packed >> 4, (packed & 15) + 1
    if not MIN_BITS <= bits <= MAX_BITS:
        raise read.error(f"{bits} bits per symbol, not {MIN_BITS} to {MAX_BITS}")
    z, s = read.float32(), read.float32()
    if not (np.isfinite([z, s]).all() and s >= 0 and np.isfinite(largest_token(bits, z, s))):
        raise read.error(f"minimum {z} and scale {s} do not give finite tokens")
    class_of = _read_map(read, d, classes)
    codes = []
    for _ in range(classes):
        code, read.at = huffman.read_table(data, read.at)
        if code.last >= 2**bits:
            raise read.error(f"symbol {code.last} does not fit {bits} bits")
        codes.append(code)
    sizes = [read.varint(len(data), "a segment's length") for _ in range(classes)]
    segments = [read.take(size) for size in sizes]
    read.end()
    return Bank(bits, z, s, class_of, codes, segments)


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
