"""Write files in one step, so that readers see either the old content or the new one.

All files of this package are written by these functions.

The content goes into a temporary file beside the target, which is then renamed to the target's name. The temporary
name is random and the file must be new (O_EXCL). So a file planted under such a name is neither followed nor
overwritten, and two writers never share one. All of this holds after a power cut, too.

A symbolic link as the target is replaced by the file; the file that it points to is left alone. So nothing is ever
written outside the given folder. The folder itself may be reached through links.
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
    """Open a new binary file that replaces `path` at the end of the block.

    An exception leaves `path` alone. The file has the permissions of any new file (the umask), even if `path` had
    others. The file and its folder are synced to the disk. Raises: OSError.
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
    """Raise unless a file can be written at `path`. Call this before long work that ends in the file.

    Writes an empty file beside `path` and removes it. A disk that fills up later is not foreseen.
    Args: name: name of the caller's argument in messages.
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


def given_path(path: str | os.PathLike, suffix: str, more: str = "") -> Path:
    """Return a user's path if its name ends in `suffix`.

    more: end of the message. Raises: TypeError, ValueError.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: got {type(path).__name__}, expected a str or a Path that ends in {suffix}")
    path = Path(path)
    if path.suffix != suffix:
        raise ValueError(f"path: got {path.name!r}, expected a name that ends in {suffix}{more}")
    return path


def check_input(path: Path, expected: str) -> None:
    """Raise FileNotFoundError or ValueError unless there is a regular file to read.

    expected: for the message.
    """
    if not path.exists():
        raise FileNotFoundError(f"path: got {path.name!r}, which does not exist, expected {expected}")
    if not path.is_file():
        raise ValueError(f"path: got {path.name!r}, which is no regular file, expected {expected}")


def _is_special(path: Path) -> bool:
    """True if the path is a folder, a device or a pipe, which a file must not replace."""
    return path.exists() and not path.is_symlink() and not path.is_file()


def _new_beside(path: Path) -> tuple[Path, BinaryIO]:
    unfinished = path.with_name(f".sage-{secrets.token_hex(16)}.part")
    # not tempfile's mode 0600: the file gets the usual permissions of new files
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        return unfinished, os.fdopen(os.open(unfinished, flags, 0o666), "wb")
    except OSError as error:  # raised again with the name that the caller knows
        raise OSError(error.errno, error.strerror, str(path)) from None


def _sync_folder(folder: Path) -> None:
    """Sync a folder to the disk, if the system can, so that a new name in it survives a power cut."""
    if os.name == "nt":  # a folder can't be opened there
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # the folder may be written to, but not listed
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems can't sync folders
            raise
    finally:
        os.close(descriptor)
