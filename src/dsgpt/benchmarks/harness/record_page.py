"""What every page that is made of a record has in common: the record is read, the page is written as a whole."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.common.files import write_atomic
from dsgpt.common.json_files import JsonError, clipped_text, read_object

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


@contextlib.contextmanager
def one_line_if_none(file: Path, *, of: str) -> Iterator[None]:
    """Around the making of a page from a record that somebody names: what is no such record is the user's mistake.

    Args:
        file: the record.
        of: what it should be a record of, for the message.

    Raises:
        UserError: a value of the record is missing or of another type.
    """
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = clipped_text(f"{type(error).__name__}: {error}")
        raise UserError(f"--table-from {file}: is no record of {of} that a page can be made of ({what})") from error


def write_page(page: Path, text: str) -> None:
    """Write ``text`` to ``page``, in a folder that is made where it is missing."""
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, text.encode())
