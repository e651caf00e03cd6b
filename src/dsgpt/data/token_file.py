"""The token file, NAME.bin, and its sidecar, NAME.json.

The .bin has little-endian token ids without a header: the format that nanoGPT reads with
``np.memmap(path, dtype=np.uint16)``. Ids are uint16 when the vocabulary fits (at most 65,536 ids), uint32 otherwise,
and every document ends with the end-of-text id. ``dsgpt data verify`` checks token files. Imports no
torch, and numpy only to read or write ids.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field

from dsgpt.common.errors import UserError
from dsgpt.common.files import sha256_of, sync_directory, write_json_atomic
from dsgpt.common.json_files import Count, JsonError, Positive, Sha256, read_object, read_or_refuse

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The sidecar, NAME.json beside NAME.bin: describes the token file, and shows whether it changed.

DtypeName = Literal["uint16", "uint32"]
DTYPES: dict[DtypeName, str] = {"uint16": "<u2", "uint32": "<u4"}
"""numpy's names of the little-endian types."""
WIDTHS: dict[DtypeName, int] = {"uint16": 2, "uint32": 4}
"""Bytes of an id."""
LLMC_TYPES = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Files of llm.c: the number at their beginning -> version, and type of ids; of GPT-2's tokenizer, and of Llama's."""


def dtype_of(vocab_size: int) -> DtypeName:
    """The type of ids below ``vocab_size``."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class TokenFileError(UserError):
    """A token file cannot be used. The message is one line with the file, the fault and what to do."""


class Stamp(NamedTuple):
    """Size and time of change of a file: shows a change without reading the file, unless the time was set back."""

    size: int
    """Bytes."""
    mtime_ns: int
    """Time of the last change, in nanoseconds since 1970."""

    @classmethod
    def of(cls, path: Path | str) -> Self:
        """The current stamp of a file."""
        status = os.stat(path)  # noqa: PTH116 - of a million files, whose paths are texts
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """The tokenizer that made the ids."""

    name: str | None = None
    """Name on the hub, or of the folder beside the file."""
    sha256: Sha256 | None = None
    """SHA-256 of the tokenizer's ``tokenizer.json``."""


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The contents of NAME.json."""

    dtype: DtypeName
    tokens: Positive
    """Ids in the file, end-of-text ids included."""
    documents: Count | None
    vocab_size: Positive | None
    """Every id in the file is below it. None only if there is no NAME.json, and uint16 was assumed."""
    eot_id: Count | None
    """The id that ends every document."""
    tokenizer: TokenizerFacts | None
    source: str | None
    """Origin of the text, in words."""
    sha256: Sha256 | None
    """SHA-256 of the .bin file."""
    size: Count | None = None
    """Size of the .bin in bytes when ``sha256`` was computed; None in sidecars of earlier versions and other tools."""
    mtime_ns: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Time of the last change of the .bin when ``sha256`` was computed, in nanoseconds since 1970."""


def sidecar_path(path: Path) -> Path:
    """NAME.json for NAME.bin."""
    return path.with_suffix(".json")


def note_stamp(path: Path, stamp: Stamp, *, sha256: str) -> None:
    """Write into the sidecar file ``path`` that a .bin with this ``stamp`` has the hash ``sha256``.

    Does nothing if this user may not replace the sidecar, if it is a link, or if it has another hash by now. Then the
    next reader hashes the .bin again.
    """
    with contextlib.suppress(OSError, JsonError):
        before = path.lstat()
        if not stat.S_ISREG(before.st_mode) or not (os.geteuid() in (0, before.st_uid) and os.access(path, os.W_OK)):
            return
        values = read_object(path)
        if values.get("sha256") != sha256:
            return
        write_json_atomic(path, values | stamp._asdict())
        # The sidecar is a new file now, and must stay readable to others.
        os.chown(path, before.st_uid, before.st_gid)
        path.chmod(stat.S_IMODE(before.st_mode))


_CHUNK = 1 << 24  # 16 Mi ids: large enough to read at disk speed, small enough for any machine


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A checked token file, ready to be read."""

    path: Path
    sidecar: Sidecar
    stamp: Stamp
    """When it was opened."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.stamp.size

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
        noted, name = (self.sidecar.size, self.sidecar.mtime_ns), self.path.name
        if self.sidecar.sha256 is None or noted == Stamp.of(self.path):
            return ""
        if None in noted:
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
        computed = sha256_of(self.path, progress)
        if Stamp.of(self.path) != before:
            raise TokenFileError(f"{self.path}: changed while it was hashed: start again when no program writes to it")
        if (claimed := self.sidecar.sha256) and computed != claimed:
            raise TokenFileError(
                f"{self.path}: its sha256 is {computed}, its sidecar says {claimed}: the file changed; bring the "
                "original back, or make it again with `.venv/bin/python data_prep/preprocess.py --overwrite`"
            )
        if claimed and before != (self.sidecar.size, self.sidecar.mtime_ns):
            note_stamp(sidecar_path(self.path), before, sha256=claimed)
        return computed


def open_token_file(path: Path) -> TokenFile:
    """Open ``path`` (a .bin) after every check that does not read its contents.

    Raises:
        TokenFileError: the file is missing or empty, its size is not a whole number of ids, or its sidecar is not
            valid or contradicts the file.
    """
    try:
        stamp = Stamp.of(path)
    except OSError as error:
        raise TokenFileError(
            f"{path}: cannot be read ({error.strerror}); make it with `.venv/bin/python data_prep/preprocess.py` "
            "(--dataset names the text)"
        ) from error
    if path.is_dir():
        raise TokenFileError(f"{path}: is a folder; name the .bin file in it")
    if (size := stamp.size) == 0:
        raise TokenFileError(
            f"{path}: is empty; make it again with `.venv/bin/python data_prep/preprocess.py --overwrite`"
        )
    if not os.access(path, os.R_OK):
        raise TokenFileError(f"{path}: cannot be read (no permission)")
    beside = sidecar_path(path)
    if not os.path.lexists(beside):  # a broken link counts as present, and is an error
        sidecar = Sidecar(
            dtype="uint16", tokens=size // 2, documents=None, vocab_size=None, eot_id=None, tokenizer=None, source=None,
            sha256=None,
        )  # fmt: skip
        with path.open("rb") as file:
            of_llmc = int.from_bytes(file.read(4), "little") in LLMC_TYPES
        if of_llmc or path.with_suffix(".idx").exists():  # a header, or ids of another type, would be read as ids
            raise TokenFileError(
                f"{path}: is a token file of {'llm.c' if of_llmc else 'Megatron-LM'}; turn it into one of this program "
                "with `.venv/bin/python data_prep/exchange.py FROM TO --to dsgpt`"
            )
    else:
        what, cure = "the sidecar of a token file", "; make the data again"
        # Other tools and later versions may write more keys.
        sidecar = read_or_refuse(beside, Sidecar, what, cure=cure, refusal=TokenFileError, unknown_keys=True)
        if sidecar.vocab_size is None:
            raise TokenFileError(f"{beside}: vocab_size is null, not a positive whole number; make the data again")
        if sidecar.vocab_size > 1 << (8 * WIDTHS[sidecar.dtype]):
            raise TokenFileError(f"{beside}: vocab_size {sidecar.vocab_size:,} does not fit dtype {sidecar.dtype}")
    width = WIDTHS[sidecar.dtype]
    if size % width:
        raise TokenFileError(
            f"{path}: {size:,} bytes is not a whole number of {width}-byte {sidecar.dtype} ids; the file is cut off or "
            "is not a token file"
        )
    if size // width != sidecar.tokens:
        raise TokenFileError(
            f"{path}: holds {size // width:,} {sidecar.dtype} ids but {beside.name} says {sidecar.tokens:,}; one of "
            "them is from another preparation, make the data again"
        )
    return TokenFile(path=path, sidecar=sidecar, stamp=stamp)


class TokenFileWriter:
    """Writes NAME.bin under a temporary name; the end of the ``with`` block renames it and writes its sidecar.

    Both are durable then. An exception inside the block leaves neither file.
    """

    def __init__(
        self, path: Path, *, vocab_size: int, eot_id: int, tokenizer: TokenizerFacts | None, source: str
    ) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._about: dict[str, Any] = {"vocab_size": vocab_size, "eot_id": eot_id, "tokenizer": tokenizer}
        self._about |= {"source": source, "dtype": dtype_of(vocab_size)}
        self.tokens = 0
        """Ids written so far."""
        self.documents = 0
        """Documents written so far."""
        self._digest = hashlib.sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._partial.unlink(missing_ok=True)
        self._file = self._partial.open("xb")  # "x" never writes through a link of that name

    def append(self, ids: "list[int] | NDArray[np.integer]") -> None:
        """Append one document, ``ids`` of shape (n,), and the end-of-text id.

        Raises:
            TokenFileError: an id is outside the vocabulary.
        """
        import numpy as np  # noqa: PLC0415

        document = np.asarray(ids, dtype=np.int64)
        if document.size and not 0 <= int(document.min()) <= int(document.max()) < self._about["vocab_size"]:
            raise TokenFileError(
                f"{self._path}: document {self.documents} has ids from {document.min()} to {document.max()}, outside "
                f"the vocabulary of {self._about['vocab_size']:,}"
            )
        self.append_encoded(np.append(document, self._about["eot_id"]).astype(DTYPES[self._about["dtype"]]).tobytes())
        self.documents += 1

    def append_encoded(self, data: bytes) -> None:
        """Append ids as the file has them; the caller counts the documents."""
        self._file.write(data)
        self._digest.update(data)
        self.tokens += len(data) // WIDTHS[self._about["dtype"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is not None:
                self._partial.unlink(missing_ok=True)
                return
            self._file.flush()
            os.fsync(self._file.fileno())
        # An old sidecar would contradict the new .bin, so it is removed first.
        sidecar_path(self._path).unlink(missing_ok=True)
        self._partial.replace(self._path)
        sync_directory(self._path.parent)
        about = self._about | Stamp.of(self._path)._asdict()
        sidecar = Sidecar(tokens=self.tokens, documents=self.documents, sha256=self._digest.hexdigest(), **about)
        write_json_atomic(sidecar_path(self._path), asdict(sidecar))
