"""The command line: one thin file per command, imported only when that command runs."""

import importlib
import os
import signal
import sys

import click

from coanerv_codec.errors import CoanervError
from coanerv_codec.version import __version__

# One line of help per command stands here so that `coanerv --help` imports none of them.
COMMANDS = {
    "encode": "Encode a video into a .coa file.",
    "decode": "Decode a .coa file into a video.",
    "info": "Show what is in a .coa file.",
    "verify": "Check that .coa files are whole and can be decoded.",
    "demo": "Encode and decode a bundled clip, and show what comes back.",
    "evaluate": "Measure PSNR, SSIM and real file sizes over a folder of videos.",
    "seams": "Measure what cells and clips do to a video.",
    "bench": "Measure the speed of encoding and decoding on this machine.",
    "train": "Train a checkpoint on a folder of videos.",
}


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

    def invoke(self, ctx: click.Context) -> None:
        """Run the command. A closed standard output is dealt with here, since click would make it a plain failure."""
        try:
            super().invoke(ctx)
        except BrokenPipeError:
            # The reader went away (`| head`): not an error worth a message, but not success either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that temporary files are removed
    try:
        sys.exit(group(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("coanerv: interrupted; nothing was left behind", err=True)
        sys.exit(130)
    except CoanervError as error:
        if os.environ.get("RANK", "0") == "0":  # of several training processes one speaks
            from coanerv_codec.cli.shared import printable  # not before: --help is fast

            click.echo(f"coanerv: {printable(str(error))}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        click.echo(f"coanerv: {error.filename or 'input or output'}: {error.strerror or error}", err=True)
        sys.exit(1)
