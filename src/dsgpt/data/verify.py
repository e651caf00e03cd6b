"""``dsgpt data verify``: reads token files whole, and compares them with their sidecars, their indexes and each other.

It also looks for evaluation texts in them (``contamination.py``), and describes files that agree in a data card.

Nothing but numbers of constant size and 8 bytes a document are kept, the latter in a temporary file. Imports no torch.
"""

import hashlib
import itertools
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
from dsgpt.data.contamination import SHORTEST, Evaluation
from dsgpt.data.download import progress
from dsgpt.data.exchange import Foreign, documents_of
from dsgpt.data.index import index_path, open_index, read_sources, sources_path
from dsgpt.data.sources import own_source
from dsgpt.data.token_file import DTYPES, TokenFile, TokenFileError, open_token_file
from dsgpt.data.vocabulary import Vocabulary, open_vocabulary
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
    """What a token file holds, read from its ids alone."""

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


def read_contents(file: TokenFile, *, advance: Callable[[int], object] = lambda _: None) -> Contents:
    """Read ``file`` once, a few megabytes at a time.

    Args:
        file: the token file.
        advance: gets the number of bytes read since its last call.
    """
    frequencies, lengths = np.zeros(0, dtype=np.int64), np.zeros(32 * BINS, dtype=np.int64)
    shortest = longest = begun = 0
    spool, digest = tempfile.TemporaryFile(), hashlib.blake2b(digest_size=8)  # noqa: SIM115 - the memmap keeps it open
    for ids in _chunks(file):
        counts = np.bincount(ids, minlength=len(frequencies))
        counts[: len(frequencies)] += frequencies
        frequencies, first = counts, 0
        for end in np.flatnonzero(ids == file.sidecar.eot_id) + 1 if file.sidecar.eot_id is not None else ():
            digest.update(ids[first:end].tobytes())
            spool.write(digest.digest())
            digest, tokens, begun, first = hashlib.blake2b(digest_size=8), begun + int(end) - first, 0, int(end)
            shortest, longest = min(shortest or tokens, tokens), max(longest, tokens)
            lengths[int(np.log2(tokens) * BINS)] += 1
        digest.update(ids[first:].tobytes())
        begun += len(ids) - first
        advance(ids.nbytes)
    spool.flush()
    documents = int(lengths.sum())
    return Contents(
        file=file,
        frequencies=frequencies,
        hashes=np.memmap(spool, dtype="<u8", mode="r") if documents else np.zeros(0, dtype="<u8"),
        lengths=lengths,
        shortest=shortest,
        longest=longest,
        unended=begun if file.sidecar.eot_id is not None else 0,
    )


def _chunks(file: TokenFile) -> Iterator[NDArray[np.unsignedinteger]]:
    """The ids, read and not mapped: mapped pages would count as memory of this process."""
    dtype = np.dtype(DTYPES[file.sidecar.dtype])
    for start in range(0, file.tokens, CHUNK):
        yield np.fromfile(file.path, dtype=dtype, count=CHUNK, offset=start * dtype.itemsize)


def faults_of(contents: Contents) -> Iterator[str]:
    """A line for everything in which the ids differ from the sidecar or the index, or are no whole documents."""
    path, sidecar = contents.file.path, contents.file.sidecar
    largest, documents = len(contents.frequencies) - 1, len(contents.hashes)
    if sidecar.vocab_size is not None and largest >= sidecar.vocab_size:
        yield f"{path}: its largest id is {largest}, but its sidecar says a vocabulary of {sidecar.vocab_size}"
    card = path.with_suffix(".card.md")
    if sidecar.sha256 and card.is_file() and sidecar.sha256 not in card.read_text(encoding="utf-8", errors="replace"):
        yield f"{card}: describes another file: remove it, and make it again with --card"
    if sidecar.eot_id is None:
        return
    if sidecar.documents is not None and documents > sidecar.documents and _ends_are_of_index(contents.file):
        return  # texts hold end-of-text tokens: --special_tokens_in_text
    if contents.unended:
        yield (
            f"{path}: its last {counted(contents.unended, 'id')} belong to a document without end: the end-of-text id "
            f"{sidecar.eot_id} must be the last; make the data again"
        )
    if sidecar.documents is not None and documents + bool(contents.unended) != sidecar.documents:
        yield (
            f"{path}: has {documents:,} end-of-text ids, but its sidecar says {sidecar.documents:,} documents; make "
            "the data again"
        )
    if contents.shortest == 1:
        yield f"{path}: has an empty document, an end-of-text id that ends nothing; make the data again"
    if index_path(path).exists():
        try:
            entries = open_index(contents.file)
        except TokenFileError as error:
            yield from error.problems
            return
        yield from _index_faults(contents.file, entries["tokens"])


def _ends_are_of_index(file: TokenFile) -> bool:
    """Whether there is an index, and each of its documents ends with an end-of-text id, the last of them the file."""
    try:
        ends = np.cumsum(open_index(file)["tokens"], dtype=np.int64) - 1
    except TokenFileError:
        return False
    for start, ids in zip(itertools.count(0, CHUNK), _chunks(file)):
        first, after = np.searchsorted(ends, [start, start + CHUNK])
        if (ids[ends[first:after] - start] != file.sidecar.eot_id).any():
            return False
    return True


def _index_faults(file: TokenFile, tokens: NDArray[np.uint32]) -> Iterator[str]:
    """A line if the documents of the index do not end where those of the file do."""
    number = end = 0
    for start, ids in zip(itertools.count(0, CHUNK), _chunks(file)):
        ends = start + np.flatnonzero(ids == file.sidecar.eot_id) + 1
        noted = end + np.cumsum(tokens[number : number + len(ends)], dtype=np.int64)
        if wrong := np.flatnonzero(noted != ends[: len(noted)]).tolist():
            yield (
                f"{index_path(file.path)}: document {number + wrong[0]:,} ends at token {noted[wrong[0]]:,}, in "
                f"{file.path.name} at {ends[wrong[0]]:,}; prepare again with --overwrite"
            )
            return
        number, end = number + len(ends), int(ends[-1]) if len(ends) else end


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
        names = f"{', '.join(f'{number:,}' for number in shared[:_NAMED])}{', ...' if len(shared) > _NAMED else ''}"
        yield (
            f"{other.file.path}: shares {counted(len(shared), 'document')} (number {names}) with {one.file.path}: "
            "validation would measure what training has read; remove copies from the text, and prepare again"
        )


def _vocabulary(file: TokenFile) -> Vocabulary:
    """The tokenizer that made the ids, from the folder beside the file.

    Raises:
        UserError: there is none, or another one.
    """
    if file.sidecar.tokenizer is None:
        raise TokenFileError(f"{file.path}: its sidecar names no tokenizer, so its text is unknown")
    vocabulary = open_vocabulary(file.path.parent / TOKENIZER_FOLDER)
    if vocabulary.sha256 != file.sidecar.tokenizer.sha256:
        raise TokenFileError(f"{vocabulary.folder}: is not the tokenizer that made {file.path.name}")
    return vocabulary


def _excerpt(file: TokenFile, tokens: int) -> str:
    """The text of the first ``tokens`` ids, or why it is unknown."""
    try:
        return repr(_vocabulary(file).tokenizer.decode(file.memmap()[:tokens].tolist(), skip_special_tokens=False))
    except UserError as error:
        return f"unknown: {error}"


def _contamination(file: TokenFile, against: Sequence[Path]) -> Iterator[str]:
    """A line for each of the evaluation sets ``against`` of which the file has texts; prints what was compared.

    Raises:
        UserError: the texts, or the text of the file, cannot be read.
    """
    vocabulary, sets = _vocabulary(file), {path: Evaluation() for path in against}
    for path, texts in sets.items():
        source = own_source((path,), text_key="text", output_dir=path / TOKENIZER_FOLDER)
        texts.add(document.text for _, document in source.documents())
    documents = documents_of(Foreign(form="dsgpt", ids=file.memmap()), eot_id=vocabulary.eot_id)
    with progress(total=file.size_bytes, description=f"comparing {file.path.name}", unit="B") as bar:
        for number, ids in enumerate(documents):
            text = vocabulary.tokenizer.decode(ids.tolist())
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


def _say(contents: Contents, *, excerpt: int, sha256: str) -> None:
    """Print what a file holds."""
    file, sidecar, documents = contents.file, contents.file.sidecar, len(contents.hashes)
    used, largest = np.count_nonzero(contents.frequencies), len(contents.frequencies) - 1
    of = f" of {sidecar.vocab_size:,}" if sidecar.vocab_size else ""
    many = "unknown: nothing beside the file says which id ends one"
    if sidecar.eot_id is not None:
        mean = f", {file.tokens / documents:,.0f} on average" if documents else ""
        many = f"{documents:,}, of {contents.shortest:,} to {contents.longest:,} tokens{mean}"
    print(f"{file.path}: {counted(file.tokens, 'token')}, {sidecar.dtype}, sha256 {sha256}")
    print(f"  documents  {many}")
    print(f"  ids        {used:,}{of} are used, up to {largest:,}")
    print(f"  source     {sidecar.source or 'not noted'}")
    if excerpt:
        print(f"  begins     {_excerpt(file, excerpt)}", flush=True)


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


def _verified(path: Path, options: VerifyOptions, problems: Problems) -> Contents | None:
    """The contents of a file, printed; None if it cannot be read. What is wrong with it is added to ``problems``."""
    try:
        file = open_token_file(path)
    except TokenFileError as error:
        problems.add(*error.problems)
        return None
    sha256 = ""
    with progress(total=2 * file.size_bytes, description=f"reading {path.name}", unit="B") as bar:
        try:
            sha256 = file.verified_sha256(bar.update)
        except TokenFileError as error:
            problems.add(*error.problems)
        contents = read_contents(file, advance=bar.update)
    problems.add(*(faults := [*faults_of(contents)]))
    if sha256 and not faults:
        _say(contents, excerpt=options.excerpt, sha256=sha256)
    return contents
