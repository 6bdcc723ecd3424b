"""Mutations of `.coa` files: of raw bytes, which CRCs catch, and of chunks and fields with all CRCs made right again."""

import random
import struct
import zlib

from seeds import Piece, Seed

from coanerv_codec.container import SIGNATURE
from coanerv_codec.fields import varint
from coanerv_codec.records import IndexBytes

NUMBERS = sorted(
    {0, 1, 2, 3, 7, 8, 10**12, 2**53}
    | {2**k + d for k in (7, 8, 12, 14, 15, 16, 20, 24, 26, 28, 31, 32, 62, 63, 64) for d in (-1, 0, 1) if 2**k + d < 2**64}
)  # fmt: skip
VARINTS = [*map(varint, NUMBERS), b"\x80\x00", b"\xff" * 9 + b"\x7f", b"\xff" * 10 + b"\x01", b"\x80" * 9 + b"\x02"]
FLOATS = [struct.pack("<f", v) for v in (0.0, -0.0, 1e-45, -1.0, 3e38, -3e38, float("inf"), float("nan"), 1.0)]
TEXTS = [
    b"\x00",
    b"\x01\xff",
    b"\x02\xc3\x28",
    b"\x03\xed\xa0\x80",
    b"\x01\x00",
    b"\x05a\nb\x1bc",
    varint(70000),
    b"\x7f",
]
KINDS = (b"HEAD", b"CLIP", b"strm", b"pckt", b"meta", b"indx", b"head", b"TAIL")
UNKNOWN = (b"xtra", b"WAVE", b"aaaa", b"ZZZZ", b"CLIp", b"hEAD", b"cl\x00p", b"\xff\xff\xff\xff")


def raw(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Change bytes and leave the CRCs as they are."""
    out = bytearray(data)
    for _ in range(1 + int(rng.random() ** 2 * 4)):
        at = int(rng.random() * len(out)) if out else 0
        match int(rng.random() * 9):
            case 0 | 1 if out:
                out[at] ^= 1 << int(rng.random() * 8)
            case 2 if out:
                out[at] = int(rng.random() * 256)
            case 3:
                del out[at:]
            case 4:
                del out[at : at + 1 + int(rng.random() * 16)]
            case 5:
                out[at:at] = out[at : at + int(rng.random() * 200)]
            case 6:  # the rest of another file
                out[at:] = other[int(rng.random() * len(other)) :]
            case 7:
                out[at : at + 4] = struct.pack("<I", NUMBERS[int(rng.random() * len(NUMBERS))] & 0xFFFFFFFF)
            case _:
                out[at:at] = VARINTS[int(rng.random() * len(VARINTS))]
    return bytes(out)


EXTREMES = {
    "byte": [bytes((value,)) for value in range(256)],
    "float32": FLOATS,
    "u64": [struct.pack("<Q", number) for number in NUMBERS],
    "text": TEXTS,
    "blob": TEXTS,
    "fraction": [a + b for a in VARINTS for b in VARINTS],
    "varint": VARINTS,
    "signed": VARINTS,
}


def field(piece: Piece, rng: random.Random) -> bytes:
    """Give one field an extreme value."""
    start, end, kind = piece.spans[int(rng.random() * len(piece.spans))]
    values = EXTREMES[kind]
    return piece.payload[:start] + values[int(rng.random() * len(values))] + piece.payload[end:]


def one_field(seed: Seed, rng: random.Random) -> bytes:
    """Give one field of the file an extreme value and make all else right: what gets farthest."""
    at = int(rng.random() * len(seed.pieces))
    pieces = list(seed.pieces)
    pieces[at] = pieces[at]._replace(payload=field(pieces[at], rng), spans=())
    return join(pieces, index=True, copy=True)


def payload(piece: Piece, other: Seed, rng: random.Random) -> bytes:
    """Change a payload: a field if its fields are known, or its bytes."""
    if piece.spans and rng.random() < 0.6:
        return field(piece, rng)
    if rng.random() < 0.15:  # the same kind of chunk of another file, or half of it
        same = [p.payload for p in other.pieces if p.kind == piece.kind]
        if same:
            new = same[int(rng.random() * len(same))]
            at = int(rng.random() * (len(new) + 1))
            return new if rng.random() < 0.5 else piece.payload[:at] + new[at:]
    return raw(piece.payload, other.data, rng)


def repaired(seed: Seed, other: Seed, rng: random.Random) -> bytes:
    """Change chunks and fields, then make CRCs right, and mostly the index and the header's copy too."""
    pieces = list(seed.pieces)
    for _ in range(1 + int(rng.random() ** 2 * 4)):
        if not pieces:
            break
        at = int(rng.random() * len(pieces))
        piece = pieces[at]
        match int(rng.random() * 14):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(int(rng.random() * len(pieces)), piece)
            case 2:
                pieces.insert(int(rng.random() * len(pieces)), pieces.pop(at))
            case 3:
                pieces.insert(at, other.pieces[int(rng.random() * len(other.pieces))])
            case 4:
                kinds = KINDS if rng.random() < 0.5 else UNKNOWN
                pieces[at] = piece._replace(kind=kinds[int(rng.random() * len(kinds))], spans=())
            case 5:
                pieces.insert(at, Piece(UNKNOWN[0], piece.payload))
            case _:
                pieces[at] = piece._replace(payload=payload(piece, other, rng), spans=())
    return join(pieces, index=rng.random() < 0.7, copy=rng.random() < 0.8)


def join(pieces: list[Piece], index: bool = False, copy: bool = False) -> bytes:
    """The file of these chunks; `index` makes indx and TAIL anew where they are unchanged, `copy` makes head a copy of HEAD."""
    out = bytearray(SIGNATURE)
    entries, frames, index_at = IndexBytes(), 0, 0
    head = next((p.payload for p in pieces if p.kind == b"HEAD"), None)
    for kind, data, spans, count, pts in pieces:
        if kind == b"CLIP" and count:
            entries.add(len(out), count, max(-(2**62), min(2**62, pts)))
            frames += count
        elif kind == b"indx":
            index_at = len(out)
            if index and spans:
                data = entries.payload()
        elif kind == b"TAIL" and index and spans:
            data = struct.pack("<QQQ", entries.count, frames, index_at)
        elif kind == b"head" and copy and spans and head is not None:
            data = head
        body = kind + len(data).to_bytes(4, "little") + data
        out += body + zlib.crc32(body).to_bytes(4, "little")
    return bytes(out)
