"""The token file: what is written, that nanoGPT can read it, and which files are refused."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from messages import without_paths
from small_run import random_ids, write_tokens

from dsgpt.data.token_file import TokenFileError, TokenFileWriter, dtype_for, open_token_file, sidecar_path

DOCUMENTS = [[1, 2, 3], [], [65_535, 0], np.array([7])]


def written(path: Path, *, vocab_size: int = 65_536, eot_id: int = 9) -> Path:
    with TokenFileWriter(path, vocab_size=vocab_size, eot_id=eot_id, tokenizer=None, source="test") as writer:
        for document in DOCUMENTS:
            writer.append(document)
    return path


def test_round_trip(tmp_path):
    file = open_token_file(written(tmp_path / "new" / "a.bin"))
    assert file.memmap().tolist() == [1, 2, 3, 9, 9, 65_535, 0, 9, 7, 9]
    assert (file.tokens, file.size_bytes, file.inferred, file.largest_id()) == (10, 20, False, 65_535)
    sidecar = file.sidecar
    assert (sidecar.dtype, sidecar.documents, sidecar.vocab_size, sidecar.eot_id) == ("uint16", 4, 65_536, 9)
    assert sidecar.sha256 == file.computed_sha256()
    stat = file.path.stat()
    assert (sidecar.size, sidecar.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert file.doubt() == ""
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["a.bin", "a.json"]


def test_nanogpt_reads_it(tmp_path):
    data = np.memmap(written(tmp_path / "a.bin"), dtype=np.uint16, mode="r")
    assert data.tolist() == [1, 2, 3, 9, 9, 65_535, 0, 9, 7, 9]
    assert data[:3].tobytes() == b"\x01\x00\x02\x00\x03\x00"  # little-endian on every machine


def test_large_vocabularies_take_four_bytes(tmp_path):
    path = tmp_path / "a.bin"
    with TokenFileWriter(path, vocab_size=65_537, eot_id=65_536, tokenizer=None, source="test") as writer:
        writer.append([65_535])
    assert np.memmap(path, dtype="<u4", mode="r").tolist() == [65_535, 65_536]
    assert open_token_file(path).memmap().tolist() == [65_535, 65_536]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_dtype_by_vocabulary(vocab_size, dtype):
    assert dtype_for(vocab_size) == dtype


@pytest.mark.parametrize("document", [[101], [3, -1], [0, 5000, 2]])
def test_an_id_outside_the_vocabulary_is_refused_and_leaves_nothing(tmp_path, document):
    with (
        pytest.raises(TokenFileError, match=r"a\.bin: document 1 has ids from .* outside the vocabulary of 101"),
        TokenFileWriter(tmp_path / "a.bin", vocab_size=101, eot_id=0, tokenizer=None, source="test") as writer,
    ):
        writer.append([100])
        writer.append(document)
    assert list(tmp_path.iterdir()) == []


def test_abandoning_leaves_the_old_file_alone(tmp_path):
    path = written(tmp_path / "a.bin")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with (
        pytest.raises(KeyboardInterrupt),
        TokenFileWriter(path, vocab_size=10, eot_id=0, tokenizer=None, source="other") as writer,
    ):
        writer.append([1] * 1000)
        raise KeyboardInterrupt
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_without_a_sidecar_uint16_is_assumed(tmp_path):
    path = written(tmp_path / "a.bin")
    sidecar_path(path).unlink()
    file = open_token_file(path)
    assert file.inferred
    assert (file.tokens, file.sidecar.vocab_size, file.sidecar.sha256) == (10, None, None)
    assert file.largest_id() == 65_535


def test_hashing_reports_its_progress(tmp_path):
    seen: list[int] = []
    file = open_token_file(written(tmp_path / "a.bin"))
    file.computed_sha256(seen.append)
    assert sum(seen) == file.size_bytes


def refused(path: Path) -> str:
    with pytest.raises(TokenFileError) as caught:
        open_token_file(path)
    message = str(caught.value)
    assert "\n" not in message
    return without_paths(message, path.parent)


def test_missing(tmp_path, snapshot):
    assert refused(tmp_path / "a.bin") == snapshot
    (tmp_path / "file").write_text("")
    assert "cannot be read (Not a directory)" in refused(tmp_path / "file" / "a.bin")


def test_empty(tmp_path, snapshot):
    path = tmp_path / "a.bin"
    path.write_bytes(b"")
    assert refused(path) == snapshot


def test_folder(tmp_path, snapshot):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert refused(folder) == snapshot


@pytest.mark.parametrize(("size", "vocab_size", "width"), [(7, 100, 2), (10, 70_000, 4)])
def test_odd_byte_counts(tmp_path, snapshot, size, vocab_size, width):
    path = write_tokens(tmp_path / "a.bin", random_ids(5), dtype=f"uint{8 * width}", vocab_size=vocab_size)
    path.write_bytes(bytes(size))
    assert refused(path) == snapshot


def test_odd_byte_count_without_a_sidecar(tmp_path, snapshot):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    assert refused(path) == snapshot


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 4},
        {"tokens": 0},
        {"tokens": True},
        {"tokens": 5.0},
        {"documents": "two"},
        {"vocab_size": None},
        {"dtype": "uint32", "tokens": 2, "vocab_size": 2**33},
        {"vocab_size": 65_537},
        {"dtype": "int64"},
        {"dtype": ["uint16"]},
        {"dtype": "uint32"},
        {"tokenizer": "gpt2"},
        {"tokenizer": {"sha256": "a"}},
        {"sha256": 5},
        {"sha256": "a" * 64 + "\n"},
        {"source": {}},
        {"size": -1},
        {"mtime_ns": 1e18},
    ],
    ids=str,
)
def test_sidecars_with_a_wrong_value(tmp_path, snapshot, changes):
    assert refused(write_tokens(tmp_path / "a.bin", random_ids(5), **changes)) == snapshot


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "Expecting property name"),
        (b"\xff\xfe", "it is UTF-16 text, not UTF-8"),
        (b"[" * 200_000, "its objects and arrays are nested more than 40 deep)"),
        (b'{"tokens": ' + b"9" * 5000 + b"}", "a whole number in it has more than 4,300 digits"),
        (b'{"tokens": 1, "tokens": 2}', 'the key "tokens" is given twice: keep one of them)'),
        (b'{"tokens": NaN}', "NaN is not a JSON number)"),
        (b"[]", "Input should be an object, not [])"),
        (b'"text"', "Input should be an object, not 'text')"),
        (b"{}", "dtype: Field required; tokens: Field required; documents: Field required; and 5 more)"),
    ],
    ids=range(9),
)
def test_unreadable_sidecars(tmp_path, text, reason):
    path = write_tokens(tmp_path / "a.bin", random_ids(5))
    sidecar_path(path).write_bytes(text)
    assert refused(path).startswith(f"FOLDER/a.json: is not the sidecar of a token file ({reason}")


def test_a_folder_in_place_of_the_sidecar(tmp_path, snapshot):
    path = write_tokens(tmp_path / "a.bin", random_ids(5))
    sidecar_path(path).unlink()
    sidecar_path(path).mkdir()
    assert refused(path) == snapshot


def test_a_broken_link_in_place_of_the_sidecar(tmp_path, snapshot):
    """If it counted as a missing sidecar, the ids would be read as uint16."""
    path = write_tokens(tmp_path / "a.bin", random_ids(5))
    sidecar_path(path).unlink()
    sidecar_path(path).symlink_to("nowhere")
    assert refused(path) == snapshot


def test_a_device_is_refused():
    again = "make it again with `.venv/bin/python data_prep/preprocess.py --overwrite`"
    assert refused(Path(os.devnull)) == f"FOLDER/{Path(os.devnull).name}: is empty; {again}"


def test_keys_of_later_versions_are_ignored(tmp_path):
    path = write_tokens(tmp_path / "a.bin", random_ids(5), mixture={"a": 0.5})
    assert "mixture" in json.loads(sidecar_path(path).read_text())
    assert open_token_file(path).tokens == 5
