"""Writes a file whole or not at all."""

import errno
import fcntl
import os
import secrets
import stat
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import HwkvError

ABANDONED_AFTER = 60  # seconds


@contextmanager
def replacing(path, overwrite=False, link_to=None):
    """Yields a binary file; what is written to it becomes `path` when the block ends without an error.

    With link_to, `path` becomes a hard link to that file instead, and None is yielded;
    where the file system cannot link, an empty file is yielded as usual.

    The bytes go to a temporary file in the same folder, are flushed to the disk, and take
    the target's name in one step. After an error, a signal that raises, or a full disk the
    temporary file is gone and the target is as it was. What a killed process left in the
    folder is removed by the next one that writes there.
    """
    path = Path(path)
    check_target(path, overwrite)
    _sweep(path.parent)
    # the name is chosen before the file exists, so that no interrupt can fall between making and knowing it
    partial = path.with_name(f".hwkv-{secrets.token_hex(8)}.partial")
    try:
        if link_to is not None and _link(link_to, partial):
            with open(partial, "rb") as file:
                _hold(file)
                yield None
        else:
            with open(partial, "xb") as file:
                _hold(file)
                yield file
                file.flush()
                os.fsync(file.fileno())
        _take_name(partial, path, overwrite)
        _sync_folder(path.parent)
    except OSError as error:
        raise _write_error(path, error) from None
    finally:
        _discard(partial)


def check_target(path, overwrite):
    """Refuses what must not be replaced: an existing file without `overwrite`, a folder, a device."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.name:
            raise HwkvError(f"{path}: not a file name") from None
        return
    except OSError as error:
        raise _write_error(path, error) from None
    if not stat.S_ISREG(mode):
        raise HwkvError(f"{path}: cannot write: it is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}")
    if not overwrite:
        raise HwkvError(f"{path}: exists already; --force replaces it")


def _write_error(path, error):
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HwkvError(f"{path}: cannot write: the disk is full; nothing was left behind")
    # of the file that failed: usually the folder of the target, not the partial file's own name
    return HwkvError(f"{path}: cannot write: {error.strerror or error}")


def _take_name(partial, path, overwrite):
    if not overwrite:  # nor what another process has written since
        try:
            return os.link(partial, path)
        except FileExistsError:
            raise HwkvError(f"{path}: exists already; --force replaces it") from None
        except OSError:
            pass  # not every file system can link
    os.replace(partial, path)


def _link(source, target):
    try:
        os.link(os.path.realpath(source), target)  # of a symbolic link, the file
    except OSError:
        return False
    return True


def _discard(partial):
    with suppress(OSError):  # renamed already, or never made
        os.unlink(partial)


def _hold(file):
    """Says that the file is in use, as long as it is open. Shared: a link is the file of all that link to it."""
    with suppress(OSError):  # not every file system can lock
        fcntl.flock(file, fcntl.LOCK_SH)


def _sweep(folder):
    """Removes temporary files that no process holds. A young one may be about to be held."""
    for partial in folder.glob(".hwkv-*.partial"):
        with suppress(OSError), open(partial, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_ctime >= ABANDONED_AFTER:
                os.unlink(partial)


def _sync_folder(folder):
    """Makes the new name itself durable. Not every file system can; then the content is still whole."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
