"""What the fuzzers run: each target takes bytes and returns the name of an outcome; anything but a typed error is a finding.

Targets also hold what they read against what the format promises, so that a wrong answer is found and not only a crash.
"""

import io
import os
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from coanerv_codec import container
from coanerv_codec.bank import decode_bank
from coanerv_codec.container import ClipRecord, Reader
from coanerv_codec.errors import FormatError
from coanerv_codec.summary import summary

Target = Callable[[bytes, random.Random], str]

# Exit codes that docs/cli.md gives to bad input (3: no frame in the time asked for); 1 is for the machine's faults.
CODES = {"info": {0, 4}, "verify": {0, 4, 5}, "decode": {0, 3, 4, 5, 6, 7}}


class OddError(AssertionError):
    """A promise that does not hold."""


class Pipe(io.RawIOBase):
    """Bytes that can be read once."""

    def __init__(self, data: bytes):
        self._file = io.BytesIO(data)

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        return self._file.read(min(size, 100))


def check(held: bool, promise: str, details: str = "") -> None:
    if not held:
        error = OddError(promise)
        error.add_note(details)
        raise error


class Parser:
    """The container and the entropy decoder: front to back and by clip, from files and pipes, stopping or skipping."""

    def __init__(self) -> None:
        # Banks seen before are not decoded again: mutants mostly leave most clips as they were.
        self.known: dict[tuple, FormatError | None] = {}
        container.decode_bank = self.decode

    def __call__(self, data: bytes, rng: random.Random) -> str:
        choice = rng.random()
        try:
            if choice < 0.45:
                return self.walk(Reader(io.BytesIO(data)), data if choice < 0.1 else None)
            if choice < 0.75:
                return self.walk(Reader(io.BytesIO(data), on_damage="skip"))
            if choice < 0.85:
                return self.walk(Reader(Pipe(data), on_damage="skip" if choice < 0.8 else "stop"))
            reader = Reader(io.BytesIO(data), on_damage="skip" if choice < 0.92 else "stop")
            for entry in reader.index():
                clip = reader.clip(entry.number)
                check(len(clip.pts) == entry.frames, "the index tells the frames of a clip")
                self.bank(clip, reader)
            return "accepted"
        except FormatError:
            return "refused"

    def walk(self, reader: Reader, data: bytes | None = None) -> str:
        """Read front to back; with `data`, hold what is found against the index of a file that is accepted."""
        number = frame = 0
        time = -(2**63) - 1
        for item in reader:
            if isinstance(item, ClipRecord):
                check(item.number >= number and item.first_frame >= frame, "clips and frames are numbered upwards")
                check(item.pts[0] > time and list(item.pts) == sorted(set(item.pts)), "times increase")
                number, frame, time = item.number + 1, item.first_frame + len(item.pts), item.pts[-1]
                self.bank(item, reader)
        check(reader.on_damage == "skip" or reader.complete, "only a whole file ends without an error")
        check(reader.complete or bool(reader.damage), "a file that is not whole has damage")
        if reader.damage:
            return "skipped damage"
        if data is not None:
            listed = sum(entry.frames for entry in Reader(io.BytesIO(data)).index())
            check(frame == listed, "the index lists the frames there are")
        return "accepted"

    def bank(self, clip: ClipRecord, reader: Reader) -> None:
        """Decode a bank that the reader let pass."""
        self.decode(clip.bank, reader.header.bank_shape)

    def decode(self, bank: bytes, shape: tuple[int, int, int]) -> None:
        """Decode a bank and hold it against its promises; the reader, too, calls this instead of `decode_bank`."""
        key = bank, shape
        if key not in self.known:
            if len(self.known) > 5000:
                self.known.clear()
            try:
                symbols, bits, _, _ = decode_bank(bank, shape)
                small = symbols.shape == shape and not (symbols >> bits).any()
                check(small, "symbols are as many and as small as told")
                self.known[key] = None
            except FormatError as error:
                self.known[key] = error
        if self.known[key]:
            raise FormatError(str(self.known[key]))


def info(data: bytes, rng: random.Random) -> str:
    """What `coanerv info` and `verify` compute, without the command line around it."""
    try:
        found = summary(io.BytesIO(data))
    except FormatError:
        return "refused"
    check(sum(found["bytes"].values()) >= 0 and found["bytes"]["damaged"] >= 0, "no part has less than no bytes")
    return "damaged" if found["damage"] else "accepted"


class CommandLine:
    """The real commands in this process, on a file in `folder`."""

    SMALL = (
        "--limit",
        "pixels=4096",
        "--limit",
        "frames=600",
        "--limit",
        "symbols=65536",
        "--limit",
        "memory=50000000",
    )
    OUTPUTS = ("out.y4m", "out.y4m", "out.mkv", "out.mp4", "out.png", "out.mov", "out.webm")

    def __init__(self, folder: Path, checkpoint: Path, commands: tuple[str, ...] = ("info", "verify", "decode")):
        from coanerv_codec import checkpoint as checkpoint_module

        os.environ["COANERV_CHECKPOINT"] = str(checkpoint)
        self.folder, self.commands = folder, commands
        self.out = folder / "out"
        self.out.mkdir(exist_ok=True)
        # The checkpoint is the same each time, and loading it takes longer than all the rest.
        checkpoint_module.load_checkpoint = cache(checkpoint_module.load_checkpoint)

    def arguments(self, rng: random.Random) -> list[str]:
        command = rng.choice(self.commands)
        found = [command, str(self.folder / "mutant.coa")]
        if command == "info":
            return found + ["--json"] * (rng.random() < 0.5)
        if command == "verify":
            return found + ["--json"] * (rng.random() < 0.3) + (["--deep", *self.SMALL] if rng.random() < 0.1 else [])
        found += ["-o", str(self.out / rng.choice(self.OUTPUTS)), "-y", "-q", *self.SMALL]
        if rng.random() < 0.4:
            found += ["--on-error", "conceal"]
        if rng.random() < 0.2:
            found += ["--fps", rng.choice(("1", "50", "24000/1001"))]
        if rng.random() < 0.2:
            found += ["--start", "0.1", "--duration", rng.choice(("0.1", "999999999"))]
        if rng.random() < 0.3:
            found += rng.choice((["--scale", "0.3"], ["--scale", "2.5"], ["--size", "7x3"], ["--crop", "1,0,2,3"]))
        return found

    def __call__(self, data: bytes, rng: random.Random) -> str:
        from coanerv_codec.cli import main

        arguments = self.arguments(rng)
        (self.folder / "mutant.coa").write_bytes(data)
        out, err = io.StringIO(), io.StringIO()
        kept = sys.argv, sys.stdout, sys.stderr
        sys.argv, sys.stdout, sys.stderr = ["coanerv", *arguments], out, err
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            error.add_note(" ".join(arguments))
            raise
        finally:
            sys.argv, sys.stdout, sys.stderr = kept
            left = list(self.out.iterdir())
            for path in left:
                path.unlink()
        said = f"{' '.join(arguments)}: exit code {code}, {err.getvalue()!r}, {out.getvalue()!r}"
        command = arguments[0]
        if code == 143:  # someone ends the fuzzer itself, whose SIGTERM the command line has taken over
            raise KeyboardInterrupt
        # A crop or size that does not fit the mutant's picture is documented as 1.
        beyond = code == 1 and {"--crop", "--scale", "--size"} & {*arguments} and "picture" in err.getvalue()
        check(beyond or code in CODES[command], f"{command}: the exit code is a documented one", said)
        lines = [line for line in err.getvalue().splitlines() if not line.startswith("coanerv: warning:")]
        if code and command != "verify":
            check(len(lines) == 1 and lines[0].startswith("coanerv: "), f"{command}: a failure is one line", said)
        if command == "verify":
            check(bool(out.getvalue()) and not lines, f"{command}: what verify finds stands on stdout", said)
        hidden = [path.name for path in left if path.name.startswith(".")]
        check(
            not hidden and not (left and code not in (0, 7)), f"{command}: a failure leaves no file", f"{said} {left}"
        )
        return f"{command} {code}"
