"""Coverage-guided fuzzing with Atheris (`pip install atheris`; not a dependency of coanerv).

    python tests/fuzz/seeds.py corpus
    python tests/fuzz/harness.py container corpus -max_total_time=3600 -rss_limit_mb=2048 -timeout=2
    python tests/fuzz/harness.py bank corpus-banks -max_total_time=3600
    python tests/fuzz/harness.py verify corpus -max_total_time=3600

libFuzzer knows nothing of CRCs: `container` and `verify` put them right in every second input before they run it. Nothing is
caught but the typed error; anything else is a crash, which libFuzzer saves.
"""

import io
import random
import struct
import sys
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["coanerv_codec"]):
    import targets

    from coanerv_codec.bank import decode_bank
    from coanerv_codec.container import SIGNATURE
    from coanerv_codec.errors import FormatError
    from coanerv_codec.summary import summary
    from coanerv_codec.verify import verify

SHAPES = ((1, 3, 4), (4, 2, 9), (1, 24, 18), (2, 12, 4), (2, 24, 19))  # the shapes of the seeds' banks
parser = targets.Parser()
folder = Path(tempfile.mkdtemp())


def with_crcs(data: bytes) -> bytes:
    """Walk the chunks as their lengths say and make each CRC right."""
    out, at = bytearray(data), len(SIGNATURE)
    while at + 12 <= len(out):
        (length,) = struct.unpack_from("<I", out, at + 4)
        end = at + 8 + length
        if end + 4 > len(out):
            break
        struct.pack_into("<I", out, end, zlib.crc32(out[at:end]))
        at = end + 4
    return bytes(out)


def container(data: bytes) -> None:
    """The parser's target, with choices that depend on the input alone."""
    key = zlib.crc32(data)
    parser(with_crcs(data) if key & 1 else data, random.Random(key))


def bank(data: bytes) -> None:
    """The entropy decoder."""
    for shape in SHAPES:
        try:
            symbols, bits, _, _ = decode_bank(data, shape)
        except FormatError:
            continue
        targets.check(
            symbols.shape == shape and not (symbols >> bits).any(), "symbols are as many and as small as told"
        )


def whole(data: bytes) -> None:
    """All that `info` and `verify --no-checkpoint` do."""
    data = with_crcs(data) if zlib.crc32(data) & 1 else data
    with suppress(FormatError):
        summary(io.BytesIO(data))
    path = folder / "input.coa"
    path.write_bytes(data)
    verdict = verify(path)
    targets.check(verdict.exit_code in (0, 4), "a finding has a documented code")


TARGETS = {"container": container, "bank": bank, "verify": whole}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: harness.py {'|'.join(TARGETS)} [CORPUS] [libFuzzer options]")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
