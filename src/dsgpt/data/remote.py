"""Files at addresses such as ``s3://bucket/run``, through fsspec: object stores, and any folder; and token files there.

fsspec has a package for each store; ``pip install 'dsgpt[stores]'`` has those of ``s3://`` and ``gs://``. They look for
keys in the environment, in the provider's files, and in the machine's role.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dsgpt.common.errors import UserError
from dsgpt.common.files import Lock, remove
from dsgpt.common.json_files import JsonError, read_as
from dsgpt.data.index import index_path, sources_path
from dsgpt.data.token_file import Sidecar, Stamp, TokenFileError, note_stamp, sidecar_path
from dsgpt.formats.tokenizer_files import KNOWN_FILES, TOKENIZER_FOLDER
from dsgpt.machine.console import Progress

_BLOCK = 8 << 20
"""Bytes that are copied at once; s3fs sends parts of at least 5 MiB."""


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
        """Copy ``name`` into the new, durable file ``target``; ``progress`` gets the bytes since its last call.

        Returns:
            The sha256 of what came.
        """
        digest = hashlib.sha256()
        with self.files.open(self.path(name), "rb", block_size=_BLOCK) as file, target.open("xb") as copy:
            while block := file.read(_BLOCK):
                copy.write(block)
                digest.update(block)
                progress(len(block))
            copy.flush()
            os.fsync(copy.fileno())
        return digest.hexdigest()

    def names(self) -> list[str]:
        """The names in the folder; empty if it does not exist."""
        self.files.invalidate_cache()
        try:
            paths = self.files.ls(self.path(""), detail=False)
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


# Token files at addresses: each machine copies them once, and reads its copy.

CACHE_VARIABLE = "DSGPT_CACHE"
"""Names the folder of copied data; by default ``~/.cache/dsgpt``."""


def local_copy(address: str) -> Path:
    """The copy of the token file at ``address`` on this machine, made if it is missing.

    The sidecar is read each time, and names the copy by its sha256: a file that was replaced is copied anew. The other
    processes of the machine wait for the one that copies.

    Raises:
        TokenFileError: the address cannot be read, has no sidecar with a sha256, or has other contents than it says.
    """
    folder, _, name = address.rpartition("/")
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "dsgpt") / "data"
    with store_errors(f"{address}: cannot be read", kind=TokenFileError):
        place = open_place(folder, flag="data")
        cache.mkdir(parents=True, exist_ok=True)
        with Lock.of_file(cache / ".lock") as lock:
            lock.take(wait=True)
            sidecar = _sidecar(place, name, cache)
            copy = cache / str(sidecar.sha256) / Path(name).name
            if not copy.exists():
                partial = copy.parent.with_suffix(".partial")
                remove(partial)
                partial.mkdir()
                size = int(place.files.size(place.path(name)))
                with contextlib.closing(Progress(total=size, what=f"copying {name}", unit="B", lines=True)) as progress:
                    computed = place.read_into(name, partial / copy.name, progress.advance)
                if computed != sidecar.sha256:
                    remove(partial)
                    raise TokenFileError(f"{address}: its sha256 is {computed}, its sidecar says {sidecar.sha256}")
                beside = sidecar_path(partial / copy.name)
                place.read_into(sidecar_path(Path(name)).name, beside)
                others = [f"{TOKENIZER_FOLDER}/{part}" for part in KNOWN_FILES if sidecar.tokenizer]
                for other in filter(place.exists, [*others, index_path(copy).name, sources_path(copy).name]):
                    (partial / other).parent.mkdir(exist_ok=True)
                    place.read_into(other, partial / other)
                note_stamp(beside, Stamp.of(partial / copy.name), sha256=str(sidecar.sha256))
                remove(copy.parent)
                partial.rename(copy.parent)
    return copy


def _sidecar(place: Place, name: str, cache: Path) -> Sidecar:
    beside, path = sidecar_path(Path(name)).name, cache / ".sidecar"
    remove(path)
    try:
        place.read_into(beside, path)
        sidecar = read_as(path, Sidecar, unknown_keys=True)
    except FileNotFoundError as error:
        raise TokenFileError(f"{place.path(beside)}: is missing; copy it there with the .bin") from error
    except JsonError as error:
        raise TokenFileError(f"{place.path(beside)}: is not the sidecar of a token file ({error})") from error
    finally:
        remove(path)
    if sidecar.sha256 is None:
        raise TokenFileError(f"{place.path(beside)}: has no sha256, by which the copy would be checked")
    return sidecar
