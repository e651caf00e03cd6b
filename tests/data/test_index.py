"""The index of a token file: where each document comes from."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from small_run import write_tokens

from dsgpt.data.index import (
    ENTRY,
    SourceEntry,
    document_hash,
    index_path,
    open_index,
    read_sources,
    relative,
    write_sources,
)
from dsgpt.data.token_file import TokenFileError, open_token_file
from dsgpt.record import where

ROWS = [(document_hash(b"a text"), 7, 1, 3), (2**64 - 1, 2**40, 2**32 - 1, 2)]


def test_the_bytes_of_an_index(tmp_path: Path):
    """As docs/data.md specifies them, read without this package."""
    file = open_token_file(write_tokens(tmp_path / "a.bin", np.array([1, 2, 9, 3, 9]), documents=2))
    np.array(ROWS, dtype=ENTRY).tofile(index_path(file.path))
    data = index_path(file.path).read_bytes()
    assert len(data) == 48
    assert data[:8] == hashlib.sha256(b"a text").digest()[:8]
    assert data[8:24] == b"\7" + bytes(7) + b"\1\0\0\0" + b"\3\0\0\0"
    assert open_index(file).tolist() == ROWS


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        (None, "is missing"),
        (b"", "is not a whole number"),
        (bytes(25), "25 bytes is not a whole number"),
        (np.array(ROWS[:1], dtype=ENTRY).tobytes(), "has 1 documents with 3 tokens, a.bin has 2 with 5"),
    ],
)
def test_an_index_of_another_file_is_refused(tmp_path: Path, data: bytes | None, refusal: str):
    file = open_token_file(write_tokens(tmp_path / "a.bin", np.array([1, 2, 9, 3, 9]), documents=2))
    if data is not None:
        index_path(file.path).write_bytes(data)
    with pytest.raises(TokenFileError, match=refusal):
        open_index(file)


def test_the_list_of_sources(tmp_path: Path):
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "a.bin"
    assert relative(tmp_path / "text" / "b.txt", path.parent) == "../text/b.txt"
    names = ("../text/b.txt", os.fsdecode(b"../caf\xe9 %41.txt"))
    files = [SourceEntry(path=name, size=3, mtime_ns=5, unit="byte") for name in names]
    write_sources(path, files)
    assert "file:../caf%E9%20%2541.txt" in (tmp_path / "out" / "a.sources.json").read_text(encoding="utf-8")
    assert read_sources(path) == files
    (tmp_path / "out" / "a.sources.json").write_text("{}")
    with pytest.raises(TokenFileError, match="is not a list of source files"):
        read_sources(path)


def test_a_long_list_of_sources(tmp_path: Path):
    """As of 200,000 small files: other JSON files are refused from 16 MiB on."""
    files = [SourceEntry(path=f"{number:02200}", size=3, mtime_ns=5, unit="byte") for number in range(8_000)]
    write_sources(tmp_path / "a.bin", files)
    assert (tmp_path / "a.sources.json").stat().st_size > 1 << 24
    assert read_sources(tmp_path / "a.bin") == files


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
def test_rows_are_compared_with_their_hash(prepare_here, bytes_tokenizer, tmp_path: Path, capsys, form: str):
    """Each row of its source; and rows in another order, of which neither size nor time says that they changed."""
    path, rows = tmp_path / f"rows.{form}", [f"row {number:02}" for number in range(12)]

    def write(texts: list[str]) -> None:
        table = pa.table({"number": range(12), "story": texts})
        if form == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        elif form == "parquet":
            parquet.write_table(table, path, row_group_size=5, compression="none", use_dictionary=False)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table, 5)

    def said(number: int) -> str:
        capsys.readouterr()
        where.main(["out/train.bin", "--document", str(number)])
        return capsys.readouterr().out

    write(rows)
    flags = ("--text_key", "story", "--tokenizer", bytes_tokenizer, "--output_dir", "out")
    prepare_here("--input", path, *flags, cwd=tmp_path)
    documents, stamp = len(open_index(open_token_file(Path("out/train.bin")))), path.stat()
    assert documents > 8
    for number in range(documents):
        assert "the source is unchanged, with this text there; the tokens decode to this text" in said(number)
    write(rows[::-1])
    assert "the source was written again since, with as many bytes; the tokens decode" in said(1)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert "the source is unchanged, but this text is not there; the tokens decode" in said(1)


def test_lines_with_a_byte_order_mark_or_bad_text_are_compared(prepare_here, bytes_tokenizer, tmp_path: Path, capsys):
    rows = [
        b'\xef\xbb\xbf{"text": "a"}',
        b'{"id": "x", "text": "\\ud800"}',
        b'{"text": "\xff"}',
        *[b'{"text": "b"}'] * 9,
    ]
    (path := tmp_path / "rows.jsonl").write_bytes(b"\n".join(rows))
    flags = ("--tokenizer", bytes_tokenizer, "--on_bad_text", "replace", "--output_dir", "out")
    prepare_here("--input", path, *flags, cwd=tmp_path)
    for split in ("train", "val"):
        for number in range(len(open_index(open_token_file(Path(f"out/{split}.bin"))))):
            where.main([f"out/{split}.bin", "--document", str(number)])
    assert capsys.readouterr().out.count("with this text there; the tokens decode to this text") == len(rows)
