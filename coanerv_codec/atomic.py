"""Files that appear whole or not at all: written beside their target without its name, which they get when complete.

    with atomic_path(target, overwrite=False) as temporary:
        write_everything(temporary)

An existing target is refused unless it may be overwritten, also when it appears while we are writing. An exception
leaves nothing behind. Where the kernel and the file system have files without a name (Linux: ext4, xfs, btrfs, tmpfs,
...) neither does SIGKILL; elsewhere that leaves a hidden `.part` file.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coanerv_codec.errors import OutputError

DESCRIPTORS = Path("/proc/self/fd")


@contextmanager
def atomic_path(target: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A path to write to, renamed to `target` at the end and removed on failure."""
    temporary = open_temporary(target, overwrite)
    try:
        yield temporary
        publish(temporary, target, overwrite)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        discard(temporary)


def write_whole(target: str | Path, data: str | bytes) -> None:
    """Write a small file in one go, replacing what was there only when it is complete."""
    with atomic_path(target, overwrite=True) as path:
        path.write_bytes(data.encode() if isinstance(data, str) else data)


def make_folder(folder: Path) -> None:
    """Make a folder for outputs, and those above it, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made a folder: {error.strerror}") from error


def open_temporary(target: str | Path, overwrite: bool) -> Path:
    """A path to write to that `publish` and `discard` know: a file without a name, or one as `temporary_beside` gives."""
    named = temporary_beside(target, overwrite)
    if not hasattr(os, "O_TMPFILE"):
        return named
    try:
        unnamed = DESCRIPTORS / str(os.open(named.parent, os.O_TMPFILE | os.O_RDWR, 0o666))
    except OSError:
        return named  # a file system that has no such files; if it is another trouble, writing will say so
    if unnamed.exists():
        return unnamed
    discard(unnamed)  # no /proc here
    return named


def discard(temporary: Path) -> None:
    """Remove a file of `open_temporary`; once only, since its descriptor may be another's afterwards."""
    if _is_unnamed(temporary):
        os.close(int(temporary.name))
    else:
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
        _to_disk(temporary)
        if _is_unnamed(temporary):
            _give_name(temporary, target, overwrite)
            return
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


def _to_disk(path: Path) -> None:
    """Wait until the content is on the disk, lest a power cut leaves the name without it; a late error shows here too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_unnamed(temporary: Path) -> bool:
    return temporary.parent == DESCRIPTORS


def _give_name(unnamed: Path, target: Path, overwrite: bool) -> None:
    """Link a file without a name to its target. A link never replaces a file, so that takes a second step."""
    name = temporary_beside(target, overwrite) if overwrite else target
    try:
        # The descriptor is not used, as the path is absolute, but makes Python follow the link below /proc.
        os.link(unnamed, name, src_dir_fd=int(unnamed.name))
    except FileExistsError:
        raise _exists(target) from None
    if overwrite:
        try:
            os.replace(name, target)
        except OSError:
            name.unlink()
            raise


def _resolved(target: str | Path) -> Path:
    """The file a symbolic link stands for, so that the link itself stays."""
    return Path(os.path.realpath(target))


def _exists(target: Path) -> OutputError:
    return OutputError(f"{target}: exists already; use -y to overwrite it")
