"""The command line of ``data_prep/download_data.py``, and what it does: a text set, kept as JSON lines."""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tqdm import tqdm

from dsgpt.common.command_line import POSITIVE, choice, flag, help_of, read_options, switch
from dsgpt.common.errors import UserError
from dsgpt.common.files import sync_directory, write_json_atomic
from dsgpt.common.json_files import Count, Positive, read_or_refuse
from dsgpt.common.text import counted, next_line, script_words
from dsgpt.data.readers import SourceFile, cut_json_lines, read_json_lines
from dsgpt.data.sources import EMBEDDED, STDLIB_NAME, TRANSFORMERS_NAME, Source
from dsgpt.data.token_file import Stamp
from dsgpt.formats.tokenizer_files import require_hub

# What this script has in common with those that prepare text.

KEPT = "nothing was published; the same command starts again"
"""Ends the error line after an interruption, or if the disk is full."""


def folder_if_named(word: str) -> Path | None:
    """The value of a flag that names a folder; None for an empty word, such as an unset variable of the shell."""
    return Path(word) if word else None


_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def set_name(known: Sequence[str]) -> Callable[[str], str]:
    """Reads the name of a set: one of ``known``, or OWNER/NAME of any set on the hub."""

    def read(word: str) -> str:
        return word if _ON_HUB.fullmatch(word) else choice(known)(word)

    return read


def progress(rows: Iterable[Any] | None = None, *, total: int | None, description: str, unit: str) -> "tqdm[Any]":
    """A progress bar with an estimate of the time left; none if standard error is not a terminal. Its end removes it.

    Args:
        rows: what the bar counts when it is iterated over; None if the caller updates it.
        total: amount of work, in bytes (``unit`` "B") or other units; None if unknown.
        description: what is being done, in a word or two.
        unit: the unit of ``total``.
    """
    return tqdm(
        rows, total=total, desc=description, unit=unit, unit_scale=True, dynamic_ncols=True, leave=False, disable=None
    )


# The documents that download_data.py writes: JSON lines in NAME/raw/, with a record that is written last.

RAW_FOLDER = "raw"
RECORD_NAME = "download.json"
_SPLIT_OF_FILE = {"documents": None, "train": "train", "validation": "val"}


@dataclass(frozen=True, kw_only=True)
class RawFile:
    """Contents of one file."""

    documents: Count
    bytes: Count


@dataclass(frozen=True, kw_only=True)
class RawRecord:
    """The contents of ``download.json``."""

    name: str
    source: str
    """Origin of the text."""
    files: dict[Literal["documents.jsonl", "train.jsonl", "validation.jsonl"], RawFile]
    max_documents: Positive | None = None


def raw_record(folder: Path) -> RawRecord | None:
    """The record of the finished download in ``folder`` (a ``raw`` folder); None if there is none.

    Raises:
        UserError: the record is damaged, or a file is missing.
    """
    path = folder / RECORD_NAME
    if not path.exists():
        return None
    cure = "; fetch again with --overwrite"
    record = read_or_refuse(path, RawRecord, "the record of a download", cure=cure, unknown_keys=True)
    if missing := [file for file in record.files if not (folder / file).is_file()]:
        raise UserError(f"{folder / missing[0]}: is missing, but {path.name} names it; fetch it again with --overwrite")
    return record


def downloaded_source(name: str, *, output_dir: Path) -> Source | None:
    """The downloaded set ``name``, from ``output_dir/raw`` or else ``data/NAME/raw``; None if it is in neither."""
    for folder in (output_dir / RAW_FOLDER, Path("data") / name / RAW_FOLDER):
        if (record := raw_record(folder)) and record.name == name:
            reading: dict[str, Any] = {"text_key": "text", "key_field": "key"}
            read, cut = partial(read_json_lines, **reading), partial(cut_json_lines, **reading)
            paths = [folder / file for file in record.files]
            files = (
                SourceFile(str(path), path.name, Stamp.of(path), read, _SPLIT_OF_FILE[path.stem], cut) for path in paths
            )
            # the documents of those in ``EMBEDDED`` come from the installed files, too
            return Source(description=record.source, files=tuple(files), same_by_documents=name in EMBEDDED)
    return None


# The sets that come from the Hugging Face hub, and how their rows become documents.


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """Address and contents of a set on the hub."""

    path: str
    """Name on the hub (or ``parquet``, which reads ``data_files``)."""
    about: str
    """One line for the help."""
    config: str | None = None
    data_files: dict[str, str] | None = None
    splits: dict[str, int] = field(default_factory=dict)
    """Rows of each split that is taken (0: not known), for the progress bar if the hub does not give them."""
    text_key: str = "text"
    """The column of the text."""
    articles: bool = False
    """True if a row is a line, and a heading line begins a document (WikiText)."""

    @property
    def source(self) -> str:
        """The address in words."""
        name = self.data_files["train"].removeprefix("hf://datasets/") if self.data_files else self.path
        return f"{name} ({self.config})" if self.config else name


_OPENWEBTEXT = HubSet(
    path="parquet",  # the hub's main branch may have a loading script, which `datasets` refuses to run
    data_files={"train": "hf://datasets/Skylion007/openwebtext/plain_text/train-*.parquet"},
    about="8 million web pages linked from Reddit, 40 GB: the open replication of GPT-2's training text",
    splits={"train": 8_013_769},
)

HUB_SETS = {
    "tinystories": HubSet(
        path="roneneldan/TinyStories",
        about="2.1 million short stories in a small child's words, 2 GB; has a validation split",
        splits={"train": 2_119_719, "validation": 21_990},
    ),
    "wikitext-103": HubSet(
        path="Salesforce/wikitext",
        config="wikitext-103-raw-v1",
        about="28,475 good and featured Wikipedia articles, 0.5 GB; has a validation split",
        splits={"train": 1_801_350, "validation": 3_760},
        articles=True,
    ),
    "openwebtext": _OPENWEBTEXT,
    "webtext": replace(
        _OPENWEBTEXT,
        about="OpenAI never published GPT-2's WebText; this name gives OpenWebText, the same as openwebtext",
    ),
    "fineweb-edu": HubSet(
        path="HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        about="9.7 million educational web pages (the sample of 10 billion tokens), 45 GB",
        splits={"train": 9_672_101},
    ),
}


_TITLE = re.compile(r" = (?!= ).* = \n?", re.DOTALL)
"""`` = Title = ``, and not `` = = Section = = ``."""


def join_articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's lines, joined into articles; a title between empty lines begins an article.

    The text does not change: the joined articles equal the joined lines.
    """
    article: list[str] = []
    previous_empty = True
    title = ""  # if an empty line follows it
    for line in lines:
        if title and not line.strip() and "".join(article).strip():
            yield "".join(article)
            article = []
        article.append(title)
        title = line if previous_empty and _TITLE.fullmatch(line) else ""
        article.append("" if title else line)
        previous_empty = not line.strip()
    if text := "".join([*article, title]):
        yield text


# The command line.

SETS = {
    TRANSFORMERS_NAME: "sources of the package transformers, 8 MB, the same everywhere; needs no network (default)",
    STDLIB_NAME: "the sources and documentation that ship with this Python, about 12 MB; needs no network",
    **{name: hub_set.about for name, hub_set in HUB_SETS.items()},
}
Rows: TypeAlias = Generator[dict[str, str], None, None]
"""The rows of one JSON lines file."""


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """The command line.

    Fetch a text set and keep its documents in data/NAME/raw/. The file is documents.jsonl, or train.jsonl and
    validation.jsonl if the set has its own split. Each line is a JSON object {"text": ...}. preprocess.py --dataset
    NAME reads them. All but the first two come from the Hugging Face hub, without an account. No code of a set is ever
    run.

    Examples:
      .venv/bin/python data_prep/download_data.py
      .venv/bin/python data_prep/download_data.py tinystories
      .venv/bin/python data_prep/download_data.py fineweb-edu --max_documents 100000
    """

    name: str = flag(set_name(tuple(SETS)), "NAME", default=TRANSFORMERS_NAME, name="name", nargs="?")
    """one of the sets above, or OWNER/NAME of any set of text on the hub"""
    config: str | None = flag(str, "NAME", "the part of a set OWNER/NAME, if it has several")
    text_key: str | None = flag(str, "KEY")
    """the column of the text of OWNER/NAME (default: text, or else its only one of strings)"""
    output_dir: Path | None = flag(folder_if_named, "DIR", "receives raw/ (default data/NAME)")
    max_documents: int | None = flag(POSITIVE, "N", "keep only the first N documents of each split")
    overwrite: bool = switch("fetch again what is already there")


def keep_embedded(folder: Path, *, name: str, max_documents: int | None) -> None:
    """Write the documents of a corpus of ``EMBEDDED``, with their keys, to ``folder``."""
    source = EMBEDDED[name]()

    def rows() -> Rows:
        with progress(total=source.total_bytes(), description="reading", unit="B") as bar:
            for _, document in source.documents():
                bar.update(document.source_bytes)
                yield {"key": document.key, "text": document.text}

    keep(folder, {"documents": rows()}, name=name, source=source.description, max_documents=max_documents)


def keep_hub_set(folder: Path, hub_set: HubSet, *, name: str, max_documents: int | None) -> None:
    """Stream a hub set's documents to ``folder``.

    Raises:
        UserError: the set cannot be reached or read.
    """
    divided = len(hub_set.splits) > 1
    rows = {split if divided else "documents": _hub_rows(hub_set, split, max_documents) for split in hub_set.splits}
    keep(folder, rows, name=name, source=hub_set.source, max_documents=max_documents)


def hub_set_of(name: str, *, config: str | None, text_key: str | None) -> HubSet:
    """The address of any set of text on the hub; its ``test`` split is left out.

    Raises:
        UserError: there is no such set, it has several parts and none is named, or no column of text.
    """
    import datasets  # noqa: PLC0415 - takes seconds; --help should not

    try:
        about = datasets.load_dataset_builder(name, config)
        rows = dict.fromkeys(about.info.splits or datasets.get_dataset_split_names(name, config), 0)
        streamed = partial(datasets.load_dataset, name, config, streaming=True)
        columns = about.info.features or next(iter(streamed().values())).features or {}
    except (OSError, ValueError, RuntimeError) as error:
        reason = re.split(r"\.\s|\n", str(error).strip())[0]
        raise UserError(f"{name}: cannot be read from the hub ({reason}); see --config") from error
    strings = [key for key, kind in columns.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    key = text_key or ("text" if "text" in strings else strings[0] if len(strings) == 1 else "")
    if key not in columns:
        raise UserError(f"{name}: has the columns {', '.join(map(repr, columns))}; name that of the text: --text_key")
    kept = [split for split in ("train", "validation") if split in rows] or list(rows)[:1]
    return HubSet(path=name, config=config, about="", text_key=key, splits=dict.fromkeys(kept, 0))


def _hub_rows(hub_set: HubSet, split: str, max_documents: int | None) -> Rows:
    """The documents of one split, streamed from the network: nothing is cached on disk, and no code of the set is run.

    Raises:
        UserError: the set cannot be reached or read; one line.
    """
    import datasets  # noqa: PLC0415 - takes seconds; --help should not

    try:
        files = hub_set.data_files
        rows = datasets.load_dataset(hub_set.path, hub_set.config, data_files=files, split=split, streaming=True)
        published = rows.info.splits[split].num_examples if rows.info.splits and split in rows.info.splits else None
        total = published or hub_set.splits[split] or None
        if max_documents is not None and not hub_set.articles:
            total = min(total or max_documents, max_documents)
        key = hub_set.text_key
        texts = (row[key] or "" for row in progress(rows, total=total, description=split, unit=" rows"))
        for text in join_articles(texts) if hub_set.articles else texts:
            yield {"text": text}
    except (OSError, ValueError, RuntimeError) as error:
        reason = re.split(r"\.\s|\n", str(error).strip())[0]
        raise UserError(
            f"{hub_set.source}: cannot be read from the hub ({reason}); try again, use python-transformers, or give "
            "your own files to preprocess.py --input"
        ) from error


def keep(folder: Path, rows: dict[str, Rows], *, name: str, source: str, max_documents: int | None) -> None:
    """Write ``rows`` to temporary files in ``folder``, rename them to ``KEY.jsonl``, and write the record last.

    Rows without text are left out and do not count towards ``max_documents``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, int]] = {}
    with contextlib.ExitStack() as left:
        for split, documents in rows.items():
            partial = folder / f".{split}.jsonl.partial"
            left.callback(partial.unlink, missing_ok=True)
            with contextlib.closing(documents):  # closes progress bar and connection if the limit is reached first
                filled = (row for row in documents if row["text"].strip())
                files[f"{split}.jsonl"] = size = {"documents": 0, "bytes": 0}
                partial.unlink(missing_ok=True)
                with partial.open("xb") as file:  # "x" never writes through a link in its place
                    for row in itertools.islice(filled, max_documents):
                        size["bytes"] += file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                        size["documents"] += 1
        if empty := [name for name, size in files.items() if not size["documents"]]:
            raise UserError(f"{name}: the set has no text for {', '.join(empty)}; nothing was kept")
        (folder / RECORD_NAME).unlink(missing_ok=True)
        for each in files:
            (folder / f".{each}.partial").replace(folder / each)
    sync_directory(folder)
    record = {"name": name, "source": source, "max_documents": max_documents, "files": files}
    write_json_atomic(folder / RECORD_NAME, record)


def main(argv: Sequence[str] | None = None) -> None:
    """Download what the command line asks for, unless it is there already, and print what is there.

    Raises:
        UserError: mistakes of the command line, one line each; the set cannot be read; or the folder has another one,
            or one with another ``--max_documents``.
    """
    sets = "\n".join(f"  {name:20} {text}" for name, text in SETS.items())
    about = f"{help_of(DownloadOptions)['description']}\n\nsets:\n{sets}"
    options, problems = read_options(DownloadOptions, argv, description=about)
    problems.raise_if_any()
    name, limit = options.name, options.max_documents
    folder = (options.output_dir or Path("data") / name) / RAW_FOLDER
    record = None if options.overwrite else raw_record(folder)
    if record is None and name in EMBEDDED:
        keep_embedded(folder, name=name, max_documents=limit)
    elif record is None:
        cure = "use python-transformers, which needs none, or give your own files to data_prep/preprocess.py --input"
        require_hub(f"the set {name}", cure=cure)
        named = HUB_SETS.get(name) or hub_set_of(name, config=options.config, text_key=options.text_key)
        keep_hub_set(folder, named, name=name, max_documents=limit)
    else:
        for what, wanted in (("name", name), ("max_documents", limit)):
            if (present := getattr(record, what)) != wanted:
                raise UserError(
                    f"{folder}: holds a download with {what} {present}, not {wanted}; replace it with --overwrite or "
                    "choose another --output_dir"
                )
    record = record or raw_record(folder)
    assert record is not None  # it was just written
    for file, size in record.files.items():
        print(f"{folder / file}: {counted(size.documents, 'document')}, {counted(size.bytes, 'byte')}")
    print(next_line(script_words("data_prep/preprocess.py", "--dataset", name)))
