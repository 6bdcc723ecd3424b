"""`coanerv verify`. Imports torch only for the checkpoint and for pictures."""

import json
from pathlib import Path

import click

from coanerv_codec.cli.shared import (
    checkpoint_option,
    device_option,
    limit_option,
    load_model,
    printable,
    progress_bar,
    quiet_option,
)

SHOWN = 5  # findings on a file's line; --json has them all


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--deep", is_flag=True, help="Decode every picture too.")
@click.option(
    "--against",
    metavar="SOURCE",
    type=click.Path(path_type=Path),
    help="Give the PSNR of each frame against this video.",
)
@click.option("--no-checkpoint", is_flag=True, help="Do not ask whether the checkpoint is here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@limit_option
@checkpoint_option
@device_option
@quiet_option
@click.pass_context
def command(ctx, files, deep, against, no_checkpoint, as_json, limits, checkpoint, device, quiet):
    """Check .coa files: structure, CRCs, index, every symbol, and that the checkpoint is the one they need.

    Prints a line per file. Exits with 0 if all is well, else with 4 (damage), 3 (a file cannot be read, or SOURCE is not its
    source) or 5 (checkpoint), the first of these that holds for any file.

    \b
    Examples:
      coanerv verify *.coa
      coanerv verify clip.coa --deep
      coanerv verify clip.coa --against in.mp4 --json
    """
    if no_checkpoint and (deep or against):
        raise click.UsageError("--deep and --against need the checkpoint")
    if against and len(files) > 1:
        raise click.UsageError("--against is for one FILE")
    from coanerv_codec.verify import WORST_FIRST, verify

    loaded = {}

    def load(header):
        from coanerv_codec.decoding import check_checkpoint

        if header.checkpoint not in loaded:
            loaded[header.checkpoint] = load_model(checkpoint, device, header.checkpoint)
        check_checkpoint(header, loaded[header.checkpoint])
        return loaded[header.checkpoint]

    codes, objects = set(), []
    for path in files:
        with progress_bar(quiet) as bar:
            bar.start(None)
            verdict = verify(
                path,
                load=None if no_checkpoint else load,
                deep=deep,
                source=against,
                limits=limits,
                progress=bar.update,
            )
        codes.add(verdict.exit_code)
        if as_json:
            objects.append(_as_json(path, verdict))
            continue
        click.echo(printable(_line(path, verdict)))
        for frame, value in verdict.psnr.items():
            click.echo(f"  frame {frame:>7} {value:8.2f} dB")
    if as_json:
        click.echo(json.dumps(objects, indent=2))
    ctx.exit(next((kind.exit_code for kind in WORST_FIRST if kind.exit_code in codes), 0))


def _line(path: Path, verdict) -> str:
    facts = f"{verdict.frames} frames in {verdict.clips} clips"
    facts += f", {verdict.decoded} decoded" if verdict.decoded else ""
    if verdict.psnr:
        worst = min(verdict.psnr, key=verdict.psnr.get)
        facts += f", PSNR {verdict.mean_psnr:.2f} dB, worst {verdict.psnr[worst]:.2f} dB at frame {worst}"
    if not verdict.findings:
        return f"{path}: ok, {facts}"
    problems = [finding.problem for finding in verdict.findings[:SHOWN]]
    more = len(verdict.findings) - len(problems)
    return f"{path}: NOT OK, {facts}: {'; '.join(problems)}" + (f"; and {more} more" if more else "")


def _as_json(path: Path, verdict) -> dict:
    def span(numbers: range | None) -> list[int] | None:
        return None if numbers is None else [numbers.start, numbers.stop]

    return {
        "file": str(path),
        "ok": not verdict.findings,
        "clips": verdict.clips,
        "frames": verdict.frames,
        "decoded": verdict.decoded,
        "checkpoint": verdict.header.checkpoint if verdict.header else None,
        "findings": [
            {"code": f.code, "problem": f.problem, "clips": span(f.clips), "frames": span(f.frames)}
            for f in verdict.findings
        ],
        "psnr": {"mean": verdict.mean_psnr, "frames": verdict.psnr} if verdict.psnr else None,
    }
