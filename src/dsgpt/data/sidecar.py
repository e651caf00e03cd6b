"""The sidecar, NAME.json beside NAME.bin: describes the token file, and shows whether it changed.

Imports neither torch nor numpy.
"""

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import Count, JsonError, Positive, Sha256, read_as, read_object

DtypeName = Literal["uint16", "uint32"]
DTYPES: dict[DtypeName, str] = {"uint16": "<u2", "uint32": "<u4"}
"""What numpy calls the little-endian types."""
WIDTHS: dict[DtypeName, int] = {"uint16": 2, "uint32": 4}
"""Bytes of an id."""
Nanoseconds = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class TokenFileError(UserError):
    """A token file cannot be used. The message is one line with the file, the fault and what to do."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """The tokenizer that made the ids."""

    name: str | None = None
    """Name on the hub, or of the folder beside the file."""
    sha256: Sha256 | None = None
    """Of its ``tokenizer.json``."""


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The contents of NAME.json."""

    dtype: DtypeName
    tokens: Positive
    """Ids in the file, end-of-text ids included."""
    documents: Count | None
    vocab_size: Positive | None
    """Every id in the file is below it. None only if there is no sidecar."""
    eot_id: Count | None
    """The id that ends every document."""
    tokenizer: TokenizerFacts | None
    source: str | None
    """Where the text came from, in words."""
    sha256: Sha256 | None
    """Of the .bin."""
    size: Count | None = None
    """Size of the .bin in bytes when ``sha256`` was computed; None in sidecars of earlier versions and other tools."""
    mtime_ns: Nanoseconds | None = None
    """Time of the last change of the .bin when ``sha256`` was computed, in nanoseconds since 1970."""

    @property
    def stamp(self) -> "Stamp | None":
        """Stamp of the .bin when ``sha256`` was computed; None if the sidecar does not have it."""
        if self.size is None or self.mtime_ns is None:
            return None
        return Stamp(size=self.size, mtime_ns=self.mtime_ns)


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Size and time of change of a file: shows a change without reading the file, unless the time was set back."""

    size: int
    """Bytes."""
    mtime_ns: int
    """Time of the last change, in nanoseconds since 1970."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """The current stamp of a file."""
        found = path.stat()
        return cls(size=found.st_size, mtime_ns=found.st_mtime_ns)


def dtype_for(vocab_size: int) -> DtypeName:
    """The narrowest dtype that holds ids below ``vocab_size``."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def sidecar_path(path: Path) -> Path:
    """NAME.json for NAME.bin."""
    return path.with_suffix(".json")


def read_sidecar(path: Path) -> Sidecar:
    """Read the sidecar file ``path``; unknown keys, of other tools or later versions, are ignored.

    Raises:
        TokenFileError: it cannot be read, a key is missing or of another type, or its values contradict each other.
    """
    try:
        sidecar = read_as(path, Sidecar, unknown_keys=True)
    except JsonError as error:
        raise TokenFileError(f"{path}: is not the sidecar of a token file ({error}); make the data again") from error
    if sidecar.vocab_size is None:
        raise TokenFileError(f"{path}: vocab_size is null, not a positive whole number; make the data again")
    if sidecar.vocab_size > 1 << (8 * WIDTHS[sidecar.dtype]):
        raise TokenFileError(f"{path}: vocab_size {sidecar.vocab_size:,} does not fit dtype {sidecar.dtype}")
    return sidecar


def note_stamp(path: Path, stamp: Stamp, *, sha256: str) -> None:
    """Write into the sidecar file ``path`` that a .bin with this ``stamp`` has the hash ``sha256``.

    Does nothing if this user may not replace the sidecar, if it is a link, or if it has another hash by now. Then the
    next reader hashes the .bin again.
    """
    with contextlib.suppress(OSError, JsonError):
        before = path.lstat()
        may_replace = os.geteuid() in (0, before.st_uid) and os.access(path, os.W_OK)
        if not stat.S_ISREG(before.st_mode) or not may_replace:
            return
        values = read_object(path)
        if values.get("sha256") != sha256:
            return
        write_json_atomic(path, values | {"size": stamp.size, "mtime_ns": stamp.mtime_ns})
        # The sidecar is a new file now, and must stay readable to others.
        os.chown(path, before.st_uid, before.st_gid)
        path.chmod(stat.S_IMODE(before.st_mode))
