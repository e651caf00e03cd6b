"""Reads JSON files that others may have written: strict, with limits on size and depth, and typed.

Python's own parser accepts NaN, keeps the last of two equal keys, and raises ``RecursionError`` on deep nesting. Here
each of these raises a ``JsonError`` with a one-line message. ``read_as`` also checks every value against the type of
its field, with pydantic. Imports no torch.
"""

import codecs
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from dsgpt.common.errors import UserError

MAX_BYTES = 16 << 20
"""The largest file that is read by default: larger than any record, manifest or recipe. Vocabularies have
their own limit."""
MAX_DEPTH = 40
"""Deepest nesting of objects and arrays; dsgpt's files have at most 8 levels."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 as lower-case hex. pydantic matches the pattern in Rust, where ``$`` is only the end of the text: a final
line break does not match."""

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""The closing quote is optional: otherwise an unclosed string would make the search quadratic."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHOWN = 3
"""Most faults of one file that the error message shows."""
T = TypeVar("T")
_adapter: Callable[[type], TypeAdapter[Any]] = cache(TypeAdapter)
"""pydantic's validator of a type. Each takes a millisecond to build."""


class JsonError(ValueError):
    """A file or text is not the expected JSON. The message is one line and does not name the file."""


def parse_json(data: bytes) -> Any:
    """Parse UTF-8 text as RFC 8259 defines JSON: every number finite, every key once.

    Raises:
        JsonError: it is not such JSON, or is nested deeper than ``MAX_DEPTH``.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    if (encoding := json.detect_encoding(data)) != "utf-8":
        raise JsonError(f"it is {encoding.upper()} text, not UTF-8: encode it as UTF-8")
    check_depth(data)
    try:
        hooks: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite}
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, **hooks)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()  # an escape can write half of a surrogate pair, UTF-8 cannot
        return value
    except JsonError:
        raise
    except UnicodeEncodeError as error:
        raise JsonError("a text in it is not valid Unicode (half of a surrogate pair)") from error
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8 text (byte {error.start:,})") from error
    except json.JSONDecodeError as error:
        raise JsonError(str(error)) from error
    except ValueError as error:  # Python's message names a setting of Python
        raise JsonError(f"a whole number in it has more than {sys.get_int_max_str_digits():,} digits") from error


def check_depth(data: bytes) -> None:
    """Check how deep objects and arrays are nested in a JSON text, without parsing it.

    Raises:
        JsonError: deeper than ``MAX_DEPTH``.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    steps = _STRINGS.sub(b"", data).translate(_STEPS, _NO_BRACKETS)  # 1 and -1, as signed bytes
    if max(accumulate(memoryview(steps).cast("b")), default=0) > MAX_DEPTH:
        raise JsonError(f"its objects and arrays are nested more than {MAX_DEPTH} deep")


def _refuse_constant(word: str) -> None:
    raise JsonError(f"{word} is not a JSON number")


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise JsonError(f"{word[:40]} is too large for a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise JsonError(f'the key "{key[:80]}" is given twice: keep one of them')
    return values


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The contents of a regular file of at most ``max_bytes``, without a byte order mark.

    Raises:
        JsonError: it cannot be read, is not a regular file, or is larger.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # opening a pipe would block
            raise JsonError("it is not a regular file")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: above, or a null byte in the path
        raise JsonError(getattr(error, "strerror", None) or str(error)) from error
    if len(data) > max_bytes:
        raise JsonError(f"it is larger than {max_bytes:,} bytes")
    return data.removeprefix(codecs.BOM_UTF8)


def read_object(path: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """A JSON object in a file, its values unchecked.

    Raises:
        JsonError: the file cannot be read, does not contain JSON within the limits, or its value is not an object.
    """
    value = parse_json(read_bytes(path, max_bytes=max_bytes))
    if not isinstance(value, dict):
        raise JsonError("it must hold an object in braces")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The same as ``read_object``, of a file that a user named.

    Raises:
        UserError: the file cannot be read, or does not contain an object.
    """
    try:
        return read_object(path)
    except JsonError as error:
        raise UserError(f"{path}: is not a readable JSON file ({error})") from error


def read_as(path: Path, kind: type[T], *, unknown_keys: bool = False, max_bytes: int = MAX_BYTES) -> T:
    """A file as the dataclass or pydantic model ``kind``: every value has exactly the type of its field.

    Args:
        path: the file.
        kind: a dataclass, or anything else that pydantic validates.
        unknown_keys: whether to ignore keys that ``kind`` does not have, instead of refusing the file.
        max_bytes: larger files are refused.

    Raises:
        JsonError: as ``read_object``; or a value is missing or of another type. The message names the first faults.
    """
    return parse_as(read_bytes(path, max_bytes=max_bytes), kind, unknown_keys=unknown_keys)


def read_or_refuse(
    path: Path, kind: type[T], what: str, *, cure: str = "", refusal: type[UserError] = UserError, **reading: Any
) -> T:
    """The same as ``read_as``, of a file that a user can repair or replace.

    Args:
        path: the file.
        kind: as for ``read_as``.
        what: the file should be, such as ``the shape of a model``.
        cure: ends the message, such as ``; make the data again``.
        refusal: the error.
        reading: further arguments of ``read_as``.

    Raises:
        UserError: of the type ``refusal``; the file is something else, or cannot be read.
    """
    try:
        return read_as(path, kind, **reading)
    except JsonError as error:
        raise refusal(f"{path}: is not {what} ({error}){cure}") from error


def parse_as(data: bytes, kind: type[T], *, unknown_keys: bool = False) -> T:
    """The same as ``read_as``, from the contents of a file."""
    parse_json(data)  # pydantic's own parser accepts NaN, and keeps the last of two equal keys
    try:
        value: T = _adapter(kind).validate_json(data, strict=True, extra="ignore" if unknown_keys else "forbid")
    except ValidationError as error:
        raise JsonError(_in_one_line(error)) from error
    return value


def _in_one_line(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_context=False, include_input=True)
    lines = []
    for fault in faults[:_SHOWN]:
        place = ".".join(str(part)[:80] for part in fault["loc"])
        without = fault["type"] in {"missing", "unexpected_keyword_argument"}
        value = "" if without else f", not {clipped(fault['input'])}"
        lines.append(f"{place}: {fault['msg']}{value}" if place else f"{fault['msg']}{value}")
    return " ".join("; ".join(lines).split()) + (f"; and {len(faults) - _SHOWN:,} more" if len(faults) > _SHOWN else "")


def clipped_text(text: str, *, width: int = 80) -> str:
    """``text`` on one line, cut at ``width`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def clipped(value: Any, *, width: int = 60) -> str:
    """The ``repr`` of ``value``, cut at ``width`` characters: a value in a file may be long."""
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"
