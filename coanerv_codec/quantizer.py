"""The paper's uniform quantizer: tokens to integer symbols and back.

symbol = round((token - z) / s), token' = symbol * s + z, where z is the minimum and s the range over 2^b - 1. Most of our token
values are near zero, so where the range includes zero we let zero be a level: s is the range over 2^b - 2, and z the minimum
lowered to a multiple of s. The decoder sees only the float32 values of z and s, so the encoder rounds them first and computes
the symbols from what the decoder will use.
"""

import numpy as np

MIN_BITS, MAX_BITS = 2, 8


def quantize(tokens: np.ndarray, bits: int) -> tuple[np.ndarray, np.float32, np.float32]:
    """Quantize float32 tokens of any shape to `bits` bits: symbols (uint8, same shape), minimum z, scale s."""
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"bits must be {MIN_BITS} to {MAX_BITS}, not {bits}")
    tokens = np.asarray(tokens, dtype=np.float32)
    if tokens.size == 0 or not np.isfinite(tokens).all():
        raise ValueError("tokens are empty or hold NaN or infinity")
    top = 2**bits - 1
    z, s = _range(np.float64(tokens.min()), np.float64(tokens.max()), bits)
    if s == 0:  # constant, or so narrow that the step is below float32's smallest
        return np.zeros(tokens.shape, np.uint8), z, s
    steps = (tokens.astype(np.float64) - np.float64(z)) / np.float64(s)
    return np.rint(steps).clip(0, top).astype(np.uint8), z, s


def _range(lowest: np.float64, highest: np.float64, bits: int) -> tuple[np.float32, np.float32]:
    """Choose z and s for tokens from lowest to highest."""
    top = 2**bits - 1
    z, s = np.float32(lowest), np.float32((highest - lowest) / top)
    if lowest < 0 < highest:
        step = np.float32((highest - lowest) / (top - 1))
        with np.errstate(over="ignore"):
            aligned = np.float32(np.floor(lowest / np.float64(step)) * np.float64(step)) if step else z
        if np.isfinite(largest_token(bits, aligned, step)):
            return aligned, step
    if not np.isfinite(largest_token(bits, z, s)):  # s was rounded up and the range is nearly all of float32
        s = np.nextafter(s, np.float32(0))
    return z, s


def dequantize(symbols: np.ndarray, z: float, s: float) -> np.ndarray:
    """Tokens (float32, same shape) of uint8 symbols: symbol * s + z in float64, rounded once to float32.

    In float64 the product is exact, so the result is the same with and without fused multiply-add, on every machine.
    """
    return _levels(256, z, s)[symbols]


def largest_token(bits: int, z: float, s: float) -> np.float32:
    """The token of the highest symbol; infinite when z and s do not fit together."""
    return _levels(2**bits, z, s)[-1]


def _levels(count: int, z: float, s: float) -> np.ndarray:
    """The tokens of symbols 0 to count - 1, float32 [count]."""
    with np.errstate(over="ignore"):  # symbols that the bank does not use may lie beyond float32
        return (np.arange(count, dtype=np.float64) * np.float64(np.float32(s)) + np.float64(np.float32(z))).astype(
            np.float32
        )
