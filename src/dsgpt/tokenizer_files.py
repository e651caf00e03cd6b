"""A tokenizer's files, known by name, and how a tokenizer is opened: no code that it brings ever runs.

Imports no torch, and transformers only where a tokenizer is opened.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgpt.errors import UserError
from dsgpt.files import is_regular_file
from dsgpt.json_files import JsonError, clipped, read_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
CONFIG = "config.json"
"""Of the model beside; it decides the tokenizer's class where ``SETTINGS`` does not."""
FILES = (
    TOKENIZER,
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
)
"""Transformers 5 writes the first two and the last; what is between, earlier versions wrote."""
COPY_LINKS = "links are not followed there: make files of them (cp -rL FOLDER COPY)"
_HONOURED = {SETTINGS: None, CONFIG: ("AutoConfig", "AutoTokenizer")}
"""The entries of each file's ``auto_map`` that opening a tokenizer would follow; None: all of them."""


class TokenizerCodeError(UserError):
    """The tokenizer works only with code that it brings along."""


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer that are in ``folder`` itself: regular ones of a known name, never through a link."""
    found = [folder / name for name in (*FILES, CONFIG)]
    return [path for path in found if is_regular_file(path)]


def is_known(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer."""
    return name in FILES or name == CONFIG


def copy_tokenizer(source: Path, target: Path) -> None:
    """Make the folder ``target`` and copy the files of the tokenizer in ``source`` into it.

    Raises:
        OSError: the file system refuses.
    """
    target.mkdir()
    for path in tokenizer_files(source):
        shutil.copyfile(path, target / path.name, follow_symlinks=False)


def fault_of(folder: Path, *, named: bool = False) -> TokenizerCodeError | UserError | None:
    """Why nothing may be taken from a tokenizer's folder: it holds links, asks for code, or cannot be read.

    Args:
        folder: the tokenizer's.
        named: the user named it, so that the folder itself may be a link.

    Returns:
        An error whose message does not name the folder; None where nothing is wrong.
    """
    if folder.is_symlink() and not named:
        return UserError(f"is a link, and {COPY_LINKS}")
    links = [name for name in (*FILES, CONFIG) if (folder / name).is_symlink()]
    if links:
        return UserError(
            f"its {' and '.join(links)} {'is a link' if len(links) == 1 else 'are links'}, and {COPY_LINKS}"
        )
    return _fault_of_files({name: folder / name for name in _HONOURED if (folder / name).exists()})


def _fault_of_files(settings: dict[str, Path]) -> TokenizerCodeError | UserError | None:
    """The same, of the files that may ask for code; by their usual names."""
    for name, path in settings.items():
        try:
            wanted = _object(path).get("auto_map")
        except JsonError as error:
            return UserError(f"its {name} cannot be read ({error})")
        entries = _HONOURED[name]
        if wanted and (entries is None or not isinstance(wanted, dict) or any(wanted.get(key) for key in entries)):
            return TokenizerCodeError(
                f"its {name} asks for code of its own (auto_map), which is never run: use a tokenizer of the "
                f"`tokenizers` library (a {TOKENIZER}), without auto_map"
            )
    return None


def _object(path: Path) -> dict[str, Any]:
    """As transformers reads it, of equal keys the last: what is refused must be what it would have followed."""
    try:
        value = json.loads(read_bytes(path))
    except RecursionError as error:
        raise JsonError("its objects and arrays are nested too deep") from error
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(str(error)) from error
    if not isinstance(value, dict):
        raise JsonError("it must hold an object in braces")
    return value


def open_tokenizer(
    source: Path | str, *, what: str, named: bool = False, fetch: bool = False, **settings: Any
) -> "PreTrainedTokenizerBase":
    """Open a tokenizer with transformers; code that it brings is refused, and nobody is asked about it.

    Args:
        source: its folder as a ``Path``, or its name on the hub as text.
        what: begins the message of an error: the flag or the folder.
        named: as in ``fault_of``.
        fetch: whether the hub may be asked for a name; else it must be in the hub library's cache.
        settings: of the tokenizer, in the place of its own.

    Raises:
        TokenizerCodeError: it brings code.
        UserError: it is not there, or is no tokenizer. One line.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, which --help need not wait for

    try:
        fault = fault_of(source, named=named) if isinstance(source, Path) else _fault_on_hub(source, fetch=fetch)
        if fault is None:
            return AutoTokenizer.from_pretrained(
                source, trust_remote_code=False, local_files_only=not fetch, **settings
            )
    except Exception as error:  # the library checks no types, and the tokenizers library raises plain Exception
        kind = "tokenizer folder" if isinstance(source, Path) else "tokenizer"
        raise UserError(f"{what}: is no {kind} that can be read ({reason_of(error)})") from error
    raise type(fault)(f"{what}: {fault}")


def _fault_on_hub(name: str, *, fetch: bool) -> TokenizerCodeError | UserError | None:
    """As ``fault_of``, of a name on the hub; its cache consists of links, which the library made."""
    from transformers.utils import cached_file  # noqa: PLC0415 - as above

    found = {
        file: cached_file(
            name, file, local_files_only=not fetch, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
        )
        for file in _HONOURED
    }  # fmt: skip
    return _fault_of_files({file: Path(path) for file, path in found.items() if path is not None})


def reason_of(error: BaseException) -> str:
    """The first line of what a library says, not too long."""
    line = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return line if len(line) <= 200 else clipped(line, width=200)
