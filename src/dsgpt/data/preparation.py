"""Makes train.bin, val.bin and tokenizer/ from a source, for ``preprocess.py`` and ``preprocess_small.py``."""

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE, Lock, remove, sha256_of, sync_directory, write_atomic, write_json_atomic
from dsgpt.common.json_files import Sha256, read_or_refuse
from dsgpt.common.text import REPOSITORY, counted, duration, next_line, script_words
from dsgpt.data.blocks import Block, Reading, blocks_of, cut_in_two
from dsgpt.data.download import downloaded_source, progress
from dsgpt.data.engine import FAST
from dsgpt.data.index import ENTRY, SourceEntry, document_hash, index_path, relative, sources_path, write_sources
from dsgpt.data.merge import SMALL_DOCUMENTS, SPLITS, chosen, divided, ids_of
from dsgpt.data.parts import ROW, Encoder, Encoding, Part, encode_blocks, read_part
from dsgpt.data.preparation_options import TRAIN, Identity, PrepareOptions, parse_options
from dsgpt.data.readers import Document
from dsgpt.data.sources import EMBEDDED, SMALL_BYTES, Source, own_source
from dsgpt.data.token_file import WIDTHS, Stamp, TokenFileWriter, TokenizerFacts, dtype_of, open_token_file
from dsgpt.data.vocabulary import open_vocabulary, save_loaded, save_trained, train_tokenizer
from dsgpt.formats.tokenizer_files import TOKENIZER, TOKENIZER_FOLDER

TOKENS_FOR_SMALL = 100_000_000
"""Up to this many tokens the suggested training is that of the demo; ``small`` would learn the text by heart."""
KEPT = "nothing was published; the same command goes on with what is encoded"
"""Ends the error line after an interruption, or if the disk is full."""
_ENCODING = ("--shard", "--workers")
"""Flags that the command of a merge lacks."""
_LAYOUT = 2
"""Counts changes of the parts: parts of another layout are not used."""

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
    if (record := place.complete()) is None:
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
    open_vocabulary(place.tokenizer)  # which its settings may have made unreadable
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
        identity = options.identity() | {"input": source.fingerprint(), "tokenizer": _fingerprint(options.tokenizer)}
        if not options.overwrite and already_prepared(place, identity):
            if options.shard is None:
                place.remove_work()
            _report(place, "already prepared:")
            return
        started = time.monotonic()
        work = place.work(identity)
        work.mkdir(exist_ok=True)
        try:
            encoder = Encoder(_encoding(options, source, place, identity))
            parts = _encoded(options, source, encoder, merge=merge)
            if options.shard is not None:
                pairs = itertools.pairwise(["", *(argv or sys.argv[1:])])
                kept = [word for before, word in pairs if before not in _ENCODING and not word.startswith(_ENCODING)]
                index, count = options.shard
                print(f"encoded part {index} of {count} in {encoder.encoding.folder}; when all are encoded:")
                print(next_line(script_words("data_prep/merge.py", *kept)))
                return
            counts = _write(options, source, place, encoder, identity, parts=parts)
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
    for path in sorted(Path(tokenizer).iterdir()):
        if path.suffix in (".json", ".txt", ".model") and path.is_file() and not path.is_symlink():
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
    source = own_source(options.inputs, text_key=options.text_key, output_dir=output_dir)
    if source.skipped_binary:
        print(f"left out {counted(source.skipped_binary, 'binary file')}")
    if links := source.skipped_links:
        more = f" and {len(links) - _NAMED:,} more" if len(links) > _NAMED else ""
        verb = "is" if len(links) == 1 else "are"
        print(f"left out {counted(len(links), 'link')}, which {verb} not followed: {', '.join(links[:_NAMED])}{more}")
    if not source.files:
        raise UserError(f"--input {' '.join(map(str, options.inputs))}: holds no text files")
    return source


def _training_texts(options: PrepareOptions, source: Source, encoding: Encoding) -> Iterator[str]:
    """The documents of the train split, as they will be divided.

    Raises:
        UserError: a text is not valid Unicode; or there is none, or only one that is too short to be divided.
    """

    def kept(description: str) -> Iterator[tuple[int, Document]]:
        seen: set[int] = set()
        with progress(total=source.total_bytes(), description=description, unit="B") as bar:
            for number, file in enumerate(source.files):
                for document in file.read(file):
                    bar.update(document.source_bytes)
                    if encoding.skips(document) or document.blank:
                        continue
                    if options.deduplicate:
                        if (text := document_hash(document.data)) in seen:
                            continue
                        seen.add(text)
                    yield number, document

    rows = np.fromiter(
        (
            (0, 0, number, 0, encoding.position(source.files[number], document), len(document.text), 0, 0)
            for number, document in kept("reading")
        ),
        dtype=ROW,
    )
    if not len(rows):
        raise UserError("the input holds no text: every document is empty")
    documents = (document for _, document in kept("training the tokenizer"))
    own = [file.split for file in source.files]
    if len(rows) == 1 and own[0] is None:
        yield cut_in_two(next(documents), val_fraction=options.share)[0].text
        return
    train = set(divided(rows, own=own, val_fraction=options.share)["train"].tolist())
    yield from (document.text for number, document in enumerate(documents) if number in train)


def _encoding(options: PrepareOptions, source: Source, place: Place, identity: Identity) -> Encoding:
    """How the options encode, with the tokenizer in the output folder or a new one.

    For small files, the one in the output folder is used if the full files there were made with the same options, and
    vice versa. A new one is trained on the whole train split for small files too, so that both can share it.

    Raises:
        UserError: the tokenizer cannot be had, or is another than that of the files there.
    """
    work, other = place.work(identity), place.other.complete()
    same = other and other.identity | {"--num_documents": None} == identity | {"--num_documents": None}
    made = place.tokenizer if same else work / TOKENIZER_FOLDER
    encoding = Encoding(
        folder=work,
        tokenizer=made,
        special=options.special_tokens_in_text,
        on_bad_text=options.on_bad_text,
        split_by=options.split_by,
        seed=options.seed,
    )
    if not made.exists():
        partial = work / f"{TOKENIZER_FOLDER}.{secrets.token_hex(8)}"
        if options.vocab_size is None:  # an existing tokenizer has its own
            save_loaded(options.tokenizer, partial)
        else:
            tokenizer = train_tokenizer(_training_texts(options, source, encoding), vocab_size=options.vocab_size)
            if (size := tokenizer.get_vocab_size()) < options.vocab_size:
                print(f"the text yields only {size:,} of the {options.vocab_size:,} ids asked for")
            save_trained(tokenizer, partial)
        with contextlib.suppress(FileExistsError, OSError):  # another shard was faster
            partial.rename(made)
        remove(partial)
    sha256 = sha256_of(made / TOKENIZER)
    if other and other.tokenizer_sha256 != sha256:
        raise UserError(
            f"{place.tokenizer}: belongs to {place.other.tokens('train').name} and differs from the tokenizer asked "
            f"for; choose another --output_dir, or remove {place.other.record.name} and the files that it describes"
        )
    (folder := work / sha256[:16]).mkdir(exist_ok=True)
    return replace(encoding, folder=folder)


def _encoded(options: PrepareOptions, source: Source, encoder: Encoder, *, merge: bool) -> list[Part]:
    """The parts of ``source``, made or found, in order; of its beginning if only the first documents are wanted.

    With ``--shard``, a block belongs to the shard in whose share of all bytes it begins.

    Raises:
        UserError: a document cannot be encoded; or a part is missing, and ``merge``.
    """
    encoding, engine, total = encoder.encoding, encoder.engine, source.total_bytes()
    if engine.cuts and engine.name != FAST:
        print(f"{FAST} is not installed: encoding with {engine.name}, several times slower (pip install {FAST})")
    width = WIDTHS[dtype_of(encoder.vocabulary.size)]
    workers = options.workers or (len(os.sched_getaffinity(0)) if total > SMALL_BYTES else 1)
    if stdin := source.files[0].stamp is None:
        workers = 1  # no other process has it
    parts: dict[int, Part] = {}
    documents = 0
    with progress(total=total, description="encoding", unit="B") as bar:

        def note(block: Block, part: Part) -> None:
            nonlocal documents
            parts[block.number] = part
            documents += len(part.rows)
            bar.update(block.size)
            bar.set_postfix_str(f"{documents:,} documents")

        def missing() -> Iterator[Block]:
            index, count = options.shard or (1, 1)
            special = encoding.special
            for block in blocks_of(source, cuts=engine.cuts, val_fraction=options.share, whitespace_only=special):
                if min(block.first_byte * count // max(total, 1), count - 1) != index - 1:
                    continue
                path = encoding.path(block.number)
                if part := read_part(path, width=width, check=True):
                    note(block, part)
                elif merge:
                    raise UserError(f"{path}: is missing or damaged; run its --shard again, which keeps the others")
                else:
                    yield block

        with contextlib.closing(encode_blocks(missing(), encoder, workers=workers)) as done:
            for block in done:
                note(block, _part(encoding.path(block.number), width=width))
                if options.num_documents is not None and _suffice(options, source, parts):
                    break
    lone = sum(len(part.rows) for part in parts.values()) == 1 and source.files[0].split is None
    if lone and options.shard is None and not stdin:
        (number,) = (int(part.rows["file"][0]) for part in parts.values() if len(part.rows))
        reading = Reading(number=number, file=source.files[number], val_fraction=options.share)
        halves = Block(number=len(parts), first_byte=0, size=0, readings=(reading,))
        encoder.encode(halves)
        return [_part(encoding.path(halves.number), width=width)]
    return [parts[number] for number in sorted(parts)]


def _suffice(options: PrepareOptions, source: Source, parts: dict[int, Part]) -> bool:
    """Whether the parts from the first without a gap have the documents that are wanted."""
    beginning = [parts[number] for number in range(len(parts)) if number in parts]
    if sorted(parts)[: len(beginning)] != list(range(len(beginning))):
        return False
    if next((part.rows["more"][-1] for part in reversed(beginning) if len(part.rows)), 0):
        return False  # the rest of the last document is in the next part
    documents, numbers = chosen(options, source, beginning)
    if len(documents.rows) <= SMALL_DOCUMENTS:
        return False  # the split of so few depends on whether there are more
    return sum(map(len, numbers.values())) == options.num_documents


def _write(
    options: PrepareOptions, source: Source, place: Place, encoder: Encoder, identity: Identity, *, parts: list[Part]
) -> dict[str, int]:
    """Write all files from parts; return how many documents were left out or changed, by the reason."""
    vocabulary, (documents, numbers) = encoder.vocabulary, chosen(options, source, parts)
    if not len(documents.rows):
        raise UserError("the input holds no text: every document is empty")
    for split in SPLITS:
        if not len(numbers[split]):
            raise UserError(f"the {split} split has no document; give more documents or change --val_fraction")
    entries = list[SourceEntry]()
    for file in source.files:
        if file.stamp and Stamp.of(file.name) != file.stamp:
            raise UserError(f"{file.name}: changed while it was read; start again when no program writes to it")
        size, mtime_ns = file.stamp or (None, None)
        path = relative(file.name, place.folder) if file.stamp else "-"
        entries.append(SourceEntry(path=path, size=size, mtime_ns=mtime_ns, unit=file.unit))
    name = TOKENIZER_FOLDER if options.tokenizer == TRAIN or Path(options.tokenizer).is_dir() else options.tokenizer
    about = TokenizerFacts(name=name, sha256=vocabulary.sha256)
    with contextlib.ExitStack() as stack:
        open_writer = partial(TokenFileWriter, vocab_size=vocabulary.size, eot_id=vocabulary.eot_id, tokenizer=about)
        writers = {
            split: stack.enter_context(open_writer(place.tokens(split), source=source.description)) for split in SPLITS
        }
        width = WIDTHS[dtype_of(vocabulary.size)]
        total = sum(int(documents.rows["tokens"][each].sum(dtype=np.int64)) for each in numbers.values())
        with progress(total=total * width, description="joining", unit="B") as bar:
            for split, writer in writers.items():
                for data in ids_of(parts, documents, numbers[split], width=width):
                    writer.append_encoded(data)
                    bar.update(len(data))
                writer.documents = len(numbers[split])
        # All files get their final names. The record is removed first and written last: it never describes a mixture.
        place.record.unlink(missing_ok=True)
        train, val = map(place.tokens, SPLITS)
        for split in SPLITS:
            index = documents.rows[numbers[split]][list(ENTRY.names or ())].astype(ENTRY)
            write_atomic(index_path(place.tokens(split)), index.tobytes())
        write_sources(train, entries)
        write_atomic(sources_path(val), sources_path(train).read_bytes())
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


def _part(path: Path, *, width: int) -> Part:
    if (part := read_part(path, width=width)) is None:
        raise UserError(f"{path}: is missing or damaged; start again, which keeps the others")
    return part


def _report(place: Place, heading: str) -> None:
    print(heading)
    files = [open_token_file(place.tokens(split)) for split in SPLITS]
    for file in files:
        documents = file.sidecar.documents  # None in a sidecar that another tool wrote
        documents_too = "" if documents is None else f"{counted(documents, 'document')}, "
        print(
            f"  {file.path}: {documents_too}{counted(file.tokens, 'token')} "
            f"({file.sidecar.dtype}, {counted(file.size_bytes, 'byte')})"
        )
    about = files[0].sidecar
    print(f"  {place.tokenizer}: {about.vocab_size:,} ids, documents end with id {about.eot_id}")
    train, val = (file.path for file in files)
    recipes, run = REPOSITORY / "ds_configs" / "sizes", Path("checkpoint") / f"{place.folder.name}-baseline"
    data = ["--train_data_path", train, "--val_data_path", val, "--run_type", "baseline", "--checkpoint_path", run]
    if files[0].tokens > TOKENS_FOR_SMALL:
        size = ["--deepspeed_config", recipes / "small.json"]
    else:
        size = ["--deepspeed_config", recipes / "demo.json", "--model_size", "demo", "--seq_length", "128"]
    print(next_line(script_words("src/gpt2.py", *data, *size, "--dry_run")))
