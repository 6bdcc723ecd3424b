"""Files that appear whole or not at all: written beside their target under another name, then moved into place.

    with atomic_path(target, overwrite=False) as temporary:
        write_everything(temporary)

An existing target is refused unless it may be overwritten, also when it appears while we are writing. An exception
leaves nothing behind.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coanerv_codec.errors import OutputError


@contextmanager
def atomic_path(target: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A path to write to, renamed to `target` at the end and removed on failure."""
    temporary = temporary_beside(target, overwrite)
    try:
        yield temporary
        publish(temporary, target, overwrite)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def temporary_beside(target: str | Path, overwrite: bool) -> Path:
    """The name of a new file in the target's directory, after checking that the target may be written."""
    target = _resolved(target)
    if target.exists():
        if not target.is_file():
            raise OutputError(f"{target}: exists and is not a regular file; choose another name, or - for a pipe")
        if not overwrite:
            raise _exists(target)
    if not target.parent.is_dir():
        raise OutputError(f"{target}: its directory does not exist; create it first")
    if not os.access(target.parent, os.W_OK):
        raise OutputError(f"{target}: its directory cannot be written to")
    # File names hold 255 bytes, 4 to a character at most.
    return target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}.part")


def publish(temporary: Path, target: str | Path, overwrite: bool) -> None:
    """Move a finished file to its target in one step."""
    target = _resolved(target)
    try:
        if overwrite:
            os.replace(temporary, target)
            return
        try:
            os.link(temporary, target)  # unlike a rename, fails if the target has appeared meanwhile
        except FileExistsError:
            raise _exists(target) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            # A file system without hard links: the check and the rename are two steps there.
            if target.exists():
                raise _exists(target) from None
            os.rename(temporary, target)
        else:
            temporary.unlink()
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error


def _resolved(target: str | Path) -> Path:
    """The file a symbolic link stands for, so that the link itself stays."""
    return Path(os.path.realpath(target))


def _exists(target: Path) -> OutputError:
    return OutputError(f"{target}: exists already; use -y to overwrite it")
