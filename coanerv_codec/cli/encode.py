"""`coanerv encode`."""

import time

import click

from coanerv_codec.cli.shared import (
    checkpoint_option,
    coder_option,
    device_option,
    load_model,
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
    help="Bits per token value before entropy coding.",
)
@click.option("--fit", is_flag=True, help="Put the whole picture into one cell: the smallest file.")
@click.option("--cells", metavar="CxR", help="Columns x rows of cells [default: cells of about their native size].")
@click.option("--overlap", type=click.IntRange(0, 255), default=None, help="Pixels that neighbouring cells share.")
@click.option("--refine", type=click.IntRange(0), default=0, metavar="STEPS", help="Optimise the tokens: slow, better.")
@click.option("--refine-from", type=click.Choice(["encoder", "random"]), default="encoder", show_default=True)
@click.option("--motion/--no-motion", default=True, show_default=True, help="Let cells move with what they show.")
@coder_option
@click.option("--frames", type=click.IntRange(1), help="Encode only the first frames.")
@click.option("--no-audio", is_flag=True, help="Leave out sound and subtitles.")
@checkpoint_option
@device_option
@overwrite_option
@quiet_option
def command(
    source,
    output,
    bits,
    fit,
    cells,
    overlap,
    refine,
    refine_from,
    motion,
    coder,
    frames,
    no_audio,
    checkpoint,
    device,
    overwrite,
    quiet,
):
    """Encode a video into a .coa file. INPUT is a file, or - for standard input (Y4M, MPEG-TS, Matroska).

    \b
    Examples:
      coanerv encode in.mp4 -o clip.coa --bits 6
      coanerv encode in.mp4 -o small.coa --fit --bits 4
      coanerv encode in.mp4 -o better.coa --refine 50
      ffmpeg -i in.mov -f yuv4mpegpipe - | coanerv encode - -o clip.coa
    """
    if fit and cells:
        raise click.UsageError("--fit and --cells exclude each other")
    from coanerv_codec.cells import DEFAULT_OVERLAP
    from coanerv_codec.encoding import EncodeOptions
    from coanerv_codec.files import encode_file

    options = EncodeOptions(
        bits=bits,
        cells=(1, 1) if fit else parse_pair(cells, "--cells") if cells else None,
        overlap=DEFAULT_OVERLAP if overlap is None else overlap,
        frames=frames,
        refine=refine,
        refine_from=refine_from,
        motion=motion,
        coder=coder,
    )
    began = time.monotonic()
    with progress_bar(quiet) as bar:
        done = encode_file(
            source,
            output,
            lambda: load_model(checkpoint, device),
            options,
            audio=not no_audio,
            overwrite=overwrite,
            opened=lambda info: bar.start(min(filter(None, (frames, info.frames)), default=None)),
            progress=lambda p: bar.update(p.frames, f"{_kilobits(p.bytes, p.seconds_of_video):.0f} kbit/s"),
        )
    warn(done.warnings)
    header = done.header
    say(
        f"{output}: {done.frames} frames of {header.width}x{header.height} in {header.columns}x{header.rows} cells, "
        f"{done.bytes:,} bytes ({_kilobits(done.bytes, done.seconds):.0f} kbit/s), "
        f"{done.frames / (time.monotonic() - began):.1f} fps"
        + (f", refined by {done.refined_db:+.2f} dB" if refine else ""),
        quiet,
    )


def _kilobits(size: int, seconds: float) -> float:
    return size * 8 / 1000 / max(seconds, 1e-9)
