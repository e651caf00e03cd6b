"""What could give wrong token files unnoticed, or lose parts: each test is a fault that was there once."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from prep_helpers import documents_of, texts_of

from dsgpt.common.errors import UserError
from dsgpt.data import blocks, parts, preparation
from dsgpt.data.preparation import main

LINE = "a line of words, and more of them\n"


@pytest.fixture
def flags(bytes_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a preparation of the folder ``in`` into ``out``, with blocks of a few kilobytes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 5000)
    Path("in").mkdir()
    return ["--input", "in", "--tokenizer", str(bytes_tokenizer), "--output_dir", "out"]


def many_files(count: int = 12) -> None:
    for number in range(count):
        Path("in", f"{number:03}.txt").write_text(f"{number} {LINE}")


@pytest.mark.parametrize("count", range(285, 301))
def test_the_first_documents_are_whole(flags, count):
    """Also if the last of them is large, so that its pieces are in several blocks."""
    many_files(300)
    Path("in", "300.txt").write_text(large := LINE * 1000)
    main([*flags, "--num_documents", str(count)], small=True)
    found = texts_of(Path("out"), "_small")
    assert len(found) == count
    assert all(text == large or (text.endswith(LINE) and text[0].isdigit()) for text in found)


@pytest.mark.parametrize("data", [b"", b"12345", bytes(24), bytes(5000), None])
def test_a_part_without_an_end_is_made_again(flags, data, monkeypatch):
    """As after a loss of power, when names are on the disk and contents are not.

    None: a process was killed that had the number of this one, as each has in a container.
    """
    many_files()
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(preparation, "write_sources", lambda *_: 1 / 0)
        main(flags)
    (part,) = Path("out").glob(".work*/*/part-*")
    if data is None:
        part.rename(part.with_name(f".{part.name}.{os.getpid()}"))
    else:
        part.write_bytes(data)
    main(flags)
    assert len(texts_of(Path("out"))) == 12


def _empty_the_part(encoder: parts.Encoder) -> None:
    encoder.encoding.path(1).write_bytes(b"")


def _change_a_source(_: parts.Encoder) -> None:
    Path("in", "005.txt").write_text("another text, and longer than it was\n")


@pytest.mark.parametrize(
    ("harm", "refusal"),
    [(_empty_the_part, "part-00000001: is missing or damaged"), (_change_a_source, r"in/005\.txt: changed while")],
)
def test_what_is_lost_or_changes_before_parts_are_joined_is_an_error(flags, monkeypatch, harm, refusal):
    many_files(300)
    monkeypatch.setattr(blocks, "_MOST_FILES", 100)
    encode = parts.Encoder.encode

    def encode_and_harm(self: parts.Encoder, block: blocks.Block) -> None:
        encode(self, block)
        if block.number == 1:
            harm(self)

    monkeypatch.setattr(parts.Encoder, "encode", encode_and_harm)
    with pytest.raises(UserError, match=refusal):
        main(flags)


@pytest.mark.parametrize("wrong", [["--shuffle"], ["--seed", "2"]])
def test_merging_with_a_mistake_and_small_files_keep_the_parts(flags, wrong):
    many_files()
    main([*flags, "--shard", "1/1"])
    with pytest.raises(UserError, match="is missing or damaged"):
        main([*flags, *wrong], merge=True)
    main([*flags, "--num_documents", "5"], small=True)
    main(flags, merge=True)
    assert len(texts_of(Path("out"))) == 12


def test_the_next_line_of_a_shard_is_a_command_of_merge(flags, capsys):
    many_files()
    main([*flags, "--workers", "2", "--shard=1/1"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "merge.py" in last
    main(last.split("merge.py ")[1].split(), merge=True)
    assert len(texts_of(Path("out"))) == 12


@pytest.mark.parametrize("how", ["replace", "skip"])
def test_bad_text_of_a_lone_large_file(flags, how):
    Path("in", "a.txt").write_bytes(LINE.encode() * 300 + b"bad \xff\n" + LINE.encode() * 300)
    if how == "skip":
        with pytest.raises(UserError, match="split has no document"):
            main([*flags, "--on_bad_text", how])
    else:
        main([*flags, "--on_bad_text", how])
        assert "".join(texts_of(Path("out"))) == LINE * 300 + "bad \ufffd\n" + LINE * 300


def test_a_large_compressed_text_is_not_cut(flags):
    text = "".join(f"{number * 7919 % 104729} words\n" for number in range(30_000))
    Path("b.txt.gz").write_bytes(gzip.compress(text.encode()))
    many_files(3)
    assert Path("b.txt.gz").stat().st_size > 2 * blocks.BLOCK_BYTES
    main(["--input", "in", "b.txt.gz", *flags[2:], "--on_bad_text", "replace"])
    assert text in texts_of(Path("out"))


DAMAGED = {
    "cut.jsonl.gz": lambda data: gzip.compress(data)[:-9],
    "flipped.jsonl.gz": lambda data: gzip.compress(data)[:40] + b"XXXX" + gzip.compress(data)[44:],
    "other.jsonl.gz": lambda data: data,
    "cut.jsonl.zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True)[:-9],
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_damaged_compressed_file_is_named(flags, name, workers):
    rows = "".join(json.dumps({"text": f"{number * 7919 % 104729}"}) + "\n" for number in range(3000))
    Path("in", name).write_bytes(DAMAGED[name](rows.encode()))
    with pytest.raises(UserError, match=rf"{name}: .*readable"):
        main([*flags, "--workers", workers])


def test_a_cut_off_arrow_file_is_named(flags):
    table = pa.table({"text": [f"row {number}" for number in range(300)]})
    path = Path("in", "a.arrow")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        for start in (0, 100, 200):
            writer.write_table(table.slice(start, 100))
    data = path.read_bytes()
    main(flags)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"a\.arrow: .*readable"):
        main([*flags[:-1], "other"])


def test_a_full_disk_is_named_by_a_worker_too(flags, monkeypatch):
    many_files(300)
    for number in range(300):
        Path("in", f"{number:03}.txt").write_text(f"{number} {LINE}" * 300)
    Path("run.py").write_text(
        "import resource, sys\n"
        "from dsgpt.common.command_line import run_script\n"
        "from dsgpt.data import preparation\n"
        "import signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "if __name__ == '__main__':\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))\n"
        "    run_script(preparation.main, kept=preparation.KEPT)\n"
    )
    command = [sys.executable, "run.py", *flags, "--workers", "2"]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert "File too large" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "memory" not in done.stderr


def test_the_tokenizer_is_trained_on_the_train_split_only_and_the_split_may_be_by_files(flags, monkeypatch):
    """Also if duplicates or bad texts are left out. Each file is in one split, and one has the text of all."""
    for file in range(9):
        rows = [json.dumps({"text": f"{file} {row} {LINE}"}) for row in range(9)] + [json.dumps({"text": "the same"})]
        Path("in", f"{file}.jsonl").write_text("\n".join([*rows, '{"text": "bad \\ud800"}']))
    seen: list[str] = []
    train = preparation.train_tokenizer

    def listen(texts, **kind):
        seen.extend(texts)
        return train(seen, **kind)

    monkeypatch.setattr(preparation, "train_tokenizer", listen)
    more = ["--split_by", "files", "--deduplicate", "--on_bad_text", "skip", "--val_fraction", "0.4"]
    main(["--input", "in", "--tokenizer", "train", "--vocab_size", "300", "--output_dir", "out", *more])
    assert seen == documents_of(Path("out"), "train")
    train, val = ({text.split()[0] for text in documents_of(Path("out"), split)} for split in ("train", "val"))
    assert train and val and not train & val and train | val == {"the", *map(str, range(9))}
