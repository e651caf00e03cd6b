"""Makes train.bin, val.bin and tokenizer/ from a source, for ``preprocess.py`` and ``preprocess_small.py``."""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.command_line import POSITIVE, Parser, Unfit, choice, flag, switch, value, whole
from dsgpt.common.errors import UserError
from dsgpt.common.files import (
    PRINTABLE,
    Lock,
    is_regular_file,
    is_utf8,
    printable,
    remove,
    sha256_of,
    sync_directory,
    undecodable,
    write_atomic,
    write_json_atomic,
)
from dsgpt.common.json_files import Sha256, read_or_refuse
from dsgpt.common.text import REPOSITORY, counted, duration, next_line, script_words
from dsgpt.data.blocks import BLOCK_BYTES, Block, Reading, blocks_of
from dsgpt.data.download import folder_if_named, progress, set_name, with_bar
from dsgpt.data.engine import FAST, open_engine
from dsgpt.data.index import SourceEntry, document_hash, index_path, relative, write_sources
from dsgpt.data.merge import Documents, PartReader, divided, entries_of, gather, shuffle, without_duplicates
from dsgpt.data.parts import Encoding, OnBadText, Part, encode_blocks, read_part
from dsgpt.data.sources import (
    EMBEDDED,
    HUB_SETS,
    STDIN,
    TRANSFORMERS_NAME,
    Document,
    Source,
    downloaded_source,
    own_source,
)
from dsgpt.data.token_file import WIDTHS, Stamp, TokenFileWriter, TokenizerFacts, dtype_of, open_token_file
from dsgpt.data.vocabulary import (
    SMALL_DOCUMENTS,
    SMALLEST_VOCABULARY,
    SPLITS,
    Divided,
    Vocabulary,
    divide,
    open_vocabulary,
    save_loaded,
    save_trained,
    train_tokenizer,
)
from dsgpt.formats.tokenizer_files import TOKENIZER, TOKENIZER_FOLDER, fault_of

# The command lines.

DESCRIPTION = """\
Turn text into token files: train.bin and val.bin (little-endian ids without a header, as nanoGPT reads them), each with
a .json that describes it, and tokenizer/, which transformers.AutoTokenizer loads. Every document ends with the
end-of-text id. Without flags it prepares sources of the Python package transformers, 8 MB that are the same on every
machine: no download, no account, a few seconds. The same command a second time changes nothing."""

EXAMPLES = """\
  .venv/bin/python data_prep/preprocess.py
  .venv/bin/python data_prep/preprocess.py --input books/ --tokenizer train --vocab_size 16384
  .venv/bin/python data_prep/preprocess.py --input notes.txt web.jsonl --text_key content --output_dir data/mine
  .venv/bin/python data_prep/download_data.py tinystories && \\
    .venv/bin/python data_prep/preprocess.py --dataset tinystories"""

MERGE_DESCRIPTION = """\
Join what `dsgpt data prepare --shard I/N` encoded for every I. Give the same flags without --shard: the files are those
that one preparation writes. Duplicates in different shards are found here; split and order are decided here. The text
is not encoded again: a part that is missing is an error."""

MERGE_EXAMPLES = """\
  .venv/bin/python data_prep/merge.py --input /data/web --tokenizer gpt2 --output_dir data/web --deduplicate"""

SMALL_DESCRIPTION = """\
As preprocess.py with the same flags, but for the first N documents only: train_small.bin and val_small.bin, for a quick
look. Of the N, --val_fraction (at least one) are the first of the validation documents, the others the first of the
training documents. Small and full files share the folder and its tokenizer/, which `--tokenizer train` trains on the
whole train split in both cases, so a model trained on one can be evaluated on the other."""

SMALL_EXAMPLES = """\
  .venv/bin/python data_prep/preprocess_small.py --num_documents 100
  .venv/bin/python data_prep/preprocess_small.py --num_documents 1000 --dataset tinystories"""

_FORMS = {
    "": (DESCRIPTION, EXAMPLES, {"num_documents"}),
    "small": (SMALL_DESCRIPTION, SMALL_EXAMPLES, {"shard"}),
    "merge": (MERGE_DESCRIPTION, MERGE_EXAMPLES, {"num_documents", "shard", "workers"}),
}
"""Description, examples and the flags that are left out, of each script."""
TRAIN = "train"
TOKENS_FOR_SMALL = 100_000_000
"""Up to this many tokens the suggested training is that of the demo; ``small`` would learn the text by heart."""
KEPT = "nothing was published; the same command goes on with what is encoded"
"""Ends the error line after an interruption, or if the disk is full."""
DATASETS = (*EMBEDDED, *HUB_SETS)
_DEFAULT_VOCAB_SIZE = 8192
_DEFAULT_VAL_FRACTION = 0.05
_DECIDING = ("text_key", "tokenizer", "vocab_size", "val_fraction", "seed", "num_documents")
"""The options that decide the output's bytes, beside the input."""
_DECIDING_SINCE = ("split_by", "shuffle", "deduplicate", "on_bad_text", "special_tokens_in_text")
"""More of them; records of earlier versions lack these, so they are named only if they are not the default."""
_ENCODING_FLAGS = ("--shard", "--workers")
"""Those that the command of a merge lacks."""
_LAYOUT = 2
"""Counts changes of the parts: parts of another layout are not used."""
Identity: TypeAlias = dict[str, str | int | float | None]
"""Options and hashes of inputs, by name."""


def shard_of(word: str) -> tuple[int, int]:
    """The value of ``--shard``: I and N of ``I/N``."""
    first, _, count = word.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise Unfit("I/N with I from 1 to N, such as 3/8")
    return int(first), int(count)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The command line; ``parse_options`` resolves what is not given."""

    dataset: str | None = flag(
        set_name(DATASETS),
        "NAME",
        f"a set by name: {', '.join(DATASETS)}, or OWNER/NAME on the hub (default {TRANSFORMERS_NAME}; what does not "
        "begin with python- needs `.venv/bin/python data_prep/download_data.py NAME` first)",
    )
    """Name of a set; None if ``inputs`` are the user's own files."""
    inputs: tuple[Path, ...] = flag(
        Path,
        "PATH",
        "your own text instead: files and folders, or - for standard input. A .jsonl (.jsonl.gz, .jsonl.zst), "
        ".parquet or .arrow file holds one document a row, any other file is one document of UTF-8 text; of folders "
        "every visible file is read, but no link",
        default=(),
        name="--input",
        nargs="+",
    )
    text_key: str | None = flag(
        str,
        "KEY",
        "key or column of the text in rows (default: text, or else the only one of strings in the first row)",
    )
    tokenizer: str = flag(
        str,
        "WHICH",
        "`train` (a byte-level BPE, trained on the train split only), a local folder or a name on the Hugging Face hub "
        f"(default: {TRAIN} for {' and '.join(EMBEDDED)}, else gpt2)",
    )
    vocab_size: int | None = flag(
        whole(low=SMALLEST_VOCABULARY),
        "N",
        f"ids of a trained tokenizer, <|endoftext|> included (default {_DEFAULT_VOCAB_SIZE}, at least "
        f"{SMALLEST_VOCABULARY}); above 65,536 token files take 4 bytes an id, not 2",
    )
    """Ids of a new tokenizer; None for an existing one."""
    val_fraction: float | None = flag(
        value(float, accepts=lambda share: 0 < share < 1, must_be="a number above 0 and below 1, such as 0.05"),
        "F",
        "share of the documents for validation, chosen by a hash of seed and name (default "
        f"{_DEFAULT_VAL_FRACTION}); sets that have a validation split keep it",
    )
    seed: int = flag(
        whole(low=0), "N", "another seed chooses other validation documents (default %(default)s)", default=1337
    )
    output_dir: Path = flag(
        folder_if_named,
        "DIR",
        "receives the token files and tokenizer/ (default data/NAME, where NAME is the set's or the one input's)",
    )
    split_by: Literal["documents", "files"] = flag(
        choice(("documents", "files")),
        "WHAT",
        "divide by documents, or keep all documents of a file in one split (default %(default)s)",
        default="documents",
    )
    shuffle: bool = switch("put the documents of each split into a random order, which depends on --seed")
    deduplicate: bool = switch("keep only the first of documents with the same text, in both splits together")
    on_bad_text: OnBadText = flag(
        choice(("replace", "skip", "fail")),
        "HOW",
        "text that is not valid Unicode: replace it by U+FFFD, skip the document, or fail (default %(default)s)",
        default="fail",
    )
    special_tokens_in_text: bool = switch(
        "the names of special tokens in a text, such as <|endoftext|>, become those tokens; otherwise they are text"
    )
    workers: int | None = flag(
        POSITIVE, "N", "processes that encode (default: one for each core, for large inputs); the result is the same"
    )
    shard: tuple[int, int] | None = flag(
        shard_of, "I/N", "only encode part I of N, from 1; `dsgpt data merge` with the same flags joins them"
    )
    num_documents: int | None = flag(
        whole(low=2), "N", "how many documents, training and validation together (at least 2)"
    )
    """Number of documents of the small files; None for all documents."""
    overwrite: bool = switch("replace what an earlier run with other options left there")

    def identity(self) -> Identity:
        """The options that decide the output's bytes. If they and the input are the same, so is the output."""
        return {
            "--input" if self.dataset is None else "--dataset": self.dataset
            or ", ".join(printable(path.resolve().name) for path in self.inputs),
            **{f"--{name}": getattr(self, name) for name in _DECIDING},
            "--text_key": self.text_key or "text",
            **{
                f"--{field.name}": getattr(self, field.name)
                for field in fields(self)
                if field.name in _DECIDING_SINCE and getattr(self, field.name) != field.default
            },
        }


def parse_options(argv: Sequence[str] | None = None, *, small: bool, merge: bool = False) -> PrepareOptions:
    """Read the command line; by default that of this process.

    Raises:
        UserError: all of its mistakes, one line each.
    """
    description, examples, left_out = _FORMS["small" if small else "merge" if merge else ""]
    parser = Parser(description=description, epilog=f"examples:\n{examples}")
    names = [field.name for field in fields(PrepareOptions) if field.name not in left_out]
    parser.add_flags(PrepareOptions, names=names)
    given, problems = parser.read(PrepareOptions, argv), parser.problems
    if given.inputs and given.dataset:
        problems.add("--input and --dataset: one preparation reads either your own files or a named set; drop one")
    problems.add(
        *(
            f"--input {path}: there is no such file or folder"
            for path in given.inputs
            if not path.exists() and path != STDIN
        )
    )
    dataset = None if given.inputs else given.dataset or TRANSFORMERS_NAME
    if dataset and given.text_key is not None:
        problems.add("--text_key: only the files of --input have keys to choose from; leave it out")
    tokenizer = given.tokenizer or (TRAIN if dataset in EMBEDDED else "gpt2")
    if tokenizer != TRAIN and given.vocab_size is not None:
        problems.add(f"--vocab_size: the tokenizer {tokenizer} has its own; leave it out, or use --tokenizer train")
    options = replace(
        given,
        dataset=dataset,
        tokenizer=tokenizer,
        vocab_size=given.vocab_size or (_DEFAULT_VOCAB_SIZE if tokenizer == TRAIN else None),
        output_dir=given.output_dir or Path("data") / (dataset or given.inputs[0].resolve().stem),
    )
    if given.output_dir is None and len(given.inputs) > 1:
        problems.add("--output_dir: is missing; several inputs have no common name, say where the output goes")
    if given.output_dir is None and not is_utf8(options.output_dir):
        problems.add(f"{undecodable(options.output_dir)}, or name another --output_dir")
    if STDIN in given.inputs and (len(given.inputs) > 1 or tokenizer == TRAIN or given.output_dir is None):
        problems.add("--input -: is read once: give no other input, a --tokenizer that exists, and an --output_dir")
    if given.shard and (tokenizer == TRAIN or given.num_documents or STDIN in given.inputs):
        problems.add("--shard: needs a --tokenizer that exists, and all documents of files")
    resolved = options.output_dir.resolve()
    if any(path.resolve() == resolved for path in given.inputs):
        problems.add(f"--output_dir {options.output_dir}: is the input itself; name another folder")
    nearest = next(path for path in (resolved, *resolved.parents) if path.exists())
    if not nearest.is_dir():
        problems.add(f"--output_dir {options.output_dir}: {nearest} is a file, not a folder")
    if small and given.num_documents is None and not problems.mention("--num_documents"):
        problems.add("--num_documents: is missing; say how many documents, for example --num_documents 100")
    problems.add(*_faults_of_name(tokenizer))
    problems.raise_if_any()
    return options


def _faults_of_name(tokenizer: str) -> Iterator[str]:
    """What is wrong with the value of ``--tokenizer``."""
    if not is_utf8(tokenizer):
        yield f"--tokenizer {undecodable(tokenizer)}"
    elif tokenizer != TRAIN and Path(tokenizer).is_dir():
        if fault := fault_of(Path(tokenizer), named=True):
            yield f"--tokenizer {tokenizer}: {fault}"
    elif tokenizer.startswith((".", "/", "~")) or tokenizer.count("/") > 1 or tokenizer.endswith("/"):
        yield f"--tokenizer {tokenizer}: there is no such folder; it should hold a tokenizer.json"


# What an earlier preparation wrote, and whether it is unchanged.

_STAMP = {"size", "mtime_ns"}
"""Keys of a sidecar that change when its file is copied."""


@dataclass(frozen=True, kw_only=True)
class PreparedSplit:
    """One token file in a record; the rest is in its sidecar."""

    sha256: Sha256


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The contents of ``preparation.json``, the record of a preparation."""

    identity: dict[str, Any]
    """Options and hashes of the input: the same identity gives the same output."""
    tokenizer_sha256: Sha256
    """SHA-256 of ``tokenizer/tokenizer.json``."""
    splits: dict[str, PreparedSplit]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The paths of one preparation in its output folder."""

    folder: Path
    suffix: str
    """Ending of the names of its files: ``_small`` if only the first documents are prepared."""

    def tokens(self, split: str) -> Path:
        """The token file of a split, for example ``train.bin``."""
        return self.folder / f"{split}{self.suffix}.bin"

    @property
    def record(self) -> Path:
        """The record. It is written last: if it is there, the preparation is complete."""
        return self.folder / f"preparation{self.suffix}.json"

    @property
    def other(self) -> "Place":
        """The place of the small files if this is that of the full ones, and vice versa. Both share the tokenizer."""
        return Place(folder=self.folder, suffix="" if self.suffix else "_small")

    @property
    def tokenizer(self) -> Path:
        """The tokenizer folder."""
        return self.folder / TOKENIZER_FOLDER

    def work(self, identity: Identity) -> Path:
        """The folder of parts that are done, until all files are complete."""
        facts = json.dumps([_LAYOUT, self.suffix, identity], sort_keys=True)
        return self.folder / f".work{self.suffix}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"

    def remove_work(self) -> None:
        """Remove all folders of parts: also those of commands with other options, which were killed."""
        for work in self.folder.glob(f".work{self.suffix}-*"):
            remove(work)

    def complete(self) -> Preparation | None:
        """The record, if all files that it describes are there; otherwise None.

        Raises:
            UserError: the file is not a record.
        """
        if not all(path.exists() for path in (self.record, self.tokenizer / TOKENIZER, *map(self.tokens, SPLITS))):
            return None
        cure = "; remove it and prepare again with --overwrite"
        return read_or_refuse(self.record, Preparation, "the record of a preparation", cure=cure, unknown_keys=True)


def already_prepared(place: Place, identity: Identity) -> bool:
    """Whether ``place`` already contains the output of ``identity``; files that changed on disk are hashed.

    Raises:
        UserError: it contains something else, which is replaced only with ``--overwrite``.
        TokenFileError: a token file differs from its sidecar.
    """
    record = place.complete()
    if record is None:
        unknown = [path for path in map(place.tokens, SPLITS) if path.exists()]
        if unknown and not place.work(identity).exists():  # if it does, the same command was killed
            raise UserError(f"{unknown[0]}: exists, but no finished preparation made it; replace it with --overwrite")
        return False
    files = {split: open_token_file(place.tokens(split)) for split in SPLITS}
    old = record.identity
    changes = [
        f"{name} was {old.get(name)}, is {identity.get(name)}" if name.startswith("--") else f"the {name} has changed"
        for name in {**old, **identity}
        if old.get(name) != identity.get(name)
    ]
    if changes:
        raise UserError(
            f"{place.folder}: was prepared differently ({'; '.join(changes)}); replace it with --overwrite or choose "
            "another --output_dir"
        )
    noted = {split: prepared.sha256 for split, prepared in record.splits.items()}
    others = [file.path for split, file in files.items() if noted.get(split) != file.sidecar.sha256]
    if sha256_of(vocabulary := place.tokenizer / TOKENIZER) != record.tokenizer_sha256:
        others.insert(0, vocabulary)
    if others:
        raise UserError(f"{others[0]}: is not the file that {place.record.name} describes; replace it with --overwrite")
    for file in files.values():
        if doubt := file.doubt():
            with progress(total=file.size_bytes, description=f"hashing {file.path.name}", unit="B") as bar:
                file.verified_sha256(bar.update)
            print(f"{doubt}: hashed again, its contents match the sidecar")
    return True


# From a source to train.bin, val.bin and tokenizer/, which get their names only when all are complete.

_NAMED = 3
"""Most skipped links that are named."""


def main(argv: Sequence[str] | None = None, *, small: bool = False, merge: bool = False) -> None:
    """Prepare what the command line asks for, unless it is prepared already, and print the result.

    Args:
        argv: the words; by default those of this process.
        small: whether the script is ``preprocess_small.py``.
        merge: whether it is ``merge.py``, which encodes nothing.

    Raises:
        UserError: mistakes of the command line; or the input or the output folder cannot be used.
    """
    options = parse_options(argv, small=small, merge=merge)
    source = _source(options)
    place = Place(folder=options.output_dir, suffix="_small" if small else "")
    place.folder.mkdir(parents=True, exist_ok=True)
    with Lock.of_folder(place.folder, follow_link=True) as lock:
        if not lock.take(shared=options.shard is not None):
            raise UserError(f"{place.folder}: another preparation is writing there; wait until it ends")
        files = _entries(source, place)
        identity = options.identity() | {"input": source.fingerprint(), "tokenizer": _fingerprint(options.tokenizer)}
        done = not options.overwrite and already_prepared(place, identity)
        work = place.work(identity)
        if done:
            if options.shard is None:
                place.remove_work()
            _report(place, "already prepared:")
            return
        started = time.monotonic()
        work.mkdir(exist_ok=True)
        try:
            vocabulary = _vocabulary(options, source, place, identity)
            other = place.other.complete()
            if other and other.tokenizer_sha256 != vocabulary.sha256:
                raise UserError(
                    f"{place.tokenizer}: belongs to {place.other.tokens('train').name} and differs from the tokenizer "
                    f"asked for; choose another --output_dir, or remove {place.other.record.name} and the files that "
                    "it describes"
                )
            encoding = _encoding(options, work, vocabulary)
            paths = _encoded(options, source, encoding, vocabulary, merge=merge)
            if options.shard is not None:
                words = list(argv or sys.argv[1:])
                kept = [
                    word
                    for before, word in zip(["", *words], words, strict=False)
                    if before not in _ENCODING_FLAGS and not word.startswith(_ENCODING_FLAGS)
                ]
                print(
                    f"encoded part {options.shard[0]} of {options.shard[1]} in {encoding.folder}; when all are encoded:"
                )
                print(next_line(script_words("data_prep/merge.py", *kept)))
                return
            counts = _write(options, source, place, vocabulary, identity, paths=paths, files=files)
            place.remove_work()
        finally:
            if options.shard is None and not any(work.glob("*/part-*")):
                remove(work)
        _report(place, f"prepared in {duration(time.monotonic() - started)}:")
        if found := [f"{number:,} {what}" for what, number in counts.items() if number]:
            print(f"  documents left out or changed: {', '.join(found)}")


def _fingerprint(tokenizer: str) -> str | None:
    """A hash of the files of a local tokenizer, whose folder may change; None for a name on the hub."""
    if tokenizer == TRAIN or not Path(tokenizer).is_dir():
        return None
    digest = hashlib.sha256()
    named = [path for path in Path(tokenizer).iterdir() if path.suffix in (".json", ".txt", ".model")]
    for path in sorted(path for path in named if is_regular_file(path)):
        digest.update(path.name.encode(errors=PRINTABLE) + path.read_bytes())
    return digest.hexdigest()


def _source(options: PrepareOptions) -> Source:
    """The source that the options name. Prints which of the user's own files are left out."""
    dataset, output_dir = options.dataset, options.output_dir
    if dataset is not None:
        source = downloaded_source(dataset, output_dir=output_dir)
        if source is None and dataset not in EMBEDDED:
            raise UserError(
                f"--dataset {dataset}: has not been downloaded to {output_dir / 'raw'}; run "
                f"`.venv/bin/python data_prep/download_data.py {dataset}` first"
            )
        source = source or EMBEDDED[dataset]()
        has_own_split = any(file.split is not None for file in source.files)
        if has_own_split and options.val_fraction is not None and options.num_documents is None:
            raise UserError(f"--val_fraction: {dataset} has its own validation split; leave the flag out")
        return source
    strict = options.on_bad_text == "fail"
    source = own_source(options.inputs, text_key=options.text_key, output_dir=output_dir, strict=strict)
    if source.skipped_binary:
        print(f"left out {counted(source.skipped_binary, 'binary file')}")
    if links := source.skipped_links:
        more = f" and {len(links) - _NAMED:,} more" if len(links) > _NAMED else ""
        verb = "is" if len(links) == 1 else "are"
        print(f"left out {counted(len(links), 'link')}, which {verb} not followed: {', '.join(links[:_NAMED])}{more}")
    if not source.files:
        raise UserError(f"--input {' '.join(map(str, options.inputs))}: holds no text files")
    return source


def _divided(options: PrepareOptions, source: Source) -> Divided:
    """The documents that are encoded, each with its split."""

    def kept() -> Iterator[tuple[str | None, Document]]:
        seen: set[int] = set()
        for file in source.files:
            for document in file.read(file):
                if document.bad and options.on_bad_text == "skip":
                    continue
                if options.deduplicate:
                    if (text := document_hash(document.text.encode())) in seen:
                        continue
                    seen.add(text)
                yield file.split, replace(document, key=file.key) if options.split_by == "files" else document

    return divide(kept(), val_fraction=_share(options), seed=options.seed)


def _vocabulary(options: PrepareOptions, source: Source, place: Place, identity: Identity) -> Vocabulary:
    """The tokenizer in the output folder, or a new one in a temporary folder.

    For small files, the one in the output folder is used if the full files there were made with the same options, and
    vice versa. A new one is trained on the whole train split for small files too, so that both can share it.
    """
    other = place.other.complete()
    if other and other.identity | {"--num_documents": None} == identity | {"--num_documents": None}:
        return open_vocabulary(place.tokenizer)
    made, partial = (
        place.work(identity) / name for name in (TOKENIZER_FOLDER, f"{TOKENIZER_FOLDER}.{secrets.token_hex(8)}")
    )
    if made.exists():
        return open_vocabulary(made)
    if options.vocab_size is None:  # an existing tokenizer has its own
        save_loaded(options.tokenizer, partial)
    else:
        read = with_bar(_divided(options, source), total=source.total_bytes(), description="training the tokenizer")
        texts = (document.text for split, document in read if split == "train")
        tokenizer = train_tokenizer(texts, vocab_size=options.vocab_size)
        if tokenizer.get_vocab_size() < options.vocab_size:
            print(f"the text yields only {tokenizer.get_vocab_size():,} of the {options.vocab_size:,} ids asked for")
        save_trained(tokenizer, partial)
    with contextlib.suppress(FileExistsError, OSError):  # another shard was faster
        partial.rename(made)
    remove(partial)
    return open_vocabulary(made)


def _encoding(options: PrepareOptions, work: Path, vocabulary: Vocabulary) -> Encoding:
    """How the options encode; the folder of the parts exists."""
    (folder := work / vocabulary.sha256[:16]).mkdir(exist_ok=True)
    return Encoding(
        folder=folder,
        tokenizer=vocabulary.folder,
        special=options.special_tokens_in_text,
        on_bad_text=options.on_bad_text,
        split_by=options.split_by,
        seed=options.seed,
    )


def _encoded(
    options: PrepareOptions, source: Source, encoding: Encoding, vocabulary: Vocabulary, *, merge: bool
) -> list[Path]:
    """The parts of ``source``, made or found, in order; of its beginning if only the first documents are wanted.

    With ``--shard``, a block belongs to the shard in whose share of all bytes it begins.

    Raises:
        UserError: a document cannot be encoded; or a part is missing, and ``merge``.
    """
    engine = open_engine(vocabulary)
    if engine.cuts and engine.name != FAST:
        print(f"{FAST} is not installed: encoding with {engine.name}, several times slower (pip install {FAST})")
    width, share, total = WIDTHS[dtype_of(vocabulary.size)], _share(options), source.total_bytes()
    workers = options.workers or (len(os.sched_getaffinity(0)) if total > 2 * BLOCK_BYTES else 1)
    if stdin := source.files[0].path == STDIN:
        workers = 1  # no other process has it
    parts: dict[int, Part] = {}
    documents = 0
    with progress(total=total, description="encoding", unit="B") as bar:

        def note(block: Block, part: Part | None) -> bool:
            nonlocal documents
            if part is not None:
                parts[block.number] = part
                documents += len(part.rows)
                bar.update(block.size)
                bar.set_postfix_str(f"{documents:,} documents")
            return part is not None

        def missing() -> Iterator[Block]:
            index, count = options.shard or (1, 1)
            for block in blocks_of(source, cuts=engine.cuts, val_fraction=share, whitespace_only=encoding.special):
                shard, path = min(block.first_byte * count // max(total, 1), count - 1), encoding.path(block.number)
                if shard == index - 1 and not note(block, read_part(path, width=width, check=True)):
                    if merge:
                        raise UserError(f"{path}: is missing or damaged; run its --shard again, which keeps the others")
                    yield block

        with contextlib.closing(encode_blocks(missing(), encoding, workers=workers)) as done:
            for block in done:
                note(block, _part(encoding.path(block.number), width=width))
                if options.num_documents is not None and _suffice(options, source, parts):
                    break
    lone = sum(len(part.rows) for part in parts.values()) == 1 and source.files[0].split is None
    if lone and options.shard is None and not stdin:
        (number,) = (int(part.rows["file"][0]) for part in parts.values() if len(part.rows))
        reading = Reading(number=number, file=source.files[number], val_fraction=share)
        halves = Block(number=len(parts), first_byte=0, size=0, readings=(reading,))
        for _ in encode_blocks(iter([halves]), encoding, workers=1):
            return [encoding.path(halves.number)]
    return [encoding.path(number) for number in sorted(parts)]


def _suffice(options: PrepareOptions, source: Source, parts: dict[int, Part]) -> bool:
    """Whether the parts from the first without a gap have the documents that are wanted."""
    beginning = [parts[number] for number in range(len(parts)) if number in parts]
    if sorted(parts)[: len(beginning)] != list(range(len(beginning))):
        return False
    if next((part.rows["more"][-1] for part in reversed(beginning) if len(part.rows)), 0):
        return False  # the rest of the last document is in the next part
    documents = _documents(options, beginning)
    if len(documents.rows) <= SMALL_DOCUMENTS:
        return False  # the split of so few depends on whether there are more
    return sum(map(len, _numbers(options, source, documents).values())) == options.num_documents


def _share(options: PrepareOptions) -> float:
    return options.val_fraction or _DEFAULT_VAL_FRACTION


def _documents(options: PrepareOptions, parts: list[Part]) -> Documents:
    documents = gather(parts)
    return without_duplicates(documents) if options.deduplicate else documents


def _numbers(options: PrepareOptions, source: Source, documents: Documents) -> dict[str, NDArray[np.int64]]:
    """The documents of each split, in the order in which they are written."""
    own = [file.split for file in source.files]
    share, count = _share(options), options.num_documents
    numbers = divided(documents, own=own, val_fraction=share, count=count)
    return shuffle(numbers, seed=options.seed) if options.shuffle else numbers


def _write(
    options: PrepareOptions,
    source: Source,
    place: Place,
    vocabulary: Vocabulary,
    identity: Identity,
    *,
    paths: list[Path],
    files: list[SourceEntry],
) -> dict[str, int]:
    """Write all files from parts; return how many documents were left out or changed, by the reason."""
    width = WIDTHS[dtype_of(vocabulary.size)]
    parts = [_part(path, width=width) for path in paths]
    documents = _documents(options, parts)
    if not len(documents.rows):
        raise UserError("the input holds no text: every document is empty")
    numbers = _numbers(options, source, documents)
    for split in SPLITS:
        if not len(numbers[split]):
            raise UserError(f"the {split} split has no document; give more documents or change --val_fraction")
    name = TOKENIZER_FOLDER if options.tokenizer == TRAIN or Path(options.tokenizer).is_dir() else options.tokenizer
    about = TokenizerFacts(name=name, sha256=vocabulary.sha256)
    for file, before in zip(source.files, files, strict=True):
        if file.path != STDIN and Stamp.of(file.path) != (before.size, before.mtime_ns):
            raise UserError(f"{file.path}: changed while it was read; start again when no program writes to it")
    with contextlib.ExitStack() as stack:
        open_writer = partial(TokenFileWriter, vocab_size=vocabulary.size, eot_id=vocabulary.eot_id, tokenizer=about)
        writers = {
            split: stack.enter_context(open_writer(place.tokens(split), source=source.description)) for split in SPLITS
        }
        with contextlib.closing(PartReader(paths, parts, width=width)) as reader:
            total = sum(int(documents.rows["tokens"][each].sum(dtype=np.int64)) for each in numbers.values())
            with progress(total=total * width, description="joining", unit="B") as bar:
                for split, writer in writers.items():
                    reader.copy(documents, numbers[split], writer, bar.update)
        # All files get their final names. The record is removed first and written last: it never describes a mixture.
        place.record.unlink(missing_ok=True)
        for split in SPLITS:
            entries = entries_of(documents, numbers[split])
            write_atomic(index_path(place.tokens(split)), entries.tobytes())
            write_sources(place.tokens(split), files)
        if vocabulary.folder != place.tokenizer:
            retired, staged = (place.folder / f".{TOKENIZER_FOLDER}.{name}" for name in ("old", "partial"))
            remove(retired)
            remove(staged)
            shutil.copytree(vocabulary.folder, staged)
            if os.path.lexists(place.tokenizer):
                place.tokenizer.rename(retired)
            staged.rename(place.tokenizer)
            remove(retired)
    sync_directory(place.folder)
    sidecars = {split: asdict(open_token_file(place.tokens(split)).sidecar) for split in SPLITS}
    splits = {split: {key: each[key] for key in each if key not in _STAMP} for split, each in sidecars.items()}
    record = {"identity": identity, "tokenizer_sha256": vocabulary.sha256, "splits": splits}
    write_json_atomic(place.record, record | {"left_out_or_changed": documents.counts})
    return documents.counts


def _entries(source: Source, place: Place) -> list[SourceEntry]:
    """The files of ``source`` as they are now."""
    return [
        SourceEntry(path="-", size=None, mtime_ns=None, unit=file.unit)
        if file.path == STDIN
        else SourceEntry(path=relative(file.path, place.folder), unit=file.unit, **Stamp.of(file.path)._asdict())
        for file in source.files
    ]


def _part(path: Path, *, width: int) -> Part:
    if (part := read_part(path, width=width)) is None:
        raise UserError(f"{path}: is missing or damaged; start again, which keeps the others")
    return part


def _report(place: Place, heading: str) -> None:
    print(heading)
    for split in SPLITS:
        file = open_token_file(place.tokens(split))
        documents = file.sidecar.documents  # None in a sidecar that another tool wrote
        documents_too = "" if documents is None else f"{counted(documents, 'document')}, "
        print(
            f"  {file.path}: {documents_too}{counted(file.tokens, 'token')} "
            f"({file.sidecar.dtype}, {counted(file.size_bytes, 'byte')})"
        )
    vocabulary = open_vocabulary(place.tokenizer)
    print(f"  {place.tokenizer}: {vocabulary.size:,} ids, documents end with id {vocabulary.eot_id}")
    train, val = (place.tokens(split) for split in SPLITS)
    recipes, run = REPOSITORY / "ds_configs" / "sizes", Path("checkpoint") / f"{place.folder.name}-baseline"
    data = ["--train_data_path", train, "--val_data_path", val, "--run_type", "baseline", "--checkpoint_path", run]
    if open_token_file(train).tokens > TOKENS_FOR_SMALL:
        size = ["--deepspeed_config", recipes / "small.json"]
    else:
        size = ["--deepspeed_config", recipes / "demo.json", "--model_size", "demo", "--seq_length", "128"]
    print(next_line(script_words("src/gpt2.py", *data, *size, "--dry_run")))
