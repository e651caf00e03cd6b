"""The tokenizer, and which documents are for training and which for validation."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE, remove
from dsgpt.data.sources import Document
from dsgpt.formats.tokenizer_files import (
    TOKENIZER,
    RefusedTokenizerError,
    end_of_text_id,
    fault_of,
    open_tokenizer,
    reason_of,
    require_hub,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Which documents are for training and which for validation: a hash of the name decides, not the order.

SPLITS = ("train", "val")
SMALL_DOCUMENTS = 256
_SMALL_CHARACTERS = 1 << 26

Divided = Iterator[tuple[str, Document]]
"""Documents with the split they belong to, in the source's order."""


def draw(key: str, *, seed: int) -> int:
    """A number below 2^64, uniform over keys, a function of seed and key alone."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode(errors=PRINTABLE)).digest()
    return int.from_bytes(digest[:8], "big")


def are_validation(draws: NDArray[np.uint64], *, val_fraction: float, small: bool) -> NDArray[np.bool_]:
    """Which documents are for validation, same shape: those whose draw is below the fraction of 2^64.

    In a ``small`` collection the lowest draw is always for validation, and the highest always for training.
    """
    below = draws.astype(np.float64) / 2.0**64 < val_fraction
    if small:
        below = (draws == draws.min()) | (below & (draws != draws.max()))
    return below


def is_small(characters: NDArray[np.uint64]) -> bool:
    """Whether chance could leave a split of documents with so many characters empty."""
    return len(characters) <= SMALL_DOCUMENTS and int(characters[:-1].sum()) < _SMALL_CHARACTERS


def divide(documents: Iterable[tuple[str | None, Document]], *, val_fraction: float, seed: int) -> Divided:
    """Assign each non-empty document to a split.

    A set's own split is kept. Otherwise a document is for validation if its ``position`` is below ``val_fraction``, so
    documents that are added or removed later do not move others. In a small collection (up to 256 documents and
    64 Mi characters), where chance could leave a split empty, each split gets at least one document. A single document
    is cut at the start of a line or word.

    Raises:
        UserError: all documents are empty, or a single document is too short to cut.
    """
    filled = ((own, document) for own, document in documents if document.text.strip())
    first = next(filled, None)
    if first is None:
        raise UserError("the input holds no text: every document is empty")
    rest = itertools.chain([first], filled)
    if first[0] is not None:
        return ((own or "train", document) for own, document in rest)
    return _divide_by_position((document for _, document in rest), val_fraction=val_fraction, seed=seed)


def _divide_by_position(documents: Iterator[Document], *, val_fraction: float, seed: int) -> Divided:
    head: list[Document] = []
    characters = 0
    while len(head) < SMALL_DOCUMENTS and characters < _SMALL_CHARACTERS and (document := next(documents, None)):
        head.append(document)
        characters += len(document.text)
    following = next(documents, None)
    if following is None and len(head) == 1:
        yield from cut_in_two(head[0], val_fraction=val_fraction)
        return
    draws = np.array([draw(document.key, seed=seed) for document in head], dtype=np.uint64)
    decided = are_validation(draws, val_fraction=val_fraction, small=following is None)
    for validation, document in zip(decided, head, strict=True):
        yield ("val" if validation else "train"), document
    if following is not None:
        for document in itertools.chain([following], documents):
            below = draw(document.key, seed=seed) / 2**64 < val_fraction
            yield ("val" if below else "train"), document


def cut_in_two(document: Document, *, val_fraction: float) -> Divided:
    """Cut about ``val_fraction`` off the end of the text for validation, at the start of a line or else of a word."""
    text = document.text
    cut = min(max(int(len(text) * (1 - val_fraction)), 1), len(text) - 1)
    last = next((text.rfind(mark, 0, cut) for mark in ("\n", " ") if text.rfind(mark, 0, cut) > 0), cut - 1)
    train, val = text[: last + 1], text[last + 1 :]
    if not train.strip() or not val.strip():
        raise UserError(f"{document.key}: is the only document and too short to be divided; give more text")
    size = document.source_bytes * len(train) // len(text)
    yield "train", replace(document, text=train, source_bytes=size)
    yield "val", replace(document, text=val, source_bytes=document.source_bytes - size)


_BOUNDARY = re.compile(r"(?<=\S)[ \n]")


def pieces(text: str, *, characters: int) -> Iterator[str]:
    """Cut a long text into pieces of at least ``characters``; the last may be shorter.

    Each piece but the first begins with a space or newline that follows a word.

    GPT-2's pre-tokenizer never joins a word with the space after it, so the pieces have the tokens of the whole text.
    """
    start = 0
    while boundary := _BOUNDARY.search(text, start + characters):
        yield text[start : boundary.start()]
        start = boundary.start()
    yield text[start:]


# The tokenizer: trained or loaded, saved as a Hugging Face folder, and used to encode documents.

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""Smallest number of ids: all 256 bytes and the end-of-text token."""
_GPT2_CONTEXT = 1024
_PIECE_CHARACTERS = 1 << 18
_BATCH_CHARACTERS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer that was read from its folder and is ready to encode."""

    folder: Path
    tokenizer: Tokenizer
    """Encodes special tokens in a text as ordinary text, and adds none."""
    size: int
    """One more than the largest id."""
    eot_id: int
    sha256: str
    """SHA-256 of the folder's tokenizer.json, as lower-case hex."""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE like GPT-2's: it encodes any text, and decoding gives the same bytes.

    Args:
        texts: the documents of the train split.
        vocab_size: number of ids, with ``<|endoftext|>`` (id 0); a small corpus may yield fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (piece for text in texts for piece in pieces(text, characters=_PIECE_CHARACTERS)), trainer
    )
    return tokenizer


def save_trained(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer`` as a folder for ``transformers.AutoTokenizer``; its ``eos_token`` is ``<|endoftext|>``."""
    from transformers import GPT2Tokenizer  # noqa: PLC0415 - takes seconds; --help should not

    _save(
        GPT2Tokenizer(
            tokenizer_object=tokenizer,
            bos_token=END_OF_TEXT,
            eos_token=END_OF_TEXT,
            unk_token=END_OF_TEXT,
            add_prefix_space=False,
            clean_up_tokenization_spaces=False,  # decoding gives the text back unchanged
        ),
        folder,
    )


def save_loaded(name: str, folder: Path) -> None:
    """Save the tokenizer ``name``, a local folder or a name on the hub, to ``folder``. Code in it is never run.

    Raises:
        UserError: there is no such tokenizer, no network to fetch it, it asks for code, or it has no fast version or
            no end-of-text token.
    """
    what = f"--tokenizer {name}"
    local = Path(name).is_dir()
    try:
        given = Path(name) if local else name
        tokenizer = open_tokenizer(given, what=what, named=local, clean_up_tokenization_spaces=False)
    except UserError as not_cached:
        if local or isinstance(not_cached, RefusedTokenizerError):
            raise
        require_hub(what, cure="use --tokenizer train, or name a local folder that holds a tokenizer.json")
        try:
            tokenizer = open_tokenizer(name, what=what, fetch=True, clean_up_tokenization_spaces=False)
        except RefusedTokenizerError:
            raise
        except UserError as error:
            raise UserError(
                f"{what}: is neither a local folder nor a tokenizer on the hub "
                f"({reason_of(error.__cause__ or error)}); use --tokenizer train to make one from the text"
            ) from error
    if not tokenizer.is_fast:
        raise UserError(f"{what}: has no tokenizer.json for the `tokenizers` library; choose another one")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{what}: has no end-of-text token (eos_token), so documents could not be ended")
    _save(tokenizer, folder)


def _save(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    if tokenizer.model_max_length > 1 << 30:  # the library's value for "unknown"
        tokenizer.model_max_length = _GPT2_CONTEXT
    remove(folder)
    tokenizer.save_pretrained(folder)


def open_vocabulary(folder: Path) -> Vocabulary:
    """Read a folder that ``save_trained`` or ``save_loaded`` wrote.

    Raises:
        UserError: the folder was changed: it has links, asks for code, or is damaged.
    """
    if fault := fault_of(folder):
        raise UserError(f"{folder}: {fault}; or make it again with --overwrite")
    path = folder / TOKENIZER
    try:
        tokenizer = Tokenizer.from_file(str(path))
        eot_id = end_of_text_id(folder)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UserError(f"{folder}: is damaged ({reason_of(error)}); make it again with --overwrite") from error
    if eot_id is None:
        raise UserError(f"{folder}: is damaged (it has no end-of-text token); make it again with --overwrite")
    tokenizer.encode_special_tokens = True  # the library's name for encoding them as ordinary text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Vocabulary(
        folder=folder,
        tokenizer=tokenizer,
        size=max(tokenizer.get_vocab().values()) + 1,
        eot_id=eot_id,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )
