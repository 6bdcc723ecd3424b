"""`coanerv encode`."""

import sys
import time
from contextlib import contextmanager
from pathlib import Path

import click

from coanerv_codec.cli.shared import (
    checkpoint_option,
    device_option,
    overwrite_option,
    parse_pair,
    progress_bar,
    quiet_option,
    say,
    warn,
)


@click.command()
@click.argument("source", metavar="INPUT")
@click.option("-o", "--output", required=True, help="The .coa file to write, or - for standard output.")
@click.option(
    "--bits",
    type=click.IntRange(2, 8),
    default=6,
    show_default=True,
    help="Bits per token value before Huffman coding.",
)
@click.option("--fit", is_flag=True, help="Put the whole picture into one cell: the smallest file.")
@click.option("--cells", metavar="CxR", help="Columns x rows of cells [default: cells of about their native size].")
@click.option("--overlap", type=click.IntRange(0, 255), default=None, help="Pixels that neighbouring cells share.")
@click.option("--frames", type=click.IntRange(1), help="Encode only the first frames.")
@click.option("--no-audio", is_flag=True, help="Leave out sound and subtitles.")
@checkpoint_option
@device_option
@overwrite_option
@quiet_option
def command(source, output, bits, fit, cells, overlap, frames, no_audio, checkpoint, device, overwrite, quiet):
    """Encode a video into a .coa file. INPUT is a file, or - for standard input (Y4M, MPEG-TS, Matroska).

    \b
    Examples:
      coanerv encode in.mp4 -o clip.coa --bits 6
      coanerv encode in.mp4 -o small.coa --fit --bits 4
      ffmpeg -i in.mov -f yuv4mpegpipe - | coanerv encode - -o clip.coa
    """
    if fit and cells:
        raise click.UsageError("--fit and --cells exclude each other")
    from coanerv_codec.cells import DEFAULT_OVERLAP
    from coanerv_codec.checkpoint import find_checkpoint, load_checkpoint
    from coanerv_codec.device import pick_device
    from coanerv_codec.encoding import EncodeOptions, encode_video
    from coanerv_codec.video import open_video

    options = EncodeOptions(
        bits=bits,
        cells=(1, 1) if fit else parse_pair(cells, "--cells") if cells else None,
        overlap=DEFAULT_OVERLAP if overlap is None else overlap,
        frames=frames,
    )
    began = time.monotonic()
    with _output(output, overwrite) as file, open_video(source, audio=not no_audio) as video:
        loaded = load_checkpoint(find_checkpoint(checkpoint))
        loaded.model.to(pick_device(device))
        total = min(filter(None, (frames, video.info.frames)), default=None)
        with progress_bar(quiet, total) as update:
            last = None

            def show(p):
                nonlocal last
                last = p
                update(p.frames, f"{p.bytes * 8 / max(p.seconds_of_video, 1e-9) / 1000:.0f} kbit/s")

            header = encode_video(video.info, video, file, loaded, options, show)
        warnings = video.warnings
    warn(warnings)
    seconds = time.monotonic() - began
    name = "standard output" if output == "-" else output
    say(
        f"{name}: {last.frames} frames of {header.width}x{header.height} in {header.columns}x{header.rows} cells, "
        f"{last.bytes:,} bytes ({last.bytes * 8 / max(last.seconds_of_video, 1e-9) / 1000:.0f} kbit/s), "
        f"{last.frames / seconds:.1f} fps",
        quiet,
    )


@contextmanager
def _output(target: str, overwrite: bool):
    """Open the file to write: under a temporary name until it is whole, or standard output as it is."""
    from coanerv_codec.atomic import atomic_path
    from coanerv_codec.errors import OutputError

    if target == "-":
        if sys.stdout.isatty():
            raise OutputError("a .coa file is binary; redirect standard output or use -o FILE")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with atomic_path(Path(target), overwrite) as path:
        try:
            with path.open("wb") as file:
                yield file
        except OSError as error:
            raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
