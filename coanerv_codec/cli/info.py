"""`coanerv info`. Imports neither torch nor PyAV."""

import json
from collections.abc import Iterator
from pathlib import Path

import click

from coanerv_codec.cli.shared import limit_option, printable
from coanerv_codec.errors import InputError


@click.command()
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@limit_option
def command(source, as_json, limits):
    """Show what is in a .coa file: video, tokens, streams, and where its bytes go. Decodes nothing.

    \b
    Examples:
      coanerv info clip.coa
      coanerv info clip.coa --json
    """
    from coanerv_codec.summary import summary

    try:
        with source.open("rb") as file:
            facts = summary(file, limits)
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from error
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for line in _lines(source, facts):
        click.echo(printable(line))


def _lines(source: Path, facts: dict) -> Iterator[str]:
    tokens, cells, sizes = facts["tokens"], facts["cells"], facts["bytes"]
    total = sum(sizes.values())
    rate = f" at {facts['frame_rate']} fps" if facts["frame_rate"] else ""
    yield f"{source}: CoANeRV video, format {facts['format']}, {total:,} bytes" + (
        "" if facts["complete"] else ", NOT COMPLETE"
    )
    yield f"  picture     {facts['width']}x{facts['height']}, {facts['frames']} frames{rate}, {facts['duration']:.3f} s"
    yield (
        f"  tokens      {cells['columns']}x{cells['rows']} cells of {tokens['per_cell']}x{tokens['dim']} per "
        f"{tokens['frames_per_clip']} frames, {'/'.join(map(str, tokens['bits']))} bits, "
        f"{'/'.join(tokens['coders']) or 'none'} coded, overlap {cells['overlap']}, "
        f"{cells['moving_share']:.0%} move"
    )
    yield f"  checkpoint  {facts['checkpoint']['name']} (decoder {facts['checkpoint']['sha256'][:16]})"
    for stream in facts["streams"]:
        yield f"  stream      {stream['kind']} {stream['codec']} {stream['language']}".rstrip()
    for scope, pairs in facts["metadata"].items():
        for key, value in pairs.items():
            yield f"  metadata    {'video track ' if scope == 'video' else ''}{key}: {value}"
    for part, size in sizes.items():
        if size:
            yield f"  {part:<11} {size:>12,} bytes {100 * size / total:6.2f} %"
    for lost in facts["damage"]:
        yield f"  DAMAGED     at byte {lost['offset']}: {lost['reason']}"
