"""Makes the golden files: small `.coa` files of the current format version and what they must decode to.

    python tests/golden/make.py [--replace NAME]

A golden file is made once and then kept for ever: this script never touches one that exists, and does not make one again
that was lost (restore it with git). For a new format version add files under a new name; `expected.json` gains their entries.
Before a format version is released, `--replace NAME` makes one of its files anew.
"""

import argparse
import hashlib
import io
import json
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

from coanerv_codec.bank import CONTEXTS, HUFFMAN, Hints, decode_bank, encode_bank
from coanerv_codec.cells import pack_shake
from coanerv_codec.container import ClipRecord, Header, Metadata, Packet, Reader, StreamInfo, Writer
from coanerv_codec.quantizer import dequantize, quantize

HERE = Path(__file__).parent


def header(**fields) -> Header:
    """A header with what all golden files have in common."""
    common = {
        "checkpoint": "golden-00000000",
        "checkpoint_sha256": bytes(range(32)),
        "frames_per_clip": 8,
        "tokens": 24,
        "token_dim": 18,
        "cell_size": 128,
        "time_base": Fraction(1, 30000),
    }
    return Header(**common | fields)


def tokens(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Laplacian tokens whose spread differs by channel, with a few dead channels."""
    spread = np.linspace(-0.2, 1, shape[-1]).clip(0)
    return (np.random.default_rng(seed).laplace(0.3, 1, shape) * spread).astype(np.float32)


def fit_6bit(file: io.BytesIO) -> None:
    """The simplest file: one cell, even frame times, a short last clip."""
    head = header(width=640, height=360, frame_duration=1001, frame_rate=Fraction(30000, 1001))
    writer = Writer(file, head)
    for clip, frames in enumerate((8, 8, 3)):
        symbols, z, s = quantize(tokens(head.bank_shape, clip), 6)
        writer.clip([1001 * (8 * clip + i) for i in range(frames)], 1001, encode_bank(symbols, 6, z, s, HUFFMAN))
    writer.finish()


def cells_vfr_audio(file: io.BytesIO) -> None:
    """Everything at once: cells, uneven times from a negative start, audio, subtitles, metadata, every header field."""
    head = header(
        width=250, height=243, columns=2, rows=2, overlap=8, frame_rate=Fraction(24), time_base=Fraction(1, 1000),
        sample_aspect_ratio=Fraction(32, 27), rotation=90, flip=True, chroma="422", bit_depth=10, alpha=True,
        scan="tff", color_range=1, matrix=9, primaries=9, transfer=16, chroma_location=1,
    )  # fmt: skip
    writer = Writer(file, head)
    writer.metadata(Metadata((("title", "Gänseblümchen"), ("artist", ""))))
    writer.metadata(Metadata((("handler_name", "camera"),), "video"))
    writer.stream(
        StreamInfo(
            index=0, kind="audio", codec="aac", time_base=Fraction(1, 48000), disposition=1, language="deu",
            bit_rate=96_000, sample_rate=48_000, channels=2, delay=1024, layout="stereo", extradata=b"\x11\x90",
            parameters=(("frame_size", "1024"),), metadata=(("title", "Ton"),),
        )
    )  # fmt: skip
    writer.stream(StreamInfo(index=1, kind="subtitle", codec="subrip", time_base=Fraction(1, 1000)))
    rng = np.random.default_rng(7)
    for clip in range(2):
        writer.packets(
            [
                Packet(stream=0, pts=1024 * i - 1024, dts=1024 * i - 1024, duration=1024, flags=1, data=rng.bytes(30))
                for i in range(4 * clip, 4 * clip + 4)
            ]
        )
        symbols, z, s = quantize(tokens(head.bank_shape, clip), 8)
        times = -40 + 400 * clip + np.cumsum(rng.integers(1, 50, 8))
        writer.clip(times.tolist(), 17, encode_bank(symbols, 8, z, s, HUFFMAN))
    line = Packet(stream=1, pts=100, dts=None, duration=900, flags=1, data=b"Hallo", side_data=(("note", b"\0"),))
    writer.packets([line])
    writer.finish()


def flat_2bit(file: io.BytesIO) -> None:
    """A still grey picture: all tokens equal, no symbol bits at all."""
    head = header(width=1, height=1, time_base=Fraction(1, 25), frame_duration=1)
    symbols, z, s = quantize(np.full(head.bank_shape, -0.5), 2)
    writer = Writer(file, head)
    writer.clip([0], 1, encode_bank(symbols, 2, z, s, HUFFMAN))
    writer.finish()


def contexts_6bit(file: io.BytesIO) -> None:
    """Coder 2: neighbours, a switch and smooth channels in two cells, a clip without hints, and a flat one."""
    head = header(width=200, height=100, columns=2, frame_duration=1, time_base=Fraction(1, 25), token_dim=19)
    writer = Writer(file, head)
    for clip, hints in enumerate((Hints(6, (18,)), Hints(), Hints(4), Hints())):
        bank = tokens(head.bank_shape, clip)
        bank[..., 17] += np.linspace(-3, 3, head.tokens, dtype=np.float32)
        bank[..., 18] = np.where(bank[..., 18] > 0, np.float32(1.5), np.float32(-1.5))
        bank[..., :9][bank[..., 18] > 0] /= 4
        symbols, z, s = quantize(bank if clip < 3 else np.full(head.bank_shape, 0.25), 6)
        writer.clip(range(8 * clip, 8 * clip + 8), 1, encode_bank(symbols, 6, z, s, CONTEXTS, hints))
    writer.finish()


def moving_5bit(file: io.BytesIO) -> None:
    """Cells that move in the first and the third clip."""
    head = header(width=120, height=60, columns=2, overlap=4, frame_duration=1, time_base=Fraction(1, 25))
    writer = Writer(file, head)
    for clip, velocities in enumerate((((-6, 8), (0, 0)), (), ((1, 0), (65_536, -65_536)))):
        symbols, z, s = quantize(tokens(head.bank_shape, clip), 5)
        times = range(8 * clip, 8 * clip + 8)
        writer.clip(times, 1, encode_bank(symbols, 5, z, s, CONTEXTS), velocities)
    writer.finish()


def shaking_5bit(file: io.BytesIO) -> None:
    """Cells that shake: one of them also moves, in the second clip none does."""
    head = header(width=120, height=60, columns=2, overlap=4, frame_duration=1, time_base=Fraction(1, 25))
    writer = Writer(file, head)
    shake = pack_shake(np.array([(0, 2), (-3, 1), (4, -4), (1, 0), (-5, 3), (7, -8), (3, 1), (-2, 0)]))
    for clip, (velocities, shakes) in enumerate(
        ((((-6, 8), (0, 0)), ((1, shake),)), ((), ((0, shake), (1, shake[::-1]))))
    ):
        symbols, z, s = quantize(tokens(head.bank_shape, clip), 5)
        times = range(8 * clip, 8 * clip + 8)
        writer.clip(times, 1, encode_bank(symbols, 5, z, s, CONTEXTS), velocities, shakes)
    writer.finish()


GOLDEN = {
    "v1.0-fit-6bit": fit_6bit,
    "v1.0-cells-vfr-audio-8bit": cells_vfr_audio,
    "v1.0-flat-2bit": flat_2bit,
    "v1.0-contexts-6bit": contexts_6bit,
    "v1.0-moving-5bit": moving_5bit,
    "v1.0-shaking-5bit": shaking_5bit,
}


def plain(record) -> dict[str, str]:
    """A record's fields as text, but for the bank, and for the motion of cells that stand still."""
    left_out = {"bank"} | {name for name in ("velocities", "shakes") if not getattr(record, name, True)}
    values = ((name, value) for name, value in vars(record).items() if name not in left_out)
    return {name: value.hex() if isinstance(value, bytes) else str(value) for name, value in values}


def describe(data: bytes) -> dict:
    """All that a reader gets out of a file: the header, the records in order, and a hash of the tokens."""
    reader = Reader(io.BytesIO(data))
    tokens_hash, items = hashlib.sha256(), []
    for item in reader:
        items += map(plain, item) if isinstance(item, list) else [plain(item)]
        if isinstance(item, ClipRecord):
            symbols, _, z, s = decode_bank(item.bank, reader.header.bank_shape)
            tokens_hash.update(dequantize(symbols, z, s).astype("<f4").tobytes())
    return {"tokens_sha256": tokens_hash.hexdigest(), "header": plain(reader.header), "items": items}


def main(arguments: list[str], here: Path = HERE) -> None:
    """Make what is new."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replace", choices=GOLDEN, action="append", default=[], metavar="NAME")
    replaced = parser.parse_args(arguments).replace
    listing = here / "expected.json"
    expected = json.loads(listing.read_text()) if listing.exists() else {}
    if lost := [name for name in expected if not (here / f"{name}.coa").exists() and name not in replaced]:
        sys.exit(f"{lost[0]}.coa is in {listing.name} but not there: restore it with git, or give --replace {lost[0]}")
    for name, make in GOLDEN.items():
        path = here / f"{name}.coa"
        if path.exists() and name not in replaced:
            print(f"kept {path.name}")
            continue
        file = io.BytesIO()
        make(file)
        path.write_bytes(file.getvalue())
        expected[name] = {"sha256": hashlib.sha256(file.getvalue()).hexdigest(), **describe(file.getvalue())}
        print(f"made {path.name}, {len(file.getvalue())} bytes")
    listing.write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
