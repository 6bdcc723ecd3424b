"""The command line: one thin file per command, imported only when that command runs."""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from coanerv_codec.errors import CoanervError, OutputError
from coanerv_codec.version import __version__

# One line of help per command stands here so that `coanerv --help` imports none of them.
COMMANDS = {
    "encode": "Encode a video into a .coa file.",
    "decode": "Decode a .coa file into a video.",
    "info": "Show what is in a .coa file.",
    "verify": "Check that .coa files are whole and can be decoded.",
    "demo": "Encode and decode a bundled clip, and show what comes back.",
    "evaluate": "Measure PSNR, SSIM and real file sizes over a folder of videos.",
    "compare": "Draw rate against distortion next to x264 and AV1.",
    "seams": "Measure what cells and clips do to a video.",
    "bench": "Measure the speed of encoding and decoding on this machine.",
    "train": "Train a checkpoint on a folder of videos.",
}

STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

# What a disk answers that takes no more.
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS}


class LazyGroup(click.Group):
    """Loads a command's module when it is called, so that --help needs neither torch nor PyAV."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which people meet them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import `coanerv_codec.cli.<name>`, which defines `command`."""
        if name not in COMMANDS:
            return None
        return importlib.import_module(f"coanerv_codec.cli.{name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Read the command line, which writes for --help."""
        with _reader_may_leave():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> None:
        """Run the command."""
        with _reader_may_leave():
            super().invoke(ctx)


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """The reader of our output went away (`| head`): not worth a message, but not success. click would make it a 1."""
    try:
        yield
    except BrokenPipeError:
        sys.exit(141)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="coanerv")
def group() -> None:
    """A neural video codec: a clip becomes tokens, a shared decoder turns any (x, y, t) and the tokens into a pixel.

    \b
    Examples:
      coanerv encode in.mp4 -o clip.coa --bits 6
      coanerv decode clip.coa -o out.mp4 --tile 64
      coanerv demo
    """


def main() -> None:
    """Run the command line; every expected failure ends in one line on stderr and a documented exit code."""
    _open_standard_streams()
    _wait_politely()
    signals: list[int] = []
    ended = False

    def stop(number: int, frame: object) -> None:
        if ended:
            return  # a signal while Python takes itself down would only make it chatter
        if signals:
            os._exit(128 + number)  # asked twice: at once
        signals.append(number)
        sys.exit(128 + number)  # an exception, so that temporary files are removed

    for number in STOPPED:
        signal.signal(number, stop)
    try:
        code = _run(signals)
    except BaseException:
        if not signals:
            raise
    ended = True
    for number in STOPPED:  # Python's own end would put back what the system does with them, and make them deadly
        signal.signal(number, signal.SIG_IGN)
    if signals:  # also if some library made another exception of ours
        code = 128 + signals[0]
        _complain(f"{STOPPED[signals[0]]}; no unfinished file is left behind")
    sys.exit(_flush_stdout(code))


def _run(signals: list[int]) -> int:
    """Run the command; returns the exit code, after one line on stderr if it is not 0 and no signal is the cause."""
    try:
        return group(standalone_mode=False) or 0
    except SystemExit as error:
        return error.code or 0
    except click.Abort:
        return 1
    except (click.ClickException, CoanervError, OSError) as error:
        # Within a library's C code a signal's exception may come out as another one, which would explain nothing.
        return 1 if signals else _explain(error)


def _explain(error: click.ClickException | CoanervError | OSError) -> int:
    """Say what went wrong, in one line; returns the exit code."""
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, CoanervError):
        _complain(str(error))
        return error.exit_code
    _complain(f"{error.filename or 'input or output'}: {error.strerror or error}")
    return OutputError.exit_code if error.errno in FULL else 1


def _complain(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # of several training processes one speaks
        from coanerv_codec.cli.shared import printable  # not before: --help is fast

        click.echo(f"coanerv: {printable(text)}", err=True)


def _open_standard_streams() -> None:
    """Open what our parent closed (`>&-`), lest a file of ours gets its number and what libraries print lands there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def _wait_politely() -> None:
    """Let torch's threads spin for a moment only, then wait asleep: on cores that others use, too, spinning takes work's time.

    GNU's OpenMP reads this when torch is imported (docs/performance.md tells what it gives). NumPy's products are small here,
    so its own threads, which spin too, would only get in the way of torch's. Who has chosen keeps that choice.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _flush_stdout(code: int) -> int:
    """Write what is left in the buffer, as Python would at exit, but without its chatter; returns the exit code."""
    if sys.stdout is None:
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code or isinstance(error, BrokenPipeError):
            return code or 141
        _complain(f"standard output: {error.strerror}")
        return OutputError.exit_code
    return code
