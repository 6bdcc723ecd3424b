"""`coanerv demo`."""

from pathlib import Path

import click

from coanerv_codec.cli.shared import checkpoint_option, device_option, load_model


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("coanerv-demo"),
    show_default=True,
    help="Folder for the results.",
)
@click.option(
    "--input", "source", type=click.Path(path_type=Path), help="Another short clip [default: the bundled one]."
)
@click.option("--bits", type=click.IntRange(2, 8), default=6, show_default=True)
@checkpoint_option
@device_option
def command(out, source, bits, checkpoint, device):
    """Encode and decode a bundled real clip; print sizes, PSNR, SSIM and speed; draw a side-by-side picture.

    The clip is cut from Big Buck Bunny (c) Blender Foundation, www.bigbuckbunny.org, CC BY 3.0.

    \b
    Example:
      coanerv demo
    """
    from rich.console import Console
    from rich.table import Table

    from coanerv_codec.demo import bundled_clip, run_demo

    loaded = load_model(checkpoint, device)
    source = source or bundled_clip()
    console = Console()
    console.print(f"Encoding and decoding {source.name} with checkpoint {loaded.name} ...")
    result = run_demo(source, out, loaded, bits)
    pixels = result.frames * result.width * result.height
    table = Table("", "", show_header=False)
    table.add_row("clip", f"{result.frames} frames of {result.width}x{result.height}")
    table.add_row("source file", f"{result.source_bytes:,} bytes")
    table.add_row(
        ".coa file", f"{result.coa_bytes:,} bytes, {8 * result.coa_bytes / pixels:.3f} bits per pixel, sound included"
    )
    table.add_row("PSNR (YUV)", f"{result.psnr:.2f} dB")
    table.add_row("SSIM (YUV)", f"{result.ssim:.4f}")
    table.add_row("encode", f"{result.encode_fps:.1f} frames per second, file to file")
    table.add_row("decode", f"{result.decode_fps:.1f} frames per second, file to file")
    table.add_row("look at", f"{result.picture}\n{result.video}")
    console.print(table)
