"""The tokenizer: trained or loaded, saved as a Hugging Face folder, and read from there."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dsgpt.common.errors import UserError
from dsgpt.common.files import json_text, remove
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.data.blocks import pieces_of
from dsgpt.formats.tokenizer_files import (
    SETTINGS,
    TOKENIZER,
    RefusedTokenizerError,
    copy_tokenizer,
    end_of_text_id,
    fault_of,
    open_tokenizer,
    reason_of,
    require_hub,
    tokenizer_files,
)

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""Smallest number of ids: all 256 bytes and the end-of-text token."""
_GPT2_CONTEXT = 1024
_SETTINGS = {
    "add_prefix_space": False,
    "backend": "tokenizers",
    "bos_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,  # decoding gives the text back unchanged
    "eos_token": END_OF_TEXT,
    "errors": "replace",
    "model_max_length": _GPT2_CONTEXT,
    "pad_token": None,
    "tokenizer_class": "GPT2Tokenizer",
    "unk_token": END_OF_TEXT,
}
"""Those of a trained tokenizer, as transformers writes them."""
_SAVED_AGAIN = _SETTINGS | {"is_local": True, "local_files_only": True}
"""Those of one of GPT-2's kind that ``save_loaded`` has written: transformers would write its files again unchanged."""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_OF_GPT2: dict[str, Any] = {"type": "BPE"} | dict.fromkeys(("dropout", "unk_token"))
_OF_GPT2 |= dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), "")
_OF_GPT2 |= dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
"""The model in its tokenizer.json, beside vocabulary and merges."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer that was read from its folder and is ready to encode."""

    folder: Path
    state: dict[str, Any]
    """The contents of its tokenizer.json."""
    special: bool
    """Whether special tokens in a text count as such; otherwise they are ordinary text."""
    size: int
    """One more than the largest id."""
    eot_id: int
    sha256: str
    """SHA-256 of the folder's tokenizer.json, as lower-case hex."""

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """As the ``tokenizers`` library reads it: a tenth of a second for GPT-2's. It adds no special tokens."""
        try:
            tokenizer = Tokenizer.from_file(str(self.folder / TOKENIZER))
        except Exception as error:  # the tokenizers library raises plain Exception
            raise UserError(
                f"{self.folder}: is damaged ({reason_of(error)}); make it again with --overwrite"
            ) from error
        tokenizer.encode_special_tokens = not self.special  # the library's name for encoding them as ordinary text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


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
    # Words are split from pieces: the library would copy a large text several times.
    tokenizer.train_from_iterator((piece.decode() for text in texts for piece in pieces_of(text.encode())), trainer)
    return tokenizer


def save_trained(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer`` as a folder for ``transformers.AutoTokenizer``; its ``eos_token`` is ``<|endoftext|>``.

    The files are those that transformers would write, whose import takes seconds.
    """
    tokenizer.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    remove(folder)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / TOKENIZER))
    (folder / SETTINGS).write_text(json_text(_SETTINGS), encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _parsed(data: bytes) -> Any:
    """A tokenizer.json, which is read where it comes from and where it was copied to."""
    return json.loads(data)


def _is_of_gpt2(state: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is as transformers writes it for its GPT-2 class, which puts its own splitter there."""
    model, kept = state["model"], (state["truncation"], state["padding"], state["normalizer"])
    lists = isinstance(model["vocab"], dict) and isinstance(model["merges"], list)
    settings = {key: model[key] for key in model if key not in ("vocab", "merges")}
    return bool(lists and settings == _OF_GPT2 and state["pre_tokenizer"] == _BYTES and kept == (None, None, None))


def save_loaded(name: str, folder: Path) -> None:
    """Save the tokenizer ``name``, a local folder or a name on the hub, to ``folder``. Code in it is never run.

    Raises:
        UserError: there is no such tokenizer, no network to fetch it, it asks for code, or it has no fast version or
            no end-of-text token.
    """
    what = f"--tokenizer {name}"
    local = Path(name).is_dir()
    if local and [path.name for path in tokenizer_files(Path(name))] == [TOKENIZER, SETTINGS]:
        with contextlib.suppress(JsonError, ValueError, LookupError, TypeError, AttributeError):  # as the library says
            if (
                not fault_of(Path(name), named=True)
                and read_object(Path(name) / SETTINGS) == _SAVED_AGAIN
                and _is_of_gpt2(_parsed((Path(name) / TOKENIZER).read_bytes()))
            ):
                copy_tokenizer(Path(name), folder)
                return
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
    if tokenizer.model_max_length > 1 << 30:  # the library's value for "unknown"
        tokenizer.model_max_length = _GPT2_CONTEXT
    remove(folder)
    tokenizer.save_pretrained(folder)


def open_vocabulary(folder: Path, *, special: bool = False) -> Vocabulary:
    """Read a folder that ``save_trained`` or ``save_loaded`` wrote.

    Args:
        folder: the folder.
        special: whether special tokens in a text count as such.

    Raises:
        UserError: the folder was changed: it has links, asks for code, or is damaged.
    """
    if fault := fault_of(folder):
        raise UserError(f"{folder}: {fault}; or make it again with --overwrite")
    try:
        data = (folder / TOKENIZER).read_bytes()
        state = _parsed(data)
        ids = state["model"]["vocab"]
        ids = range(len(ids)) if isinstance(ids, list) else ids.values()  # a list of a Unigram model
        size = max([*ids, *(token["id"] for token in state["added_tokens"])]) + 1
        eot_id = end_of_text_id(folder, state=state)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: is damaged ({reason_of(error)}); make it again with --overwrite") from error
    if eot_id is None:
        raise UserError(f"{folder}: is damaged (it has no end-of-text token); make it again with --overwrite")
    sha256 = hashlib.sha256(data).hexdigest()
    return Vocabulary(folder=folder, state=state, special=special, size=size, eot_id=eot_id, sha256=sha256)
