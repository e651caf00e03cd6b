"""Parts: killed and continued, with other workers, of large texts; what is left out; the index of what is written."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from prep_helpers import documents_of, texts_of

from dsgpt.common.errors import UserError
from dsgpt.data import blocks, readers
from dsgpt.data.index import index_path, open_index, read_sources
from dsgpt.data.parts import read_part
from dsgpt.data.token_file import open_token_file
from dsgpt.data.verify import faults_of, read_contents

WORDS = "the quick brown fox — naïve “quotes” 日本語\n\n  and\ttabs isn't it? "


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few kilobytes, so that a small text has many."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(readers, "RANGE_BYTES", 5000)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Many small files, a large one, and rows."""
    (folder := tmp_path / "texts").mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"file {number} " + WORDS * (number % 7))
    (folder / "large.md").write_text("".join(f"{number} {WORDS}" for number in range(1500)))
    rows = [{"text": f"row {number} " + WORDS * (number % 5)} for number in range(400)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    return folder


def same_files(one: Path, other: Path) -> bool:
    names = [f"{split}.{kind}" for split in ("train", "val") for kind in ("bin", "index")]
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_killed_at_any_time_and_continued_with_other_workers(prepare_here, texts, bytes_tokenizer, tmp_path):
    """The bytes are those of one undisturbed process with blocks of the usual size; finished parts are kept."""
    flags = ["--input", texts, "--tokenizer", bytes_tokenizer, "--shuffle", "--output_dir"]
    prepare_here(*flags, "whole", cwd=tmp_path)
    program = (
        "from dsgpt.data import blocks, readers, preparation\n"
        "blocks.BLOCK_BYTES = readers.RANGE_BYTES = 5000\n"
        "import sys\n"
        "preparation.main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", program, *map(str, flags), "out"]
    out, kept = tmp_path / "out", 0
    for kill, wanted in enumerate((1, 8, 20)):
        process = subprocess.Popen([*command, "--workers", str(1 + kill % 2)], cwd=tmp_path)
        deadline = time.monotonic() + 120
        while len(parts := sorted(out.glob(".work-*/*/part-*"))) < wanted and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
        process.wait()
        if not (out / "preparation.json").exists():
            assert not list(out.glob("*.bin"))
            kept = len(parts)
            before = {path: path.stat().st_mtime_ns for path in parts}
    assert kept
    subprocess.run([*command, "--workers", "3"], check=True, cwd=tmp_path)
    assert same_files(out, tmp_path / "whole")
    assert before and not list(out.glob(".work-*"))


def test_a_damaged_part_is_made_again(prepare_here, small_blocks, texts, bytes_tokenizer, tmp_path, monkeypatch):
    flags = ["--input", texts, "--tokenizer", bytes_tokenizer, "--output_dir"]
    prepare_here(*flags, "whole", cwd=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("dsgpt.data.preparation.write_sources", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_here(*flags, "out", cwd=tmp_path)
    first, second, *_ = parts = sorted((tmp_path / "out").glob(".work-*/*/part-*"))
    assert len(parts) > 20
    (data := bytearray(first.read_bytes()))[5] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-1])
    assert read_part(first, width=2) and not read_part(first, width=2, check=True)
    assert not read_part(second, width=2)
    kept = parts[2].stat().st_mtime_ns
    with monkeypatch.context() as patched:
        patched.setattr("dsgpt.data.preparation.remove", lambda _: None)
        prepare_here(*flags, "out", cwd=tmp_path)
    assert same_files(tmp_path / "out", tmp_path / "whole")
    assert parts[2].stat().st_mtime_ns == kept


def test_a_lone_large_text_in_pieces_is_the_same(prepare_here, prepared, texts, tmp_path, monkeypatch):
    """Also with a tokenizer that joins words: the pieces have the ids of the whole, and the halves their hashes.

    It is divided at a line.
    """
    flags = ["--input", texts / "large.md", "--tokenizer", prepared / "tokenizer", "--val_fraction", 0.1]
    prepare_here(*flags, cwd=tmp_path)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 3000)
    prepare_here(*flags, "--output_dir", "pieces", cwd=tmp_path)
    assert same_files(tmp_path / "data" / "large", tmp_path / "pieces")
    (train,), (val,) = (documents_of(tmp_path / "pieces", split) for split in ("train", "val"))
    assert train + val == (text := (texts / "large.md").read_text()) and train.endswith("\n")
    assert len(val) / len(text) == pytest.approx(0.1, abs=0.002)
    file = open_token_file(tmp_path / "pieces" / "val.bin")
    assert open_index(file)["place"].tolist() == [len(train.encode())]
    assert open_index(file)["hash"].tobytes() == hashlib.sha256(val.encode()).digest()[:8]


def test_the_index_gives_every_document(prepare_here, small_blocks, texts, bytes_tokenizer, tmp_path):
    prepare_here("--input", texts, "--tokenizer", bytes_tokenizer, "--output_dir", "out", cwd=tmp_path)
    seen = []
    for split in ("train", "val"):
        file = open_token_file(tmp_path / "out" / f"{split}.bin")
        entries, listed = open_index(file), read_sources(file.path)
        assert len(listed) == 42
        ends = np.cumsum(entries["tokens"].astype(np.int64))
        assert (file.memmap()[ends - 1] == file.sidecar.eot_id).all()
        for text, entry in zip(documents_of(tmp_path / "out", split), entries, strict=True):
            source = listed[entry["file"]]
            data = (tmp_path / "out" / source.path).read_bytes()
            assert source.size == len(data)
            assert entry["hash"].tobytes() == hashlib.sha256(text.encode()).digest()[:8]
            if source.path.endswith(".jsonl"):
                assert json.loads(data[entry["place"] :].split(b"\n")[0])["text"] == text
            else:
                assert (entry["place"], data) == (0, text.encode())
            seen.append((int(entry["file"]), int(entry["place"])))
    assert len(set(seen)) == len(seen) == 41 + 400


# What is left out or changed, counted; the order.

BAD = {"a.txt": b"good text", "b.txt": b"bad \xff text", "c.txt": b" \n", "e.txt": b"good text", "f.txt": b"other"}


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    (folder := tmp_path / "bad").mkdir()
    for name, data in BAD.items():
        (folder / name).write_bytes(data)
    (folder / "d.jsonl").write_bytes(
        b'{"text": "half \\ud800"}\n{"text": "bad \xc3("}\n{"text": ""}\n{"text": "fine"}\n'
    )
    return folder


@pytest.mark.parametrize(
    ("how", "expected", "counts"),
    [
        ("replace", ["bad \ufffd text", "bad \ufffd(", "half \ufffd"], {"bad text replaced": 3}),
        ("skip", [], {"bad text skipped": 3}),
    ],
)
def test_bad_text(prepare_here, bad, bytes_tokenizer, tmp_path, how, expected, counts, capsys):
    flags = ["--input", bad, "--tokenizer", bytes_tokenizer, "--val_fraction", 0.3, "--output_dir", "out"]
    prepare_here(*flags, "--on_bad_text", how, cwd=tmp_path)
    assert sorted(texts_of(tmp_path / "out")) == sorted(["good text", "good text", "other", "fine", *expected])
    record = json.loads((tmp_path / "out" / "preparation.json").read_text())["left_out_or_changed"]
    assert {name: number for name, number in record.items() if number} == {"empty": 2} | counts
    assert f"2 empty, 3 {next(iter(counts))}" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"b\.txt: is not UTF-8.*--on_bad_text|d\.jsonl"):
        prepare_here(*flags[:-1], "other", cwd=tmp_path)


@pytest.mark.parametrize("flag", [b"\xff", b"\xf0\x9f\x98 x"])
def test_bad_text_of_a_large_file(prepare_here, small_blocks, bytes_tokenizer, tmp_path, flag):
    (folder := tmp_path / "in").mkdir()
    data = WORDS.encode() * 200 + flag + WORDS.encode() * 200
    (folder / "a.txt").write_bytes(data)
    (folder / "b.txt").write_text("small")
    (folder / "c.txt").write_bytes(b" " * 20_000)
    (folder / "d.txt").write_text("small too")
    flags = ["--input", folder, "--tokenizer", bytes_tokenizer, "--val_fraction", 0.3, "--output_dir"]
    for how, expected in (
        ("replace", [data.decode(errors="replace"), "small", "small too"]),
        ("skip", ["small", "small too"]),
    ):
        prepare_here(*flags, how, "--on_bad_text", how, cwd=tmp_path)
        assert sorted(texts_of(tmp_path / how)) == sorted(expected)
    with pytest.raises(UserError, match=rf"a\.txt: is not UTF-8 text \(byte {200 * len(WORDS.encode()):,}"):
        prepare_here(*flags, "fail", cwd=tmp_path)


def test_duplicates_and_shuffle(prepare_here, bytes_tokenizer, tmp_path):
    rows = [f"row {number}" for number in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in [*rows, *rows[:70]]))
    flags = ["--input", "rows.jsonl", "--tokenizer", bytes_tokenizer]
    out = {}
    for name, more in {"plain": [], "dedup": ["--deduplicate"], "shuffle": ["--deduplicate", "--shuffle"]}.items():
        prepare_here(*flags, *more, "--output_dir", name, cwd=tmp_path)
        out[name] = [documents_of(tmp_path / name, split) for split in ("train", "val")]
    assert sum(map(len, out["plain"])) == 370
    assert sorted([*out["dedup"][0], *out["dedup"][1]]) == sorted(rows)
    for one, other in zip(out["dedup"], out["shuffle"], strict=True):
        assert one == [row for row in rows if row in set(one)] != other and sorted(one) == sorted(other)


@pytest.mark.parametrize("special", [False, True])
def test_special_tokens_in_text(prepare_here, bytes_tokenizer, tmp_path, special):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"a<|endoftext|>{n}"}) + "\n" for n in range(9)))
    flags = ["--input", "rows.jsonl", "--tokenizer", bytes_tokenizer, "--output_dir", "out"]
    prepare_here(*flags, *(["--special_tokens_in_text"] if special else []), cwd=tmp_path)
    file = open_token_file(tmp_path / "out" / "train.bin")
    ends = int(np.count_nonzero(file.memmap() == file.sidecar.eot_id))
    assert ends == file.sidecar.documents * (2 if special else 1)
    assert [*faults_of(read_contents(file))] == []
    entries = np.array(open_index(file))
    entries["tokens"][:2] += np.array([1, -1], dtype=np.int32).view(np.uint32)
    index_path(file.path).write_bytes(entries.tobytes())
    assert [*faults_of(read_contents(file))]
