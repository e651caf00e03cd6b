"""``dsgpt data verify``: reads token files whole, and compares them with their sidecars, their indexes and each other.

It also looks for evaluation texts in them (``contamination.py``), and describes files that agree in a data card.

Nothing but one document, numbers of constant size and 8 bytes a document are kept, the latter in a temporary file.
Imports no torch.
"""

import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.command_line import flag, read_options, whole
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import write_atomic
from dsgpt.common.text import counted, next_line, script_words
from dsgpt.data.addresses import LONGEST, decoded, vocabulary_of
from dsgpt.data.contamination import SHORTEST, Evaluation
from dsgpt.data.download import progress
from dsgpt.data.index import Entries, document_hash, index_path, open_index, read_sources, sources_path
from dsgpt.data.sources import own_source
from dsgpt.data.token_file import DTYPES, TokenFile, TokenFileError, open_token_file
from dsgpt.data.vocabulary import Vocabulary
from dsgpt.formats.tokenizer_files import TOKENIZER_FOLDER

DESCRIPTION = """\
Read token files, and compare hash, size, ids, documents and index with what preparation noted beside them. Of several
files, no document may be in two. Prints what a file that agrees holds, with the beginning of its text. Exit code 0:
all agree; 2: something differs, or cannot be read."""
EXAMPLES = """\
examples:
  .venv/bin/python data_prep/verify.py data/python-transformers/train.bin data/python-transformers/val.bin
  .venv/bin/python data_prep/verify.py data/python-transformers/train.bin --plot tokens.png --excerpt 200
  .venv/bin/python data_prep/verify.py data/mine/train.bin --against evaluation.jsonl --card CC-BY-4.0"""

CHUNK = 1 << 22
"""Ids that are read at once."""
BLOCK = 1 << 22
"""Document hashes of each file that are compared at once."""
BINS = 8
"""Bins of document lengths per factor of two."""
_NAMED = 3
"""Most documents that a line names."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The command line."""

    files: tuple[Path, ...] = flag(Path, "BIN", "token files", default=(), name="files", nargs="+")
    plot: Path | None = flag(
        Path, "FILE", "draw document lengths and token frequencies into FILE, a .png or .svg", default=None
    )
    against: tuple[Path, ...] = flag(
        Path,
        "PATH",
        "evaluation texts, files or folders: none may share a run of 13 words with a document (as in the GPT-3 paper)",
        default=(),
        nargs="+",
    )
    card: str | None = flag(
        str, "LICENCE", "write a data card, NAME.card.md, beside each file if all agree; LICENCE is that of the text"
    )
    excerpt: int = flag(whole(low=0), "N", "tokens of the beginning to show (default: %(default)s)", default=32)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a token file holds."""

    file: TokenFile
    frequencies: NDArray[np.int64]
    """How often each id occurs, from 0 to the largest, shape (ids,)."""
    hashes: NDArray[np.uint64]
    """A hash of the ids of each document, shape (documents,), on disk; none if the end-of-text id is unknown."""
    lengths: NDArray[np.int64]
    """Documents by length: element i counts those of at least 2**(i / BINS) tokens that no later element counts."""
    shortest: int
    """Tokens of the shortest document, with its end-of-text id; 0 if there is none."""
    longest: int
    """Those of the longest."""
    unended: int
    """Ids after the last end-of-text id."""
    of_index: tuple[str, ...]
    """What is wrong with the index."""
    uncompared: str
    """Why the texts were not compared with the hashes in the index; empty if they were."""


def read_contents(file: TokenFile, *, advance: Callable[[int], object] = lambda _: None) -> Contents:
    """Read ``file``, a few megabytes or a document at a time.

    Args:
        file: the token file.
        advance: gets the number of bytes read since its last call; in the end twice those of the file.
    """
    frequencies, lengths = np.zeros(0, dtype=np.int64), np.zeros(32 * BINS, dtype=np.int64)
    for ids in _chunks(file):
        counts = np.bincount(ids, minlength=len(frequencies))
        counts[: len(frequencies)] += frequencies
        frequencies = counts
        advance(ids.nbytes)
    shortest = longest = unended = 0
    entries, of_index = checked_index(file)
    vocabulary, uncompared = _comparable(file, entries)
    others: list[int] = []
    spool = tempfile.TemporaryFile()  # noqa: SIM115 - the memmap keeps it open
    for number, ids in enumerate(documents_of(file, entries)):
        advance(ids.nbytes)
        if ids[-1] != file.sidecar.eot_id:
            unended = len(ids)
            break
        if entries is not None and vocabulary is not None:
            if len(ids) > LONGEST:
                uncompared = f"document {number:,}, which has {len(ids):,} tokens"
            elif document_hash(decoded(vocabulary, ids[:-1]).encode()) != entries["hash"][number]:
                others.append(number)
        spool.write(hashlib.blake2b(ids.tobytes(), digest_size=8).digest())
        shortest, longest = min(shortest or len(ids), len(ids)), max(longest, len(ids))
        lengths[int(np.log2(len(ids)) * BINS)] += 1
    spool.flush()
    if others:
        what = f"{counted(len(others), 'document')} of {file.path.name} ({_some(others)})"
        of_index = (f"{index_path(file.path)}: has other hashes than the text of {what}; make the data again",)
    return Contents(
        file=file,
        frequencies=frequencies,
        hashes=np.memmap(spool, dtype="<u8", mode="r") if longest else np.zeros(0, dtype="<u8"),
        lengths=lengths,
        shortest=shortest,
        longest=longest,
        unended=unended,
        of_index=of_index,
        uncompared=uncompared,
    )


def _chunks(file: TokenFile) -> Iterator[NDArray[np.unsignedinteger]]:
    """The ids, read and not mapped: mapped pages would count as memory of this process."""
    dtype = np.dtype(DTYPES[file.sidecar.dtype])
    for start in range(0, file.tokens, CHUNK):
        yield np.fromfile(file.path, dtype=dtype, count=CHUNK, offset=start * dtype.itemsize)


def checked_index(file: TokenFile) -> tuple[Entries | None, tuple[str, ...]]:
    """The index of ``file``, if its documents end with end-of-text ids; otherwise a line that says what is wrong."""
    if file.sidecar.eot_id is None or not index_path(file.path).exists():
        return None, ()
    try:
        entries = open_index(file)
    except TokenFileError as error:
        return None, error.problems
    ids, stop = file.memmap(), 0
    for first in range(0, len(entries), BLOCK):
        tokens = entries["tokens"][first : first + BLOCK]
        stops = stop + np.cumsum(tokens, dtype=np.int64)
        if wrong := np.flatnonzero((tokens == 0) | (ids[stops - 1] != file.sidecar.eot_id)).tolist():
            number, end = first + wrong[0], stops[wrong[0]] - 1
            what = f"document {number:,} ends at token {end:,}, which is no end-of-text id of its own"
            return None, (f"{index_path(file.path)}: {what}; prepare again with --overwrite",)
        stop = int(stops[-1])
    return entries, ()


def _comparable(file: TokenFile, entries: Entries | None) -> tuple[Vocabulary | None, str]:
    """The tokenizer whose texts can be compared with the hashes in the index, or why there is none.

    A byte-level tokenizer gives every text back, unless it normalizes the text, or adds or swallows spaces.
    """
    if entries is None:
        return None, "there is no index of it"
    try:
        vocabulary = vocabulary_of(file)
    except UserError as error:
        return None, str(error)
    state = json.loads(vocabulary.tokenizer.to_str())
    exact = state["normalizer"] is None and (state["decoder"] or {}).get("type") == "ByteLevel"
    exact &= '"add_prefix_space": true' not in json.dumps(state["pre_tokenizer"])
    if not exact or any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return None, "its tokenizer does not give every text back unchanged"
    return vocabulary, ""


def documents_of(file: TokenFile, entries: Entries | None) -> Iterator[NDArray[np.unsignedinteger]]:
    """The ids of each document with its end-of-text id, and then those without one.

    Args:
        file: the token file; nothing is yielded if its end-of-text id is unknown.
        entries: its index, by which texts may hold end-of-text tokens (``--special_tokens_in_text``).
    """
    dtype = np.dtype(DTYPES[file.sidecar.dtype])
    with file.path.open("rb", buffering=CHUNK * dtype.itemsize) as data:
        for tokens in _lengths(file, entries):
            yield np.frombuffer(data.read(tokens * dtype.itemsize), dtype=dtype)


def _lengths(file: TokenFile, entries: Entries | None) -> Iterator[int]:
    if file.sidecar.eot_id is None:
        return
    start = 0
    if entries is not None:
        for first in range(0, len(entries), BLOCK):
            yield from entries["tokens"][first : first + BLOCK].tolist()
        return
    for before, ids in zip(itertools.count(0, CHUNK), _chunks(file)):
        for end in (before + np.flatnonzero(ids == file.sidecar.eot_id) + 1).tolist():
            yield end - start
            start = end
    if start < file.tokens:
        yield file.tokens - start


def faults_of(contents: Contents) -> Iterator[str]:
    """A line for everything in which the ids differ from the sidecar or the index, or are no whole documents."""
    path, sidecar = contents.file.path, contents.file.sidecar
    largest, documents = len(contents.frequencies) - 1, len(contents.hashes)
    if sidecar.vocab_size is not None and largest >= sidecar.vocab_size:
        yield f"{path}: its largest id is {largest}, but its sidecar says a vocabulary of {sidecar.vocab_size}"
    card = path.with_suffix(".card.md")
    if sidecar.sha256 and card.is_file() and sidecar.sha256 not in card.read_text(encoding="utf-8", errors="replace"):
        yield f"{card}: describes another file: remove it, and make it again with --card"
    if contents.unended:
        yield (
            f"{path}: its last {counted(contents.unended, 'id')} belong to a document without end: the end-of-text id "
            f"{sidecar.eot_id} must be the last; make the data again"
        )
    if None not in (sidecar.eot_id, sidecar.documents) and documents + bool(contents.unended) != sidecar.documents:
        yield (
            f"{path}: has {documents:,} end-of-text ids, but its sidecar says {sidecar.documents:,} documents; make "
            "the data again"
        )
    if contents.shortest == 1:
        yield f"{path}: has an empty document, an end-of-text id that ends nothing; make the data again"
    yield from contents.of_index


def shared_documents(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> list[int]:
    """The numbers of the documents of ``other`` whose hash is in ``one``, compared a block at a time."""
    found: list[int] = []
    for at in range(0, len(other), BLOCK):
        block = np.array(other[at : at + BLOCK])
        shared = np.zeros(len(block), dtype=bool)
        for start in range(0, len(one), BLOCK):
            shared |= np.isin(block, one[start : start + BLOCK])
        found += (at + np.flatnonzero(shared)).tolist()
    return found


def _incomparable(one: Contents, other: Contents) -> str:
    """Why the documents of two files cannot be compared; empty if they can."""
    if not (len(one.hashes) and len(other.hashes)):
        return "nothing says where the documents of both end"
    sidecars = (one.file.sidecar, other.file.sidecar)
    makers = {(each.tokenizer and each.tokenizer.sha256, each.dtype) for each in sidecars}
    return "other tokenizers made their ids" if len(makers) > 1 else ""


def _overlap(one: Contents, other: Contents) -> Iterator[str]:
    """A line if a document is in both files."""
    if why := _incomparable(one, other):
        print(f"warning: {one.file.path} and {other.file.path}: not compared, because {why}", file=sys.stderr)
    elif shared := shared_documents(one.hashes, other.hashes):
        yield (
            f"{other.file.path}: shares {counted(len(shared), 'document')} ({_some(shared)}) with {one.file.path}: "
            "validation would measure what training has read; remove copies from the text, and prepare again"
        )


def _some(numbers: Sequence[int]) -> str:
    """``number 1, 5, 7, ...``."""
    return f"number {', '.join(f'{number:,}' for number in numbers[:_NAMED])}{', ...' if numbers[_NAMED:] else ''}"


def _texts_of(file: TokenFile) -> Iterator[str]:
    """The text of each document, without its end-of-text token.

    Raises:
        UserError: nothing says which tokenizer made the ids.
    """
    vocabulary = vocabulary_of(file)
    with progress(total=file.size_bytes, description=f"comparing {file.path.name}", unit="B") as bar:
        for ids in documents_of(file, checked_index(file)[0]):
            yield decoded(vocabulary, ids[:-1])
            bar.update(ids.nbytes)


def _contamination(file: TokenFile, against: Sequence[Path]) -> Iterator[str]:
    """A line for each of the evaluation sets ``against`` of which the file has texts; prints what was compared.

    Raises:
        UserError: the texts, or the text of the file, cannot be read.
    """
    sets = {path: Evaluation() for path in against}
    for path, texts in sets.items():
        source = own_source((path,), text_key="text", output_dir=path / TOKENIZER_FOLDER)
        texts.add(document.text for _, document in source.documents())
    for number, text in enumerate(_texts_of(file)):
        for texts in sets.values():
            texts.read(text, document=number)
    for path, texts in sets.items():
        short = f"; {texts.too_short:,} have fewer than {SHORTEST} words" if texts.too_short else ""
        print(f"{file.path}: compared with {counted(texts.texts, 'text')} of {path}{short}")
        for number, (words, document) in itertools.islice(texts.found.items(), 1):
            yield (
                f"{file.path}: has {len(texts.found):,} of the {texts.texts:,} texts of {path}, such as {number:,} in "
                f"document {document:,} ({words!r}): leave such documents out, and prepare again"
            )


def _card(contents: Contents, options: VerifyOptions, *, compared: Sequence[Path]) -> str:
    """The data card of a file with which everything agrees."""
    file, sidecar = contents.file, contents.file.sidecar
    files = "not noted"
    if sources_path(file.path).exists():
        sources = read_sources(file.path)
        files = f"{counted(len(sources), 'file')}, {sum(each.size or 0 for each in sources):,} bytes"
    maker = sidecar.tokenizer
    others = ", ".join(path.name for path in compared) or "no other file"
    facts = {
        "source": sidecar.source or "not noted",
        "source files": files,
        "licence": options.card,
        "documents": f"{len(contents.hashes):,}, of {contents.shortest:,} to {contents.longest:,} tokens",
        "tokens": f"{file.tokens:,}, {sidecar.dtype}",
        "ids": f"{np.count_nonzero(contents.frequencies):,} of {sidecar.vocab_size or 0:,} are used",
        "tokenizer": f"{maker.name}, sha256 {maker.sha256}" if maker else "not noted",
        "end-of-text id": f"{sidecar.eot_id}",
        "sha256": sidecar.sha256 or "not noted",
        "no document is also in": others,
        "no run of 13 words is also in": ", ".join(path.name for path in options.against) or "not compared",
    }
    rows = "".join(f"| {name} | {str(value).replace('|', '&#124;')} |\n" for name, value in facts.items())
    return (
        f"# {file.path.name}\n\nBy `dsgpt data verify --card`, which read the whole file.\n\n| | |\n|---|---|\n{rows}"
    )


def _verified(path: Path, options: VerifyOptions, problems: Problems) -> Contents | None:
    """The contents of a file, printed; None if it cannot be read. What is wrong with it is added to ``problems``."""
    try:
        file = open_token_file(path)
    except TokenFileError as error:
        problems.add(*error.problems)
        return None
    sha256 = ""
    with progress(total=3 * file.size_bytes, description=f"reading {path.name}", unit="B") as bar:
        try:
            sha256 = file.verified_sha256(bar.update)
        except TokenFileError as error:
            problems.add(*error.problems)
        contents = read_contents(file, advance=bar.update)
    problems.add(*(faults := [*faults_of(contents)]))
    if not sha256 or faults:
        return contents
    sidecar, documents = file.sidecar, len(contents.hashes)
    of = f" of {sidecar.vocab_size:,}" if sidecar.vocab_size else ""
    many = "unknown: nothing beside the file says which id ends one"
    if sidecar.eot_id is not None:
        mean = f", {file.tokens / documents:,.0f} on average" if documents else ""
        many = f"{documents:,}, of {contents.shortest:,} to {contents.longest:,} tokens{mean}"
    print(f"{path}: {counted(file.tokens, 'token')}, {sidecar.dtype}, sha256 {sha256}")
    print(f"  documents  {many}")
    print(
        f"  ids        {np.count_nonzero(contents.frequencies):,}{of} are used, up to {len(contents.frequencies) - 1:,}"
    )
    print(f"  source     {sidecar.source or 'not noted'}")
    print(f"  texts      {contents.uncompared and 'not compared: '}{contents.uncompared or 'as the index notes them'}")
    if options.excerpt:
        try:
            begins = repr(decoded(vocabulary_of(file), file.memmap()[: options.excerpt]))
        except UserError as error:
            begins = f"unknown: {error}"
        print(f"  begins     {begins}", flush=True)
    return contents


def main(words: Sequence[str] | None = None, *, draw: Callable[[Sequence[Contents], Path], None]) -> None:
    """Read every file that the command line names, and say what it holds.

    Args:
        words: the command line; by default that of this process.
        draw: draws the picture of ``--plot``.

    Raises:
        UserError: with a line for everything that cannot be read, or differs.
    """
    options, problems = read_options(VerifyOptions, words, description=DESCRIPTION, epilog=EXAMPLES)
    if options.plot and options.plot.suffix not in (".png", ".svg"):
        problems.add(f"--plot {options.plot}: must end with .png or .svg")
    problems.raise_if_any()
    read = [contents for path in dict.fromkeys(options.files) if (contents := _verified(path, options, problems))]
    for one, other in itertools.combinations(read, 2):
        problems.add(*_overlap(one, other))
    for path in options.against:
        if not path.exists():
            problems.add(f"--against {path}: there is no such file or folder")
    if options.against and not problems:
        for each in read:
            problems.add(*_contamination(each.file, options.against))
    if options.plot and read:
        draw(read, options.plot)
        print(f"wrote {options.plot}")
    problems.raise_if_any()
    for each in read if options.card else ():
        card = each.file.path.with_suffix(".card.md")
        compared = [other.file.path for other in read if other is not each and not _incomparable(each, other)]
        text = _card(each, options, compared=compared)
        write_atomic(card, text.encode())
        print(f"wrote {card}")
    noted = [each.file for each in read if each.file.sidecar.sha256]
    found = f"{len(noted)} as noted, of the rest nothing is noted" if noted else "nothing is noted"
    print(
        f"checked {counted(len(read), 'file')}: {'all is as noted' if len(noted) == len(read) else found} beside them"
    )
    print(next_line(script_words("src/gpt2.py", "--train_data_path", read[0].file.path, "--dry_run")))
