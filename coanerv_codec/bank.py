"""One clip's token bank to bytes and back.

A bank is the quantized tokens of a clip: symbols [cells, N, d] (uint8) with the quantizer's bits, z and s. Two coders can
write it: `huffman`, the paper's, and `contexts`, which takes about a fifth less. `docs/format.md` has the layout.
"""

import struct
from typing import NamedTuple

import numpy as np

from coanerv_codec import bank_contexts, bank_huffman, fields
from coanerv_codec.bank_contexts import NO_HINTS, Hints
from coanerv_codec.quantizer import MAX_BITS, MIN_BITS, largest_token

HUFFMAN, CONTEXTS = "huffman", "contexts"
CODERS = {HUFFMAN: 1, CONTEXTS: 2}  # as a bank's first byte names them
DEFAULT_CODER = CONTEXTS
_MODULES = {1: bank_huffman, 2: bank_contexts}


class Bank(NamedTuple):
    """A parsed but still coded bank."""

    coder: str
    bits: int
    z: float
    s: float
    coded: bank_huffman.Coded | bank_contexts.Coded


def encode_bank(
    symbols: np.ndarray, bits: int, z: float, s: float, coder: str = DEFAULT_CODER, hints: Hints = NO_HINTS
) -> bytes:
    """Code the symbols [cells, N, d], all below 2^bits, of a clip quantized with z and s; hints make contexts smaller."""
    if symbols.dtype != np.uint8 or symbols.max() >> bits:
        raise ValueError(f"symbols must be uint8 below 2^{bits}")
    if coder == CONTEXTS and len(symbols) * symbols.shape[1] <= bank_contexts.MAX_TOKENS:
        nibble, rest = bank_contexts.encode(symbols, bits, float(z), float(s), hints)
    elif coder in CODERS:
        coder = HUFFMAN
        nibble, rest = bank_huffman.encode(symbols, bits)
    else:
        raise ValueError(f"coder must be {HUFFMAN} or {CONTEXTS}, not {coder!r}")
    return struct.pack("<BBff", CODERS[coder], bits << 4 | nibble, z, s) + rest


def decode_bank(data: bytes, shape: tuple[int, int, int]) -> tuple[np.ndarray, int, float, float]:
    """Symbols (uint8, `shape` = [cells, N, d]), bits, z and s of a coded bank; FormatError if anything is amiss."""
    bank = parse_bank(data, shape)
    return _MODULES[CODERS[bank.coder]].decode(bank.coded, bank.bits, shape), bank.bits, bank.z, bank.s


def parse_bank(data: bytes, shape: tuple[int, int, int]) -> Bank:
    """Everything of a bank of `shape` [cells, N, d] but the symbols themselves, checked."""
    read = fields.Fields(data, "token bank")
    number = read.byte()
    if number not in _MODULES:
        raise read.error(f"coder {number} is unknown; a newer coanerv may read it")
    packed = read.byte()
    bits = packed >> 4
    if not MIN_BITS <= bits <= MAX_BITS:
        raise read.error(f"{bits} bits per symbol, not {MIN_BITS} to {MAX_BITS}")
    z, s = read.float32(), read.float32()
    if not (np.isfinite([z, s]).all() and s >= 0 and np.isfinite(largest_token(bits, z, s))):
        raise read.error(f"minimum {z} and scale {s} do not give finite tokens")
    name = next(name for name, code in CODERS.items() if code == number)
    return Bank(name, bits, z, s, _MODULES[number].parse(read, bits, packed & 15, shape))
