"""What the fuzzers start from: small whole `.coa` files, cut into chunks whose fields are known.

    python tests/fuzz/seeds.py FOLDER      writes them to FOLDER, and their banks to FOLDER-banks, as corpora for Atheris

Where fields lie is not written down a second time: the readers of `records.py` and `bank.py` are watched while they read.
"""

import io
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coanerv_codec import records
from coanerv_codec.bank import CONTEXTS, HUFFMAN, NO_HINTS, Hints, encode_bank, parse_bank
from coanerv_codec.container import DEFAULT_LIMITS, FRAMING, SIGNATURE, Header, Metadata, Packet, StreamInfo, Writer
from coanerv_codec.fields import Fields
from coanerv_codec.quantizer import quantize

GOLDEN = Path(__file__).parents[1] / "golden"
FAST = records.MAX_VELOCITY
SHAKE = bytes((0, 0x87))  # in two frames
CALM = ((0, 0), (1, 0), (-8, 5), (0, 0))  # velocities of four cells
WATCHED = ("byte", "float32", "varint", "signed", "blob", "text", "fraction")


class Span(NamedTuple):
    """A field of a payload: payload[start:end], read by the method of `Fields` called `kind` (or a "u64")."""

    start: int
    end: int
    kind: str


class Piece(NamedTuple):
    """A chunk, its fields, and for a clip the frames and time that an index gives."""

    kind: bytes
    payload: bytes
    spans: tuple[Span, ...] = ()
    frames: int = 0
    pts: int = 0


class Seed(NamedTuple):
    """A whole file and its chunks."""

    name: str
    data: bytes
    pieces: tuple[Piece, ...]


@contextmanager
def watched() -> Iterator[list[Span]]:
    """Note every field that is read meanwhile, outermost calls only."""
    spans: list[Span] = []
    depth = 0

    def wrap(name: str, original: Callable) -> Callable:
        def method(self, *arguments, **options):
            nonlocal depth
            start, depth = self.at, depth + 1
            try:
                return original(self, *arguments, **options)
            finally:
                depth -= 1
                if not depth:
                    spans.append(Span(start, self.at, name))

        return method

    originals = {name: getattr(Fields, name) for name in WATCHED}
    for name, original in originals.items():
        setattr(Fields, name, wrap(name, original))
    try:
        yield spans
    finally:
        for name, original in originals.items():
            setattr(Fields, name, original)


def cut(name: str, data: bytes) -> Seed:
    """Cut an intact file into its pieces."""
    at, pieces, header = len(SIGNATURE), [], None
    readers = {b"strm": records.read_stream, b"pckt": records.read_packets, b"meta": records.read_metadata}
    readers |= {b"indx": records.read_index, b"head": records.read_header, b"HEAD": records.read_header}
    while at < len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        payload = data[at + 8 : at + 8 + length]
        frames = pts = 0
        with watched() as spans:
            if kind == b"CLIP":
                clip = records.read_clip(payload, header, DEFAULT_LIMITS)
                frames, pts = len(clip.pts), clip.pts[0]
            elif kind in readers:
                record = readers[kind](payload, DEFAULT_LIMITS)
                header = record if kind == b"HEAD" else header
        if kind == b"CLIP":
            with watched() as inside:
                parse_bank(clip.bank, header.bank_shape)
            ahead = length - len(clip.bank)
            spans += [Span(start + ahead, end + ahead, kind) for start, end, kind in inside]
            tables = inside[3].end + ahead  # behind coder, bits, z and s come the map and the tables, byte by byte
            spans += [Span(i, i + 1, "byte") for i in range(tables, min(tables + 40, length))]
        if kind == b"TAIL":
            spans += [Span(i, i + 8, "u64") for i in (0, 8, 16)]
        pieces.append(Piece(kind, payload, tuple(spans), frames, pts))
        at += length + FRAMING
    return Seed(name, data, tuple(pieces))


def header(**fields) -> Header:
    """A header of the smallest kind."""
    common = {
        "checkpoint": "seed-00000000",
        "checkpoint_sha256": bytes(32),
        "frames_per_clip": 2,
        "tokens": 3,
        "token_dim": 4,
        "cell_size": 16,
        "width": 20,
        "height": 10,
        "time_base": Fraction(1, 25),
        "frame_duration": 1,
        "frame_rate": Fraction(25),
    }
    return Header(**common | fields)


def write(
    head: Header,
    clips: int,
    *,
    sound: bool = False,
    bits: int = 3,
    uneven: bool = False,
    coder: str = HUFFMAN,
    smooth: bool = False,
    hints: Hints = NO_HINTS,
    moving: tuple[tuple[tuple[int, int], ...], ...] = (),
    shaking: tuple[tuple[tuple[int, bytes], ...], ...] = (),
) -> bytes:
    """A whole file with random tokens; clip i has the velocities moving[i] and the shakes shaking[i], others none."""
    file, rng = io.BytesIO(), np.random.default_rng(clips)
    writer = Writer(file, head)
    if sound:
        writer.metadata(Metadata((("title", "é"),)))
        writer.stream(
            StreamInfo(
                index=0, kind="audio", codec="pcm_s16le", time_base=Fraction(1, 8000), sample_rate=8000, channels=1,
                layout="mono", language="deu", parameters=(("frame_size", "4"),), metadata=(("title", "Ton"),),
            )
        )  # fmt: skip
        writer.stream(StreamInfo(index=1, kind="subtitle", codec="subrip", time_base=Fraction(1, 1000)))
    at = 0
    for number in range(clips):
        if sound:
            writer.packets(
                [
                    Packet(stream=0, pts=640 * number, dts=640 * number, duration=320, flags=1, data=b"\1\2\3\4"),
                    Packet(stream=1, pts=80 * number, dts=None, duration=40, data=b"Hi", side_data=(("x", b"\0"),)),
                ]
            )
        spread = np.exp(rng.normal(0, 1, head.token_dim))
        tokens = rng.laplace(0, 1, head.bank_shape) * spread
        if smooth:  # neighbours predict each other
            y, x = np.divmod(np.arange(head.tokens), hints.row)
            tokens = tokens / 50 + (2 * y - x)[:, None]
        symbols, z, s = quantize(tokens.astype(np.float32), bits)
        times = [at + (3 * i + i % 2 if uneven else i) for i in range(head.frames_per_clip)]
        velocities = moving[number] if number < len(moving) else ()
        shakes = shaking[number] if number < len(shaking) else ()
        writer.clip(times, 1, encode_bank(symbols, bits, z, s, coder, hints), velocities, shakes)
        at = times[-1] + 1
    writer.finish()
    return file.getvalue()


def format_seeds() -> list[Seed]:
    """Files for the parser: the goldens, and smaller ones. They need no checkpoint to be read."""
    made = {
        "one-clip": write(header(), 1),
        "no-clip": write(header(), 0),
        "three-clips": write(header(), 3),
        "sound": write(header(), 2, sound=True),
        "uneven": write(header(frame_duration=0), 2, uneven=True),
        "cells": write(header(columns=2, rows=2, overlap=2, tokens=2, token_dim=9), 2, bits=8),
        "contexts": write(header(), 2, coder=CONTEXTS),
        "contexts-hints": write(header(columns=2, tokens=12), 3, bits=5, coder=CONTEXTS, hints=Hints(3, (1, 3))),
        "contexts-flat": write(header(token_dim=1, tokens=1), 1, bits=2, coder=CONTEXTS),
        "contexts-smooth": write(
            header(tokens=48, token_dim=3), 1, bits=8, coder=CONTEXTS, hints=Hints(6, (1,)), smooth=True
        ),
        "moving": write(header(), 2, coder=CONTEXTS, moving=(((3, -2),), ((FAST, -FAST),))),
        "moving-cells": write(
            header(columns=2, rows=2, overlap=2),
            3,
            sound=True,
            coder=CONTEXTS,
            moving=(CALM, (), (*CALM[1:], (-FAST, FAST))),
        ),
        "shaking": write(header(), 2, moving=(((3, -2),),), shaking=(((0, SHAKE),), ((0, SHAKE),))),
        "shaking-cells": write(
            header(columns=2, rows=2, overlap=2),
            2,
            coder=CONTEXTS,
            shaking=(((1, SHAKE), (3, SHAKE[::-1])), ((0, SHAKE),)),
        ),
        "moving-huffman": write(header(frame_duration=0), 1, uneven=True, moving=(((0, 1),),)),
    }
    golden = {path.stem: path.read_bytes() for path in sorted(GOLDEN.glob("*.coa"))}
    return [cut(name, data) for name, data in (made | golden).items()]


def picture_seeds(identity: tuple[str, bytes], config) -> list[Seed]:
    """Files that a checkpoint (its name and decoder hash) decodes, of pictures of a few pixels."""
    shape = {"frames_per_clip": config.frames, "tokens": config.tokens, "token_dim": config.token_dim}
    common = shape | {"checkpoint": identity[0], "checkpoint_sha256": identity[1], "cell_size": config.cell}
    shake = SHAKE * (config.frames // len(SHAKE)) + SHAKE[: config.frames % len(SHAKE)]
    made = {
        "picture": write(header(**common, width=6, height=4, chroma="420"), 1),
        "picture-sound": write(header(**common, width=4, height=4, chroma="444", rotation=90), 2, sound=True, bits=6),
        "picture-uneven": write(header(**common, width=5, height=3, frame_duration=0, frame_rate=Fraction(0)), 2, uneven=True),
        "picture-cells": write(header(**common, width=16, height=8, columns=2, overlap=2, chroma="rgb"), 1, bits=4),
        "picture-contexts": write(header(**common, width=6, height=4), 2, bits=6, coder=CONTEXTS, hints=config.hints),
        "picture-moving": write(header(**common, width=9, height=7), 2, bits=6, coder=CONTEXTS, hints=config.hints,
                                moving=(((3, -2),), ((FAST, -FAST),))),
        "picture-moving-cells": write(header(**common, width=16, height=12, columns=2, rows=2, overlap=2), 2, sound=True,
                                      coder=CONTEXTS, moving=(CALM, (*CALM[1:], (-FAST, FAST)))),
        "picture-shaking": write(header(**common, width=20, height=9, columns=2, overlap=2), 2, coder=CONTEXTS,
                                 moving=(((3, -2), (0, 0)),), shaking=(((0, shake),), ((0, shake), (1, shake[::-1])))),
        "picture-moving-pixel": write(header(**common, width=1, height=1), 1, moving=(((FAST, 1),),)),
    }  # fmt: skip
    return [cut(name, data) for name, data in made.items()]


def banks(seed: Seed) -> Iterator[bytes]:
    """The coded banks of a file's clips."""
    head = records.read_header(seed.pieces[0].payload, DEFAULT_LIMITS)
    for piece in seed.pieces:
        if piece.kind == b"CLIP":
            yield records.read_clip(piece.payload, head, DEFAULT_LIMITS).bank


def main(folder: Path) -> None:
    """Write the corpora: whole files into `folder`, banks into `folder`-banks."""
    inside = folder.with_name(f"{folder.name}-banks")
    for target in (folder, inside):
        target.mkdir(parents=True, exist_ok=True)
    for seed in format_seeds():
        (folder / f"{seed.name}.coa").write_bytes(seed.data)
        for number, bank in enumerate(banks(seed)):
            (inside / f"{seed.name}-{number}").write_bytes(bank)
    print(f"{len(list(folder.iterdir()))} files in {folder}, {len(list(inside.iterdir()))} banks in {inside}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
