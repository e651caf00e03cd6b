"""Files at addresses such as ``s3://bucket/run``, through fsspec: object stores, and any folder.

fsspec has a package for each store; ``pip install 'dsgpt[stores]'`` has those of ``s3://`` and ``gs://``. They look for
keys in the environment, in the provider's files, and in the machine's role.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dsgpt.common.errors import UserError

_BLOCK = 8 << 20
"""Bytes that are copied at once; s3fs sends parts of at least 5 MiB."""


def is_address(text: str) -> bool:
    """Whether ``text`` names a store, and not a path of this machine."""
    return "://" in text


@contextlib.contextmanager
def store_errors(what: str, *, kind: type[UserError] = UserError) -> Iterator[None]:
    """Raises an error of a store as ``kind``, with the line ``what`` and the reason; a ``UserError`` stays as it is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each store raises errors of its own package
        raise kind(f"{what} ({error})") from error


@dataclass(frozen=True)
class Place:
    """A folder in a store. Names are paths inside it, with forward slashes."""

    files: Any
    """An ``fsspec.AbstractFileSystem``; it raises ``OSError``, or an error of the store's own package."""
    root: str

    def path(self, name: str) -> str:
        """The path of ``name`` in the store."""
        return f"{self.root.rstrip('/')}/{name}"

    def write(self, name: str, source: IO[bytes]) -> None:
        """Copy what is left of ``source`` into ``name``, and replace what was there."""
        path = self.path(name)
        if "file" in self.files.protocol:  # object stores have no folders; asked to make one, they may make a bucket
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self.files.open(path, "wb", block_size=_BLOCK) as file:
            shutil.copyfileobj(source, file, _BLOCK)

    def read_into(self, name: str, target: Path, progress: Callable[[int], object] = lambda _: None) -> str:
        """Copy ``name`` into the new file ``target``; ``progress`` gets the bytes since its last call.

        Returns:
            The sha256 of what came.
        """
        digest = hashlib.sha256()
        with self.files.open(self.path(name), "rb", block_size=_BLOCK) as file, target.open("xb") as copy:
            while block := file.read(_BLOCK):
                copy.write(block)
                digest.update(block)
                progress(len(block))
        return digest.hexdigest()

    def names(self, folder: str = "") -> list[str]:
        """The names in ``folder``, without it; empty if it does not exist."""
        self.files.invalidate_cache()
        try:
            paths = self.files.ls(self.path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def exists(self, name: str) -> bool:
        """Whether the file ``name`` is there."""
        return bool(self.files.exists(self.path(name)))

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it is there."""
        if self.exists(name):
            self.files.rm(self.path(name), recursive=True)


def open_place(address: str, *, flag: str) -> Place:
    """The folder at ``address``, a path or an address; nothing is asked of the store yet.

    Raises:
        UserError: the store is unknown, or its package is not installed.
    """
    import fsspec  # noqa: PLC0415 - most runs name no store

    try:
        files, root = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{flag} {address}: cannot be opened ({error}): pip install 'dsgpt[stores]' has s3:// and gs://"
        ) from error
    return Place(files, root)
