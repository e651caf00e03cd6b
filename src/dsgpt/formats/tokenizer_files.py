"""The files of a tokenizer, its vocabulary, and how one is opened; and where a published model is.

Code that comes with a tokenizer is never run. Imports no torch, transformers only when a tokenizer is opened, and no
library of Hugging Face for a model before it is known that the hub answers.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from dsgpt.common.errors import UserError
from dsgpt.common.files import is_regular_file
from dsgpt.common.json_files import Count, JsonError, clipped, clipped_text, read_bytes, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FOLDER = "tokenizer"
"""The folder beside token files, and in a checkpoint; a run compares it with the sidecar of its data."""
TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
CONFIG = "config.json"
"""The configuration of the model in the same folder. It decides the tokenizer's class if ``SETTINGS`` does not."""
KNOWN_FILES = (
    *(TOKENIZER, SETTINGS, SPECIAL_TOKENS, "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja", CONFIG),
)
"""Transformers 5 writes the first two and the template; earlier versions wrote the others."""
COPY_LINKS = "links are not followed there: replace them by copies (cp -rL FOLDER COPY)"
_HONOURED = {SETTINGS: None, CONFIG: ("AutoConfig", "AutoTokenizer")}
"""Entries of ``auto_map`` in each file that transformers would follow when it opens a tokenizer; None: all entries."""
_READ = (SETTINGS, SPECIAL_TOKENS, CONFIG)
"""Files whose entries can name other files or code."""
_UNUSED = {"tokenizer_file", "special_tokens_map_file"}
"""Entries of ``SETTINGS`` with paths on the author's machine, which the library replaces or ignores."""


class RefusedTokenizerError(UserError):
    """The tokenizer would run its own code or open files of other names, so it is not opened."""


def tokenizer_files(folder: Path, *, config: bool = True) -> list[Path]:
    """The regular files in ``folder`` with a name of a tokenizer's file; links are left out.

    ``config``: whether ``CONFIG`` is one of them. In the folder of a model it is the model's.
    """
    return [folder / name for name in KNOWN_FILES if (config or name != CONFIG) and is_regular_file(folder / name)]


def copy_tokenizer(source: Path, target: Path) -> None:
    """Create the folder ``target`` and copy the files of the tokenizer in ``source`` into it.

    Raises:
        OSError: the file system refuses.
    """
    target.mkdir()
    for path in tokenizer_files(source):
        shutil.copyfile(path, target / path.name, follow_symlinks=False)


def fault_of(folder: Path, *, named: bool = False) -> UserError | None:
    """Why a tokenizer's folder must not be used: it has links, asks for code or other files, or cannot be read.

    Args:
        folder: the tokenizer's folder.
        named: the user named the folder, so it may be a link itself.

    Returns:
        An error whose message does not name the folder; None if nothing is wrong.
    """
    if folder.is_symlink() and not named:
        return UserError(f"is a link, and {COPY_LINKS}")
    if links := [name for name in KNOWN_FILES if (folder / name).is_symlink()]:
        are = "is a link" if len(links) == 1 else "are links"
        return UserError(f"its {' and '.join(links)} {are}, and {COPY_LINKS}")
    return _fault_of_files({name: folder / name for name in _READ if (folder / name).exists()})


def _fault_of_files(settings: dict[str, Path]) -> UserError | None:
    """The same as ``fault_of``, for the contents of the files of ``_READ``, given by name."""
    for name, path in settings.items():
        try:  # parsed as transformers does: of equal keys the last counts, so that one is checked
            values = json.loads(read_bytes(path))
        except RecursionError:
            return UserError(f"its {name} cannot be read (its objects and arrays are nested too deep)")
        except (JsonError, ValueError) as error:
            return UserError(f"its {name} cannot be read ({error})")
        if not isinstance(values, dict):
            return UserError(f"its {name} cannot be read (it must hold an object in braces)")
        if others := sorted(set(_naming_files(name, values))):
            which = f"names other files to open ({', '.join(others[:3])}), which nothing has checked"
            these = "this entry" if len(others) == 1 else "these entries"
            cure = f"remove {these}, and leave the vocabulary in {TOKENIZER}"
            return RefusedTokenizerError(f"its {name} {which}: {cure}")
        wanted, entries = values.get("auto_map"), _HONOURED.get(name, ())
        if wanted and (entries is None or not isinstance(wanted, dict) or any(wanted.get(key) for key in entries)):
            cure = f"use a tokenizer of the `tokenizers` library (a {TOKENIZER}), without auto_map"
            return RefusedTokenizerError(f"its {name} asks for its own code (auto_map), which is never run: {cure}")
    return None


def _naming_files(name: str, values: dict[str, Any]) -> Iterator[str]:
    """The keys in the file ``name`` that would make the library open files of other names."""
    if name == CONFIG:
        if values.get("configuration_files"):
            yield "configuration_files"
        return
    objects: list[Any] = [{key: value for key, value in values.items() if name != SETTINGS or key not in _UNUSED}]
    while objects:  # no recursion: the values may be deeply nested
        value = objects.pop()
        if isinstance(value, list):
            objects += value
        elif isinstance(value, dict):
            yield from (clipped_text(key) for key in value if key.endswith(("_file", "_files")) and value[key])
            objects += value.values()
    yield from (key for key in ("vocab", "merges") if isinstance(values.get(key), str))  # a path, to some classes
    if values.get("init_inputs"):  # positional arguments, which may be any of the above
        yield "init_inputs"


def open_tokenizer(
    source: Path | str, *, what: str, named: bool = False, fetch: bool = False, **settings: Any
) -> "PreTrainedTokenizerBase":
    """Open a tokenizer with transformers. One that comes with code is refused without asking the user.

    Transformers opens a copy of a folder's known regular files, because in the original it would look for other
    files and follow links.

    Args:
        source: its folder as a ``Path``, or its name on the hub as text.
        what: the flag or the folder; begins error messages.
        named: as in ``fault_of``.
        fetch: whether a name may be fetched from the hub; otherwise it must be in the hub library's cache.
        settings: replace those of the tokenizer.

    Raises:
        RefusedTokenizerError: it asks for code or for files of other names.
        UserError: it does not exist, or is not a tokenizer; one line.
    """
    try:
        fault = fault_of(source, named=named) if isinstance(source, Path) else _fault_on_hub(source, fetch=fetch)
        if fault is None and isinstance(source, Path):
            return _open_copy(source, **settings)
        if fault is None:
            return _open(source, local_files_only=not fetch, **settings)
    except RefusedTokenizerError as error:
        fault = error
    except Exception as error:  # the library checks no types, and the tokenizers library raises plain Exception
        kind = "tokenizer folder" if isinstance(source, Path) else "tokenizer"
        raise UserError(f"{what}: is not a readable {kind} ({reason_of(error)})") from error
    raise type(fault)(f"{what}: {fault}")


def _open_copy(source: Path, **settings: Any) -> "PreTrainedTokenizerBase":
    """Open a copy of the folder's files, which is checked again: the original may have changed since its check."""
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as place:
        copy = Path(place) / "tokenizer"
        try:
            copy_tokenizer(source, copy)
        except OSError as error:
            what = f"cannot be copied to {place} ({error.strerror})"
            raise RefusedTokenizerError(f"{what}: make room there, or name another place in TMPDIR") from error
        if fault := fault_of(copy):
            raise fault
        try:
            tokenizer = _open(copy, local_files_only=True, **settings)
        except Exception as error:  # as in open_tokenizer; the message must name the original
            raise ValueError((str(error) or type(error).__name__).replace(str(copy), str(source))) from error
    tokenizer.name_or_path = str(source)
    return tokenizer


def _open(source: Path | str, **settings: Any) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds; --help should not

    return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **settings)


def _fault_on_hub(name: str, *, fetch: bool) -> UserError | None:
    """The same as ``fault_of``, for a name on the hub. Links in the hub library's cache are the library's own."""
    from transformers.utils.hub import cached_file  # noqa: PLC0415 - as above

    faults = ("missing_entries", "connection_errors", "gated_repo")
    quietly: dict[str, Any] = {f"_raise_exceptions_for_{fault}": False for fault in faults}
    paths = {file: cached_file(name, file, local_files_only=not fetch, **quietly) for file in _READ}
    return _fault_of_files({file: Path(path) for file, path in paths.items() if path is not None})


def reason_of(error: BaseException) -> str:
    """The first line of a library's message, clipped."""
    line = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return line if len(line) <= 200 else clipped(line, width=200)


# The vocabulary in a tokenizer's files: enough to compare two tokenizers without opening them.

_MAX_BYTES = 256 << 20
_TOKEN_IDS = TypeAdapter(dict[str, Count])
_IDS = TypeAdapter(list[Count])


def token_ids(folder: Path, *, state: dict[str, Any] | None = None) -> dict[str, int] | None:
    """Id by token, including added tokens, from ``tokenizer.json`` or ``vocab.json``; None if there is neither.

    Args:
        folder: the tokenizer's folder.
        state: the contents of its ``tokenizer.json``, if they have been read: megabytes of JSON.

    Raises:
        UserError: the file is not a vocabulary.
    """
    path = next((folder / name for name in (TOKENIZER, "vocab.json") if (folder / name).is_file()), None)
    if path is None:
        return None
    try:
        values = state or read_object(path, max_bytes=_MAX_BYTES)
        if path.name == TOKENIZER:
            vocabulary = values["model"]["vocab"]
            if isinstance(vocabulary, list):  # of a Unigram model: pairs of text and score in the order of ids
                vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
            values = dict(vocabulary) | {token["content"]: token["id"] for token in values.get("added_tokens") or ()}
        return _TOKEN_IDS.validate_python(values, strict=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is not a readable vocabulary ({clipped_text(str(error))})") from error


def other_meaning(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """The first token of ``ours`` that has another id in ``theirs``; None if each id of ours means the same there."""
    return next((text for text, number in ours.items() if theirs.get(text) != number), None)


def end_of_text_id(folder: Path, *, state: dict[str, Any] | None = None) -> int | None:
    """The id of the tokenizer's ``eos_token``; None if the files do not name one. Arguments as ``token_ids`` has them.

    Raises:
        UserError: a file cannot be read.
    """
    ids, settings = token_ids(folder, state=state), folder / SETTINGS
    if not ids or not settings.is_file():
        return None
    try:
        token = read_object(settings).get("eos_token")
    except JsonError as error:
        raise UserError(f"{settings}: cannot be read as settings of a tokenizer ({error})") from error
    text = token.get("content") if isinstance(token, dict) else token
    return ids.get(text) if isinstance(text, str) else None


def end_ids(folder: Path) -> tuple[int, ...]:
    """The ids of ``generation_config.json`` that end a text, of which there may be a list; empty if it names none.

    Raises:
        UserError: the file cannot be read, or they are no ids.
    """
    path = folder / "generation_config.json"
    try:
        ids = read_object(path).get("eos_token_id") if path.is_file() else None
        return tuple(_IDS.validate_python([] if ids is None else ids if isinstance(ids, list) else [ids]))
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as settings of a generation ({clipped_text(str(error))})") from error


# A published model: in a folder, or on the Hugging Face hub, from which single files are fetched.

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TIMEOUT_SECONDS = 10


def require_hub(what: str, *, cure: str) -> None:
    """Check that the hub answers.

    Args:
        what: what needs the hub; begins the message.
        cure: what the user can do without it; ends the message.

    Raises:
        UserError: it does not answer, or the environment forbids network access.
    """
    import ssl  # noqa: PLC0415 - --help needs no network
    import urllib.error  # noqa: PLC0415
    import urllib.request  # noqa: PLC0415

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise UserError(f"{what}: needs the Hugging Face hub, but {name} is set; {cure}")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return  # the hub answers; the library reports what the code means
    except (OSError, ValueError) as error:  # ValueError: HF_ENDPOINT is not an address
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return  # the library has its own certificates, so it may still connect
        raise UserError(f"{what}: no network, {endpoint} does not answer ({reason}); {cure}") from error


def model_folder(given: str, *, weights: bool, quiet: bool = False) -> Path:
    """The folder with a published model.

    Args:
        given: a folder, or a name on the hub; then the folder is in the hub library's cache, and all its files are of
            one commit.
        weights: whether the weights are needed, or only ``config.json`` and the vocabulary.
        quiet: fetch without progress bars.

    Raises:
        UserError: there is no such model, or it is neither on this machine nor can it be fetched.
    """
    folder = Path(given)
    if folder.is_dir():
        return folder
    if folder.exists() or not _HUB_NAME.fullmatch(given):
        raise UserError(f"--init_from {given}: is not a folder: give a folder, or a name on the Hugging Face hub")
    from dsgpt.formats.hugging_face import WEIGHT_FILES, index_file, parts_of  # noqa: PLC0415 - imports torch

    if quiet:
        from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415 - as in _hub_file

        disable_progress_bars()
    offline = None
    try:
        require_hub(f"--init_from {given}", cure="fetch it on a machine with a network, and give its folder")
    except UserError as error:
        offline = error  # the model may be in the hub library's cache
    fetch = partial(_hub_file, given, local=offline is not None)
    if (config := fetch("config.json")) is None:
        raise offline or UserError(f"--init_from {given}: has no config.json on the hub")
    fetch = partial(fetch, revision=config.parent.name)  # the commit
    for name in (TOKENIZER, "vocab.json"):
        fetch(name)
    if weights:
        for name in WEIGHT_FILES:
            if fetch(name):
                break
            if (index := fetch(index_file(name))) and all(fetch(part) for part in parts_of(index)):
                break
        else:
            raise offline or UserError(f"--init_from {given}: has neither {' nor '.join(WEIGHT_FILES)} on the hub")
    return config.parent


def _hub_file(model: str, name: str, *, local: bool, revision: str | None = None) -> Path | None:
    """A file of a model on the hub, fetched if it is not in the cache; None if the model has no file of that name.

    Raises:
        UserError: the hub has no such model, or does not answer any more.
    """
    from huggingface_hub import errors, hf_hub_download  # noqa: PLC0415 - only a model on the hub needs it

    what = f"--init_from {model}"
    try:
        return Path(hf_hub_download(model, name, revision=revision, local_files_only=local))
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"{what}: is neither a folder here nor a readable model on the hub") from error
    except (errors.EntryNotFoundError, OSError) as error:
        stopped = isinstance(error, errors.LocalEntryNotFoundError)
        if isinstance(error, errors.EntryNotFoundError) and (local or not stopped):
            return None
        failed = "the hub stopped answering" if stopped else "could not be fetched"
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{what}: {failed} ({reason}): try again, or give a folder") from error
