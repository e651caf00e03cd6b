"""The token file: NAME.bin, little-endian token ids without a header, and its sidecar NAME.json.

The .bin is the format that nanoGPT reads with ``np.memmap(path, dtype=np.uint16)``; ids are uint16 when the vocabulary
fits (at most 65,536 ids), uint32 otherwise, and every document ends with the end-of-text id. Imports no torch, and
numpy only to read or write ids.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dsgpt.common.files import sha256_of, sync_directory, write_json_atomic
from dsgpt.data.sidecar import (
    DTYPES,
    WIDTHS,
    Sidecar,
    Stamp,
    TokenFileError,
    TokenizerFacts,
    dtype_for,
    note_stamp,
    read_sidecar,
    sidecar_path,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CHUNK = 1 << 24  # 16 Mi ids: large enough to read at disk speed, small enough for any machine


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A checked token file, ready to be read."""

    path: Path
    sidecar: Sidecar
    inferred: bool
    """True if there is no NAME.json and uint16 was assumed."""
    size_bytes: int

    @property
    def tokens(self) -> int:
        """Number of ids in the file."""
        return self.sidecar.tokens

    def memmap(self) -> "NDArray[np.unsignedinteger]":
        """The ids, shape (tokens,), read-only, not loaded into memory."""
        import numpy as np  # noqa: PLC0415 - takes a sixth of the time of --help

        return np.memmap(self.path, dtype=DTYPES[self.sidecar.dtype], mode="r")

    def largest_id(self) -> int:
        """The largest id in the file; reads all of it."""
        ids = self.memmap()
        return max(int(ids[start : start + _CHUNK].max()) for start in range(0, len(ids), _CHUNK))

    def doubt(self) -> str:
        """Why the file may differ from its sidecar's sha256; empty if size and time of change are as noted there.

        Also empty if the sidecar has no sha256. A change is not seen if the time of change was set back.
        """
        noted, name = self.sidecar.stamp, self.path.name
        if self.sidecar.sha256 is None or noted == Stamp.of(self.path):
            return ""
        if noted is None:
            return f"{sidecar_path(self.path).name} does not say when {name} was written"
        return f"{name} changed on disk since it was prepared (or was copied)"

    def verified_sha256(self, progress: Callable[[int], object] = lambda _: None) -> str:
        """Hash the file, compare the hash with the sidecar's, and note the file's stamp there if they agree.

        Args:
            progress: gets the number of bytes hashed since its last call.

        Raises:
            TokenFileError: the hashes differ, or the file changed meanwhile.
        """
        before = Stamp.of(self.path)
        computed = self.computed_sha256(progress)
        if Stamp.of(self.path) != before:
            raise TokenFileError(f"{self.path}: changed while it was hashed: start again when no program writes to it")
        claimed = self.sidecar.sha256
        if claimed and computed != claimed:
            raise TokenFileError(
                f"{self.path}: its sha256 is {computed}, its sidecar says {claimed}: the file changed; bring the "
                "original back, or make it again with `.venv/bin/python data_prep/preprocess.py --overwrite`"
            )
        if claimed and before != self.sidecar.stamp:
            note_stamp(sidecar_path(self.path), before, sha256=claimed)
        return computed

    def computed_sha256(self, progress: Callable[[int], object] = lambda _: None) -> str:
        """Hash the file's bytes; ``progress`` gets the number of bytes hashed since its last call."""
        return sha256_of(self.path, progress)


def open_token_file(path: Path) -> TokenFile:
    """Open ``path`` (a .bin) after every check that does not read its contents.

    Raises:
        TokenFileError: the file is missing or empty, its size is not a whole number of ids, or its sidecar is not
            valid or contradicts the file.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TokenFileError(
            f"{path}: cannot be read ({error.strerror}); make it with `.venv/bin/python data_prep/preprocess.py`"
        ) from error
    if path.is_dir():
        raise TokenFileError(f"{path}: is a folder; name the .bin file in it")
    if size == 0:
        raise TokenFileError(
            f"{path}: is empty; make it again with `.venv/bin/python data_prep/preprocess.py --overwrite`"
        )
    if not os.access(path, os.R_OK):
        raise TokenFileError(f"{path}: cannot be read (no permission)")
    sidecar_file = sidecar_path(path)
    inferred = not os.path.lexists(sidecar_file)  # a broken link counts as present, and is an error
    sidecar = _inferred(size) if inferred else read_sidecar(sidecar_file)
    _check_size(path, size, sidecar, inferred)
    return TokenFile(path=path, sidecar=sidecar, inferred=inferred, size_bytes=size)


def _inferred(size: int) -> Sidecar:
    return Sidecar(
        dtype="uint16", tokens=size // 2, documents=None, vocab_size=None, eot_id=None, tokenizer=None, source=None,
        sha256=None,
    )  # fmt: skip


def _check_size(path: Path, size: int, sidecar: Sidecar, inferred: bool) -> None:
    width = WIDTHS[sidecar.dtype]
    if size % width:
        raise TokenFileError(
            f"{path}: {size:,} bytes is not a whole number of {width}-byte {sidecar.dtype} ids; the file is cut off or "
            "is not a token file"
        )
    if not inferred and size != sidecar.tokens * width:
        raise TokenFileError(
            f"{path}: holds {size // width:,} {sidecar.dtype} ids but {sidecar_path(path).name} says "
            f"{sidecar.tokens:,}; one of them is from another preparation, make the data again"
        )


class TokenFileWriter:
    """Writes NAME.bin under a temporary name; ``close`` renames it and writes its sidecar. A context manager.

    An exception inside the ``with`` block leaves neither file.
    """

    def __init__(
        self, path: Path, *, vocab_size: int, eot_id: int, tokenizer: TokenizerFacts | None, source: str
    ) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._about: dict[str, Any] = {
            "vocab_size": vocab_size,
            "eot_id": eot_id,
            "tokenizer": tokenizer,
            "source": source,
        }
        self._dtype = dtype_for(vocab_size)
        self._tokens = 0
        self._documents = 0
        self._digest = hashlib.sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._partial.unlink(missing_ok=True)
        self._file = self._partial.open("xb")  # "x" never writes through a link of that name

    @property
    def tokens(self) -> int:
        """Ids written so far."""
        return self._tokens

    def append(self, ids: "list[int] | NDArray[np.integer]") -> None:
        """Append one document, ``ids`` of shape (n,), and the end-of-text id.

        Raises:
            TokenFileError: an id is outside the vocabulary.
        """
        import numpy as np  # noqa: PLC0415

        document = np.asarray(ids, dtype=np.int64)
        vocab_size = self._about["vocab_size"]
        if document.size and not 0 <= int(document.min()) <= int(document.max()) < vocab_size:
            raise TokenFileError(
                f"{self._path}: document {self._documents} has ids from {document.min()} to {document.max()}, outside "
                f"the vocabulary of {vocab_size:,}"
            )
        data = np.append(document, self._about["eot_id"]).astype(DTYPES[self._dtype]).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._tokens += document.size + 1
        self._documents += 1

    def close(self) -> Sidecar:
        """Give the file its name and write its sidecar; both are durable on return."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        # An old sidecar would contradict the new .bin, so it is removed first.
        sidecar_path(self._path).unlink(missing_ok=True)
        self._partial.replace(self._path)
        sync_directory(self._path.parent)
        sidecar = Sidecar(
            dtype=self._dtype,
            tokens=self._tokens,
            documents=self._documents,
            sha256=self._digest.hexdigest(),
            **self._about,
            **asdict(Stamp.of(self._path)),
        )
        write_json_atomic(sidecar_path(self._path), asdict(sidecar))
        return sidecar

    def abandon(self) -> None:
        """Remove what was written."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
