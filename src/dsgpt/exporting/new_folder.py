"""A folder that appears under its name only when it is complete."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.common.files import sync_directory


def check_out(out: Path) -> None:
    """Check that a new folder can be made at ``out``.

    Raises:
        UserError: something is there already, or its parent cannot be written.
    """
    if out.is_dir() and not out.is_symlink():
        if any(out.iterdir()):
            raise UserError(f"{out}: is not empty: name a folder that does not exist yet")
    elif os.path.lexists(out):
        raise UserError(f"{out}: exists and is not a folder: name one that does not exist yet")
    place = out.absolute().parent
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UserError(f"{out}: {place} is a file, not a folder: name another folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{out}: no permission to write in {place}: name another folder")


def check_room(out: Path, size: int) -> None:
    """Check that ``size`` bytes are free where ``out`` will be.

    Raises:
        UserError: fewer are free.
    """
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise UserError(f"{out}: needs {size / 1e9:.2f} GB, and {place} has {free / 1e9:.2f} GB free")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A context that gives a hidden folder next to ``out``; at its end the folder is renamed to ``out``.

    After an error the folder is removed.

    Raises:
        UserError: the file system refuses, here or while the caller fills the folder.
    """
    target = out.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise UserError(f"{out}: cannot be made ({error.strerror}): name another folder") from error
    try:
        yield folder
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)  # mkdtemp's is private
        sync_directory(folder)
        folder.rename(target)  # replaces an empty folder
        sync_directory(target.parent)
    except OSError as error:
        raise UserError(f"{out}: could not be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
