"""Writes files of a checkpoint. Every failure is an ``OSError`` that names the reason and the file."""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_EXPECTED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE)
"""Errors of a file system that does not accept a file."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the permissions of any other new file; the library would make it private.

    Raises:
        OSError: it could not be written.
    """
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise _as_os_error(error, path) from error
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def save_pickled(value: Any, path: Path) -> None:
    """Write the new file ``path`` with ``torch.save``, for other programs; durable on return. Never read such a file.

    Raises:
        OSError: it could not be written.
    """
    with path.open("xb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            raise _as_os_error(error, path) from error
        file.flush()
        os.fsync(file.fileno())


def _as_os_error(error: Exception, path: Path) -> Exception:
    """The ``OSError`` that caused ``error``; ``error`` itself if none did."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return OSError(cause.errno, cause.strerror, str(path))
        for number in _EXPECTED:
            if os.strerror(number) in str(cause):
                return OSError(number, os.strerror(number), str(path))
        cause = cause.__cause__ or cause.__context__
    return error


def try_to_write(folder: Path, *, rank: int) -> None:
    """Make and remove a file in ``folder``; every rank does so before the first collective of a save.

    Raises:
        OSError: no file can be made there.
    """
    probe = folder / f".probe-{rank:05d}"
    with probe.open("wb") as file:
        file.write(b"\0")
        file.flush()
        os.fsync(file.fileno())
    probe.unlink()


def require_room(folder: Path, needed: int) -> None:
    """Check that the file system has the ``needed`` bytes free.

    Raises:
        OSError: it has fewer.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"{os.strerror(errno.ENOSPC)}: the last checkpoint took {needed:,} bytes, and {free:,} are free"
        raise OSError(errno.ENOSPC, reason, str(folder))


def reason_of(error: OSError) -> str:
    """``/data/run/step-...: No space left on device``, for a message."""
    if isinstance(error, shutil.Error):  # from a copied folder: source, target and reason of each file
        return "; ".join(str(reason) for _, _, reason in error.args[0])
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename else what
