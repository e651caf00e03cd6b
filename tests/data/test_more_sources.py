"""Compressed rows, Arrow folders, standard input; and preparation by shards."""

import gzip
import json
import subprocess
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from prep_helpers import documents_of, texts_of
from pyarrow import parquet

from dsgpt.common.errors import UserError
from dsgpt.data import blocks, readers
from dsgpt.data.preparation import main
from dsgpt.data.readers import found_key
from dsgpt.data.sources import own_source

ROWS = [f"row {number} “quoted”\n" for number in range(60)]
LINES = "".join(json.dumps({"id": str(number), "n": number, "text": row}) + "\n" for number, row in enumerate(ROWS))


@pytest.fixture
def prepare(prepare_here, bytes_tokenizer, tmp_path):
    def run(*flags: object, out: str = "out") -> Path:
        prepare_here(*flags, "--tokenizer", bytes_tokenizer, "--output_dir", out, cwd=tmp_path)
        return tmp_path / out

    return run


def test_compressed_rows(prepare, tmp_path):
    """Also files of several frames, as parallel compressors write them; the split is that of the plain file's rows."""
    half = len(LINES) // 2
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(
        gzip.compress(LINES[:half].encode()) + gzip.compress(LINES[half:].encode())
    )
    assert sorted(texts_of(prepare("--input", "in"))) == sorted(ROWS)
    (tmp_path / "in" / "a.jsonl.gz").unlink()
    frames = [pa.Codec("zstd").compress(part.encode(), asbytes=True) for part in (LINES[:half], LINES[half:])]
    (tmp_path / "in" / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert sorted(texts_of(prepare("--input", "in", out="zst"))) == sorted(ROWS)


def test_arrow_folders_keep_their_splits(prepare, tmp_path):
    of = {"train": ROWS[:40], "validation": ROWS[40:50], "test": ROWS[50:]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"body": rows}) for name, rows in of.items()})
    saved.save_to_disk(tmp_path / "saved")
    out = prepare("--input", "saved")
    assert documents_of(out, "train") == of["train"]
    assert documents_of(out, "val") == of["validation"]
    assert sorted(texts_of(prepare("--input", tmp_path / "saved" / "train", out="alone"))) == sorted(of["train"])


@pytest.mark.parametrize("rows", [True, False])
def test_standard_input(script_command, bytes_tokenizer, tmp_path, rows):
    """With workers, of which none can read it."""
    flags = ["--input", "-", "--tokenizer", bytes_tokenizer, "--output_dir", "out", "--workers", 2]
    command, environment = script_command("preprocess.py", *flags)
    text = LINES if rows else "a line of text\n" * 100
    subprocess.run(command, env=environment, cwd=tmp_path, input=text.encode(), check=True)
    if rows:
        assert sorted(texts_of(tmp_path / "out")) == sorted(ROWS)
    else:
        assert "".join(texts_of(tmp_path / "out")) == text
    assert json.loads((tmp_path / "out" / "train.sources.json").read_text())["files"][0]["path"] == "-"


def test_standard_input_is_read_once():
    with pytest.raises(UserError, match="--input -: is read once"):
        main(["--input", "-"])


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ({"text": ["a"], "title": ["b"]}, "text"),
        ({"n": [1], "body": ["b"]}, "body"),
        ({"a": ["a"], "b": ["b"]}, "text"),
    ],
)
def test_the_column_of_the_text_is_found(tmp_path, columns, key):
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps({name: values[0] for name, values in columns.items()}))
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    paths = [tmp_path / "a.parquet", tmp_path / "a.jsonl", *(tmp_path / "saved").glob("*.arrow")]
    assert [found_key(path) for path in paths] == [key] * 3


# Shards: parts made apart, joined into the files of one preparation.


@pytest.fixture
def many(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(blocks, "_MOST_FILES", 1)
    monkeypatch.setattr(readers, "RANGE_BYTES", 3000)
    (folder := tmp_path / "many").mkdir()
    (folder / "a.jsonl").write_text(LINES * 5)
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"file {number % 20}\n" * 50)
    for name in ("y.txt", "z.txt"):  # nothing follows their block
        (folder / name).write_text("" if name == "z.txt" else "a line\n" * 400)
    (folder / "large.txt").write_text("".join(f"a line {number}\n" for number in range(3000)))
    return folder


def test_shards_are_joined_into_the_same_files(prepare, many, bytes_tokenizer, tmp_path, capsys):
    flags = ["--input", many, "--deduplicate", "--shuffle"]
    whole = prepare(*flags, out="whole")
    words = [*map(str, flags), "--tokenizer", str(bytes_tokenizer), "--output_dir", "out"]
    for shard in (2, 3):
        prepare(*flags, f"--shard={shard}/3")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("next: ") and "merge.py" in last and "--shard" not in last
    with pytest.raises(UserError, match=r"part-00000000: is missing or damaged; run its --shard again"):
        main(words, merge=True)
    prepare(*flags, "--shard", "1/3")
    sizes = [len(list((tmp_path / "out").glob(".work-*/*/part-*")))]
    main(words, merge=True)
    for name in ("train.bin", "val.bin", "train.index", "val.index"):
        assert (whole / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    records = [json.loads((folder / "preparation.json").read_text()) for folder in (whole, tmp_path / "out")]
    assert records[0] == records[1] and records[0]["left_out_or_changed"]["empty"] == 1
    assert sizes[0] > 20 and not list((tmp_path / "out").glob(".work-*"))


def test_refused_shards():
    with pytest.raises(UserError, match=r"--shard.*3/2.*must be I/N with I from 1 to N|--shard.*I/N"):
        main(["--shard", "3/2"])
    with pytest.raises(UserError, match="--shard: needs a --tokenizer that exists"):
        main(["--shard", "1/2"])


def test_shards_cover_every_block_once(many, tmp_path):
    source = own_source([many], text_key=None, output_dir=tmp_path)
    every = list(blocks.blocks_of(source, cuts=True, val_fraction=0.05, whitespace_only=False))
    assert [block.number for block in every] == list(range(len(every)))
    assert sum(block.size for block in every) == source.total_bytes()
