"""The vocabulary in a tokenizer's files: enough to compare two tokenizers without opening them."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import Count, JsonError, clipped_text, read_object

_MAX_BYTES = 256 << 20
_TOKEN_IDS = TypeAdapter(dict[str, Count])
_IDS = TypeAdapter(list[Count])


def token_ids(folder: Path) -> dict[str, int] | None:
    """Id by token, including added tokens, from ``tokenizer.json`` or ``vocab.json``; None if there is neither.

    Raises:
        UserError: the file is not a vocabulary.
    """
    for name, read in (("tokenizer.json", _from_tokenizer), ("vocab.json", _from_vocabulary)):
        path = folder / name
        if path.is_file():
            try:
                return _TOKEN_IDS.validate_python(read(read_object(path, max_bytes=_MAX_BYTES)), strict=True)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path}: is not a readable vocabulary ({clipped_text(str(error))})") from error
    return None


def other_meaning(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """The first token of ``ours`` that has another id in ``theirs``; None if each id of ours means the same there."""
    return next((text for text, number in ours.items() if theirs.get(text) != number), None)


def end_of_text_id(folder: Path) -> int | None:
    """The id of the tokenizer's ``eos_token``; None if the files do not name one.

    Raises:
        UserError: a file cannot be read.
    """
    ids = token_ids(folder)
    settings = folder / "tokenizer_config.json"
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
        found = read_object(path).get("eos_token_id") if path.is_file() else None
        return tuple(_IDS.validate_python([] if found is None else found if isinstance(found, list) else [found]))
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as settings of a generation ({clipped_text(str(error))})") from error


def _from_tokenizer(values: dict[str, Any]) -> dict[str, int]:
    vocabulary = values["model"]["vocab"]
    if isinstance(vocabulary, list):  # of a Unigram model: pairs of text and score in the order of ids
        vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
    return dict(vocabulary) | {token["content"]: token["id"] for token in values.get("added_tokens") or ()}


def _from_vocabulary(values: dict[str, int]) -> dict[str, int]:
    return dict(values.items())
