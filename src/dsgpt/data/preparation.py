"""From a source to train.bin, val.bin and tokenizer/."""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE, Lock, is_regular_file, remove, sha256_of, sync_directory, write_json_atomic
from dsgpt.common.json_files import JsonError, Sha256, read_as
from dsgpt.common.text import REPOSITORY, counted, next_line, script_words
from dsgpt.data.options import TRAIN, Bar, Identity, PrepareOptions, duration, parse_options, progress
from dsgpt.data.sources import STDLIB_NAME, Source, downloaded_source, own_source, stdlib_source
from dsgpt.data.token_file import Sidecar, TokenFile, TokenFileWriter, TokenizerFacts, open_token_file
from dsgpt.data.vocabulary import (
    SPLITS,
    Divided,
    Vocabulary,
    divide,
    encode,
    first_documents,
    open_vocabulary,
    save_loaded,
    save_trained,
    train_tokenizer,
)

# What an earlier preparation wrote, and whether it is unchanged.

TOKENIZER_FOLDER = "tokenizer"
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
    """Of ``tokenizer/tokenizer.json``."""
    splits: dict[str, PreparedSplit]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The paths of one preparation in its output folder."""

    folder: Path
    suffix: str

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

    @property
    def vocabulary(self) -> Path:
        """The tokenizer's file, whose hash identifies it."""
        return self.tokenizer / "tokenizer.json"

    @property
    def staged_tokenizer(self) -> Path:
        """Temporary name of the tokenizer folder, until all files are complete."""
        return self.folder / f".{TOKENIZER_FOLDER}.partial"

    def complete(self) -> Preparation | None:
        """The record, if all files that it describes are there; otherwise None.

        Raises:
            UserError: the file is not a record.
        """
        if not all(path.exists() for path in (self.record, self.vocabulary, *map(self.tokens, SPLITS))):
            return None
        try:
            return read_as(self.record, Preparation, unknown_keys=True)
        except JsonError as error:
            raise UserError(
                f"{self.record}: is not the record of a preparation ({error}); remove it and prepare again with "
                "--overwrite"
            ) from error

    def write_record(self, *, identity: Identity, tokenizer_sha256: str, sidecars: dict[str, Sidecar]) -> None:
        """Write the record, which marks the preparation as complete; ``sidecars`` are by split."""
        splits = {
            split: {name: value for name, value in dataclasses.asdict(sidecar).items() if name not in _STAMP}
            for split, sidecar in sidecars.items()
        }
        write_json_atomic(self.record, {"identity": identity, "tokenizer_sha256": tokenizer_sha256, "splits": splits})


def already_prepared(place: Place, identity: Identity) -> bool:
    """Whether ``place`` already contains the output of ``identity``; files that changed on disk are hashed.

    Raises:
        UserError: it contains something else, which is replaced only with ``--overwrite``.
        TokenFileError: a token file differs from its sidecar.
    """
    record = place.complete()
    if record is None:
        unknown = [path for path in map(place.tokens, SPLITS) if path.exists()]
        if unknown:
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
    _check_contents(place, record, files)
    return True


def _check_contents(place: Place, record: Preparation, files: dict[str, TokenFile]) -> None:
    others = [] if sha256_of(place.vocabulary) == record.tokenizer_sha256 else [place.vocabulary]
    for split, file in files.items():
        prepared = record.splits.get(split)
        if prepared is None or prepared.sha256 != file.sidecar.sha256:
            others.append(file.path)
    if others:
        raise UserError(f"{others[0]}: is not the file that {place.record.name} describes; replace it with --overwrite")
    for file in files.values():
        if doubt := file.doubt():
            with progress(total=file.size_bytes, description=f"hashing {file.path.name}", unit="B") as bar:
                file.verified_sha256(bar.update)
            print(f"{doubt}: hashed again, its contents match the sidecar")


# From a source to train.bin, val.bin and tokenizer/, which get their names only when all are complete.

_NAMED = 3
"""How many skipped links are named."""


def prepare(options: PrepareOptions) -> None:
    """Prepare what ``options`` ask for, unless it is prepared already, and print the result.

    Raises:
        UserError: the input or the output folder cannot be used.
    """
    source = _source(options)
    place = Place(folder=options.output_dir, suffix=options.suffix)
    with locked_folder(place.folder):
        identity = options.identity() | {"input": source.fingerprint(), "tokenizer": _fingerprint(options.tokenizer)}
        if not options.overwrite and already_prepared(place, identity):
            _report(place, "already prepared:")
            return
        started = time.monotonic()
        try:
            vocabulary = _vocabulary(options, source, place, identity)
            _check_shared_tokenizer(place, vocabulary)
            _write(options, source, place, vocabulary, identity)
        finally:
            with contextlib.suppress(OSError):  # otherwise the next preparation removes it
                remove(place.staged_tokenizer)
        _report(place, f"prepared in {duration(time.monotonic() - started)}:")


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
    if options.dataset is None:
        source = own_source(options.inputs, text_key=options.text_key, output_dir=options.output_dir)
        _print_left_out(source)
        if not source.files:
            raise UserError(f"--input {' '.join(map(str, options.inputs))}: holds no text files")
    else:
        source = _named_source(options.dataset, output_dir=options.output_dir)
    if source.has_own_split and options.val_fraction is not None and options.num_documents is None:
        raise UserError(f"--val_fraction: {options.dataset} has its own validation split; leave the flag out")
    return source


def _named_source(dataset: str, *, output_dir: Path) -> Source:
    downloaded = downloaded_source(dataset, output_dir=output_dir)
    if downloaded is not None:
        return downloaded
    if dataset == STDLIB_NAME:
        return stdlib_source()
    raise UserError(
        f"--dataset {dataset}: has not been downloaded to {output_dir / 'raw'}; run "
        f"`.venv/bin/python data_prep/download_data.py {dataset}` first"
    )


def _print_left_out(source: Source) -> None:
    if source.skipped_binary:
        print(f"left out {counted(source.skipped_binary, 'binary file')}")
    links = source.skipped_links
    if links:
        more = f" and {len(links) - _NAMED:,} more" if len(links) > _NAMED else ""
        verb = "is" if len(links) == 1 else "are"
        print(f"left out {counted(len(links), 'link')}, which {verb} not followed: {', '.join(links[:_NAMED])}{more}")


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """A context that creates the folder and locks it, so that two preparations cannot mix.

    Raises:
        UserError: another preparation holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with Lock.of_folder(folder, follow_link=True) as lock:
        if not lock.take():
            raise UserError(f"{folder}: another preparation is writing there; wait until it ends")
        yield


def _divided(options: PrepareOptions, source: Source) -> Divided:
    return divide(source.documents(), val_fraction=options.validation_share, seed=options.seed)


def _vocabulary(options: PrepareOptions, source: Source, place: Place, identity: Identity) -> Vocabulary:
    """The tokenizer in the output folder, or a new one in a temporary folder.

    For small files, the one in the output folder is used if the full files there were made with the same options, and
    vice versa. A new one is trained on the whole train split for small files too, so that both can share it.
    """
    other = place.other.complete()
    if other and other.identity | {"--num_documents": None} == identity | {"--num_documents": None}:
        return open_vocabulary(place.tokenizer)
    if options.vocab_size is None:  # an existing tokenizer has its own
        save_loaded(options.tokenizer, place.staged_tokenizer)
        return open_vocabulary(place.staged_tokenizer)
    with progress(total=source.total_bytes(), description="training the tokenizer", unit="B") as bar:
        tokenizer = train_tokenizer(_train_texts(_divided(options, source), bar), vocab_size=options.vocab_size)
    if tokenizer.get_vocab_size() < options.vocab_size:
        print(f"the text yields only {tokenizer.get_vocab_size():,} of the {options.vocab_size:,} ids asked for")
    save_trained(tokenizer, place.staged_tokenizer)
    return open_vocabulary(place.staged_tokenizer)


def _train_texts(divided: Divided, bar: Bar) -> Iterator[str]:
    for split, document in divided:
        bar.update(document.source_bytes)
        if split == "train":
            yield document.text


def _check_shared_tokenizer(place: Place, vocabulary: Vocabulary) -> None:
    other = place.other.complete()
    if other and other.tokenizer_sha256 != vocabulary.sha256:
        raise UserError(
            f"{place.tokenizer}: belongs to {place.other.tokens('train').name} and differs from the tokenizer asked "
            f"for; choose another --output_dir, or remove {place.other.record.name} and the files that it describes"
        )


def _write(options: PrepareOptions, source: Source, place: Place, vocabulary: Vocabulary, identity: Identity) -> None:
    divided = _divided(options, source)
    total, unit = source.total_bytes(), "B"
    if options.num_documents is not None:
        divided = first_documents(divided, count=options.num_documents, val_fraction=options.validation_share)
        total, unit = options.num_documents, " documents"
    name = TOKENIZER_FOLDER if options.tokenizer == TRAIN or Path(options.tokenizer).is_dir() else options.tokenizer
    about = TokenizerFacts(name=name, sha256=vocabulary.sha256)
    with contextlib.ExitStack() as stack:
        writers = {
            split: TokenFileWriter(
                place.tokens(split), vocab_size=vocabulary.size, eot_id=vocabulary.eot_id, tokenizer=about,
                source=source.description,
            )
            for split in SPLITS
        }  # fmt: skip
        for writer in writers.values():
            stack.callback(writer.abandon)
        with progress(total=total, description="encoding", unit=unit) as bar:
            for split, source_bytes, ids in encode(vocabulary, divided):
                writers[split].append(ids)
                bar.update(source_bytes if unit == "B" else 1)
        for split, writer in writers.items():
            if not writer.tokens:
                raise UserError(f"the {split} split has no document; give more documents or change --val_fraction")
        stack.pop_all()
        _publish(place, vocabulary, writers, identity)


def _publish(place: Place, vocabulary: Vocabulary, writers: dict[str, TokenFileWriter], identity: Identity) -> None:
    """Give all files their final names. The record is removed first and written last.

    So it never describes a mixture of old and new files.
    """
    place.record.unlink(missing_ok=True)
    if vocabulary.folder != place.tokenizer:
        retired = place.folder / f".{TOKENIZER_FOLDER}.old"
        remove(retired)
        if os.path.lexists(place.tokenizer):
            place.tokenizer.rename(retired)
        vocabulary.folder.rename(place.tokenizer)
        remove(retired)
    sidecars: dict[str, Sidecar] = {split: writer.close() for split, writer in writers.items()}
    sync_directory(place.folder)
    place.write_record(identity=identity, tokenizer_sha256=vocabulary.sha256, sidecars=sidecars)


def _report(place: Place, heading: str) -> None:
    print(heading)
    for split in SPLITS:
        file = open_token_file(place.tokens(split))
        documents = file.sidecar.documents  # None in a sidecar that another tool wrote
        held = "" if documents is None else f"{counted(documents, 'document')}, "
        print(
            f"  {file.path}: {held}{counted(file.tokens, 'token')} "
            f"({file.sidecar.dtype}, {counted(file.size_bytes, 'byte')})"
        )
    vocabulary = open_vocabulary(place.tokenizer)
    print(f"  {place.tokenizer}: {vocabulary.size:,} ids, documents end with id {vocabulary.eot_id}")
    train, val = (place.tokens(split) for split in SPLITS)
    data = ["--train_data_path", train, "--val_data_path", val, "--run_type", "baseline", "--dry_run"]
    recipe = REPOSITORY / "ds_configs" / "sizes" / "small.json"
    print(next_line(script_words("src/gpt2.py", *data, "--deepspeed_config", recipe)))


# The command lines of ``data_prep/preprocess.py`` and ``data_prep/preprocess_small.py``.

DESCRIPTION = """\
Turn text into token files: train.bin and val.bin (little-endian ids without a header, as nanoGPT reads them), each with
a .json that describes it, and tokenizer/, which transformers.AutoTokenizer loads. Every document ends with the
end-of-text id. Without flags it prepares the text that ships with Python itself, about 12 MB (Debian's packages hold a
bit less): no download, no account, under a minute. The same command a second time changes nothing."""

EXAMPLES = """\
  .venv/bin/python data_prep/preprocess.py
  .venv/bin/python data_prep/preprocess.py --input books/ --tokenizer train --vocab_size 16384
  .venv/bin/python data_prep/preprocess.py --input notes.txt web.jsonl --text_key content --output_dir data/mine
  .venv/bin/python data_prep/download_data.py tinystories && \\
    .venv/bin/python data_prep/preprocess.py --dataset tinystories"""

SMALL_DESCRIPTION = """\
As preprocess.py with the same flags, but for the first N documents only: train_small.bin and val_small.bin, for a quick
look. Of the N, --val_fraction (at least one) are the first of the validation documents, the others the first of the
training documents. Small and full files share the folder and its tokenizer/, which `--tokenizer train` trains on the
whole train split in both cases, so a model trained on one can be evaluated on the other."""

SMALL_EXAMPLES = """\
  .venv/bin/python data_prep/preprocess_small.py --num_documents 100
  .venv/bin/python data_prep/preprocess_small.py --num_documents 1000 --dataset tinystories"""


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare what the command line of ``preprocess.py`` asks for."""
    prepare(parse_options(argv, description=DESCRIPTION, examples=EXAMPLES, small=False))


def main_small(argv: Sequence[str] | None = None) -> None:
    """Prepare what the command line of ``preprocess_small.py`` asks for."""
    prepare(parse_options(argv, description=SMALL_DESCRIPTION, examples=SMALL_EXAMPLES, small=True))
