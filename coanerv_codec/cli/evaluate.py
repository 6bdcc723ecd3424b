"""`coanerv evaluate`."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import click

from coanerv_codec.atomic import make_folder, write_whole
from coanerv_codec.cli.shared import (
    checkpoint_option,
    coder_option,
    device_option,
    load_model,
    progress_bar,
    quiet_option,
    report_option,
    say,
)


def _parse_bits(ctx, param, text: str) -> tuple[int, ...]:
    try:
        bits = tuple(int(b) for b in text.split(","))
    except ValueError:
        bits = ()
    if not bits or not all(2 <= b <= 8 for b in bits):
        raise click.BadParameter(f"{text!r} is not a list of numbers from 2 to 8, as in 8,6,4")
    return bits


@click.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Folder of videos.")
@click.option("--bits", default="8,7,6,5,4", show_default=True, callback=_parse_bits, help="Numbers of bits to try.")
@click.option("--side", type=click.IntRange(16), default=256, show_default=True, help="Side of the centre square.")
@click.option("--overlap", type=click.IntRange(0, 255), help="Pixels that neighbouring cells share.")
@click.option("--refine", type=click.IntRange(0), default=0, metavar="STEPS", help="Optimise the tokens of each clip.")
@click.option("--motion/--no-motion", default=True, show_default=True, help="Let cells move with what they show.")
@coder_option
@report_option("--json", "json_path", help="Write every score and the means as JSON.")
@click.option(
    "--pictures", type=click.Path(path_type=Path), help="Folder for pictures of the best and the worst clips."
)
@checkpoint_option
@device_option
@quiet_option
def command(data, bits, side, overlap, refine, motion, coder, json_path, pictures, checkpoint, device, quiet):
    """Measure PSNR, SSIM and MS-SSIM (normalised YUV) and real file bytes over a folder of videos.

    \b
    Examples:
      coanerv evaluate --data videos/
      coanerv evaluate --data videos/ --bits 6 --json scores.json --pictures pictures/
    """
    from rich.console import Console
    from rich.table import Table

    from coanerv_codec.cells import DEFAULT_OVERLAP
    from coanerv_codec.corpus import VIDEO_SUFFIXES, list_media
    from coanerv_codec.evaluate import EvaluateOptions, average, evaluate

    if pictures:
        make_folder(pictures)  # before the work, which may take hours
    loaded = load_model(checkpoint, device)
    options = EvaluateOptions(bits, side, DEFAULT_OVERLAP if overlap is None else overlap, refine, motion, coder)
    files = [f for f in list_media(data) if f.suffix.lower() in VIDEO_SUFFIXES]
    extremes = _Extremes(6 if 6 in bits else bits[0])
    with progress_bar(quiet) as bar:
        bar.start(len(files) * len(bits))
        scores = []
        for score in evaluate(files, loaded, options, extremes.see):
            scores.append(score)
            bar.update(len(scores), score.name)
    rows = average(scores)
    if left_out := len(files) - rows[0]["clips"]:
        say(
            f"{left_out} of {len(files)} videos have fewer than {loaded.model.config.frames} frames and are left out",
            quiet,
        )
    table = Table("bits", "clips", "bytes", "PSNR dB", "SSIM", "MS-SSIM")
    for row in rows:
        numbers = [f"{row['bytes']:,.0f}", f"{row['psnr']:.2f}", f"{row['ssim']:.4f}"]
        table.add_row(
            str(row["bits"]), str(row["clips"]), *numbers, "-" if row["ms_ssim"] is None else f"{row['ms_ssim']:.4f}"
        )
    Console().print(table)
    if json_path:
        each = [{k: v if v == v and v != math.inf else None for k, v in asdict(s).items()} for s in scores]
        content = {"checkpoint": loaded.name, "means": rows, "scores": each}
        write_whole(json_path, json.dumps(content, indent=1, allow_nan=False))
    if pictures:
        extremes.write(pictures)


class _Extremes:
    """Keeps the middle frames of the two worst and two best clips at one number of bits."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.kept: list[tuple[float, str, object]] = []

    def see(self, score, source, result) -> None:
        from coanerv_codec.pictures import side_by_side

        if score.bits != self.bits:
            return
        middle = len(source) // 2
        label = f"{score.psnr:05.2f}dB-{score.bits}bits-{Path(score.name).stem}"
        self.kept.append((score.psnr, label, side_by_side(source[middle], result[middle])))
        self.kept.sort(key=lambda k: k[0])
        self.kept = self.kept[:2] + self.kept[-2:] if len(self.kept) > 4 else self.kept

    def write(self, folder: Path) -> None:
        from coanerv_codec.raw_video import png_bytes

        for _, label, picture in self.kept:
            write_whole(folder / f"{label}.png", png_bytes(picture))
