"""Writing a video: frames in model YUV and copied packets to a file that plays like the source.

`open_output` takes the description of the source (`VideoInfo`) and gives an `Output`: `write` it the `Frame`s and
`Packet`s in the order they come, then `close`. The kind of file follows from its name:

    .mp4 .m4v .mov   H.264 or the named encoder    .y4m   raw video
    .mkv             the same, FFV1 if lossless    -      raw video (Y4M) to standard output
    .webm            VP9 or the named encoder      .png   one picture per frame: name_00001.png and on

Files appear under their name only when complete. Encoding runs in a thread of its own, beside the caller. What the file
cannot carry is said in `.warnings`, which is complete after `close`.
"""

import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, Self

import av

from coanerv_codec.atomic import discard, open_temporary, publish
from coanerv_codec.errors import OutputError
from coanerv_codec.mux import CONTAINERS, ContainerSink
from coanerv_codec.raw_video import PngSink, Y4mSink
from coanerv_codec.records import Packet
from coanerv_codec.video import Frame, VideoInfo

# Items waiting for the encoder: enough to keep it busy, few enough for memory at 4K.
QUEUE_LENGTH = 6


class Sink(Protocol):
    """What takes the frames of one kind of file. `files` maps what it writes to what that becomes in the end."""

    files: dict[Path, Path]
    warnings: list[str]

    def write(self, item: Frame | Packet) -> None:
        """Take the next frame or packet."""

    def finish(self) -> None:
        """Write what is left and close."""

    def discard(self) -> None:
        """Close without caring for the content."""


def open_output(
    path: str | Path,
    info: VideoInfo,
    *,
    encoder: str | None = None,
    crf: int | None = None,
    lossless: bool = False,
    overwrite: bool = False,
) -> "Output":
    """Start writing a video like `info` to `path`, or as Y4M to standard output for "-"."""
    if str(path) == "-":
        _refuse_encoder("Y4M", encoder, crf)
        if sys.stdout is None:
            raise OutputError("standard output is closed; use -o FILE")
        return Output("standard output", Y4mSink(sys.stdout.buffer, info, {}), overwrite)
    path = Path(path)
    suffix = path.suffix.lower()
    with _output_errors(path):
        if suffix == ".png":
            _refuse_encoder("PNG", encoder, crf)
            return Output(path, PngSink(path, overwrite, info), overwrite)
        if suffix == ".y4m":
            _refuse_encoder("Y4M", encoder, crf)
            temporary = open_temporary(path, overwrite)
            with _discarded_on_failure(temporary):
                return Output(path, Y4mSink(temporary.open("wb"), info, {temporary: path}), overwrite)
        if suffix not in CONTAINERS:
            raise OutputError(f"{path}: unknown file type; end the name in {' '.join(CONTAINERS)} .y4m or .png")
        if lossless:
            _refuse_encoder("lossless video", encoder, crf)
            if suffix != ".mkv":
                raise OutputError(f"{path}: lossless video (FFV1) needs a name that ends in .mkv")
            encoder = "ffv1"
        temporary = open_temporary(path, overwrite)
        with _discarded_on_failure(temporary):
            return Output(path, ContainerSink(temporary, path, info, encoder, crf), overwrite)


class Output:
    """A video being written; as a context manager it closes on success and aborts on an exception."""

    def __init__(self, name: str | Path, sink: Sink, overwrite: bool) -> None:
        self._name = name
        self._sink = sink
        self._overwrite = overwrite
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coanerv-writer")
        self._waiting: deque[Future[None]] = deque()

    @property
    def warnings(self) -> list[str]:
        """What the file does not carry."""
        return self._sink.warnings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if exception_type is None:
            self.close()
        else:
            self.abort()

    def write(self, item: Frame | Packet) -> None:
        """Hand over the next frame or packet. An error of an earlier one is raised here."""
        self._waiting.append(self._thread.submit(self._sink.write, item))
        with _output_errors(self._name):
            while self._waiting and (len(self._waiting) > QUEUE_LENGTH or self._waiting[0].done()):
                self._waiting.popleft().result()

    def close(self) -> None:
        """Finish the file and give it its name."""
        try:
            with _output_errors(self._name):
                for written in self._waiting:
                    written.result()
                self._thread.submit(self._sink.finish).result()
                for temporary, target in self._sink.files.items():
                    publish(temporary, target, self._overwrite)
        finally:
            self.abort()

    def abort(self) -> None:
        """Stop, and remove what was written; does nothing to a closed file."""
        self._thread.shutdown(cancel_futures=True)
        with suppress(av.FFmpegError, OSError):
            self._sink.discard()
        while self._sink.files:
            discard(self._sink.files.popitem()[0])


@contextmanager
def _discarded_on_failure(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        discard(temporary)
        raise


def _refuse_encoder(what: str, encoder: str | None, crf: int | None) -> None:
    if encoder or crf is not None:
        raise OutputError(f"{what} takes no encoder and no crf; leave them out")


@contextmanager
def _output_errors(name: str | Path) -> Iterator[None]:
    """Errors of FFmpeg and the operating system become an `OutputError` that names the file."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our standard output went away, which is no fault of the output
    except (av.FFmpegError, OSError) as error:
        raise OutputError(f"{name}: cannot be written: {error.strerror}") from error
