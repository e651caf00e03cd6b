"""From a source to train.bin, val.bin and tokenizer/, which get their names only when all are complete."""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE, is_regular_file, remove, sync_directory
from dsgpt.common.locks import Lock
from dsgpt.common.next_step import REPOSITORY, next_line, script_words
from dsgpt.data.sidecar import Sidecar, TokenizerFacts
from dsgpt.data.token_file import TokenFileWriter, open_token_file
from dsgpt.prepare.console import Bar, counted, duration, progress
from dsgpt.prepare.documents import Source
from dsgpt.prepare.downloaded_set import downloaded_source
from dsgpt.prepare.options import TRAIN, Identity, PrepareOptions
from dsgpt.prepare.own_text import own_source
from dsgpt.prepare.prepared import TOKENIZER_FOLDER, Place, already_prepared
from dsgpt.prepare.splitting import SPLITS, Divided, divide, first_documents
from dsgpt.prepare.stdlib_corpus import STDLIB_NAME, stdlib_source
from dsgpt.prepare.vocabulary import Vocabulary, encode, open_vocabulary, save_loaded, save_trained, train_tokenizer

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
