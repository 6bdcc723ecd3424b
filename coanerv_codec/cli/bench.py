"""`coanerv bench`."""

import json
from pathlib import Path

import click

from coanerv_codec.cli.shared import checkpoint_option, device_option, parse_pair, quiet_option, report_option, say

RESOLUTIONS = {"1080p": (1920, 1080), "720p": (1280, 720), "256": (256, 256)}


@click.command()
@click.option("--resolution", metavar="1080p|720p|256|WxH", help="Size of the test picture [default: 1080p].")
@click.option("--frames", type=click.IntRange(1), default=16, show_default=True)
@click.option("--input", "source", type=click.Path(path_type=Path), help="Measure on this video, at its own size.")
@click.option("--engine", type=click.Choice(["all", "separable", "reference"]), default="all", show_default=True)
@click.option("--tile", type=click.IntRange(1, 4096), default=64, show_default=True)
@click.option(
    "--max-memory", type=click.IntRange(1), metavar="MB", help="Choose the tile as `decode --max-memory` does."
)
@report_option("--json", "output", help="Also write the results to this file.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown instead of tables for the terminal.")
@checkpoint_option
@device_option
@quiet_option
def command(resolution, frames, source, engine, tile, max_memory, output, as_markdown, checkpoint, device, quiet):
    """Measure the speed of encoding and decoding on this machine, next to x264 and SVT-AV1.

    Keep the machine otherwise idle; the default takes about five minutes on two cores.

    \b
    Examples:
      coanerv bench
      coanerv bench --resolution 256 --json bench.json
      coanerv bench --input clip.mp4 --frames 32 --markdown
    """
    if source and resolution:
        raise click.UsageError("--input is measured at its own size; leave out --resolution")
    resolution = resolution or "1080p"
    size = RESOLUTIONS.get(resolution) or parse_pair(resolution, "--resolution")

    from coanerv_codec.atomic import write_whole
    from coanerv_codec.bench import run
    from coanerv_codec.bench_report import markdown, tables
    from coanerv_codec.checkpoint import find_checkpoint

    result = run(
        find_checkpoint(checkpoint),
        size,
        frames,
        source=source,
        engines=("separable", "reference") if engine == "all" else (engine,),
        tile=tile,
        max_memory=max_memory * 10**6 if max_memory else None,
        device=device,
        note=lambda text: say(f"{text} ...", quiet),
    )
    if output:
        write_whole(output, json.dumps(result, indent=1) + "\n")
    if as_markdown:
        click.echo(markdown(result))
        return
    from rich.console import Console
    from rich.table import Table

    for title, headings, rows in tables(result):
        table = Table(*headings, title=title, title_justify="left", show_header=any(headings))
        for row in rows:
            table.add_row(*row)
        Console().print(table)
