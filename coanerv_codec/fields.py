"""The fields that chunk payloads are made of (varints, strings, fractions), written and read back with every check."""

import struct
from fractions import Fraction
from math import gcd

from coanerv_codec.errors import FormatError


def varint(value: int) -> bytes:
    """LEB128: seven bits per byte, least significant first, the high bit set on all bytes but the last."""
    if not 0 <= value < 1 << 64:
        raise FormatError(f"{value} does not fit an unsigned 64-bit field")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def signed(value: int) -> bytes:
    """A signed varint, zigzag: 0, -1, 1, -2 become 0, 1, 2, 3."""
    if not -(1 << 63) <= value < 1 << 63:
        raise FormatError(f"{value} does not fit a signed 64-bit field")
    return varint(value << 1 if value >= 0 else ~value << 1 | 1)


def blob(data: bytes) -> bytes:
    """Bytes behind their length."""
    return varint(len(data)) + data


def text(value: str) -> bytes:
    """A UTF-8 string behind its length in bytes."""
    return blob(value.encode())


def fraction(value: Fraction) -> bytes:
    """Numerator and denominator, in lowest terms."""
    return varint(value.numerator) + varint(value.denominator)


class Fields:
    """Reads fields one after another from a payload; `what` names the payload in error messages."""

    def __init__(self, data: bytes, what: str):
        self.data, self.what, self.at = data, what, 0

    def error(self, problem: str) -> FormatError:
        """The error to raise for a problem in this payload."""
        return FormatError(f"{self.what}: {problem}")

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self.data) - self.at

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        start, end = self.at, self.at + count
        if end > len(self.data):
            raise self.error(f"ends at byte {len(self.data)}, {count - self.left} bytes too early")
        self.at = end
        return self.data[start:end]

    def byte(self) -> int:
        """An unsigned byte."""
        at = self.at
        if at >= len(self.data):
            self.take(1)  # raises
        self.at = at + 1
        return self.data[at]

    def float32(self) -> float:
        """A little-endian IEEE 754 single."""
        return struct.unpack("<f", self.take(4))[0]

    def varint(self, limit: int = 2**64 - 1, name: str = "a number", raised_by: str = "") -> int:
        """An unsigned varint of at most `limit`, in its shortest form; `raised_by` names the limit a user may raise."""
        byte = self.byte()
        value, shift = byte & 0x7F, 7
        while byte >= 0x80:
            if shift == 70:
                raise self.error("a varint is longer than 10 bytes")
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
        if byte == 0 and shift > 7:
            raise self.error("a varint is longer than it needs to be")
        if value > limit:
            raise self.error(f"{name} is {value}, more than {limit}" + (f" (limit {raised_by})" if raised_by else ""))
        return value

    def signed(self) -> int:
        """A zigzag varint."""
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def blob(self, limit: int, name: str) -> bytes:
        """Bytes behind their length, which is at most `limit`."""
        return self.take(self.varint(limit, f"the length of {name}"))

    def text(self, limit: int, name: str) -> str:
        """A UTF-8 string of at most `limit` bytes."""
        try:
            return self.blob(limit, name).decode()
        except UnicodeDecodeError:
            raise self.error(f"{name} is not UTF-8") from None

    def fraction(self, name: str) -> Fraction:
        """A non-negative fraction in lowest terms, both parts below 2^31."""
        numerator, denominator = self.varint(2**31 - 1, name), self.varint(2**31 - 1, name)
        if denominator == 0 or gcd(numerator, denominator) != 1:
            raise self.error(f"{name} {numerator}/{denominator} is not a fraction in lowest terms")
        return Fraction(numerator, denominator)

    def end(self) -> None:
        """Check that nothing is left."""
        if self.left:
            raise self.error(f"has {self.left} bytes left over")
