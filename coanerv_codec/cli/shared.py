"""What several commands have in common: options, warnings, and the progress bar on stderr."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

checkpoint_option = click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Checkpoint file [default: $COANERV_CHECKPOINT, or the shipped one].",
)
device_option = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
overwrite_option = click.option("-y", "--overwrite", is_flag=True, help="Overwrite an existing output.")
quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="No progress, no summary; errors and warnings still show."
)


def warn(warnings: Iterable[str]) -> None:
    """Print each warning once, as a line on stderr."""
    for warning in dict.fromkeys(warnings):
        click.echo(f"coanerv: warning: {warning}", err=True)


def say(text: str, quiet: bool) -> None:
    """Print a line of the summary on stderr, where it cannot get into a pipe."""
    if not quiet:
        click.echo(text, err=True)


def parse_pair(text: str, name: str) -> tuple[int, int]:
    """Read WxH, two whole numbers from 1 up."""
    try:
        a, b = (int(v) for v in text.lower().split("x"))
    except ValueError:
        a = b = 0
    if a < 1 or b < 1:
        raise click.BadParameter(f"{text!r} is not of the form WxH, as in 1280x720", param_hint=name)
    return a, b


@contextmanager
def progress_bar(quiet: bool, total: int | None) -> Iterator[Callable[[int, str], None]]:
    """Show frames, frames per second, time left and a note; gives `update(frames_done, note)`.

    Nothing is drawn where stderr is no terminal, so that logs stay clean.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done, note: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Speed(ProgressColumn):
        """Frames per second."""

        def render(self, task) -> Text:
            """Show the speed of the last seconds."""
            return Text(f"{task.speed:.1f} fps" if task.speed else "- fps")

    columns = [
        TextColumn("{task.completed:.0f}" + (f"/{total}" if total else "") + " frames"),
        *([BarColumn()] if total else []),
        Speed(),
        *([TimeRemainingColumn()] if total else []),
        TextColumn("{task.fields[note]}"),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)
