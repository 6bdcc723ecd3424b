"""What several commands have in common: options, warnings, and the progress bar on stderr."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from coanerv_codec.atomic import temporary_beside

checkpoint_option = click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Checkpoint file [default: $COANERV_CHECKPOINT, or the shipped one].",
)
device_option = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
coder_option = click.option(
    "--coder",
    type=click.Choice(["contexts", "huffman"]),
    default="contexts",
    show_default=True,
    help="Entropy coder: contexts is smaller, huffman is the paper's.",
)
overwrite_option = click.option("-y", "--overwrite", is_flag=True, help="Overwrite an existing output.")
quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="No progress, no summary; errors and warnings still show."
)


def _check_output(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse before the work what could not be written after it."""
    if path:
        temporary_beside(path, overwrite=True)
    return path


def report_option(*names: str, help: str):
    """Return an option that names a file for results, which replaces what is there."""
    return click.option(*names, type=click.Path(path_type=Path), callback=_check_output, help=help)


def _parse_limits(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]):
    """Turn NAME=VALUE pairs into `Limits`."""
    from dataclasses import fields

    from coanerv_codec.records import Limits

    names = [field.name for field in fields(Limits)]
    chosen = {}
    for value in values:
        name, _, number = value.partition("=")
        if name not in names:
            raise click.BadParameter(f"there is no limit {name!r}; the limits are {', '.join(names)}")
        if not (number.isascii() and number.isdigit() and 0 < len(number) <= 18):
            raise click.BadParameter(f"{value!r} is not of the form NAME=NUMBER, as in frames=100000000")
        chosen[name] = int(number)
    return Limits(**chosen)


limit_option = click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_parse_limits,
    help="Change what the file may ask for, as in frames=100000000; docs/format.md lists the limits. May be repeated.",
)


def printable(text: str) -> str:
    """Text from a file on its way to a terminal: control characters are spelled out, so that they cannot act there."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def load_model(checkpoint: Path | None, device: str, wanted: str | None = None):
    """Load the checkpoint to use (the one called `wanted` unless another is given) onto a device."""
    from coanerv_codec.checkpoint import find_checkpoint, load_checkpoint
    from coanerv_codec.device import keep_freed_memory, pick_device

    keep_freed_memory()
    target = pick_device(device)
    loaded = load_checkpoint(find_checkpoint(checkpoint, wanted))
    loaded.model.to(target)
    return loaded


def warn(warnings: Iterable[str]) -> None:
    """Print each warning once, as a line on stderr."""
    for warning in dict.fromkeys(warnings):
        click.echo(f"coanerv: warning: {printable(warning)}", err=True)


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


class Bar:
    """A progress bar on stderr: frames, frames per second, time left and a note. Starts when `start` is called."""

    def __init__(self, shown: bool):
        self._shown, self._bar = shown, None

    def start(self, total: int | None) -> None:
        """Begin to draw; without a total there is no time left to tell."""
        if not self._shown:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
        from rich.text import Text

        class Speed(ProgressColumn):
            """Frames per second."""

            def render(self, task) -> Text:
                """Show the speed of the last seconds."""
                return Text(f"{task.speed:.1f} fps" if task.speed else "- fps")

        columns = [TextColumn("{task.completed:.0f}" + (f"/{total}" if total else "") + " frames"), Speed()]
        if total:
            columns[1:1] = [BarColumn(), TimeRemainingColumn()]
        self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=total, note="")
        self._bar.start()

    def update(self, done: int, note: str = "") -> None:
        """Show that so many frames are done."""
        if self._bar:
            self._bar.update(self._task, completed=done, note=note)

    def advance(self) -> None:
        """Show that one more frame is done."""
        if self._bar:
            self._bar.advance(self._task)

    def stop(self) -> None:
        """Take the bar off the screen."""
        if self._bar:
            self._bar.stop()


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Bar]:
    """Give a `Bar`, which is not drawn where stderr is no terminal, so that logs stay clean."""
    bar = Bar(not quiet and sys.stderr is not None and sys.stderr.isatty())
    try:
        yield bar
    finally:
        bar.stop()
