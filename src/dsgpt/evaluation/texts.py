"""The ids that an evaluation predicts, and the bytes of the text that they stand for."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dsgpt.common.errors import UserError
from dsgpt.common.files import sha256_of
from dsgpt.data.token_file import TokenFile, open_token_file
from dsgpt.formats.tokenizer_files import TOKENIZER, reason_of
from dsgpt.formats.vocabulary_files import other_meaning, token_ids
from dsgpt.inference.loading import Loaded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A text as ids; all but the first are predicted."""

    ids: Tensor
    """(n,)."""
    bytes: int | None
    """Size of the predicted text in UTF-8, without ends of documents; None if the model has no tokenizer."""
    sha256: str | None = None
    """Of a token file, as its sidecar says."""
    same_tokenizer: bool | None = True
    """Whether an id means the same to the model; None if that is unknown."""


def read_text(path: Path, tokenizer: "PreTrainedTokenizerBase") -> Evaluated:
    """A text file, after the token that ends documents, if the tokenizer has one.

    Raises:
        UserError: it cannot be read, is no text, or has too few tokens.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"--text {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path}: is not valid UTF-8 text") from error
    try:
        # a text that names an end-of-text token is encoded as for training: the name is ordinary text
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise UserError(f"--text {path}: the tokenizer cannot encode it ({reason_of(error)})") from error
    size = len(text.encode())
    if tokenizer.eos_token_id is not None:
        ids = [tokenizer.eos_token_id, *ids]
    elif ids:
        size -= len(_decoded(tokenizer, ids[:1]))
    if len(ids) < 2 or not size:
        raise UserError(f"--text {path}: has no token to predict")
    return Evaluated(ids=torch.tensor(ids), bytes=size)


def read_data(path: Path, loaded: Loaded, *, most: int | None) -> Evaluated:
    """A token file.

    Args:
        path: the .bin.
        loaded: the model that reads it.
        most: predicted ids, from the start of the file; None for all.

    Raises:
        UserError: it is not a token file, was made with another tokenizer, or has too few tokens.
    """
    file = open_token_file(path)
    if file.tokens < 2:
        raise UserError(f"--data {path}: has {file.tokens} token: there is nothing to predict")
    same = _check_tokenizer(file, loaded.folder)
    ids = torch.from_numpy(file.memmap()[: None if most is None else most + 1].astype(np.int64))
    size = None if loaded.tokenizer is None else _bytes_of(ids[1:], loaded.tokenizer)
    return Evaluated(ids=ids, bytes=size or None, sha256=file.sidecar.sha256, same_tokenizer=same)


def _check_tokenizer(file: TokenFile, folder: Path | None) -> bool | None:
    """Compare the tokenizer that made ``file`` with the model's in ``folder``: by hash, or else id by id.

    Returns:
        True; None where the file or the model names no tokenizer.

    Raises:
        UserError: an id means something else to the model, or that cannot be found out.
    """
    facts, beside = file.sidecar.tokenizer, file.path.parent / "tokenizer"
    if folder is None or facts is None or facts.sha256 is None:
        return None
    if _hash_of(folder) == facts.sha256:
        return True
    ours, theirs = token_ids(beside) if _hash_of(beside) == facts.sha256 else None, token_ids(folder)
    if ours is None or theirs is None:
        found = "and that tokenizer is not beside it, to compare their ids"
    elif (text := other_meaning(ours, theirs)) is not None:
        found = f"in which id {ours[text]} is {text!r}"
    else:
        return True
    raise UserError(
        f"--data {file.path}: was made with another tokenizer than that of the model, {found}: prepare the text with "
        f"the model's (data_prep/preprocess.py --tokenizer {folder})"
    )


def _hash_of(folder: Path) -> str | None:
    return sha256_of(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else None


def _bytes_of(ids: Tensor, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Bytes of the documents that ``ids`` stand for."""
    end = tokenizer.eos_token_id
    ends = [] if end is None else (ids == end).nonzero()[:, 0].tolist()
    starts = [0, *(place + 1 for place in ends)]
    return sum(
        len(_decoded(tokenizer, ids[start:stop].tolist()))
        for start, stop in zip(starts, [*ends, len(ids)], strict=True)
    )


def _decoded(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> bytes:
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # a list only for a batch
    return text.encode()
