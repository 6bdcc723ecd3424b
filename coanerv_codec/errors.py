"""Every failure a user can cause or meet, each with its exit code.

The library raises these and nothing else for bad input; the command line prints the message as one line and exits with
`exit_code`. A message says what is wrong and, where there is a way out, what to do.
"""


class CoanervError(Exception):
    """Base of all errors that are the input's or the environment's fault, not a bug."""

    exit_code = 1


class ProcessLostError(CoanervError):
    """Another process of a training is gone. Of those that notice, one should say so."""


class InputError(CoanervError):
    """The source video cannot be read, or holds no video."""

    exit_code = 3


class FormatError(CoanervError):
    """A `.coa` file is damaged, truncated, of an unknown version, or beyond a limit."""

    exit_code = 4


class CheckpointError(CoanervError):
    """A checkpoint is missing, damaged, or not the one a `.coa` file names."""

    exit_code = 5


class DamageError(CoanervError):
    """The output was written, but parts of the source were damaged and had to be concealed."""

    exit_code = 7


class OutputError(CoanervError):
    """The output exists already, cannot be written, or its container cannot hold the content."""

    exit_code = 6
