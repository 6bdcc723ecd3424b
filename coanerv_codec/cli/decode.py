"""`coanerv decode`."""

import re
import time
from fractions import Fraction

import click

from coanerv_codec.cli.shared import (
    checkpoint_option,
    device_option,
    limit_option,
    load_model,
    overwrite_option,
    parse_pair,
    progress_bar,
    quiet_option,
    say,
    warn,
)
from coanerv_codec.errors import DamageError, FormatError


class Number(click.ParamType):
    """A number kept exact: 29.97, 30000/1001 or 2."""

    name = "number"

    def convert(self, value, param, ctx):
        """Read a decimal number or a fraction, not negative. Short, as 1e999999999 would fill the memory with its digits."""
        if isinstance(value, Fraction):
            return value
        try:
            return Fraction(re.fullmatch(r"\d{0,9}\.?\d{1,9}|\d{1,9}/\d{1,9}", value)[0])
        except (TypeError, ZeroDivisionError):
            self.fail(f"{value!r} is not a number from 0 up", param, ctx)


@click.command()
@click.argument("source", metavar="INPUT")
@click.option(
    "-o", "--output", required=True, help="Video to write: .mp4 .mov .mkv .webm .y4m .png, or - for Y4M to stdout."
)
@click.option(
    "--tile",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="Memory: F x TILE x TILE queries at a time, on a CPU for each thread.",
)
@click.option(
    "--max-memory",
    type=click.IntRange(1),
    metavar="MB",
    help="Choose the largest tile whose queries need at most this much memory, instead of --tile.",
)
@click.option("--engine", type=click.Choice(["separable", "reference"]), default="separable", show_default=True)
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    show_default=True,
    help="Of the products. bf16 is faster on CPUs that have it, mostly where cells move, and nearly exact; auto is fp32.",
)
@click.option("--scale", type=Number(), help="Decode at this multiple of the size.")
@click.option("--size", metavar="WxH", help="Decode at this size.")
@click.option("--crop", metavar="X,Y,W,H", help="Decode only this part of the picture.")
@click.option("--fps", type=Number(), help="Decode at this frame rate.")
@click.option("--start", type=Number(), default="0", help="Begin at this time, in seconds.")
@click.option("--duration", type=Number(), help="Decode this many seconds.")
@click.option(
    "--crf", type=click.IntRange(0, 63), help="Quality of the video encoder: lower is better [default: its own]."
)
@click.option("--encoder", help="Video encoder, as FFmpeg calls it [default: libx264; WebM: libvpx-vp9].")
@click.option("--lossless", is_flag=True, help="FFV1 in a .mkv.")
@click.option("--no-audio", is_flag=True, help="Leave out sound and subtitles.")
@click.option(
    "--on-error",
    type=click.Choice(["stop", "conceal"]),
    default="stop",
    show_default=True,
    help="At damage: write nothing, or repeat the frame before it, say so, and exit with 7.",
)
@limit_option
@checkpoint_option
@device_option
@overwrite_option
@quiet_option
def command(
    source, output, tile, max_memory, engine, precision, scale, size, crop, fps, start, duration, crf, encoder,
    lossless, no_audio, on_error, limits, checkpoint, device, overwrite, quiet,
):  # fmt: skip
    """Decode a .coa file into a video. INPUT is a file, or - for standard input.

    \b
    Examples:
      coanerv decode clip.coa -o out.mp4 --tile 64
      coanerv decode clip.coa -o zoom.mp4 --crop 100,50,320,180 --scale 4
      coanerv decode clip.coa -o smooth.mkv --fps 60 --start 1.5 --duration 2
      coanerv decode clip.coa -o - | ffplay -
    """
    if scale is not None and size:
        raise click.UsageError("--scale and --size exclude each other")
    if fps == 0 or scale == 0:
        raise click.UsageError("--fps and --scale must be more than 0")
    from torch import get_num_threads

    from coanerv_codec.decoding import EngineOptions, make_view
    from coanerv_codec.device import pick_precision
    from coanerv_codec.engine import tile_within
    from coanerv_codec.files import decode_file, open_coa
    from coanerv_codec.moments import Timing

    timing = Timing(start, duration, fps)
    box = _parse_crop(crop) if crop else None
    asked = parse_pair(size, "--size") if size else None
    began = time.monotonic()
    with open_coa(source, "skip" if on_error == "conceal" else "stop", limits) as reader, progress_bar(quiet) as bar:
        header = reader.header
        if scale is not None:
            width, height = box[2:] if box else (header.width, header.height)
            asked = max(1, round(width * scale)), max(1, round(height * scale))
        view = make_view(header.width, header.height, asked, box, limits)
        loaded = load_model(checkpoint, device, header.checkpoint)
        if max_memory:
            # On a CPU each thread decodes a cell of its own.
            cells = get_num_threads() if loaded.model.decoder.base.device.type == "cpu" else 1
            tile = tile_within(loaded.model.config, engine, max_memory * 10**6 // cells)
        bar.start(_count_frames(reader) if timing == Timing() else None)
        done = decode_file(
            reader,
            output,
            loaded,
            view,
            timing,
            EngineOptions(engine, tile, pick_precision(precision)),
            audio=not no_audio,
            encoder=encoder,
            crf=crf,
            lossless=lossless,
            overwrite=overwrite,
            progress=lambda frame: bar.advance(),
        )
    warn(done.warnings)
    seconds = time.monotonic() - began
    say(
        f"{output}: {done.frames} frames of {done.info.width}x{done.info.height}, {done.frames / seconds:.1f} fps",
        quiet,
    )
    if done.damage:
        lost = "; ".join(_describe(damage) for damage in done.damage)
        raise DamageError(f"{output} was written, but {source} is damaged: {lost}")


def _count_frames(reader) -> int | None:
    """Return how many frames will come, where the file has an index that tells."""
    try:
        return sum(entry.frames for entry in reader.index()) if reader.seekable else None
    except FormatError:
        return None


def _describe(damage) -> str:
    if damage.frames is None:
        return f"{damage.reason}, everything after is lost"
    return damage.reason + (f", frames {damage.frames.start}-{damage.frames.stop - 1} lost" if damage.frames else "")


def _parse_crop(text: str) -> tuple[int, int, int, int]:
    try:
        x, y, w, h = (int(v) for v in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form X,Y,W,H", param_hint="--crop") from None
    return x, y, w, h
