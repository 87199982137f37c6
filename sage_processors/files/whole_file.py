"""Files that are there whole or not at all: every file that this package writes is written by these functions.

The content goes into a temporary file beside the target, which then takes the target's name. The temporary name can't
be foretold and the file must be new (O_EXCL), so nothing that was planted under such a name is followed or
overwritten, and no two writers share one. A reader sees the old content or the new one, also after a power cut.

A symbolic link as the target is replaced by the file: what it points to is left as it is, and nothing is ever written
outside of the folder that was named. The folder itself may be reached through links.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A new binary file to write to; at the end of the block it replaces `path`. An exception leaves `path` alone.

    Permissions are those of any new file (the umask's), also where `path` had others. The file and its folder are
    synced to the disk. Raises: OSError.
    """
    path = Path(path)
    if _is_special(path):
        raise FileExistsError(errno.EEXIST, "is no regular file, expected one or none", str(path))
    unfinished, file = _new_beside(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_whole(path: str | os.PathLike, content: bytes | str) -> None:
    """Replace `path` by `content` (text: as UTF-8) in one step. Raises: OSError."""
    with whole_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def check_output(path: str | os.PathLike, name: str = "path") -> None:
    """Raise unless a file can be written at `path`: to be called before hours of work that end in it.

    Tries it with an empty file beside `path`, which is gone afterwards. What fills the disk later is not foreseen.
    Args: name: what the caller's argument is called.
    Raises: ValueError.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{name}: got {str(path)!r}, but folder {path.parent} does not exist; make it first")
    if _is_special(path):
        raise ValueError(f"{name}: got {str(path)!r}, which is no regular file, expected one or none")
    try:
        unfinished, file = _new_beside(path)
        file.close()
        unfinished.unlink()
    except OSError as error:
        raise ValueError(
            f"{name}: got {str(path)!r}, but nothing can be written to folder {path.parent} ({error.strerror}); "
            "choose another one"
        ) from error


def _is_special(path: Path) -> bool:
    """Whether a folder, a device or a pipe has this name: nothing to be replaced by a file."""
    return path.exists() and not path.is_symlink() and not path.is_file()


def _new_beside(path: Path) -> tuple[Path, BinaryIO]:
    unfinished = path.with_name(f".sage-{secrets.token_hex(16)}.part")
    # not tempfile's 0600: whoever may read any other new file of this user may read this one
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        return unfinished, os.fdopen(os.open(unfinished, flags, 0o666), "wb")
    except OSError as error:  # of the name that the caller knows
        raise OSError(error.errno, error.strerror, str(path)) from None


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut, where the system can."""
    if os.name == "nt":  # a folder can't be opened there
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that may be written to, but not listed
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that sync no folders
            raise
    finally:
        os.close(descriptor)
