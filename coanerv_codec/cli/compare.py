"""`coanerv compare`."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from coanerv_codec.cli.shared import checkpoint_option, device_option, load_model, quiet_option, report_option, say


@click.command()
@click.argument("sources", metavar="[INPUT...]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--frames", type=click.IntRange(1), default=48, show_default=True, help="Frames to code of each video.")
@report_option("--plot", help="Draw the curves into this SVG.")
@report_option("--json", "json_path", help="Write every point as JSON.")
@checkpoint_option
@device_option
@quiet_option
def command(sources, frames, plot, json_path, checkpoint, device, quiet):
    """Draw rate against distortion next to x264 and SVT-AV1: complete files, PSNR in 4:2:0. Prints Markdown tables.

    "Clips alone" is x264 with a key frame where each of our clips begins, so that it can be entered as often and damage
    costs as little. Without INPUT the bundled clip is used. Of several videos the means are shown.

    \b
    Examples:
      coanerv compare
      coanerv compare in.mp4 --frames 100 --plot rd.svg --json rd.json
    """
    from coanerv_codec import compare
    from coanerv_codec.atomic import write_whole
    from coanerv_codec.curves import Chart, svg
    from coanerv_codec.demo import bundled_clip

    loaded = load_model(checkpoint, device)
    sources = sources or (bundled_clip(),)
    tables = {}
    for source in sources:
        tables[source] = compare.compare(
            source, loaded, frames, lambda p, s=source: say(f"{s.name}: {p.codec}, {p.setting} ...", quiet)
        )
    points = compare.average(list(tables.values()))
    rows = [("codec", "setting", "bytes", "bits per pixel", "PSNR dB", "encode fps", "decode fps")]
    rows += [
        (p.codec, p.setting, f"{p.bytes:,}", f"{p.bits_per_pixel:.4f}", f"{p.psnr:.2f}", f"{p.encode_fps:.1f}",
         f"{p.decode_fps:.1f}") for p in points
    ]  # fmt: skip
    click.echo("\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * 2 + ["---:"] * 5, *rows[1:])))
    click.echo()
    for other in compare.OTHERS:
        more = compare.rate_difference(points, compare.OURS, other)
        verdict = "no PSNR in common" if more is None else f"{more:+.0%} bytes at equal PSNR"
        click.echo(f"{compare.OURS} against {other} ({_settings(compare.OTHERS[other].options)}): {verdict}")
    if plot:
        lines = {p.codec: [(q.bits_per_pixel, q.psnr) for q in points if q.codec == p.codec] for p in points}
        write_whole(plot, svg([Chart("PSNR (4:2:0), dB", "bits per pixel", lines)]))
    if json_path:
        content = {
            "checkpoint": loaded.name,
            "inputs": {source.name: [asdict(p) for p in some] for source, some in tables.items()},
            "means": [asdict(p) for p in points],
        }
        write_whole(json_path, json.dumps(content, indent=1))


def _settings(options: dict[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in options.items())
