"""Writes a file, or several that belong together, whole or not at all."""

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, overload

from ..errors import HwkvError

ABANDONED_AFTER = 60  # seconds


@overload
def replacing(path: str | Path, overwrite: bool = False) -> AbstractContextManager[BinaryIO]: ...
@overload
def replacing(
    path: str | Path, overwrite: bool = False, link_to: str | Path | None = None
) -> AbstractContextManager[BinaryIO | None]: ...
@contextmanager
def replacing(path: str | Path, overwrite: bool = False, link_to: str | Path | None = None) -> Iterator[Any]:
    """Yields a binary file. What is written to it becomes `path` when the block ends without an error.

    With link_to, `path` becomes a hard link to that file, and None is yielded. Where the file system cannot link, an
    empty file is yielded as usual.

    The bytes go to a temporary file in the same folder, are flushed to the disk, and take the target's name in one
    step. After an error, a signal that raises, or a full disk the temporary file is gone and the target is as it was.
    What a killed process left in the folder is removed by the next one that writes there. HwkvError if `path` must not
    be replaced (see check_target) or cannot be written.
    """
    with replacing_together(overwrite) as add:
        yield add(path, link_to)


@contextmanager
def replacing_together(overwrite: bool = False) -> Iterator[Callable[..., BinaryIO | None]]:
    """Yields a call that takes what `replacing` takes and returns what it yields, for files that belong together.

    All are written before the first takes its name. Those that they replace are kept aside until the last has its name.
    After an error or a signal that raises, at whatever moment, all targets are as they were; or all are new, if it came
    after the last rename. A SIGKILL or a power loss between the first and the last rename cannot be undone: then some
    are new and some old.
    """
    members: list[_Member] = []
    with ExitStack() as opened:
        try:

            def add(path: str | Path, link_to: str | Path | None = None) -> BinaryIO | None:
                path = Path(path)
                check_target(path, overwrite)
                _sweep(path.parent)
                member = _Member(path)
                members.append(member)  # before the file exists: no interrupt can fall between making and knowing it
                if link_to is not None and _link(link_to, member.partial):
                    _hold(opened.enter_context(open(member.partial, "rb")))
                    return None
                member.file = open(member.partial, "xb")
                opened.callback(_close, member.file)
                _hold(member.file)
                return member.file

            yield add
            for member in members:
                if member.file:
                    member.file.flush()
                    os.fsync(member.file.fileno())
            _take_names(members, overwrite)
            for folder in {member.path.parent for member in members}:
                _sync_folder(folder)
        except OSError as error:
            if not members:
                raise
            named = [x for x in members if str(error.filename) in (str(x.path), str(x.partial))]
            raise _write_error((named or members)[-1].path, error) from None
        finally:
            _to_the_end(_clean_up, members)


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # a disk that is full was told of before
        file.close()


class _Member:
    """A file that waits for its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f".hwkv-{secrets.token_hex(8)}.partial")  # its own bytes
        self.aside = path.with_name(f".hwkv-{secrets.token_hex(8)}.partial")  # what it replaces
        self.file: BinaryIO | None = None
        self.is_new = False  # nothing had the name
        self.identity: os.stat_result | None = None  # os.stat of its own bytes, once they are about to take the name


def _take_names(members: list[_Member], overwrite: bool) -> None:
    """All, or after an error none."""
    try:
        for member in members:
            member.is_new = not os.path.lexists(member.path)
            if len(members) > 1 and overwrite and not member.is_new:  # one alone is replaced in one step
                _keep_aside(member)
            member.identity = os.stat(member.partial)
            _take_name(member.partial, member.path, overwrite)
    except BaseException:
        _to_the_end(_give_back, members)
        raise


def _to_the_end(step: Callable[[_Member], None], members: list[_Member]) -> None:
    """Does a step, which can be done twice, for all members; an interrupt is raised when that is done."""
    interrupt: BaseException | None = None
    while True:
        try:
            for member in members:
                step(member)
            break
        except (KeyboardInterrupt, SystemExit) as raised:
            interrupt = raised
    if interrupt:
        raise interrupt


def _keep_aside(member: _Member) -> None:
    try:
        os.link(member.path, member.aside, follow_symlinks=False)  # the old one keeps its name, too
    except (OSError, NotImplementedError):  # not every file system can link
        os.rename(member.path, member.aside)


def _give_back(member: _Member) -> None:
    """Undoes what _take_names did for a member, as far as it came."""
    with suppress(OSError):
        if os.path.lexists(member.aside):
            os.replace(member.aside, member.path)
        elif member.is_new and member.identity and os.path.samestat(os.stat(member.path), member.identity):
            os.unlink(member.path)


def _clean_up(member: _Member) -> None:
    _discard(member.partial)
    if os.path.lexists(member.path):
        _discard(member.aside)


def check_target(path: str | Path, overwrite: bool) -> None:
    """HwkvError for what must not be replaced: an existing file without `overwrite`, a folder, a device."""
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


def _write_error(path: Path, error: OSError) -> HwkvError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HwkvError(f"{path}: cannot write: the disk is full; nothing was left behind")
    # only the reason: the error's own file name is that of the temporary file
    return HwkvError(f"{path}: cannot write: {error.strerror or error}")


def _take_name(partial: Path, path: Path, overwrite: bool) -> None:
    if not overwrite:  # a link refuses a file that another process has made meanwhile
        try:
            os.link(partial, path)
            return
        except FileExistsError:
            raise HwkvError(f"{path}: exists already; --force replaces it") from None
        except OSError:
            pass  # not every file system can link
    os.replace(partial, path)


def _link(source: str | Path, target: Path) -> bool:
    try:
        os.link(os.path.realpath(source), target)  # to the file itself, where the source is a symbolic link
    except OSError:
        return False
    return True


def _discard(partial: Path) -> None:
    with suppress(OSError):  # renamed already, or never made
        os.unlink(partial)


def _hold(file: BinaryIO) -> None:
    """Locks the file as long as it is open: it is in use. The lock is shared: other links to the file have it, too."""
    with suppress(OSError):  # not every file system can lock
        fcntl.flock(file, fcntl.LOCK_SH)


def _sweep(folder: Path) -> None:
    """Removes temporary files that no process holds. A young one stays: its process may not hold it yet."""
    for partial in folder.glob(".hwkv-*.partial"):
        with suppress(OSError), open(partial, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_ctime >= ABANDONED_AFTER:
                os.unlink(partial)


def _sync_folder(folder: Path) -> None:
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
