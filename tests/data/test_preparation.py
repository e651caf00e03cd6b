"""Preparation: the whole, the small one, its split, again, and its command line."""

import hashlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from prep_helpers import CORPUS, documents_of, hashes, texts_of
from pyarrow import parquet
from small_run import REPOSITORY, write_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GPT2Tokenizer

from dsgpt.common.errors import UserError
from dsgpt.common.files import Lock
from dsgpt.data.blocks import pieces_of
from dsgpt.data.merge import divided
from dsgpt.data.parts import ROW, Encoding
from dsgpt.data.preparation_options import parse_options
from dsgpt.data.readers import STDIN, Document, SourceFile, read_text_file
from dsgpt.data.sources import own_source
from dsgpt.data.token_file import open_token_file
from dsgpt.data.vocabulary import END_OF_TEXT, open_vocabulary, save_loaded
from dsgpt.formats.tokenizer_files import open_tokenizer
from dsgpt.training.command import check

# preprocess.py: what is written, byte for byte, and what happens the second time, or when it is killed.


def test_what_is_written(prepared: Path, corpus: Path):
    """Every document, byte for byte; a description of each file; a folder of Hugging Face; nothing else."""
    texts = texts_of(prepared)
    assert sorted(text.encode() for text in texts) == sorted(text.encode() for text in CORPUS.values())
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    data = (prepared / "tokenizer" / "tokenizer.json").read_bytes()
    for split in ("train", "val"):
        sidecar = open_token_file(prepared / f"{split}.bin").sidecar
        ids = np.memmap(prepared / f"{split}.bin", dtype=np.uint16, mode="r")
        assert (sidecar.dtype, sidecar.tokens, sidecar.source) == ("uint16", len(ids), "corpus")
        assert ids.max() < sidecar.vocab_size == len(tokenizer) <= 400
        assert 0 < sidecar.documents == np.count_nonzero(ids == sidecar.eot_id)
        assert sidecar.sha256 == hashlib.sha256(ids.tobytes()).hexdigest()
        assert asdict(sidecar.tokenizer) == {"name": "tokenizer", "sha256": hashlib.sha256(data).hexdigest()}
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", sidecar.eot_id)
    assert tokenizer.model_max_length == 1024
    names = {path.name for path in prepared.iterdir()}
    kinds = {f"{split}.{kind}" for split in ("train", "val") for kind in ("bin", "json", "index", "sources.json")}
    assert names == kinds | {"tokenizer", "preparation.json"}
    for path in prepared.rglob("*.json"):
        assert str(corpus.parent) not in path.read_text(encoding="utf-8")


def test_second_run_keeps_and_other_options_are_refused(prepare_here, corpus: Path, tmp_path: Path, capsys):
    flags = ["--input", corpus, "--tokenizer", "train", "--vocab_size", 300, "--output_dir", "out"]
    prepare_here(*flags, cwd=tmp_path)
    first = hashes(tmp_path / "out")
    prepare_here(*flags, cwd=tmp_path)
    assert "already prepared" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^.*--val_fraction was None, is 0\.5; --seed was 1337, is 1.*--overwrite.*$"):
        prepare_here(*flags, "--seed", 1, "--val_fraction", 0.5, cwd=tmp_path)
    assert hashes(tmp_path / "out") == first
    prepare_here(*flags, "--overwrite", cwd=tmp_path)
    assert hashes(tmp_path / "out") == first, "two runs of the same command must write the same bytes"


def test_what_another_program_or_preparation_writes_stays(prepare_here, text, bytes_tokenizer, tmp_path):
    (out := tmp_path / "out").mkdir()
    (out / "train.bin").write_bytes(b"\1\0")
    flags = ["--input", text, "--tokenizer", bytes_tokenizer, "--output_dir", out]
    with pytest.raises(UserError, match=r"^[^\n]*train\.bin: exists[^\n]*--overwrite$"):
        prepare_here(*flags, cwd=tmp_path)
    with Lock.of_folder(out) as other, pytest.raises(UserError, match="another preparation"):
        assert other.take()
        prepare_here(*flags, "--overwrite", cwd=tmp_path)
    assert (out / "train.bin").read_bytes() == b"\1\0"


def test_gpt2_vocabulary(prepare_here, corpus: Path, tmp_path: Path, capfd):
    """With the real GPT-2 tokenizer if it lies beside the checkout, otherwise with one that has the same last id."""
    folder = REPOSITORY.parent / "shared" / "data" / "gpt2-tokenizer"
    if not (real := (folder / "vocab.json").exists()):
        write_tokenizer(folder := tmp_path / "gpt2-like", size=50257)
    (tmp_path / "long.txt").write_text("Hello world" + " and more" * 3000)
    prepare_here("--input", corpus, "long.txt", "--tokenizer", folder, "--output_dir", "out", cwd=tmp_path)
    assert "longer than" not in capfd.readouterr().err
    sidecar = open_token_file(tmp_path / "out" / "train.bin").sidecar
    assert (sidecar.vocab_size, sidecar.eot_id, sidecar.dtype) == (50257, 50256, "uint16")
    texts = texts_of(tmp_path / "out")
    assert len(texts) == len(CORPUS) + 1 and set(CORPUS.values()) <= set(texts)
    if real:
        ids = [np.fromfile(tmp_path / "out" / f"{split}.bin", "<u2").tobytes() for split in ("train", "val")]
        hello_world = np.array([50256, 15496, 995, 290, 517], "<u2").tobytes()  # as OpenAI's own encoder gives it
        assert any(hello_world in data for data in ids)


def test_rows_of_json_lines_and_parquet(prepare_here, bytes_tokenizer: Path, tmp_path: Path):
    rows = [f"row {number} “quoted” \r\n" for number in range(30)]
    lines = [json.dumps({"body": text}) for text in [*rows[:15], "", "  "]] + ['{"body": null}', ""]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    parquet.write_table(pa.table({"body": [*rows[15:], None, ""], "id": range(17)}), tmp_path / "more.parquet")
    flags = ["--input", "some.jsonl", "more.parquet", "--text_key", "body", "--tokenizer", bytes_tokenizer]
    prepare_here(*flags, "--val_fraction", 0.3, "--output_dir", "out", cwd=tmp_path)
    train, val = (documents_of(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(rows)
    assert train == [text for text in rows if text in set(train)], "documents keep their order"
    assert 2 <= len(val) <= 18


# preprocess_small.py: the first documents, in the full set's folder and with its tokenizer.


def test_small_files_are_the_beginnings_of_the_full_ones(prepare_here, prepared: Path, corpus: Path, tmp_path: Path):
    out = shutil.copytree(prepared, tmp_path / "out")
    before = hashes(out)
    flags = ["--input", corpus, "--tokenizer", "train", "--output_dir", out, "--num_documents", 8, "--vocab_size"]
    prepare_here(*flags, 400, cwd=tmp_path, small=True)
    for split, count in (("train", 7), ("val", 1)):
        assert documents_of(out, split, "_small") == documents_of(out, split)[:count]
        small, full = (open_token_file(out / f"{split}{suffix}.bin").sidecar for suffix in ("_small", ""))
        assert small.tokenizer == full.tokenizer
    assert hashes(out) == before
    with pytest.raises(UserError, match=r"^.*belongs to train\.bin.*--output_dir.*$"):
        prepare_here(*flags, 300, "--overwrite", cwd=tmp_path, small=True)
    assert hashes(out) == before


def test_full_files_are_the_same_after_small_ones(run, prepared: Path, corpus: Path, tmp_path: Path):
    flags = ["--input", corpus, "--tokenizer", "train", "--vocab_size", 400, "--output_dir", "out"]
    small = ["preprocess_small.py", *flags, "--num_documents", 5]
    run(*small, cwd=tmp_path)
    assert not (tmp_path / "out" / "train.bin").exists()
    run("preprocess.py", *flags, cwd=tmp_path)
    assert hashes(tmp_path / "out") == hashes(prepared)
    assert "already prepared" in run(*small, cwd=tmp_path).stdout


# The split of each document, and cutting long texts without changing their tokens.


def validation(count: int, *, fraction: float = 0.05, seed: int = 1337) -> set[int]:
    """The numbers of those of ``count`` documents that are for validation; the others are for training."""
    encoding = Encoding(
        folder=Path(), tokenizer=Path(), special=False, on_bad_text="fail", split_by="documents", seed=seed
    )
    file = SourceFile(name=str(STDIN), key="f", stamp=None, read=read_text_file)
    documents = [Document(f"d{number}", "text", b"text", 9) for number in range(count)]
    rows = np.array([(0, 0, 0, 0, encoding.position(file, each), 4, 0, 0) for each in documents], dtype=ROW)
    numbers = divided(rows, own=[None], val_fraction=fraction)
    assert sorted([*numbers["train"], *numbers["val"]]) == list(range(count))
    return set(numbers["val"].tolist())


def test_a_document_stays_in_its_split_when_others_are_added():
    before, after = validation(2000), validation(3000)
    assert 60 < len(before) < 140
    assert before == {number for number in after if number < 2000}
    assert validation(2000, seed=1) != before


@pytest.mark.parametrize("fraction", [0.0001, 0.5, 0.9999])
@pytest.mark.parametrize("count", [2, 3, 256])
def test_small_collections_have_both_sides(count: int, fraction: float):
    assert 1 <= len(validation(count, fraction=fraction)) <= count - 1


def test_pieces_encode_as_the_whole(prepared: Path):
    vocabulary = open_vocabulary(prepared / "tokenizer")
    chance = random.Random(0)
    marks = [" ", "  ", "\n", "\n\n ", "\t", "\x1c", "\x85", "\xa0", "the", "dog's", "!?", "12", "\r\n", "\u2028", "é"]
    for _ in range(300):
        text = "".join(chance.choices([*marks, *CORPUS.values()], weights=[9] * len(marks) + [1] * len(CORPUS), k=80))
        cut = [piece.decode() for piece in pieces_of(text.encode(), least=7)]
        assert "".join(cut) == text and len(cut) > 1
        whole = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        encodings = vocabulary.tokenizer.encode_batch(cut, add_special_tokens=False)
        assert [token for encoding in encodings for token in encoding.ids] == whole


def test_own_output_is_not_read_back(tmp_path: Path):
    (tmp_path / "note.txt").write_text("text")
    (tmp_path / "data" / "x").mkdir(parents=True)
    (tmp_path / "data" / "x" / "train.json").write_text("{}")
    source = own_source([tmp_path], text_key="text", output_dir=tmp_path / "data" / "x")
    assert [file.key for file in source.files] == ["note.txt"]


# preprocess.py a second time, after the files of the first run were changed.


OTHER = r"not the file that preparation\.json describes; replace it with --overwrite"
RECORD = r"preparation\.json: is not the record of a preparation \(.*--overwrite"
CHANGES = {
    "out/train.bin": (lambda data: data[2:] + data[:2], r"train\.bin: its sha256 is .* make it again .* --overwrite"),
    "out/train.json": (None, OTHER),
    "out/tokenizer/tokenizer.json": (lambda data: b"{}", OTHER),
    "out/preparation.json": (lambda data: b'{"identity": 5}', RECORD),
    "out/tokenizer/tokenizer_config.json": (lambda data: b"{}", "out/tokenizer: is damaged"),
    "text/0.txt": (lambda data: data + b"more\n", r"out: was prepared differently \(the input has changed\)"),
}
"""What changes a file, None if it is removed, and the refusal."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_refused(again, tmp_path, name):
    """``formats/file_kinds.py`` has further records that are none."""
    change, refusal = CHANGES[name]
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink() if change is None else (tmp_path / name).write_bytes(change(data))
    with pytest.raises(UserError, match=refusal):
        again()


def test_a_copy_is_hashed_once(again, tmp_path, capsys, snapshot):
    os.utime(tmp_path / "out" / "val.bin", ns=(5, 5))
    again()
    assert [line for line in capsys.readouterr().out.splitlines() if "val.bin changed" in line] == snapshot
    again()
    assert capsys.readouterr().out.startswith("already prepared")


# Mistakes on the command line and in the input are reported together, one line each, with exit code 2.


def test_the_next_line_is_a_dry_run_that_works(run, bytes_tokenizer: Path, tmp_path: Path, monkeypatch):
    flags = ("--input", REPOSITORY / "docs" / "training.md", "--tokenizer", bytes_tokenizer, "--output_dir", "text")
    done = run("preprocess.py", *flags, cwd=tmp_path)
    _, script, *words = shlex.split(done.stdout.splitlines()[-1].removeprefix("next: "))
    assert script == str(REPOSITORY / "src/gpt2.py")
    assert words[-1] == "--dry_run"
    monkeypatch.chdir(tmp_path)
    check(words)


def test_an_empty_output_folder_is_the_default():
    """As of a shell variable that is not set. The path of an empty word would be the current folder."""
    assert parse_options(["--output_dir", ""], small=False).output_dir == Path("data/python-transformers")


# Tokenizers: their files are those of transformers, also where its import is saved.


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_of_tokenizers_are_those_that_transformers_writes(prepared: Path, tmp_path: Path, monkeypatch):
    """Of a trained one, and of one that was loaded before, which is copied."""
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    trained = Tokenizer.from_file(str(prepared / "tokenizer" / "tokenizer.json"))
    written = GPT2Tokenizer(
        tokenizer_object=trained, **ends, add_prefix_space=False, clean_up_tokenization_spaces=False
    )
    written.model_max_length = 1024
    written.save_pretrained(tmp_path / "trained")
    assert contents(tmp_path / "trained") == contents(prepared / "tokenizer")
    for source, target in (("trained", "one"), ("one", "two")):
        save_loaded(str(tmp_path / source), tmp_path / target)
    loaded = open_tokenizer(tmp_path / "one", what="", named=True, clean_up_tokenization_spaces=False)
    loaded.save_pretrained(tmp_path / "again")
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "again")
    monkeypatch.setattr("dsgpt.data.vocabulary.open_tokenizer", lambda *_, **__: 1 / 0)
    save_loaded(str(tmp_path / "one"), tmp_path / "copy")
    state = json.loads((place := tmp_path / "one" / "tokenizer.json").read_bytes())
    place.write_text(json.dumps(state | {"pre_tokenizer": {"type": "Digits", "individual_digits": True}}))
    for changed in ("trained", "one"):  # the class for GPT-2 would put its own splitter there
        with pytest.raises(ZeroDivisionError):
            save_loaded(str(tmp_path / changed), tmp_path / "other")


def test_preparing_text_imports_no_large_library(prepared: Path, tmp_path: Path):
    save_loaded(str(prepared / "tokenizer"), tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(9)))
    program = (
        "import sys\n"
        "from dsgpt.data.preparation import main\n"
        "main(['--input', 'rows.jsonl', '--tokenizer', 'tokenizer', '--output_dir', 'out'])\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow', 'awkward'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, capture_output=True)
