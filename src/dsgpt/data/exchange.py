"""``dsgpt data convert``: token files of nanoGPT, llm.c and Megatron-LM, read and written. Imports no torch.

Written from what those projects say about their files:

* nanoGPT (``data/openwebtext/prepare.py``): uint16 ids alone; the end-of-text id follows each document.
* llm.c (``dev/data/data_common.py``, ``llmc/dataloader.h``): 256 int32, of which the first three are 20240520, 1 and
  the number of ids; then uint16 ids. Of Llama 3's tokenizer: 20240801, 7, and uint32 ids, which are only read here. The
  end-of-text id precedes each document (``dev/data/fineweb.py``).
* Megatron-LM (``megatron/core/datasets/indexed_dataset.py``): ids in NAME.bin, and NAME.idx. That begins with
  ``MMIDIDX``, two zero bytes, version 1 (uint64), the code of the type (uint8), and the numbers of sequences and of
  document bounds (uint64). Lengths (int32) and byte offsets (int64) of sequences follow, then the bounds of documents,
  counted in sequences (int64).
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.command_line import COUNT, choice, flag, read_options, switch, whole
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import remove, sync_directory
from dsgpt.common.text import counted, next_line, script_words
from dsgpt.data.download import progress
from dsgpt.data.token_file import LLMC_TYPES, TokenFileWriter, TokenizerFacts, open_token_file, sidecar_path
from dsgpt.data.vocabulary import open_vocabulary, save_loaded
from dsgpt.formats.tokenizer_files import TOKENIZER_FOLDER, copy_tokenizer

FORMATS = ("dsgpt", "nanogpt", "llmc", "megatron")
LLMC_HEADER = 256
_LLMC_MAGIC, _LLMC_VERSION = 20240520, 1
_MEGATRON_MAGIC, _MEGATRON_HEAD = b"MMIDIDX\0\0", struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Whole numbers, by their codes; those of 6 and 7 are not whole."""
_CHUNK = 1 << 22
Ids = NDArray[np.integer]


@dataclass(frozen=True, kw_only=True)
class ConvertDataOptions:
    """The command line.

    Turn a token file into one of another trainer, or one of another trainer into ours. Documents stay whole and in
    their order; each format marks their ends as its own tools do. Formats: dsgpt (NAME.bin and NAME.json), nanogpt
    (NAME.bin), llmc (NAME.bin with a header), megatron (NAME.bin and NAME.idx).

    Examples:
      .venv/bin/python data_prep/exchange.py data/openwebtext/train.bin megatron/train.bin --to megatron
      .venv/bin/python data_prep/exchange.py fineweb_train_000001.bin data/fineweb/train.bin --to dsgpt --tokenizer gpt2
    """

    source: Path = flag(Path, "FROM", "the .bin to read", name="source", nargs="?", needs="the .bin to read")
    target: Path = flag(Path, "TO", "the .bin to write", name="target", nargs="?", needs="the .bin to write")
    form: str = flag(
        choice(FORMATS), "FORMAT", f"of TO: {', '.join(FORMATS)}", name="--to", needs=f"one of {', '.join(FORMATS)}"
    )
    tokenizer: str | None = flag(str, "WHICH")
    """to read a format of others: the tokenizer of its ids, a folder or a name on the hub"""
    vocab_size: int | None = flag(whole(low=2), "N")
    """the same without a tokenizer, with --eot_id: ids of the vocabulary"""
    eot_id: int | None = flag(COUNT, "ID", "the id that marks the end, or the beginning, of a document")
    overwrite: bool = switch("replace TO")


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A token file of any format: its ids, and where its documents must end besides behind end-of-text ids."""

    form: str
    ids: Ids
    """Of shape (tokens,), not loaded into memory."""
    bounds: NDArray[np.int64] | None = None
    """The end of every document of Megatron's, in ids, shape (documents,)."""


def open_foreign(path: Path) -> Foreign:
    """Open a token file of any of ``FORMATS``, recognized by what is beside it and by its header.

    Raises:
        UserError: it cannot be read, is cut off, or is of a version or type that is not known.
    """
    if not path.is_file():
        open_token_file(path)  # says what is there instead
    index = path.with_suffix(".idx")
    if index.exists():
        return _open_megatron(path, index)
    if sidecar_path(path).exists():
        return Foreign(form="dsgpt", ids=open_token_file(path).memmap())
    header = np.fromfile(path, dtype="<i4", count=LLMC_HEADER)
    if not len(header) or int(header[0]) not in LLMC_TYPES:
        return Foreign(form="nanogpt", ids=open_token_file(path).memmap())
    start, (version, dtype) = 4 * LLMC_HEADER, LLMC_TYPES[int(header[0])]
    width, tokens = np.dtype(dtype).itemsize, int(header[2:3].sum())
    if len(header) < LLMC_HEADER or header[1] != version or path.stat().st_size != start + width * tokens:
        raise UserError(
            f"{path}: has llm.c's magic number, but not version {version} with {tokens:,} ids of {width} bytes behind "
            f"{start:,} bytes; it is cut off, or of a later version"
        )
    return Foreign(form="llmc", ids=np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(tokens,)))


def _open_megatron(path: Path, index: Path) -> Foreign:
    with index.open("rb") as file:
        magic, version, code, sequences, bounds = _MEGATRON_HEAD.unpack(file.read(34).ljust(34, b"\0"))
    if (magic, version) != (_MEGATRON_MAGIC, 1) or code not in _MEGATRON_TYPES:
        raise UserError(f"{index}: is no index of Megatron-LM of version 1 with whole numbers; make it again")
    if index.stat().st_size < 34 + 12 * sequences + 8 * bounds or bounds < 1:
        raise UserError(f"{index}: is cut off: {sequences:,} sequences and {bounds:,} bounds need more bytes")
    dtype = np.dtype(_MEGATRON_TYPES[code])
    lengths = np.fromfile(index, dtype="<i4", count=sequences, offset=34)
    offsets = np.fromfile(index, dtype="<i8", count=sequences, offset=34 + 4 * sequences)
    documents = np.fromfile(index, dtype="<i8", count=bounds, offset=34 + 12 * sequences)
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
    whole = documents[0] == 0 and documents[-1] == sequences and not (np.diff(documents) < 0).any()
    if not (np.array_equal(offsets, ends[:-1] * dtype.itemsize) and whole and not (lengths < 0).any()):
        raise UserError(
            f"{index}: its sequences do not follow each other in {path.name}, or documents lack some of them"
        )
    if not ends[-1]:
        raise UserError(f"{index}: has no ids")
    if path.stat().st_size != (size := ends[-1] * dtype.itemsize):
        raise UserError(f"{path}: must have {size:,} bytes by {index.name}; it is cut off, or of another index")
    return Foreign(form="megatron", ids=np.memmap(path, dtype=dtype, mode="r"), bounds=ends[documents[1:]])


def documents_of(foreign: Foreign, *, eot_id: int) -> Iterator[Ids]:
    """The ids of each document, without end-of-text ids; empty documents are left out."""
    start = 0
    for end in map(int, [len(foreign.ids)] if foreign.bounds is None else foreign.bounds):
        for at in range(start, end, _CHUNK):
            for mark in (at + np.flatnonzero(foreign.ids[at : min(at + _CHUNK, end)] == eot_id)).tolist():
                if mark > start:
                    yield foreign.ids[start:mark]
                start = mark + 1
        if end > start:
            yield foreign.ids[start:end]
        start = end


def _write_foreign(path: Path, documents: Iterable[Ids], *, form: str, vocab_size: int, eot_id: int) -> None:
    """Write a file of another trainer under a temporary name, and rename it at the end."""
    code = 8 if form != "megatron" or vocab_size < 65_500 else 4  # as Megatron's own tools choose
    dtype, eot, sizes = np.dtype(_MEGATRON_TYPES[code]), [eot_id], list[int]()
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)
    with ExitStack() as left, partial.open("xb") as file:
        left.callback(partial.unlink, missing_ok=True)
        if form == "llmc":
            file.write(bytes(4 * LLMC_HEADER))
        for ids in documents:
            file.write(np.concatenate((eot, ids) if form == "llmc" else (ids, eot)).astype(dtype).tobytes())
            sizes.append(len(ids) + 1)
        lengths = np.array(sizes, dtype=np.int64)
        if form == "llmc":
            file.seek(0)
            file.write(np.array([_LLMC_MAGIC, _LLMC_VERSION, lengths.sum()], dtype="<i4").tobytes())
        file.flush()
        os.fsync(file.fileno())
        if form == "megatron":
            head = _MEGATRON_HEAD.pack(_MEGATRON_MAGIC, 1, code, len(lengths), len(lengths) + 1)
            offsets = (np.cumsum(lengths) - lengths) * dtype.itemsize
            values = [lengths.astype("<i4"), offsets.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")]
            path.with_suffix(".idx").write_bytes(b"".join([head, *(each.tobytes() for each in values)]))
        partial.replace(path)
    sync_directory(path.parent)


def _check(options: ConvertDataOptions, foreign: Foreign, problems: Problems) -> None:
    """Note what is missing or cannot be done, before anything is written."""
    source, target = options.source, options.target
    if foreign.form == options.form:
        problems.add(f"--to {options.form}: {source} is of this format; name another")
    if target.suffix != ".bin":
        problems.add(f"{target}: must end with .bin")
    elif (there := [path for path in _family(target) if os.path.lexists(path)]) and not options.overwrite:
        problems.add(f"{there[0]}: exists; replace it with --overwrite, or name another file")
    if target.resolve() == source.resolve():
        problems.add(f"{target}: is the file to read; name another")
    by_hand = options.vocab_size is not None and options.eot_id is not None
    if foreign.form == "dsgpt":
        if open_token_file(source).sidecar.eot_id is None:
            problems.add(f"{sidecar_path(source)}: names no end-of-text id; make the data again")
        if options.tokenizer or options.vocab_size is not None or options.eot_id is not None:
            problems.add(f"--tokenizer, --vocab_size and --eot_id: {sidecar_path(source)} says it; leave them out")
    elif bool(options.tokenizer) == by_hand:
        problems.add(
            f"--tokenizer: {source} ({foreign.form}) does not say which id ends a document; give the tokenizer that "
            "made its ids, such as gpt2, or else --vocab_size and --eot_id"
        )
    if options.form == "llmc" and len(foreign.ids) >= 1 << 31:
        problems.add(f"{source}: has {len(foreign.ids):,} ids, and a file of llm.c at most {(1 << 31) - 1:,}")


def _family(target: Path) -> list[Path]:
    """The file and what may stand beside it, by which its format is recognized."""
    return [target, *(target.with_suffix(end) for end in (".idx", ".json", ".index", ".sources.json", ".card.md"))]


def _tokenizer(name: str, folder: Path) -> TokenizerFacts:
    """Save the tokenizer ``name`` into ``folder``, where training looks for it, unless the same one is there.

    Raises:
        UserError: it cannot be read, or another one is there.
    """
    staged, place = folder / f".{TOKENIZER_FOLDER}.partial", folder / TOKENIZER_FOLDER
    remove(staged)
    if Path(name).is_dir():  # its files unchanged: their hash says what made the ids
        open_vocabulary(Path(name))
        folder.mkdir(parents=True, exist_ok=True)
        copy_tokenizer(Path(name), staged)
    else:
        save_loaded(name, staged)
    vocabulary = open_vocabulary(staged)
    if not os.path.lexists(place):
        staged.rename(place)
    elif open_vocabulary(place).sha256 != vocabulary.sha256:
        remove(staged)
        raise UserError(f"{place}: is another tokenizer than {name}; write TO into another folder")
    remove(staged)
    return TokenizerFacts(name=TOKENIZER_FOLDER if Path(name).is_dir() else name, sha256=vocabulary.sha256)


def main(words: Sequence[str] | None = None) -> None:
    """Convert what the command line names.

    Raises:
        UserError: mistakes of the command line; FROM cannot be read, or TO cannot hold it.
    """
    options, problems = read_options(ConvertDataOptions, words)
    problems.raise_if_any()
    source, target, form = options.source, options.target, options.form
    foreign = open_foreign(source)
    _check(options, foreign, problems)
    problems.raise_if_any()
    vocab_size, eot_id, facts = options.vocab_size, options.eot_id, None
    if foreign.form == "dsgpt":
        sidecar = open_token_file(source).sidecar
        vocab_size, eot_id = sidecar.vocab_size, sidecar.eot_id
    elif options.tokenizer:
        facts = _tokenizer(options.tokenizer, target.parent)
        vocabulary = open_vocabulary(target.parent / TOKENIZER_FOLDER)
        vocab_size, eot_id = vocabulary.size, vocabulary.eot_id
    assert vocab_size is not None and eot_id is not None  # _check refuses everything else
    if form in ("nanogpt", "llmc") and vocab_size > 1 << 16:
        raise UserError(f"--to {form}: has 2 bytes an id, too few for a vocabulary of {vocab_size:,}; take megatron")
    about: dict[str, int] = {"vocab_size": vocab_size, "eot_id": eot_id}
    count = tokens = 0

    def documents() -> Iterator[Ids]:
        nonlocal count, tokens
        with progress(total=foreign.ids.nbytes, description="converting", unit="B") as bar:
            for ids in documents_of(foreign, eot_id=eot_id):
                if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
                    raise UserError(f"{source}: document {count} has ids outside the vocabulary of {vocab_size:,}")
                yield ids
                count, tokens = count + 1, tokens + len(ids)
                bar.update(ids.nbytes)
        if not count:
            raise UserError(f"{source}: has no document")

    if form == "dsgpt":
        origin = f"{source.name}, a token file of {foreign.form}"
        with TokenFileWriter(target, **about, tokenizer=facts, source=origin) as writer:
            for ids in documents():
                writer.append(ids)
    else:
        _write_foreign(target, documents(), form=form, **about)
    beside = {"dsgpt": ".json", "megatron": ".idx"}.get(form, ".bin")
    for path in {*_family(target)} - {target, target.with_suffix(beside)}:
        path.unlink(missing_ok=True)  # of the file that it replaces
    print(f"{target}: {counted(count, 'document')} of {source} ({foreign.form}), as {form}")
    if foreign.bounds is None and tokens == len(foreign.ids):
        print(f"  its end-of-text id {eot_id} never occurs: is it one text, or did another tokenizer make the ids?")
    elif foreign.form == "llmc" and foreign.ids[0] != eot_id:
        print("  it begins within a document, as a later part of a set does: the rest of that is its first document")
    if form == "dsgpt":
        print(next_line(script_words("data_prep/verify.py", target)))
