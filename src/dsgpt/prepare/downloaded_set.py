"""The documents that download_data.py writes: JSON lines in NAME/raw/, with a record that is written last."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import Count, JsonError, Positive, read_as
from dsgpt.prepare.documents import Source, SourceFile, json_lines_reader
from dsgpt.prepare.stdlib_corpus import STDLIB_NAME

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
    try:
        record = read_as(path, RawRecord, unknown_keys=True)
    except JsonError as error:
        raise UserError(f"{path}: is not the record of a download ({error}); fetch again with --overwrite") from error
    missing = [file for file in record.files if not (folder / file).is_file()]
    if missing:
        raise UserError(f"{folder / missing[0]}: is missing, but {path.name} names it; fetch it again with --overwrite")
    return record


def downloaded_source(name: str, *, output_dir: Path) -> Source | None:
    """The downloaded set ``name``, from ``output_dir/raw`` or else ``data/NAME/raw``; None if it is in neither."""
    for folder in (output_dir / RAW_FOLDER, Path("data") / name / RAW_FOLDER):
        record = raw_record(folder)
        if record and record.name == name:
            read = json_lines_reader(text_key="text", key_field="key")
            return Source(
                description=record.source,
                files=tuple(
                    SourceFile(path=folder / file, key=file, split=_SPLIT_OF_FILE[Path(file).stem], read=read)
                    for file in record.files
                ),
                same_by_documents=name
                == STDLIB_NAME,  # stdlib_source reads the same documents from the interpreter's files
            )
    return None
