"""``dsgpt data verify``: reads token files whole, and compares them with their sidecars, their indexes and each other.

It also looks for evaluation texts in them (``contamination.py``), and describes files that agree in a data card.

Keeps one document in memory, and about 40 bytes a document. Imports no torch.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from dsgpt.common.command_line import COUNT, flag, read_options, value
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import write_atomic
from dsgpt.common.text import counted, next_line, script_words
from dsgpt.data.addresses import LONGEST, decoded, vocabulary_of
from dsgpt.data.contamination import SHORTEST, Evaluation, resembling
from dsgpt.data.download import progress
from dsgpt.data.index import Entries, document_hash, index_path, open_index, read_sources, sources_path
from dsgpt.data.sources import own_source
from dsgpt.data.token_file import DTYPES, TokenFile, TokenFileError, open_token_file
from dsgpt.data.vocabulary import Vocabulary
from dsgpt.formats.tokenizer_files import TOKENIZER_FOLDER

CHUNK = 1 << 22
"""Ids that are read at once."""
_NAMED = 3
"""Most documents that a line names."""
_CHANGING = ('"add_prefix_space": true', "Removed", "Whitespace", "CharDelimiter", "Metaspace", "Bert")
"""Settings and kinds of splitters that add something to a text, or drop some of it."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The command line.

    Read token files, and compare hash, size, ids, documents, texts and index with what preparation noted beside them.
    Of several files, no document may be in two. Prints what a file that agrees holds, with the beginning of its text.
    Exit code 0: all agree; 2: something differs, or cannot be read.

    Examples:
      .venv/bin/python data_prep/verify.py data/python-transformers/train.bin data/python-transformers/val.bin
      .venv/bin/python data_prep/verify.py data/python-transformers/train.bin --plot tokens.png --excerpt 200
      .venv/bin/python data_prep/verify.py data/mine/train.bin --against evaluation.jsonl --card CC-BY-4.0
    """

    files: tuple[Path, ...] = flag(Path, "BIN", "token files", default=(), name="files", nargs="+")
    plot: Path | None = flag(Path, "FILE", "draw document lengths and token frequencies into FILE, a .png or .svg")
    against: tuple[Path, ...] = flag(Path, "PATH", default=(), nargs="+")
    """evaluation texts, files or folders: none may share a run of 13 words with a document (as in the GPT-3 paper)"""
    near_duplicates: float | None = flag(
        value(float, accepts=lambda number: 0.5 <= number <= 0.95, must_be="a number from 0.5 to 0.95"), "SHARE"
    )
    """look for documents that have so much in common with an earlier one (needs datasketch); of several files, none may
    have one of another"""
    card: str | None = flag(str, "LICENCE")
    """write a data card, NAME.card.md, beside each file if all agree; LICENCE is that of the text"""
    excerpt: int = flag(COUNT, "N", "tokens of the beginning to show (default: %(default)s)", default=32)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a token file holds."""

    file: TokenFile
    frequencies: NDArray[np.int64]
    """How often each id occurs, from 0 to the largest, shape (ids,)."""
    sizes: NDArray[np.int64]
    """Tokens of each document with its end-of-text id, shape (documents,); none if that id is unknown."""
    hashes: NDArray[np.uint64]
    """A hash of the ids of each document, same shape."""
    of_index: tuple[str, ...]
    """What is wrong with the index."""
    uncompared: str
    """Why the texts were not compared with the hashes in the index; empty if they were."""

    @property
    def documents(self) -> str:
        """``5, of 2 to 21 tokens``."""
        span = f", of {self.sizes.min():,} to {self.sizes.max():,} tokens" if len(self.sizes) else ""
        return f"{len(self.sizes):,}{span}"


def read_contents(file: TokenFile, *, advance: Callable[[int], object] = lambda _: None) -> Contents:
    """Read ``file``, a few megabytes or a document at a time.

    Args:
        file: the token file.
        advance: gets the number of bytes read since its last call; in the end twice those of the file.
    """
    frequencies, dtype = np.zeros(0, dtype=np.int64), np.dtype(DTYPES[file.sidecar.dtype])
    found, of_index, entries = [frequencies], tuple[str, ...](), None
    for start in range(0, file.tokens, CHUNK):  # read and not mapped: mapped pages would count as memory
        ids = np.fromfile(file.path, dtype=dtype, count=CHUNK, offset=start * dtype.itemsize)
        counts = np.bincount(ids, minlength=len(frequencies))
        counts[: len(frequencies)] += frequencies
        frequencies = counts
        found.append(start + np.flatnonzero(ids == file.sidecar.eot_id) + 1)
        advance(ids.nbytes)
    stops = np.concatenate(found)
    try:
        if len(stops) and index_path(file.path).exists():
            entries = _checked_index(file, stops)
            stops = np.cumsum(entries["tokens"], dtype=np.int64)
    except TokenFileError as error:
        of_index = error.problems
    sizes, others = np.diff(stops, prepend=0), list[int]()
    hashes, (vocabulary, uncompared) = np.empty(len(sizes), dtype=np.uint64), _comparable(file, entries)
    for number, ids in enumerate(documents_of(file, sizes)):
        advance(ids.nbytes)
        hashes[number] = int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
        if entries is not None and vocabulary is not None:
            if len(ids) > LONGEST:
                uncompared = f"document {number:,}, which has {len(ids):,} tokens"
            elif document_hash(decoded(vocabulary, ids[:-1]).encode()) != entries["hash"][number]:
                others.append(number)
    if others:
        what = f"{counted(len(others), 'document')} of {file.path.name} ({_some(others)})"
        of_index = (f"{index_path(file.path)}: has other hashes than the text of {what}; make the data again",)
    return Contents(
        file=file, frequencies=frequencies, sizes=sizes, hashes=hashes, of_index=of_index, uncompared=uncompared
    )


def _checked_index(file: TokenFile, stops: NDArray[np.int64]) -> Entries:
    """The index of ``file``, whose end-of-text ids are before the tokens ``stops``; texts may hold some of these ids.

    Raises:
        TokenFileError: it is another file's, or a document of it ends elsewhere.
    """
    entries = open_index(file)
    ends = np.cumsum(entries["tokens"], dtype=np.int64)
    if wrong := np.flatnonzero(~np.isin(ends, stops) | (entries["tokens"] == 0)).tolist():
        number, end = wrong[0], ends[wrong[0]]
        there = next(iter(stops[stops > end - entries["tokens"][number]]), file.tokens)
        raise TokenFileError(
            f"{index_path(file.path)}: document {number:,} ends at token {end:,}, in {file.path.name} at {there:,}; "
            "prepare again with --overwrite"
        )
    return entries


def _comparable(file: TokenFile, entries: Entries | None) -> tuple[Vocabulary | None, str]:
    """The tokenizer whose texts can be compared with the hashes in the index, or why there is none.

    A byte-level tokenizer with all bytes gives every text back, unless it normalizes the text, or adds or drops spaces.
    """
    if entries is None:
        return None, "there is no index of it"
    try:
        vocabulary = vocabulary_of(file)
    except UserError as error:
        return None, str(error)
    state = json.loads(vocabulary.tokenizer.to_str())
    exact = state["normalizer"] is None and (state["decoder"] or {}).get("type") == "ByteLevel"
    exact &= not any(word in json.dumps(state["pre_tokenizer"]) for word in _CHANGING)
    exact &= vocabulary.tokenizer.get_vocab().keys() >= set(ByteLevel.alphabet())
    if not exact or any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return None, "its tokenizer does not give every text back unchanged"
    return vocabulary, ""


def documents_of(file: TokenFile, sizes: NDArray[np.int64]) -> Iterator[NDArray[np.unsignedinteger]]:
    """The ids of each document of ``file``, with its end-of-text id."""
    dtype = np.dtype(DTYPES[file.sidecar.dtype])
    with file.path.open("rb", buffering=CHUNK) as data:
        for tokens in map(int, sizes):
            yield np.frombuffer(data.read(tokens * dtype.itemsize), dtype=dtype)


def faults_of(contents: Contents) -> Iterator[str]:
    """A line for everything in which the ids differ from the sidecar or the index, or are no whole documents."""
    path, sidecar, sizes = contents.file.path, contents.file.sidecar, contents.sizes
    if sidecar.vocab_size is not None and len(contents.frequencies) > sidecar.vocab_size:
        largest = len(contents.frequencies) - 1
        yield f"{path}: its largest id is {largest}, but its sidecar says a vocabulary of {sidecar.vocab_size}"
    card = path.with_suffix(".card.md")
    if sidecar.sha256 and card.is_file() and sidecar.sha256 not in card.read_text(encoding="utf-8", errors="replace"):
        yield f"{card}: describes another file: remove it, and make it again with --card"
    unended = contents.file.tokens - int(sizes.sum()) if sidecar.eot_id is not None else 0
    if unended:
        yield (
            f"{path}: its last {counted(unended, 'id')} belong to a document without end: the end-of-text id "
            f"{sidecar.eot_id} must be the last; make the data again"
        )
    if None not in (sidecar.eot_id, sidecar.documents) and len(sizes) + bool(unended) != sidecar.documents:
        yield (
            f"{path}: has {len(sizes):,} end-of-text ids, but its sidecar says {sidecar.documents:,} documents; make "
            "the data again"
        )
    if (sizes == 1).any():
        yield f"{path}: has an empty document, an end-of-text id that ends nothing; make the data again"
    yield from contents.of_index


def _incomparable(one: Contents, other: Contents) -> str:
    """Why the documents of two files cannot be compared; empty if they can."""
    if not (len(one.hashes) and len(other.hashes)):
        return "nothing says where the documents of both end"
    makers = {(each.tokenizer and each.tokenizer.sha256, each.dtype) for each in (one.file.sidecar, other.file.sidecar)}
    return "other tokenizers made their ids" if len(makers) > 1 else ""


def _overlap(one: Contents, other: Contents) -> Iterator[str]:
    """A line if a document is in both files."""
    if why := _incomparable(one, other):
        print(f"warning: {one.file.path} and {other.file.path}: not compared, because {why}", file=sys.stderr)
    elif shared := np.flatnonzero(np.isin(other.hashes, one.hashes)).tolist():
        yield (
            f"{other.file.path}: shares {counted(len(shared), 'document')} ({_some(shared)}) with {one.file.path}: "
            "validation would measure what training has read; remove copies from the text, and prepare again"
        )


def _some(numbers: Sequence[int]) -> str:
    """``number 1, 5, 7, ...``."""
    return f"number {', '.join(f'{number:,}' for number in numbers[:_NAMED])}{', ...' if numbers[_NAMED:] else ''}"


def _contamination(contents: Contents, against: Sequence[Path]) -> Iterator[str]:
    """A line for each of the evaluation sets ``against`` of which the file has texts; prints what was compared.

    Raises:
        UserError: the texts, or the text of the file, cannot be read.
    """
    file, sets = contents.file, {path: Evaluation() for path in against}
    vocabulary = vocabulary_of(file)
    for path, texts in sets.items():
        source = own_source((path,), text_key="text", output_dir=path / TOKENIZER_FOLDER)
        texts.add(document.text for _, document in source.documents())
    with progress(total=file.size_bytes, description=f"comparing {file.path.name}", unit="B") as bar:
        for number, ids in enumerate(documents_of(file, contents.sizes)):
            text = decoded(vocabulary, ids[:-1])
            for texts in sets.values():
                texts.read(text, document=number)
            bar.update(ids.nbytes)
    for path, texts in sets.items():
        short = f"; {texts.too_short:,} have fewer than {SHORTEST} words" if texts.too_short else ""
        print(f"{file.path}: compared with {counted(texts.texts, 'text')} of {path}{short}")
        for number, (words, document) in itertools.islice(texts.found.items(), 1):
            yield (
                f"{file.path}: has {len(texts.found):,} of the {texts.texts:,} texts of {path}, such as {number:,} in "
                f"document {document:,} ({words!r}): leave such documents out, and prepare again"
            )


def _near_duplicates(read: Sequence[Contents], threshold: float) -> Iterator[str]:
    """A line if documents resemble earlier ones of another file; prints how many resemble one, and in how many groups.

    Raises:
        UserError: datasketch is not installed.
    """
    if why := next(filter(None, (_incomparable(read[0], each) for each in read)), ""):
        yield f"--near_duplicates: {why}"
        return
    counts = [len(each.sizes) for each in read]
    firsts, total = np.cumsum([0, *counts]), sum(counts)
    documents = (ids[:-1] for each in read for ids in documents_of(each.file, each.sizes))
    with progress(documents, total=total, description="comparing", unit=" documents") as bar:
        found = [*resembling(bar, threshold=threshold)]
    first_of = dict[int, int]()
    """The first document of the group of each."""
    for number, earlier, _ in found:
        first_of[number] = first_of.get(earlier, earlier)

    def place(number: int) -> tuple[int, str]:
        file = int(np.searchsorted(firsts, number, side="right")) - 1
        return file, f"document {number - firsts[file]:,} of {read[file].file.path}"

    groups = counted(len(set(first_of.values())), "group")
    print(f"near-duplicates: {len(found):,} of {counted(total, 'document')} resemble an earlier one, in {groups}")
    for number, earlier, similar in found[:_NAMED]:
        print(f"  {place(number)[1]}: {similar:.2f} in common with {place(earlier)[1]}")
    if across := [number for number, first in first_of.items() if place(number)[0] != place(first)[0]]:
        yield (
            f"{place(across[0])[1]}: resembles {place(first_of[across[0]])[1]}, as {len(across):,} in all do one of "
            "another file: validation would measure what training has read; remove them, and prepare again"
        )


def _card(contents: Contents, options: VerifyOptions, *, compared: Sequence[Path]) -> str:
    """The data card of a file with which everything agrees."""
    file, sidecar = contents.file, contents.file.sidecar
    files = "not noted"
    if sources_path(file.path).exists():
        sources = read_sources(file.path)
        files = f"{counted(len(sources), 'file')}, {sum(each.size or 0 for each in sources):,} bytes"
    maker = sidecar.tokenizer
    facts = {
        "source": sidecar.source or "not noted",
        "source files": files,
        "licence": options.card,
        "documents": contents.documents,
        "tokens": f"{file.tokens:,}, {sidecar.dtype}",
        "ids": f"{np.count_nonzero(contents.frequencies):,} of {sidecar.vocab_size or 0:,} are used",
        "tokenizer": f"{maker.name}, sha256 {maker.sha256}" if maker else "not noted",
        "end-of-text id": f"{sidecar.eot_id}",
        "sha256": sidecar.sha256 or "not noted",
        "no document is also in": ", ".join(path.name for path in compared) or "no other file",
        "no run of 13 words is also in": ", ".join(path.name for path in options.against) or "not compared",
    }
    rows = "".join(f"| {name} | {str(value).replace('|', '&#124;')} |\n" for name, value in facts.items())
    about = "By `dsgpt data verify --card`, which read the whole file."
    return f"# {file.path.name}\n\n{about}\n\n| | |\n|---|---|\n{rows}"


def _verified(path: Path, options: VerifyOptions, problems: Problems) -> Contents | None:
    """The contents of a file, printed; None if it cannot be read. What is wrong with it is added to ``problems``."""
    try:
        file = open_token_file(path)
    except TokenFileError as error:
        problems.add(*error.problems)
        return None
    sha256 = ""
    with progress(total=3 * file.size_bytes, description=f"reading {path.name}", unit="B") as bar:
        with problems.collect():
            sha256 = file.verified_sha256(bar.update)
        contents = read_contents(file, advance=bar.update)
    problems.add(*(faults := [*faults_of(contents)]))
    if not sha256 or faults:
        return contents
    sidecar, sizes, used = file.sidecar, contents.sizes, np.count_nonzero(contents.frequencies)
    of = f" of {sidecar.vocab_size:,}" if sidecar.vocab_size else ""
    many = "unknown: nothing beside the file says which id ends one"
    if sidecar.eot_id is not None:
        many = contents.documents + (f", {file.tokens / len(sizes):,.0f} on average" if len(sizes) else "")
    print(f"{path}: {counted(file.tokens, 'token')}, {sidecar.dtype}, sha256 {sha256}")
    print(f"  documents  {many}")
    print(f"  ids        {used:,}{of} are used, up to {len(contents.frequencies) - 1:,}")
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
    options, problems = read_options(VerifyOptions, words)
    if options.plot and options.plot.suffix not in (".png", ".svg"):
        problems.add(f"--plot {options.plot}: must end with .png or .svg")
    problems.raise_if_any()
    read = [contents for path in dict.fromkeys(options.files) if (contents := _verified(path, options, problems))]
    for one, other in itertools.combinations(read, 2):
        problems.add(*_overlap(one, other))
    missing = [path for path in options.against if not path.exists()]
    problems.add(*(f"--against {path}: there is no such file or folder" for path in missing))
    if options.against and not problems:
        for each in read:
            problems.add(*_contamination(each, options.against))
    if options.near_duplicates and not problems:
        problems.add(*_near_duplicates(read, options.near_duplicates))
    if options.plot and read:
        draw(read, options.plot)
        print(f"wrote {options.plot}")
    problems.raise_if_any()
    for each in read if options.card else ():
        card = each.file.path.with_suffix(".card.md")
        compared = [other.file.path for other in read if other is not each and not _incomparable(each, other)]
        write_atomic(card, _card(each, options, compared=compared).encode())
        print(f"wrote {card}")
    noted = sum(each.file.sidecar.sha256 is not None for each in read)
    some = f"{noted} as noted, of the rest nothing is noted" if noted else "nothing is noted"
    print(f"checked {counted(len(read), 'file')}: {'all is as noted' if noted == len(read) else some} beside them")
    print(next_line(script_words("src/gpt2.py", "--train_data_path", read[0].file.path, "--dry_run")))
