"""The raw documents that download_data.py keeps: JSON lines in NAME/raw/, with a record written last."""

import json
from pathlib import Path

from documents import Source, SourceFile, json_lines_reader
from stdlib_corpus import STDLIB_NAME

RAW_FOLDER = "raw"
RECORD_NAME = "download.json"
_SPLIT_OF_FILE = {"documents": None, "train": "train", "validation": "val"}


def raw_record(folder: Path) -> dict | None:
    """What the finished download in ``folder`` (a ``raw`` folder) is, or None."""
    path = folder / RECORD_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def downloaded_source(name: str, *, output_dir: Path) -> Source | None:
    """The downloaded set ``name`` in ``output_dir/raw`` or in ``data/NAME/raw``; None if it is in neither."""
    for folder in (output_dir / RAW_FOLDER, Path("data") / name / RAW_FOLDER):
        record = raw_record(folder)
        if record and record["name"] == name:
            read = json_lines_reader(text_key="text", key_field="key")
            return Source(
                description=record["source"],
                files=tuple(
                    SourceFile(path=folder / file, key=file, split=_SPLIT_OF_FILE[Path(file).stem], read=read)
                    for file in record["files"]
                ),
                same_by_documents=name == STDLIB_NAME,  # the interpreter's own files hold them too
            )
    return None
