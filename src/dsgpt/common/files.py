"""Write beside, then rename: a reader sees the old file or the new one, never half of one."""

import codecs
import contextlib
import hashlib
import json
import os
import shutil
import stat
import traceback
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

_BLOCK = 1 << 22


PRINTABLE = "dsgpt.printable"
"""For ``encode``: a byte of a path that is no UTF-8, or a character that an encoding lacks, is ``\\xe9``."""


def _spelt_out(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(_escape(character) for character in characters), error.end


def _escape(character: str) -> str:
    byte = ord(character) - 0xDC00  # what os.fsdecode makes of a byte that it cannot decode
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else character.encode("ascii", "backslashreplace").decode()


codecs.register_error(PRINTABLE, _spelt_out)


def printable(path: object) -> str:
    """A path, or a text that holds one, as valid Unicode, for files and for people."""
    return str(path).encode("utf-8", PRINTABLE).decode("utf-8")


def is_utf8(path: object) -> bool:
    """Whether every byte of a path is of valid UTF-8."""
    return printable(path) == str(path)


def undecodable(path: object) -> str:
    """What to say of a path that is not, and that a library must open."""
    return (
        f"{printable(path)}: is not valid UTF-8, and the libraries that read tokenizers and weights open no such path: "
        "rename it"
    )


def sha256_of(path: Path, progress: Callable[[int], object] = lambda _: None) -> str:
    """The SHA-256 of a file, as lower-case hex; ``progress`` gets the number of bytes read since its last call."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def is_regular_file(path: Path) -> bool:
    """Whether a file lies at ``path`` itself, as far as can be seen; a link to one is none."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):  # none, no permission, a name that is none
        return False


def link_between(folder: Path, path: Path) -> Path | None:
    """The first link on the way from ``folder``, which may be one, down to ``path`` inside it; None without any."""
    inside = [path, *path.parents]
    below = inside[: inside.index(folder)]
    return next((part for part in reversed(below) if part.is_symlink()), None)


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one; of a link the link alone, never what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def append_to(path: Path) -> FileIO:
    """Open a file for appending, unbuffered, and make it if need be.

    Raises:
        OSError: the system refuses, or a link is in its place: what it points to must not be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return FileIO(os.open(path, flags, 0o666), "ab")


def sync_directory(path: Path) -> None:
    """Make the names inside ``path`` durable; a rename is only safe from a power cut after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step, durable on return; a failure leaves no partial file behind."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.unlink(missing_ok=True)
        with beside.open("xb") as file:  # never through a link in its place
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ``value`` as JSON. NaN and infinity are refused: they are not JSON and other readers choke on them."""
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def print_traceback() -> None:
    """Show the error that is being handled, if anybody still reads; the program goes on."""
    with contextlib.suppress(OSError):
        traceback.print_exc()
