"""Helpers for files: atomic writes, hashes, links, and names that can be printed."""

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
"""Error handler for ``encode``: escapes bytes that are not UTF-8 and characters that the encoding lacks (``\\xe9``)."""


def _spelt_out(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(_escape(character) for character in characters), error.end


def _escape(character: str) -> str:
    byte = ord(character) - 0xDC00  # os.fsdecode maps a byte that it cannot decode to U+DC00 plus the byte
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else character.encode("ascii", "backslashreplace").decode()


codecs.register_error(PRINTABLE, _spelt_out)


def printable(path: object) -> str:
    """A path, or a text that contains one, as valid Unicode that can be printed and written."""
    return str(path).encode("utf-8", PRINTABLE).decode("utf-8")


def is_utf8(path: object) -> bool:
    """Whether the name of a path is valid UTF-8."""
    return printable(path) == str(path)


def undecodable(path: object) -> str:
    """The message about a path that is not UTF-8 and that a library must open."""
    return (
        f"{printable(path)}: is not valid UTF-8, and the libraries that read tokenizers and weights cannot open such "
        "a path: rename it"
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
    """Whether ``path`` is a regular file and not a link; False where that cannot be found out."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):  # no such file, no permission, or not a valid name
        return False


def link_between(folder: Path, path: Path) -> Path | None:
    """The first link on the path from ``folder`` (not itself checked) down to ``path``; None if there is none."""
    inside = [path, *path.parents]
    below = inside[: inside.index(folder)]
    return next((part for part in reversed(below) if part.is_symlink()), None)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists. If it is a link, only the link is removed, never its target."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def append_to(path: Path) -> FileIO:
    """Open a file for appending, unbuffered; create it if needed.

    Raises:
        OSError: the system refuses, or ``path`` is a link: its target must not be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return FileIO(os.open(path, flags, 0o666), "ab")


def sync_directory(path: Path) -> None:
    """Make the names inside ``path`` durable: only after this does a rename survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the contents of ``path`` by ``data``: a reader sees the old file or the new one, never a part of one.

    The file is durable on return. A failure leaves no partial file behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # "x" never writes through a link of that name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ``value`` as JSON. NaN and infinity raise ``ValueError``: they are not JSON."""
    write_atomic(path, json_text(value).encode())


def json_text(value: Any) -> str:
    """``value`` as files hold it. NaN and infinity raise ``ValueError``: they are not JSON."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def print_traceback() -> None:
    """Print the exception being handled, if standard error is still open, and continue."""
    with contextlib.suppress(OSError):
        traceback.print_exc()
