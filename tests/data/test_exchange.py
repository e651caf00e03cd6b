"""``dsgpt data convert``: files whose bytes are written here by hand, from what the other projects say about them."""

import struct
from pathlib import Path

import numpy as np
import pytest
from prep_helpers import documents_of

from dsgpt.common.errors import UserError
from dsgpt.data import exchange
from dsgpt.data.token_file import TokenFileWriter, open_token_file

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 300]]
EOT = 9
FLAGS = ("--vocab_size", 301, "--eot_id", EOT)
AFTER = [1, 2, 3, 9, 4, 9, 5, 6, 7, 8, 300, 9]
BEFORE = [9, 1, 2, 3, 9, 4, 9, 5, 6, 7, 8, 300]
LLMC = struct.pack("<256i", 20240520, 1, 12, *[0] * 253) + struct.pack("<12H", *BEFORE)
INDEX = (
    b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4) + struct.pack("<3i", 4, 2, 6) + struct.pack("<3q", 0, 8, 12)
) + struct.pack("<4q", 0, 1, 2, 3)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(exchange, "_CHUNK", 5)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    path = tmp_path / "ours" / "train.bin"
    with TokenFileWriter(path, vocab_size=301, eot_id=EOT, tokenizer=None, source="test") as writer:
        for document in DOCUMENTS:
            writer.append(document)
    return path


def convert(source: Path, target: Path, form: str, *flags: object) -> Path:
    exchange.main([str(word) for word in (source, target, "--to", form, *flags)])
    return target


def refused(*words: object) -> str:
    with pytest.raises(UserError) as error:
        convert(*words)
    return str(error.value)


def test_our_files_have_the_bytes_of_the_other_formats(ours: Path, tmp_path: Path):
    assert convert(ours, tmp_path / "n.bin", "nanogpt").read_bytes() == struct.pack("<12H", *AFTER)
    assert convert(ours, tmp_path / "l.bin", "llmc").read_bytes() == LLMC
    megatron = convert(ours, tmp_path / "m.bin", "megatron")
    assert (megatron.read_bytes(), megatron.with_suffix(".idx").read_bytes()) == (struct.pack("<12H", *AFTER), INDEX)
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "n.bin", "l.bin", "m.bin", "m.idx"}


@pytest.mark.parametrize("form", ["nanogpt", "llmc", "megatron"])
def test_there_and_back_is_the_same_file(ours: Path, tmp_path: Path, form: str, capsys):
    there = convert(ours, tmp_path / "there.bin", form)
    back = open_token_file(convert(there, tmp_path / "back.bin", "dsgpt", *FLAGS))
    assert back.path.read_bytes() == ours.read_bytes()
    assert (back.sidecar.documents, back.sidecar.vocab_size, back.sidecar.eot_id) == (3, 301, EOT)
    assert back.sidecar.source == f"there.bin, a token file of {form}"
    out = capsys.readouterr().out
    assert f"3 documents of {there} ({form}), as dsgpt" in out
    assert "begins within" not in out and "never occurs" not in out


def test_megatron_files_without_marks_of_several_sequences_and_of_wide_ids(tmp_path: Path):
    """Two documents: the first without an end-of-text id, the second of two sequences."""
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3) + struct.pack("<3i3q3q", 2, 3, 1, 0, 8, 20, 0, 1, 3)
    (tmp_path / "m.idx").write_bytes(index + bytes(3))  # modes of a multimodal set may follow
    (tmp_path / "m.bin").write_bytes(struct.pack("<6i", 1, 2, 3, 70_000, 5, 9))
    flags = ("--vocab_size", 70_001, "--eot_id", EOT)
    back = open_token_file(convert(tmp_path / "m.bin", tmp_path / "back.bin", "dsgpt", *flags))
    assert (back.sidecar.dtype, back.memmap().tolist()) == ("uint32", [1, 2, 9, 3, 70_000, 5, 9])
    assert "too few for a vocabulary of 70,001; take megatron" in refused(back.path, tmp_path / "n.bin", "nanogpt")
    again = convert(back.path, tmp_path / "again.bin", "megatron")
    assert np.fromfile(again, dtype="<i4").tolist() == [1, 2, 9, 3, 70_000, 5, 9]


def test_the_wide_ids_of_llmc(tmp_path: Path):
    """Read as uint16, each of them would be two small ids of the same vocabulary; the name has the end of a list's."""
    header = struct.pack("<256i", 20240801, 7, 4, *[0] * 253)
    (tmp_path / "l.bin").write_bytes(header + struct.pack("<4I", 128_000, 5, 128_000, 70_000))
    flags = ("--vocab_size", 128_256, "--eot_id", 128_000)
    back = open_token_file(convert(tmp_path / "l.bin", tmp_path / "my.sources.bin", "dsgpt", *flags))
    assert (back.sidecar.dtype, back.memmap().tolist()) == ("uint32", [5, 128_000, 70_000, 128_000])


def test_an_end_of_text_id_that_never_occurs_is_said(ours: Path, tmp_path: Path, capsys):
    there = convert(ours, tmp_path / "n.bin", "nanogpt")
    convert(there, tmp_path / "back.bin", "dsgpt", "--vocab_size", 301, "--eot_id", 299)
    assert "its end-of-text id 299 never occurs: is it one text, or did another tokenizer" in capsys.readouterr().out


def test_a_file_of_llmc_that_begins_within_a_document(tmp_path: Path, capsys):
    """As every part of a set but the first: the rest is a document, and it is said."""
    (tmp_path / "l.bin").write_bytes(LLMC[:8] + struct.pack("<i", 10) + LLMC[12:1024] + LLMC[1028:])
    back = convert(tmp_path / "l.bin", tmp_path / "back.bin", "dsgpt", *FLAGS)
    assert open_token_file(back).memmap().tolist() == AFTER[1:]
    assert "it begins within a document" in capsys.readouterr().out


def test_a_tokenizer_says_what_the_file_does_not(prepared: Path, bytes_tokenizer: Path, tmp_path: Path, capsys):
    """The training finds it beside the file, where another one is not replaced."""
    there = convert(prepared / "val.bin", tmp_path / "l.bin", "llmc")
    back = convert(there, tmp_path / "new" / "val.bin", "dsgpt", "--tokenizer", prepared / "tokenizer")
    assert back.read_bytes() == (prepared / "val.bin").read_bytes()
    assert documents_of(back.parent, "val") == documents_of(prepared, "val")
    facts, expected = (open_token_file(path).sidecar.tokenizer for path in (back, prepared / "val.bin"))
    assert facts == expected
    other = back.with_name("other.bin")
    assert "is another tokenizer than" in refused(there, other, "dsgpt", "--tokenizer", bytes_tokenizer)
    assert sorted(path.name for path in back.parent.iterdir()) == ["tokenizer", "val.bin", "val.json"]


def test_mistakes(ours: Path, tmp_path: Path):
    """All of a line at once; ids that do not fit leave the old file alone."""
    nano = convert(ours, tmp_path / "n.bin", "nanogpt")
    lines = refused(nano, nano.with_suffix(".txt"), "nanogpt", "--eot_id", 1).splitlines()
    said = ["--to nanogpt:", f"{nano.with_suffix('.txt')}: must end with .bin", "--tokenizer: "]
    assert [line for line, beginning in zip(lines, said, strict=True) if not line.startswith(beginning)] == []
    assert refused(Path(), nano, "llmc") == ".: is a folder; name the .bin file in it"
    assert "nothing.bin: cannot be read (No such file" in refused(tmp_path / "nothing.bin", nano, "llmc")
    assert refused(ours, Path(), "llmc") == ".: must end with .bin"
    lines = refused(ours, nano, "llmc", "--eot_id", 1).splitlines()
    assert len(lines) == 2 and lines[0] == f"{nano}: exists; replace it with --overwrite, or name another file"
    old = convert(ours, tmp_path / "l.bin", "llmc")
    flags = ("--vocab_size", 300, "--eot_id", EOT, "--overwrite")
    assert "n.bin: document 2 has ids outside the vocabulary of 300" in refused(nano, old, "llmc", *flags)
    assert old.read_bytes() == LLMC
    convert(nano, old, "dsgpt", *FLAGS, "--overwrite")
    convert(ours, old, "megatron", "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["l.bin", "l.idx", "n.bin", "ours"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.bin", LLMC[:-2], "has llm.c's magic number, but not version 1 with 12 ids"),
        ("a.bin", LLMC[:4] + b"\2" + LLMC[5:], "has llm.c's magic number"),
        ("a.bin", LLMC[:16], "has llm.c's magic number"),
        ("a.idx", b"", "is no index of Megatron-LM"),
        ("a.idx", INDEX.replace(b"MMID", b"TNTI"), "is no index of Megatron-LM"),
        ("a.idx", INDEX[:17] + b"\6" + INDEX[18:], "is no index of Megatron-LM of version 1 with whole numbers"),
        ("a.idx", INDEX[:-1], "is cut off: 3 sequences and 4 bounds"),
        ("a.idx", INDEX.replace(struct.pack("<q", 12), struct.pack("<q", 10)), "do not follow each other"),
        ("a.idx", INDEX[:-8] + struct.pack("<q", 2), "or documents lack some of them"),
        ("a.idx", INDEX[:-24] + struct.pack("<3q", 2, 1, 3), "or documents lack some of them"),
        ("a.idx", INDEX[:18] + struct.pack("<QQq", 0, 1, 0), "a.idx: has no ids"),
        ("a.idx", INDEX, "must have 24 bytes by a.idx"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, data: bytes, said: str):
    (tmp_path / "a.bin").write_bytes(b"\1\0")
    (tmp_path / name).write_bytes(data)
    assert said in refused(tmp_path / "a.bin", tmp_path / "b.bin", "dsgpt", *FLAGS)
    assert not (tmp_path / "b.bin").exists()
