"""File to file: what `coanerv encode` and `coanerv decode` do, without the terminal. "-" is standard input or output."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from coanerv_codec.atomic import atomic_path
from coanerv_codec.checkpoint import Checkpoint
from coanerv_codec.container import DEFAULT_LIMITS, Damage, Reader
from coanerv_codec.decoding import EngineOptions, View
from coanerv_codec.encoding import EncodeOptions, EncodeProgress, encode_video
from coanerv_codec.errors import InputError, OutputError
from coanerv_codec.moments import Timing
from coanerv_codec.playing import decode_items, describe_output, read_preamble
from coanerv_codec.records import Header, Limits
from coanerv_codec.video import Frame, VideoInfo, open_video
from coanerv_codec.writer import open_output


@dataclass(frozen=True)
class Encoded:
    """What was written, and what of the source could not be kept."""

    header: Header
    frames: int
    bytes: int
    seconds: float  # of video
    refined_db: float  # what refining gained
    warnings: list[str]


def encode_file(
    source: str | Path,
    output: str | Path,
    load: Callable[[], Checkpoint],
    options: EncodeOptions = EncodeOptions(),
    *,
    audio: bool = True,
    overwrite: bool = False,
    opened: Callable[[VideoInfo], None] = lambda info: None,
    progress: Callable[[EncodeProgress], None] = lambda p: None,
) -> Encoded:
    """Encode a video into a `.coa`. `load` is called once source and output are known to be fine; `opened` sees the source."""
    last = EncodeProgress(0, 0, 0.0)

    def follow(p: EncodeProgress) -> None:
        nonlocal last
        last = p
        progress(p)

    with _open_target(output, overwrite) as file, open_video(source, audio=audio) as video:
        opened(video.info)
        header = encode_video(video.info, video, file, load(), options, follow)
    return Encoded(header, last.frames, last.bytes, last.seconds_of_video, last.refined_db, video.warnings)


@contextmanager
def _open_target(target: str | Path, overwrite: bool) -> Iterator[BinaryIO]:
    """Open the `.coa` to write: under a temporary name until it is whole, or standard output as it is."""
    if str(target) != "-":
        with atomic_path(target, overwrite) as path, path.open("wb") as file:
            yield file
    elif sys.stdout is None or sys.stdout.isatty():
        raise OutputError("a .coa file is binary; redirect standard output or use -o FILE")
    else:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()


@contextmanager
def open_coa(source: str | Path, on_damage: str = "stop", limits: Limits = DEFAULT_LIMITS) -> Iterator[Reader]:
    """Open a `.coa` file, or standard input."""
    if str(source) == "-" and sys.stdin is None:
        raise InputError("standard input is closed; name a file")
    try:
        opened = nullcontext(sys.stdin.buffer) if str(source) == "-" else Path(source).open("rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from error
    with opened as file:
        yield Reader(file, limits, on_damage)


@dataclass(frozen=True)
class Decoded:
    """What was written, what the output cannot carry, and what of the file was damaged."""

    info: VideoInfo
    frames: int
    warnings: list[str]
    damage: list[Damage]


def decode_file(
    reader: Reader,
    output: str | Path,
    checkpoint: Checkpoint,
    view: View,
    timing: Timing = Timing(),
    options: EngineOptions = EngineOptions(),
    *,
    audio: bool = True,
    encoder: str | None = None,
    crf: int | None = None,
    lossless: bool = False,
    overwrite: bool = False,
    progress: Callable[[Frame], None] = lambda frame: None,
) -> Decoded:
    """Decode an open `.coa` into a video; `progress` sees every frame."""
    streams, metadata, items = read_preamble(reader)
    streams = streams if audio else {}
    info = describe_output(reader.header, streams.values(), metadata, view, timing)
    frames = 0
    with open_output(output, info, encoder=encoder, crf=crf, lossless=lossless, overwrite=overwrite) as out:
        for item in decode_items(items, reader.header, checkpoint, view, timing, options, streams, reader.limits):
            out.write(item)
            if isinstance(item, Frame):
                frames += 1
                progress(item)
        if not frames:
            raise InputError("there is no frame in the time asked for; see `coanerv info` for the duration")
    return Decoded(info, frames, out.warnings, reader.damage)
