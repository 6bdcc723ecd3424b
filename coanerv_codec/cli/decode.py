"""`coanerv decode`."""

import sys
import time
from contextlib import nullcontext
from fractions import Fraction

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


class Number(click.ParamType):
    """A number kept exact: 29.97, 30000/1001 or 2."""

    name = "number"

    def convert(self, value, param, ctx):
        """Read a decimal number or a fraction, not negative."""
        try:
            number = value if isinstance(value, Fraction) else Fraction(value)
        except (ValueError, ZeroDivisionError):
            number = Fraction(-1)
        if number < 0:
            self.fail(f"{value!r} is not a number from 0 up", param, ctx)
        return number


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
    help="Memory: F x TILE x TILE queries at a time.",
)
@click.option("--engine", type=click.Choice(["separable", "reference"]), default="separable", show_default=True)
@click.option("--precision", type=click.Choice(["auto", "fp32", "bf16"]), default="auto", show_default=True)
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
@checkpoint_option
@device_option
@overwrite_option
@quiet_option
def command(
    source, output, tile, engine, precision, scale, size, crop, fps, start, duration, crf, encoder, lossless, no_audio,
    checkpoint, device, overwrite, quiet,
):  # fmt: skip
    """Decode a .coa file into a video. INPUT is a file, or - for standard input.

    \b
    Examples:
      coanerv decode clip.coa -o out.mp4 --tile 64
      coanerv decode clip.coa -o zoom.mp4 --crop 100,50,320,180 --scale 4
      coanerv decode clip.coa -o smooth.mkv --fps 60 --start 1.5 --duration 2
      coanerv decode clip.coa -o - | ffplay -
    """
    from pathlib import Path

    from coanerv_codec.checkpoint import find_checkpoint, load_checkpoint
    from coanerv_codec.container import Reader
    from coanerv_codec.decoding import EngineOptions, Timing, decode_items, describe_output, make_view, read_preamble
    from coanerv_codec.device import pick_device, pick_precision
    from coanerv_codec.errors import InputError
    from coanerv_codec.video import Frame
    from coanerv_codec.writer import open_output

    if scale is not None and size:
        raise click.UsageError("--scale and --size exclude each other")
    if fps == 0 or scale == 0:
        raise click.UsageError("--fps and --scale must be more than 0")
    timing = Timing(start, duration, fps)
    began = time.monotonic()
    try:
        opened = nullcontext(sys.stdin.buffer) if source == "-" else Path(source).open("rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from error
    with opened as file:
        reader = Reader(file)
        header = reader.header
        box = _parse_crop(crop) if crop else None
        asked = parse_pair(size, "--size") if size else None
        if scale is not None:
            width, height = box[2:] if box else (header.width, header.height)
            asked = max(1, round(width * scale)), max(1, round(height * scale))
        view = make_view(header.width, header.height, asked, box)
        loaded = load_checkpoint(find_checkpoint(checkpoint, header.checkpoint))
        chosen = pick_device(device)
        loaded.model.to(chosen)
        options = EngineOptions(engine, tile, pick_precision(precision, chosen))
        streams, metadata, items = read_preamble(reader)
        streams = {} if no_audio else streams
        info = describe_output(header, streams.values(), metadata, view, timing)
        frames = 0
        target = open_output(output, info, encoder=encoder, crf=crf, lossless=lossless, overwrite=overwrite)
        with target as out, progress_bar(quiet, None) as update:
            for item in decode_items(items, header, loaded, view, timing, options, streams):
                out.write(item)
                if isinstance(item, Frame):
                    frames += 1
                    update(frames, "")
            if not frames:
                raise InputError(f"{source} has no frame in the time asked for")
    warn(target.warnings)
    seconds = time.monotonic() - began
    say(f"{output}: {frames} frames of {info.width}x{info.height}, {frames / seconds:.1f} fps", quiet)


def _parse_crop(text: str) -> tuple[int, int, int, int]:
    try:
        x, y, w, h = (int(v) for v in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form X,Y,W,H", param_hint="--crop") from None
    return x, y, w, h
