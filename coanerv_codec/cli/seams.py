"""`coanerv seams`."""

import json
from pathlib import Path

import click

from coanerv_codec.atomic import write_whole
from coanerv_codec.cli.shared import checkpoint_option, device_option, load_model, report_option


@click.command()
@click.argument("sources", metavar="INPUT...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--bits", type=click.IntRange(2, 8), default=6, show_default=True, help="Bits per token value.")
@click.option("--frames", type=click.IntRange(1), default=24, show_default=True, help="Frames to read of each video.")
@report_option("--json", "json_path", help="Write the tables as JSON.")
@report_option("--picture", help="PNG of a corner where cells of the first video meet.")
@checkpoint_option
@device_option
def command(sources, bits, frames, json_path, picture, checkpoint, device):
    """Measure what cells and clips do to videos: error on borders, the quality ladder, flicker. Prints Markdown tables.

    \b
    Examples:
      coanerv seams in.mp4
      coanerv seams videos/*.mp4 --json seams.json --picture seams.png
    """
    from coanerv_codec import seams
    from coanerv_codec.errors import InputError
    from coanerv_codec.raw_video import png_bytes

    loaded = load_model(checkpoint, device)
    length = loaded.model.config.frames
    tables = {"overlap": [], "ladder": [], "time": []}
    for source in sources:
        video = seams.read_frames(source, frames)
        if len(video) < 2 * length:
            raise InputError(f"{source}: {len(video)} frames were read, but two clips of {length} are needed")
        clip = video[:length]
        if picture and source == sources[0]:
            write_whole(picture, png_bytes(seams.seam_picture(clip, loaded, bits)))
        tables["overlap"].append(seams.overlap_table(clip, loaded, bits))
        tables["ladder"].append(seams.ladder_table(clip, loaded))
        tables["time"].append(seams.time_table(video, loaded, bits))
    means = {name: seams.average(rows) for name, rows in tables.items()}
    click.echo("\n\n".join(map(_markdown, means.values())))
    if json_path:
        content = {"checkpoint": loaded.name, "inputs": [source.name for source in sources], **means}
        write_whole(json_path, json.dumps(content, indent=1))


def _markdown(rows: list[dict]) -> str:
    lines = [[key.replace("_", " ") for key in rows[0]], ["---:"] * len(rows[0])]
    lines += [[_text(key, value) for key, value in row.items()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(key: str, value: float | str) -> str:
    if key == "bytes":
        return f"{value:,.0f}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
