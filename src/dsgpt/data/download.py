"""The command line of ``data_prep/download_data.py``."""

import contextlib
import itertools
import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from dsgpt.common.command_line import POSITIVE, choice, flag, read_options, switch
from dsgpt.common.errors import UserError
from dsgpt.common.files import sync_directory, write_json_atomic
from dsgpt.common.text import counted, next_line, script_words
from dsgpt.data.options import Bar, folder_if_named, progress
from dsgpt.data.sources import (
    HUB_SETS,
    RAW_FOLDER,
    RECORD_NAME,
    STDLIB_NAME,
    HubSet,
    hub_rows,
    join_articles,
    raw_record,
    stdlib_source,
)
from dsgpt.formats.hub_access import require_hub

DESCRIPTION = """\
Fetch a text set and keep its documents in data/NAME/raw/: one JSON object {"text": ...} per line, in documents.jsonl,
or in train.jsonl and validation.jsonl if the set has its own split. preprocess.py --dataset NAME reads them. All
but the first come from the Hugging Face hub, without an account; no code of a set is ever run.

sets:
"""

EXAMPLES = """\
  .venv/bin/python data_prep/download_data.py
  .venv/bin/python data_prep/download_data.py tinystories
  .venv/bin/python data_prep/download_data.py fineweb-edu --max_documents 100000"""

_STDLIB_ABOUT = "the sources and documentation that ship with this Python, about 12 MB; needs no network (default)"


Rows: TypeAlias = Generator[dict[str, str], None, None]
"""The rows of one JSON lines file."""


SETS = {STDLIB_NAME: _STDLIB_ABOUT} | {name: hub_set.about for name, hub_set in HUB_SETS.items()}


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """The command line."""

    name: str = flag(choice(tuple(SETS)), "NAME", "one of the sets above", default=STDLIB_NAME, name="name", nargs="?")
    output_dir: Path | None = flag(folder_if_named, "DIR", "receives raw/ (default data/NAME)")
    max_documents: int | None = flag(POSITIVE, "N", "keep only the first N documents of each split")
    overwrite: bool = switch("fetch again what is already there")

    @property
    def folder(self) -> Path:
        """The ``raw`` folder."""
        return (self.output_dir or Path("data") / self.name) / RAW_FOLDER


def parse_options(argv: Sequence[str] | None) -> DownloadOptions:
    """Read the command line.

    Raises:
        UserError: all of its mistakes, one line each.
    """
    about = "\n".join(f"  {name:14} {text}" for name, text in SETS.items())
    options, problems = read_options(
        DownloadOptions, argv, description=DESCRIPTION + about, epilog=f"examples:\n{EXAMPLES}"
    )
    problems.raise_if_any()
    return options


def keep_stdlib(folder: Path, *, max_documents: int | None) -> None:
    """Write the standard library's documents, with their keys, to ``folder``."""
    source = stdlib_source()
    with progress(total=source.total_bytes(), description="reading", unit="B") as bar:

        def rows() -> Rows:
            for _, document in source.documents():
                bar.update(document.source_bytes)
                yield {"key": document.key, "text": document.text}

        keep(folder, {"documents": rows()}, name=STDLIB_NAME, source=source.description, max_documents=max_documents)


def keep_hub_set(folder: Path, hub_set: HubSet, *, name: str, max_documents: int | None) -> None:
    """Stream a hub set's documents to ``folder``.

    Raises:
        UserError: the set cannot be reached or read.
    """
    divided = len(hub_set.splits) > 1
    rows = {split if divided else "documents": _hub_rows(hub_set, split, max_documents) for split in hub_set.splits}
    keep(folder, rows, name=name, source=hub_set.source, max_documents=max_documents)


def _hub_rows(hub_set: HubSet, split: str, max_documents: int | None) -> Rows:
    texts, total = hub_rows(hub_set, split)
    if max_documents is not None and not hub_set.articles:
        total = min(total or max_documents, max_documents)
    with progress(total=total, description=split, unit=" rows") as bar:
        shown = _shown(texts, bar)
        for text in join_articles(shown) if hub_set.articles else shown:
            yield {"text": text}


def _shown(texts: Iterable[str], bar: Bar) -> Iterator[str]:
    for text in texts:
        bar.update(1)
        yield text


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
                kept = itertools.islice(filled, max_documents)
                files[f"{split}.jsonl"] = _write(partial, kept)
        empty = [file for file, size in files.items() if not size["documents"]]
        if empty:
            raise UserError(f"{name}: the set has no text for {', '.join(empty)}; nothing was kept")
        (folder / RECORD_NAME).unlink(missing_ok=True)
        for file in files:
            (folder / f".{file}.partial").replace(folder / file)
    sync_directory(folder)
    record = {"name": name, "source": source, "max_documents": max_documents, "files": files}
    write_json_atomic(folder / RECORD_NAME, record)


def _write(path: Path, rows: Iterable[dict[str, str]]) -> dict[str, int]:
    documents = written = 0
    path.unlink(missing_ok=True)
    with path.open("xb") as file:  # "x" never writes through a link in its place
        for row in rows:
            written += file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            documents += 1
    return {"documents": documents, "bytes": written}


def already_kept(options: DownloadOptions) -> bool:
    """Whether the same download is already there and complete.

    Raises:
        UserError: the folder contains another set, or one with another ``--max_documents``.
    """
    record = None if options.overwrite else raw_record(options.folder)
    if record is None:
        return False
    for what, wanted in (("name", options.name), ("max_documents", options.max_documents)):
        if (found := getattr(record, what)) != wanted:
            raise UserError(
                f"{options.folder}: holds a download with {what} {found}, not {wanted}; replace it with "
                "--overwrite or choose another --output_dir"
            )
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Download what the command line asks for, unless it is there already, and print what is there."""
    options = parse_options(argv)
    if not already_kept(options):
        if options.name == STDLIB_NAME:
            keep_stdlib(options.folder, max_documents=options.max_documents)
        else:
            require_hub(
                f"the set {options.name}",
                cure="use python-stdlib, which needs none, or give your own files to data_prep/preprocess.py --input",
            )
            keep_hub_set(options.folder, HUB_SETS[options.name], name=options.name, max_documents=options.max_documents)
    record = raw_record(options.folder)
    assert record is not None  # it was just written, or found complete
    for file, size in record.files.items():
        print(f"{options.folder / file}: {counted(size.documents, 'document')}, {counted(size.bytes, 'byte')}")
    print(next_line(script_words("data_prep/preprocess.py", "--dataset", options.name)))
