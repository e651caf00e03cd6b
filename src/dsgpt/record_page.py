"""What every page that is made of a record has in common: the record is read, the page is written as a whole."""

from pathlib import Path
from typing import Any

from dsgpt.errors import UserError
from dsgpt.files import write_atomic
from dsgpt.json_files import JsonError, read_object

_MAX_BYTES = 256 << 20


def read_record(file: Path, *, of: str) -> dict[str, Any]:
    """The record that ``--table-from`` names.

    Args:
        file: holds it.
        of: what it is a record of, for the message.

    Raises:
        UserError: it cannot be read as one.
    """
    try:
        return read_object(file, max_bytes=_MAX_BYTES)
    except JsonError as error:
        raise UserError(f"--table-from {file}: cannot be read as a record of {of}: {error}") from error


def write_page(page: Path, text: str) -> None:
    """Write ``text`` to ``page``, in a folder that is made where it is missing."""
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, text.encode())
