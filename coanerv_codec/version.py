"""The package's version, alone in a file so that neither setup nor `--version` imports anything else."""

__version__ = "0.1.0"
